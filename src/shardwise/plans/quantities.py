"""Seconds and bytes as readable text."""

from __future__ import annotations

from collections.abc import Callable


def format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits: ``0.0123`` -> ``12.3 ms``. Less than a picosecond is ``0 us``."""
    if abs(seconds) < 1e-12:
        return "0 us"
    for unit in ("s", "ms", "us"):
        if seconds >= 0.9995 or unit == "us":
            return f"{seconds:.3g} {unit}"
        seconds *= 1e3
    raise AssertionError("microseconds are the last unit")


def format_bytes(count: float) -> str:
    """Format bytes with three significant digits: ``65536`` -> ``64 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


_UNIT_SIZES = (
    ("s", 1.0),
    ("ms", 1e-3),
    ("us", 1e-6),
    ("KiB", 2.0**10),
    ("MiB", 2.0**20),
    ("GiB", 2.0**30),
    ("TiB", 2.0**40),
)


def format_interval(value: float, low: float, high: float, form: Callable[[float], str]) -> str:
    """Format a figure and its interval in one unit: ``1.34 s (1.22-1.49)``; only the figure if the interval is empty.
    ``form``: ``format_seconds`` or ``format_bytes``."""
    text = form(value)
    if low == high:
        return text
    number, unit = text.split()
    scale = next((size for name, size in _UNIT_SIZES if name == unit), 1.0)
    ends = (f"{end / scale:.3g}" if end / scale < 999.5 else f"{end / scale:.0f}" for end in (low, high))
    return f"{number} {unit} ({'-'.join(ends)})"
