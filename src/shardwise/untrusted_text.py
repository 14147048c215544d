"""Texts that somebody else may have written, or broken: plan files, cluster files, layouts, strategies.

A reader bounds a text before it looks inside: its size, its characters, its nesting and its numbers. What follows may
then take time that is linear in the text. Messages quote an excerpt of it, never the whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

from shardwise.errors import NotationError, ShardwiseError, caret

MAX_DEVICES = 2**20  # of a mesh, a cluster or a job; the largest bundled cluster has 2 ** 16
MAX_NOTATION = 2**21  # characters of a layout or a strategy: a range for each of MAX_DEVICES hardly fits
MAX_FILE = 2**28  # bytes of a plan: some 10 KB a layer is usual
MAX_NUMBER = 2**63 - 1  # what torch can hold as a size
MAX_NESTING = 16

_DIGITS = re.compile(r"[0-9]{1,19}")
_NOT_PLAIN = re.compile(r"[^ -~]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Strings are skipped, unfinished ones to the end of the text: no character is looked at twice.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)


def shorten_repr(value: object, most: int = 60) -> str:
    """``repr`` for a message: with at most so many characters, whatever the value is."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[: most - 20]!r}... ({len(value):,} characters)"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"
    if isinstance(value, (list, tuple, dict, set)):
        return f"a {type(value).__name__} of {len(value):,}" if value else repr(value)
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def is_number(value: object) -> bool:
    """Whether a setting is a real number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(text: str) -> int | None:
    """The number that a text of ASCII digits writes, up to what torch can hold as a size; None for any other text."""
    number = int(text) if _DIGITS.fullmatch(text) else MAX_NUMBER + 1
    return number if number <= MAX_NUMBER else None


def check_notation(text: object, reads: str, most: int = MAX_NOTATION) -> str:
    """The text of a notation, if it may be one: printable ASCII of at most so many characters. ``reads``: "a layout
    reads ...". Raises NotationError."""
    if not isinstance(text, str):
        raise NotationError(f"{shorten_repr(text)} is not a text: {reads}")
    if len(text) > most:
        raise NotationError(f"a text of {len(text):,} characters, at most {most:,} are read: {reads}")
    odd = _NOT_PLAIN.search(text)
    if odd:
        raise NotationError(
            caret(text, odd.start(), f"{odd.group()!a} is not a plain character (printable ASCII): {reads}")
        )
    return text


def read_text(path: str | Path, most: int) -> str:
    """The content of a UTF-8 file. Raises OSError, UnicodeDecodeError, or ShardwiseError for more than ``most``
    bytes."""
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ShardwiseError(f"{path} has more than {most:,} bytes, which no such file needs")
    return content.decode("utf-8")


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ShardwiseError saying what is wrong: what is not JSON; and what the standard
    library takes, names given twice, numbers that no float or 64-bit integer holds, nesting deeper than
    ``MAX_NESTING``, and lone surrogates."""
    if len(text) > MAX_FILE:
        raise ShardwiseError(f"it has {len(text):,} characters, more than {MAX_FILE:,}")
    _check_brackets(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_repetition,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except ShardwiseError:
        raise
    except ValueError as error:
        raise ShardwiseError(f"it is not JSON: {error}; it has {len(text):,} characters") from error
    check_texts(value)
    return value


def check_texts(value: Any) -> None:
    """Raise ShardwiseError for a text with a lone surrogate, which no file can hold, anywhere in a nested value, and
    for a value that is nested deeper than ``MAX_NESTING``."""
    for text in _texts(value):
        odd = None if text.isascii() else _SURROGATE.search(text)
        if odd:
            raise ShardwiseError(f"{shorten_repr(text)} has a lone surrogate ({odd.group()!a}), which is no character")


def _texts(value: Any) -> Iterator[str]:
    left = [(value, 0)]
    while left:
        part, depth = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, (dict, list, tuple)):
            if depth == MAX_NESTING:
                raise ShardwiseError(f"it is nested more than {MAX_NESTING} deep")
            if isinstance(part, dict):
                left += [(key, depth + 1) for key in part]
            left += [(item, depth + 1) for item in (part.values() if isinstance(part, dict) else part)]


def _check_brackets(text: str) -> None:
    """Deep nesting is found before a parser goes down."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += (match.group(1) is not None) - (match.group(2) is not None)
        if depth > MAX_NESTING:
            raise ShardwiseError(f"it is nested more than {MAX_NESTING} deep at character {match.start():,}")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ShardwiseError(f"{shorten_repr(counts.most_common(1)[0][0])} is given twice")
    return table


def _integer(text: str) -> int:
    number = whole_number(text.removeprefix("-"))
    if number is None:
        raise ShardwiseError(f"{shorten_repr(text)} is a number beyond 64 bits")
    return -number if text.startswith("-") else number


def _finite(text: str) -> float:
    number = float(text) if len(text) <= 64 else float("inf")
    if not isfinite(number):
        raise ShardwiseError(f"{shorten_repr(text)} is not a number that a float can hold")
    return number


def _no_constant(text: str) -> Any:
    raise ShardwiseError(f"{text} is not a number")


def is_line(text: str, most: int = MAX_NOTATION) -> bool:
    """Whether a text is one line: without control characters, of at most ``most`` characters."""
    return len(text) <= most and not _CONTROL.search(text)
