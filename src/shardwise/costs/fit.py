"""Calibration: the figures of a device and of its links, out of measured times.

Every model of ``costs`` is a straight line in the size: a matmul takes ``latency + ramp + flops / rate``, an
element-wise operator ``latency + bytes / bandwidth``, a collective ``launch + steps x latency + bytes / pace``. So each
series of measurements is fitted by a line (``robust_line``), and the figures are read off the lines. What a line cannot
say shows in the residuals, which are written into the cluster file beside them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from math import log
from statistics import median
from typing import Any

from shardwise.costs.cluster import PRODUCTS, Cluster, Device, Level
from shardwise.costs.cluster_file import family
from shardwise.costs.collectives import Span, affine_terms, num_steps, share_sent
from shardwise.costs.kernels import ROWS_BACKWARD, KernelWork, kernel_seconds
from shardwise.costs.units import Figures, format_quantity

_MOST_POINTS = 40  # that a line is fitted to

REFERENCE = "all_reduce"  # the kind whose bandwidth is the level's


@dataclass(frozen=True, slots=True)
class MatmulTime:
    """Seconds of a matmul of ``flops`` FLOPs."""

    dtype: str
    flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamTime:
    """Seconds of an element-wise operator that reads and writes ``num_bytes`` bytes."""

    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds of a collective of ``num_bytes`` bytes (as ``Collective.num_bytes`` counts) on a group that is spread
    over ``units`` (``Span.units``), while all other such groups do the same."""

    kind: str
    units: tuple[int, ...]
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of a kernel of a kind that has a figure of its own (``Device.kernels``)."""

    work: KernelWork
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured on a machine. ``sizes``: of its levels, innermost first. ``overlap``: the part of a collective
    that matmuls at the same time do not notice. ``kernels``, ``launch``, ``host_bandwidth``, ``reserve_bytes``: those
    of GPUs; what is 0 was not measured. ``fresh_bandwidth``: as of a device. ``noise``: by how much the middle one of
    several rounds was slower than the fastest, half of all times less. ``facts``: date, versions, backend."""

    device: str
    memory_bytes: float
    sizes: tuple[int, ...]
    kernel_latency: float
    matmuls: tuple[MatmulTime, ...]
    streams: tuple[StreamTime, ...]
    collectives: tuple[CollectiveTime, ...]
    overlap: float = 1.0
    kernels: tuple[KernelTime, ...] = ()
    launch: float = 0.0
    host_bandwidth: float = 0.0
    reserve_bytes: float = 0.0
    noise: float = 0.0
    fresh_bandwidth: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Measurements:
        return Measurements(
            **{
                **content,
                "sizes": tuple(content["sizes"]),
                "matmuls": tuple(MatmulTime(**entry) for entry in content["matmuls"]),
                "streams": tuple(StreamTime(**entry) for entry in content["streams"]),
                "collectives": tuple(
                    CollectiveTime(**{**entry, "units": tuple(entry["units"])}) for entry in content["collectives"]
                ),
                "kernels": tuple(
                    KernelTime(KernelWork(**entry["work"]), entry["seconds"]) for entry in content.get("kernels", ())
                ),
            }
        )


