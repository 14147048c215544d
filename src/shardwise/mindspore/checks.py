"""Checks of options, and notes. A check takes an option's name and value, and returns the value to store or raises an
error: a wrong type is a TypeError, a wrong value a ValueError, a feature of a later version a NotImplementedError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any

from shardwise import rank
from shardwise.errors import problem

Check = Callable[[str, Any], Any]
_told: set[str] = set()  # texts and topics printed by this process


def note(text: str, topic: str = "") -> None:
    """Print ``text`` on rank 0, unless it, or a note on the same ``topic``, was printed before."""
    if (topic or text) not in _told:
        _told.add(topic or text)
        if rank() == 0:
            print(f"shardwise.mindspore: {text}", file=sys.stderr)


def closest(name: str, candidates: Iterable[str]) -> str:
    """Suggest a fix for a misspelled name: the closest known name, or the list of all.

    >>> closest("semi_autoparallel", ["auto_parallel", "semi_auto_parallel"])
    'did you mean "semi_auto_parallel"?'
    """
    candidates = sorted(candidates)
    near = get_close_matches(name.lower(), candidates, n=1, cutoff=0.75)
    return f'did you mean "{near[0]}"?' if near else f"choose from {', '.join(candidates)}"


def of_type(name: str, value: Any, kinds: Any, fix: str) -> Any:
    """Check for an instance of ``kinds``; True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(problem(f"{name} is {value!r}, of type {type(value).__name__}", fix=fix))
    return value


def integer(name: str, value: Any, fix: str = "give an integer") -> int:
    return int(of_type(name, value, int, fix))


def number(name: str, value: Any) -> float:
    return float(of_type(name, value, int | float, "give a number"))


def flag(name: str, value: Any) -> bool:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise TypeError(problem(f"{name} is {value!r}, not True or False", fix=f"write {name}={bool(value)}"))
    return value


def whole(low: int, high: int) -> Check:
    """Return a check for an integer from ``low`` to ``high``."""

    def check(name: str, value: Any) -> int:
        fix = f"give an integer from {low} to {high}"
        if not low <= integer(name, value, fix) <= high:
            bound = f"smaller than {low}" if value < low else f"larger than {high}"
            raise ValueError(problem(f"{name} is {value}, {bound}", fix=fix))
        return int(value)

    return check


def from_on(name: str, value: Any, low: int, fix: str = "a whole number") -> int:
    """Check for an integer from ``low`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(problem(f"{name} is {value!r}", fix=f"{fix} from {low}"))
    return value


def numbers(is_right: Callable[[str, Any], bool], fix: str, kind: Callable[[Any], Any] = lambda value: value) -> Check:
    """Return a check for numbers for which ``is_right`` holds, which are stored as ``kind``."""

    def check(name: str, value: Any) -> Any:
        if not is_right(name, value):
            raise ValueError(problem(f"{name} is {value}", fix=fix))
        return kind(value)

    return check


def within(low: float, high: float, fix: str) -> Check:
    """Return a check for a number above ``low`` and below ``high``."""
    return numbers(lambda _, value: low < value < high, fix)


positive = numbers(lambda name, value: number(name, value) > 0, "give a number above 0")
not_negative = numbers(lambda _, value: value >= 0, "a number from 0")
fraction = numbers(lambda name, value: 0 < number(name, value) <= 1, "give a number above 0, at most 1")


def text(name: str, value: Any) -> str:
    """Check for a string."""
    return str(of_type(name, value, str, "give a string"))


def one_of(*known: str) -> Check:
    """Return a check for one of some words."""

    def check(name: str, value: Any) -> str:
        if text(name, value) not in known:
            raise ValueError(problem(f'{name} is "{value}", which does not exist', fix=closest(value, known)))
        return str(value)

    return check


def channels_first(title: str, data_format: str, else_: str = "") -> str:
    """Raise NotImplementedError unless the channels are dim 1."""
    if data_format != "NCHW":
        raise NotImplementedError(f"{title}(data_format={data_format!r}): channels are dim 1 here{else_}")
    return data_format


def unknown_words(settings: dict[str, Any], *known: str) -> None:
    """Raise TypeError for settings other than the known ones, which have no effect here."""
    for name in settings:
        if name not in known:
            raise TypeError(problem(f"there is no setting {name!r}", fix=closest(name, known)))


def known_name(name: str, names: Iterable[str], where: str) -> None:
    """Raise ValueError unless ``where`` has an option of this name."""
    names = tuple(names)
    if name not in names:
        raise ValueError(problem(f'{where} has no option "{name}"', fix=closest(name, names)))


def entries(checks: dict[str, Check], defaults: dict[str, Any] | None = None) -> Check:
    """Return a check for a dictionary with a check per entry. Missing entries get their defaults."""

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(problem(f"{name} is {value!r}, not a dictionary", fix=f"its keys are {', '.join(checks)}"))
        for key in value:
            known_name(text(f"a key of {name}", key), checks, name)
        return {**(defaults or {}), **{key: checks[key](f"{name}[{key!r}]", entry) for key, entry in value.items()}}

    return check


def option(default: Any, check: Check, *, later: str = "", meaningless: str = "", idle: str = "") -> Any:
    """Return a field of a dataclass of options: its default and its check.

    Args:
        later: another value is refused, as this follows in a later version.
        meaningless: another value is refused, as the option cannot have an effect here, for this reason.
        idle: another value is kept with a note, as the option has no effect here, for this reason.
    """

    def checked(name: str, value: Any) -> Any:
        stored, fix = check(name, value), f"leave {name} at {default!r}"
        if stored != default and later:
            raise NotImplementedError(problem(f"{name}={value!r}: {later} in a later version", fix=fix))
        if stored != default and meaningless:
            raise ValueError(problem(f"{name}={value!r} means nothing here: {meaningless}", fix=fix))
        if stored != default and idle:
            note(f"{name}={value!r} has no effect here: {idle}")
        return stored

    metadata = {"check": checked}
    if isinstance(default, dict):
        return field(default_factory=default.copy, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def checks_of(options: Any) -> dict[str, Check]:
    """Return the checks of a dataclass of options by name."""
    return {entry.name: entry.metadata["check"] for entry in fields(options) if "check" in entry.metadata}
