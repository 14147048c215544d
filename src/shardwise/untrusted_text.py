"""Read untrusted text safely: plan files, cluster files, layouts, strategies.

Readers check the limits of a text first: its size, characters, nesting and numbers. Parsing then takes time linear in
the text. Messages quote an excerpt of it, never the whole.
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
MAX_NOTATION = 2**21  # characters of a layout or a strategy: two per device of MAX_DEVICES
MAX_FILE = 2**28  # bytes of a plan, which usually has about 10 KB per layer
MAX_NUMBER = 2**63 - 1  # the largest size that torch can represent
MAX_NESTING = 16

_DIGITS = re.compile(r"[0-9]{1,19}")
_NOT_PLAIN = re.compile(r"[^ -~]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Skips strings (unfinished ones to the end of the text), so that no character is scanned twice.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)


def shorten_repr(value: object, most: int = 60) -> str:
    """Return a ``repr`` of at most ``most`` characters for any value, for a message."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[: most - 20]!r}... ({len(value):,} characters)"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"
    if isinstance(value, (list, tuple, dict, set)):
        return f"a {type(value).__name__} of {len(value):,}" if value else repr(value)
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def is_number(value: object) -> bool:
    """Return whether a setting is a real number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(text: str) -> int | None:
    """Return the number of a text of ASCII digits, at most ``MAX_NUMBER``; None for any other text."""
    number = int(text) if _DIGITS.fullmatch(text) else MAX_NUMBER + 1
    return number if number <= MAX_NUMBER else None


def check_notation(text: object, reads: str, most: int = MAX_NOTATION) -> str:
    """Return the text if it is printable ASCII of at most ``most`` characters. ``reads``: the expected form, as in "a
    layout reads ...". Raises NotationError."""
    if not isinstance(text, str):
        raise NotationError(f"{shorten_repr(text)} is not a text: {reads}")
    if len(text) > most:
        raise NotationError(f"the text has {len(text):,} characters, at most {most:,} are allowed: {reads}")
    odd = _NOT_PLAIN.search(text)
    if odd:
        raise NotationError(
            caret(text, odd.start(), f"{odd.group()!a} is not a plain character (printable ASCII): {reads}")
        )
    return text


def read_text(path: str | Path, most: int) -> str:
    """Return the content of a UTF-8 file. Raises OSError, UnicodeDecodeError, or ShardwiseError for more than ``most``
    bytes."""
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ShardwiseError(f"{path} has more than {most:,} bytes, the limit for such files")
    return content.decode("utf-8")


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ShardwiseError for invalid JSON, and for some texts that the standard
    library accepts: repeated names, numbers beyond a float or 64 bits, deep nesting, and lone surrogates."""
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
            raise ShardwiseError(f"{shorten_repr(text)} has a lone surrogate ({odd.group()!a}), not a character")


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
    """Raise ShardwiseError for deep nesting before the recursive parser sees it."""
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
    """Return whether a text is one line, without control characters and with at most ``most`` characters."""
    return len(text) <= most and not _CONTROL.search(text)
