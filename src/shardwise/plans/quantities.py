"""Seconds and bytes as a reader wants them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """``0.0123`` -> ``12.3 ms``; three significant digits."""
    for unit in ("s", "ms", "us"):
        if seconds >= 0.9995 or unit == "us":
            return f"{seconds:.3g} {unit}"
        seconds *= 1e3
    raise AssertionError("microseconds are the last unit")


def format_bytes(count: float) -> str:
    """``65536`` -> ``64 KiB``; three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
