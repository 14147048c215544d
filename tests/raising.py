"""Errors are known by their class, their fields and the data of the case, never by the words of their sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from shardwise.errors import ShardwiseError

Error = TypeVar("Error", bound=BaseException)


@contextmanager
def raises(
    error: type[Error] | tuple[type[Error], ...],
    *values: object,
    op: str | None = None,
    source: str | None = None,
    facts: Sequence[str] = (),
    section: str | None = None,
    fix: object = (),
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error, like ``pytest.raises``, with these fields.

    Args:
        error: The class, or several of which it is one.
        values: Numbers, names, options and quoted values of the case, or lists and tuples of them (of tables of cases).
            Each is in the message, as a whole: 6 is not found in 16 or 1.6, nor ``up`` in ``upper``.
        op: The operator or path of the error.
        source: The file of the line of the user's code, or ``file:line``.
        facts: Names of further facts of the message.
        section: The section of docs/errors.md.
        fix: Like ``values``, but of the suggested change alone.
    """
    with pytest.raises(error) as caught:
        yield caught
    raised: Any = caught.value
    text, parts = str(raised), raised if isinstance(raised, ShardwiseError) else (*raised.args, None)[0]
    for value in flattened(values):
        assert holds(text, value), f"{value} is not in: {text}"
    for value in flattened([fix]):
        assert holds(getattr(parts, "fix", ""), value), f"{value} is not in the fix of: {text}"
    for name, expected in (("op", op), ("section", section)):
        assert expected in (None, getattr(parts, name, "")), f"{name} is not {expected}: {text}"
    assert source is None or holds(getattr(parts, "source", ""), source), f"source is not {source}: {text}"
    missing = set(facts) - {name for name, _ in getattr(parts, "facts", ())}
    assert not missing, f"no facts {missing}: {text}"


def flattened(values: Sequence[object]) -> list[str]:
    """The texts of values, and of those in lists and tuples."""
    groups = [group if isinstance(group, list | tuple) else [group] for group in values]
    return [str(value) for group in groups for value in group]


def holds(text: str, value: str) -> bool:
    """Whether the value is in the text as a whole: not a part of a longer word or number."""
    before = r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", value) else ""
    after = r"(?!\w)(?![.,]\d)" if re.search(r"\w\Z", value) else ""
    return re.search(before + re.escape(value) + after, text) is not None


Errors = type[BaseException] | tuple[type[BaseException], ...]


def message(action: Callable[[], object], error: Errors = ShardwiseError) -> str:
    """Return what an error says, on a rank that is to tell it; "" where there is none."""
    try:
        action()
    except error as raised:
        return str(raised)
    return ""


def refusal(action: Callable[[], object], error: Errors = (ShardwiseError, RuntimeError)) -> str:
    """Return the class and the text of an error; "accepted" where there is none."""
    try:
        action()
    except error as raised:
        return f"{type(raised).__name__}: {raised}"
    return "accepted"