def robust_line(points: Sequence[tuple[float, float]], *, rising: bool = False) -> tuple[float, float]:
    """(intercept, slope), neither negative (``rising``: the slope not 0 either), with the least sum of
    ``|log(line(x) / y)|`` over points (x, y), y > 0. Of equally good lines, one through a larger x.

    An outlier costs no more than its distance, a microsecond counts as much in a small message as a millisecond in a
    large one, and half as much is as wrong as twice as much. Tried are the lines through two of the points, or through
    one and with one coefficient 0: where the least sum of plain absolute deviations lies (Boscovich, 1757). Of more
    than 40 points, some 40 are taken, at equal ratios of x.
    """
    taken = _thinned(sorted(points))[::-1]
    has_zero = taken[-1][0] == 0

    def distance(line: tuple[float, float]) -> float:
        return sum(abs(log((line[0] + line[1] * x) / y)) for x, y in taken)

    lines = [] if has_zero else [(0.0, y / x) for x, y in taken]
    if taken[0][0] > taken[-1][0] or has_zero:  # one size tells no intercept
        lines += [] if rising else [(y, 0.0) for _, y in taken]
        for (x2, y2), (x1, y1) in combinations(taken, 2):
            slope = (y2 - y1) / (x2 - x1) if x2 > x1 else 0.0
            if slope > 0 and y1 - slope * x1 > 0:
                lines.append((y1 - slope * x1, slope))
    return min(lines, key=lambda line: round(distance(line), 9))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most 40 points, of many in ascending order of x, as many among small x as among large ones."""
    if len(points) <= _MOST_POINTS:
        return points
    least, most = max(points[0][0], 1.0), points[-1][0]
    targets = [least * (most / least) ** (i / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)]
    places = {min(bisect_left(points, (x,)), len(points) - 1) for x in targets}
    return [points[place] for place in sorted(places)]


def fit_cluster(measured: Measurements, name: str, like: Cluster | None = None) -> Cluster:
    """Return the cluster that was measured. ``like``: one of the same hardware, whose peaks are known and whose links
    have the same shape, and are taken where none were measured (on one device); without, peaks are what was reached."""
    levels: list[Level] = []
    names = ("machine",) if len(measured.sizes) == 1 else ("node", "network", *("",) * len(measured.sizes))
    for index, size in enumerate(measured.sizes):
        # Groups in one unit of this level, with one member in each of several units below.
        inside = [t for t in measured.collectives if t.units[index] == t.units[0] and t.units[index + 1] == 1]
        reference = like.levels[index] if like is not None and index < len(like.levels) else None
        levels.append(fit_level(names[index] or f"level{index}", size, inside, reference))
    facts = measured.facts
    source = f"measured on {facts.get('date', 'an unknown day')} ({facts.get('software', 'unknown software')})"
    sources = {f"device.{key}": source for key in ("flops", "memory", "memory_bandwidth", "kernel_latency")}
    sources |= {"device.matmul_half_flops": source, "device.overlap": source, "levels": source}
    if like is not None:
        sources |= dict.fromkeys(("device.flops", "device.memory_bandwidth"), f"as {like.device.name}")
        sources |= dict.fromkeys(("device.matmul_efficiency", "device.memory_efficiency"), source)
    device = fit_device(measured, None if like is None else like.device)
    if measured.kernels:
        device = _with_kernels(device, measured.kernels)
        sources["device.kernels"] = source
    for key, figure in (("launch", "launch"), ("host_bandwidth", "host_bandwidth"), ("reserve", "reserve_bytes")):
        if getattr(measured, figure):
            device = replace(device, **{figure: getattr(measured, figure)})
            sources[f"device.{key}"] = source
    if not measured.collectives:
        sources["levels"] = f"as {'local' if like is None else like.name}: not measured on {measured.sizes[0]} device"
    return _with_spreads(Cluster(name, device, tuple(levels), sources=tuple(sources.items())), measured)


def _with_spreads(cluster: Cluster, measured: Measurements) -> Cluster:
    """The cluster with the error that nine of ten of its measurements stay below, of operators and of collectives."""
    errors: dict[bool, list[float]] = {False: [], True: []}
    for residual in residuals(cluster, measured):
        errors[" over " in residual.series].append(residual.relative_error)
    operator_error, link_error = (quantile(series, 0.9) if series else 0.0 for series in (errors[False], errors[True]))
    levels = tuple(replace(level, spread=round(link_error, 3)) for level in cluster.levels)
    return replace(cluster, device=replace(cluster.device, spread=round(operator_error, 3)), levels=levels)


def fit_device(measured: Measurements, like: Device | None = None) -> Device:
    """Rates are what large operators reach. The line of each series has its own intercept, of which the latency of a
    kernel is a part; the rest of a matmul's, in FLOPs of the fastest dtype, is ``matmul_half_flops``."""
    latency = measured.kernel_latency
    rates: dict[str, float] = {}
    ramps: list[float] = []
    for dtype in sorted({time.dtype for time in measured.matmuls}):
        points = [(time.flops, max(time.seconds - latency, 1e-9)) for time in measured.matmuls if time.dtype == dtype]
        intercept, slope = robust_line(points, rising=True)
        rates[dtype] = 1 / slope
        ramps.append(intercept)
    _, slope = robust_line(
        [(time.num_bytes, max(time.seconds - latency, 1e-9)) for time in measured.streams], rising=True
    )
    device = Device(
        name=measured.device,
        flops=Figures(rates),
        memory_bytes=measured.memory_bytes,
        memory_bandwidth=1 / slope,
        kernel_latency=latency,
        matmul_efficiency=Figures(dict.fromkeys(rates, 1.0)),
        matmul_half_flops=median(ramps) * max(rates.values()),
        overlap=measured.overlap,
        fresh_bandwidth=measured.fresh_bandwidth,
        foreach=not measured.facts.get("backend", "").startswith("gloo"),  # ranks on CPUs
    )
    if like is None:
        return device
    peaks = {dtype: max(like.flops.get(dtype, rate), rate) for dtype, rate in rates.items()}
    bandwidth = max(like.memory_bandwidth, device.memory_bandwidth)
    described = replace(
        device,
        flops=Figures({**like.flops, **peaks}),
        memory_bandwidth=bandwidth,
        matmul_efficiency=Figures({**like.matmul_efficiency, **{d: rates[d] / peaks[d] for d in rates}}),
        memory_efficiency=device.memory_bandwidth / bandwidth,
        reserve_bytes=like.reserve_bytes,
        host_bandwidth=like.host_bandwidth,
        kernels=like.kernels,
        scalar_rate=like.scalar_rate,
        attention_row=like.attention_row,
        launch=like.launch,
        memory_spread=like.memory_spread,
    )
    return replace(described, matmul_half_flops=median(ramps) * max(map(described.matmul_flops, described.flops)))


