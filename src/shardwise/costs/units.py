"""Figures with units: ``"900 GB/s"``, ``"80 GiB"``, ``"312 TFLOP/s"``, ``"5 us"``; a plain number is in SI base units.

SI prefixes are powers of ten (GB = 1e9 bytes), binary ones powers of two (GiB = 2 ** 30); B is a byte, b a bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import inf, isfinite

from shardwise.errors import ShardwiseError
from shardwise.untrusted_text import shorten_repr

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"": 1.0, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {
    **{f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()},
    **{f"{prefix}b": factor / 8 for prefix, factor in _DECIMAL.items()},
    **{f"{prefix}bit": factor / 8 for prefix, factor in _DECIMAL.items()},
}

# What is measured -> the units it may be written in -> the factor to the base unit.
UNITS: dict[str, dict[str, float]] = {
    "B": _BYTES,
    "B/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()},
    "FLOP/s": {f"{prefix}{name}": factor for prefix, factor in _DECIMAL.items() for name in ("FLOP/s", "FLOPS")},
    "FLOP": {f"{prefix}FLOP": factor for prefix, factor in _DECIMAL.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "/s": {f"{prefix}/s": factor for prefix, factor in _DECIMAL.items()},
    "": {"": 1.0, "%": 1e-2},
}

# What is measured -> between which figures, other than 0, any hardware has: sums and quotients of them stay finite.
RANGES = {
    "B": (1.0, 1e18),
    "B/s": (1.0, 1e18),
    "FLOP/s": (1.0, 1e24),
    "FLOP": (1e-3, 1e24),
    "s": (1e-15, 1e6),
    "/s": (1.0, 1e18),
    "": (1e-6, 1e6),
}
_EXAMPLES = {
    "B": "80 GiB",
    "B/s": "900 GB/s",
    "FLOP/s": "312 TFLOP/s",
    "FLOP": "2 GFLOP",
    "s": "5 us",
    "/s": "350 G/s",
    "": "0.8",
}
_LONGEST = 64  # characters of a figure
_QUANTITY = re.compile(r"([-+]?[0-9.][0-9_.]*(?:[eE][-+]?[0-9]+)?) *([A-Za-zµ/%]*)")


class Figures(Mapping[str, float]):
    """An immutable, hashable mapping from names (dtypes, kinds of collectives) to numbers."""

    __slots__ = ("_figures",)

    def __init__(self, figures: Mapping[str, float] | None = None) -> None:
        self._figures = dict(sorted((figures or {}).items()))

    def __getitem__(self, name: str) -> float:
        return self._figures[name]

    def __contains__(self, name: object) -> bool:
        return name in self._figures

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def __hash__(self) -> int:
        return hash(tuple(self._figures.items()))

    def __eq__(self, other: object) -> bool:
        return self._figures == other._figures if isinstance(other, Figures) else NotImplemented

    def __repr__(self) -> str:
        return f"Figures({self._figures})"


def parse_quantity(value: object, unit: str) -> float:
    """Return a figure in base units (``unit``: a key of ``UNITS``) from a number or a text.

    >>> parse_quantity("80 GiB", "B"), parse_quantity("200 Gb/s", "B/s"), parse_quantity(5e-6, "s")
    (85899345920.0, 25000000000.0, 5e-06)

    Raises ShardwiseError for anything else, negative, and infinite numbers included.
    """
    example = _EXAMPLES[unit]
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value.strip(" ")) if len(value) <= _LONGEST else None
        if match is None:
            raise ShardwiseError(f"{shorten_repr(value)} is not a number with a unit, such as {example!r}")
        units = UNITS[unit]
        if match[2] not in units and match[2]:
            raise ShardwiseError(f"unknown unit {match[2]!r} in {value!r}: write for example {example!r}")
        try:
            factor = units[match[2]] if match[2] else 1.0
            number = float(match[1]) * factor if factor >= 1 else float(match[1]) / round(1 / factor)
        except ValueError:
            raise ShardwiseError(f"{match[1]!r} is not a number") from None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if isinstance(value, float) or value.bit_length() < 1000 else inf
    else:
        raise ShardwiseError(f"{shorten_repr(value)} is not a number with a unit, such as {example!r}")
    if not isfinite(number):
        raise ShardwiseError(f"{shorten_repr(value)} is not finite")
    if number < 0:
        raise ShardwiseError(f"{shorten_repr(value)} is negative")
    return number


def format_quantity(number: float, unit: str) -> str:
    """Return a figure as one reads it: 85899345920, B -> ``80 GiB``; 3.12e14, FLOP/s -> ``312 TFLOP/s``. With the
    digits that it takes to read it back, if those are nine at most; others (measured ones) with four.

    >>> format_quantity(85899345920, "B"), format_quantity(9e11, "B/s"), format_quantity(5e-6, "s")
    ('80 GiB', '900 GB/s', '5 us')
    """
    if unit == "s":
        scale, name = next(((f, n) for n, f in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if number >= f), (1e-9, "ns"))
    elif unit == "B":
        fitting = [(_BINARY[p], f"{p}B") for p in ("Ti", "Gi", "Mi", "Ki", "") if number >= _BINARY[p]] or [(1.0, "B")]
        scale, name = next(
            (pair for pair in fitting if number < 1e6 * pair[0] and _is_short(number / pair[0], 6)), fitting[0]
        )
    elif unit:
        prefix = next((p for p in "PTGMk" if number >= _DECIMAL[p]), "")
        scale, name = _DECIMAL[prefix], prefix + unit
    else:
        scale, name = 1.0, ""
    return f"{_few_digits(number / scale)} {name}".rstrip()


def _few_digits(number: float) -> str:
    text = next((f"{number:.{digits}g}" for digits in range(4, 10) if _is_short(number, digits)), f"{number:.4g}")
    return f"{float(text):.9g}" if 1e-4 <= abs(number) < 1e9 else text


def _is_short(number: float, digits: int) -> bool:
    return abs(float(f"{number:.{digits}g}") - number) <= 1e-13 * number
