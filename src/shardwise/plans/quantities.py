"""Seconds and bytes as readable text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.costs.cluster import Cluster
from shardwise.costs.ledger import Peak
from shardwise.costs.prediction import Interval, between, between_bytes


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


def format_ranges(numbers: Sequence[int]) -> str:
    """Format numbers in their order: ``(0, 1, 2, 3, 8)`` -> ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def format_parts(peak: Peak) -> str:
    """Format the categories of a peak that hold any bytes."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.parts.items() if size)


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


def format_interval_seconds(interval: Interval) -> str:
    return format_interval(interval.value, interval.low, interval.high, format_seconds)


def format_seconds_interval(seconds: float, cluster: Cluster | None) -> str:
    """Format seconds with the wider of the compute and communication intervals: the split between them is unknown."""
    if cluster is None:
        return format_seconds(seconds)
    device, links = between(seconds, seconds, cluster), between(seconds, 0.0, cluster)
    return format_interval_seconds(max(device, links, key=lambda interval: interval.high))


def format_bytes_interval(num_bytes: float, cluster: Cluster | None) -> str:
    """Format the peak bytes of a device."""
    if cluster is None:
        return format_bytes(num_bytes)
    interval = between_bytes(num_bytes, cluster)
    return format_interval(interval.value, interval.low, interval.high, format_bytes)