def _with_kernels(device: Device, kernels: Sequence[KernelTime]) -> Device:
    """The device with the part of its peaks that each kind of kernel reached: the median, where there are several."""
    shares: dict[str, list[float]] = {}
    for kernel in kernels:
        work = kernel.work
        busy = kernel.seconds - device.kernel_latency
        if work.kind in PRODUCTS:
            rows = work.rows * device.attention_row * (ROWS_BACKWARD if work.kind.endswith("backward") else 1.0)
            done, peak, busy = work.flops, device.peak_flops(work.dtype), busy - device.matmul_ramp - rows
        else:
            done, peak = work.num_bytes, device.memory_bandwidth
            busy -= work.written / device.bytes_per_second()
        shares.setdefault(work.kind, []).append(min(1.0, done / peak / max(busy, kernel.seconds / 10)))
    medians = {kind: median(reached) for kind, reached in shares.items()}
    return replace(device, kernels=Figures({**device.kernels, **medians}))


def fit_level(name: str, size: int, times: Iterable[CollectiveTime], like: Level | None = None) -> Level:
    """Return the figures of one level from collectives that cross no other.

    The slope of a line gives the bandwidth of its kind and group size; intercepts are ``launch + steps x latency``. For
    groups that were measured the level keeps the lines themselves; the figures are for all others.
    ``like``: a level with the same links; group sizes that it names but were not measured get its bandwidths, scaled as
    the measured ones are.
    A level without measurements (one device) is ``like``.
    """
    series: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for time in times:
        series.setdefault((time.kind, time.units[0]), []).append((time.num_bytes, time.seconds))
    if not series:
        base = family("local").levels[0] if like is None else like
        return replace(base, name=name, size=size)
    lines = {key: robust_line(points, rising=True) for key, points in series.items()}
    fixed = {(kind, units): (num_steps(kind, units), line[0]) for (kind, units), line in lines.items()}
    latency = _latency(fixed)
    starts = {key: max(seconds - steps * latency, 0.0) for key, (steps, seconds) in fixed.items()}
    launches = {kind: median(start for (other, _), start in starts.items() if other == kind) for kind, _ in lines}
    paces = {(kind, units): share_sent(kind, units) / slope for (kind, units), (_, slope) in lines.items()}
    reference = REFERENCE if any(kind == REFERENCE for kind, _ in paces) else next(iter(paces))[0]
    by_size = {units: pace for (kind, units), pace in sorted(paces.items()) if kind == reference}
    if like is not None:
        by_size = _completed(by_size, like)
    kinds = sorted({kind for kind, _ in paces} - {reference})
    efficiency = {
        kind: median(
            pace / by_size[units] for (other, units), pace in paces.items() if other == kind and units in by_size
        )
        for kind in kinds
    }
    return Level(
        name,
        size,
        bandwidth=by_size[max(by_size)],
        latency=latency,
        launch=median(launches.values()),
        group_bandwidths=tuple(by_size.items()) if len(by_size) > 1 else (),
        efficiency=Figures(efficiency),
        launches=Figures(launches),
        lines=tuple((kind, units, first, slope) for (kind, units), (first, slope) in lines.items()),
    )


def _completed(by_size: Mapping[int, float], like: Level) -> dict[int, float]:
    """Measured bandwidths, and those of ``like`` for its other group sizes, times the ratio of the measured sizes."""
    ratios = tuple((units, pace / like.link_bandwidth(units)) for units, pace in by_size.items())
    scale = replace(like, group_bandwidths=ratios)
    others = {units: pace * scale.link_bandwidth(units) for units, pace in like.group_bandwidths}
    return dict(sorted((others | dict(by_size)).items()))


def _latency(fixed: Mapping[tuple[str, int], tuple[int, float]]) -> float:
    """Seconds per step, from (steps, seconds) of every kind and group size: the median slope between group sizes of the
    same kind (Theil and Sen); between kinds, where all groups are of one size."""
    pairs = combinations(fixed.items(), 2)
    same_kind = [(first, second) for ((kind, _), first), ((other, _), second) in pairs if kind == other]
    if not same_kind:
        same_kind = list(combinations(fixed.values(), 2))
    slopes = [(late - soon) / (many - few) for (few, soon), (many, late) in same_kind if many != few]
    return max(median(slopes), 0.0) if slopes else 0.0


@dataclass(frozen=True, slots=True)
class Residual:
    """Predicted against measured seconds of one series."""

    series: str
    size: float
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


def residuals(cluster: Cluster, measured: Measurements) -> tuple[Residual, ...]:
    """Every measurement beside what the cluster's figures say."""
    device = cluster.device
    result = []
    for product in measured.matmuls:
        seconds = device.kernel_latency + device.matmul_ramp + product.flops / device.matmul_flops(product.dtype)
        result.append(Residual(f"matmul {product.dtype}", product.flops, product.seconds, seconds))
    for stream in measured.streams:
        seconds = device.kernel_latency + stream.num_bytes / device.bytes_per_second()
        result.append(Residual("element-wise", stream.num_bytes, stream.seconds, seconds))
    for kernel in measured.kernels:
        size = kernel.work.flops or kernel.work.num_bytes
        result.append(Residual(kernel.work.kind, size, kernel.seconds, kernel_seconds(device, kernel.work)))
    for time in measured.collectives:
        algorithms = affine_terms(time.kind, cluster.levels, Span(time.units))
        seconds = min(fixed + slope * time.num_bytes for fixed, slope in algorithms)
        spread = " x ".join(str(units) for units in time.units[:-1])
        result.append(Residual(f"{time.kind} over {spread}", time.num_bytes, time.seconds, seconds))
    return tuple(result)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that is not exceeded by ``part`` of them.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([4.0, 1.0, 3.0, 2.0], 0.9)
    (2.0, 4.0)
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def format_residuals(rows: Sequence[Residual]) -> list[str]:
    """One line per series: how many measurements, median and 90th percentile of the relative error, and the largest
    measurement beside its prediction."""
    by_series: dict[str, list[Residual]] = {}
    for residual in rows:
        by_series.setdefault(residual.series, []).append(residual)
    lines = []
    for series, those in by_series.items():
        errors = [residual.relative_error for residual in those]
        largest = max(those, key=lambda residual: residual.size)
        lines.append(
            f"{series}: {len(those)} points, median {quantile(errors, 0.5):.0%}, 90th percentile"
            f" {quantile(errors, 0.9):.0%}; the largest {format_quantity(largest.measured, 's')},"
            f" predicted {format_quantity(largest.predicted, 's')}"
        )
    return lines
