"""Variants of a request: what makes a model fit, or a step cheaper, each planned as the request was.

``sw.fits`` plans them, and a refusal of ``sw.plan`` names those that fit if planning them takes seconds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.optimizers import ON_HOST, may_wait_on_host
from shardwise.errors import NothingFits, PlanError, ShardwiseError
from shardwise.graph.step_precision import Precision
from shardwise.layouts.mesh import Mesh
from shardwise.planning.execute import Planning, execute
from shardwise.planning.plan_cache import PlanCache
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import default_seconds, figures
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.plans.request import PlanRequest
from shardwise.plans.result import PlanningResult
from shardwise.plans.schedule import schedule_of
from shardwise.progress import STOPPED, stop_with
from shardwise.search.mesh_shapes import candidate_meshes

NUM_SHOWN = 3
_MOST_NODES = 8  # the largest factor by which nodes are multiplied
_MOST_MESHES = 4
_PIPELINE_RANKS = (2, 4)  # that are tried if the request has no stages
_SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
# CPU seconds that a refused plan may have taken for suggestions to be planned as well, and that these may take.
MAX_REFUSED_SECONDS, MAX_SUGGESTION_SECONDS = 2.0, 8.0


@dataclass(frozen=True)
class Option:
    """A request (``what`` changes, in words) with its plan, or why there is none."""

    what: str
    request: PlanRequest
    found: PlanningResult | None = None
    refused: str = ""

    @property
    def plan(self) -> Plan | None:
        return None if self.found is None else self.found.plan

    @property
    def cluster(self) -> Cluster:
        return self.request.cluster

    @property
    def samples(self) -> int | None:
        return self.request.step_samples

    @property
    def fits(self) -> bool:
        return self.found is not None

    @property
    def is_priced(self) -> bool:
        """Whether it fits at a known price; stages have none under a mode."""
        return self.step_seconds > 0

    @property
    def step_seconds(self) -> float:
        """The seconds of a step as it runs by default; 0 if the plan was not priced."""
        return 0.0 if self.plan is None else default_seconds(self.plan)

    @property
    def peak_bytes(self) -> float:
        """The bytes of the fullest device; 0 if the plan was not priced."""
        return self._figures[1]

    @property
    def _figures(self) -> tuple[float, float]:
        return (self.plan and figures(self.plan)) or (0.0, 0.0)

    @property
    def price(self) -> float:
        """The device-seconds of a sample by an eager step: those of stages are predicted eager only."""
        return self._figures[0] * self.cluster.num_devices / (self.samples or 1)


def try_request(
    request: PlanRequest,
    what: str = "",
    captures: list[Planning] | None = None,
    seconds: float = inf,
    cache: PlanCache | None = None,
) -> Option:
    """Plan a request, and return why if nothing fits. Raises errors that are not about memory. ``what``: it is a
    variant; ``captures``, ``seconds``, ``cache``: as for ``execute``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if what else "default")
            found = execute(request, exact_refusal=not what, captures=captures, seconds=seconds, cache=cache)
    except PlanError as error:
        if not (what or isinstance(error, NothingFits)):
            raise
        return Option(what, request, refused=str(error))
    predicted = found.plan.predicted
    peak = 0.0 if predicted is None else predicted.peak_bytes
    if peak > request.limit:  # a plan that was not searched is not refused for that
        refused = f"the peak is {format_bytes(peak)} a device, {format_bytes(request.limit)} are allowed"
        return Option(what, request, refused=refused)
    return Option(what, request, found)


Variant = tuple[str, PlanRequest]


def execute_or_suggest(request: PlanRequest, seconds: float = inf, cache: PlanCache | None = None) -> PlanningResult:
    """Plan a request; a refusal of what does not fit names variants that do, or why they were not planned. ``seconds``,
    ``cache``: as for ``execute``."""
    start, began, captures = time.process_time(), time.monotonic(), list[Planning]()
    try:
        return execute(request, captures=captures, seconds=seconds, cache=cache)
    except NothingFits as refusal:
        took, refused = refusal.search_seconds or time.process_time() - start, refusal
    if took > min(MAX_REFUSED_SECONDS, seconds):
        why = f"not planned, as this plan took {took:.0f} s of CPU time: sw.fits plans them"
        raise refused.naming([], why) from None
    rest = seconds - (time.monotonic() - began)
    raise refused.naming(*_suggestions(request, captures, min(MAX_SUGGESTION_SECONDS, rest), cache)) from None


def _suggestions(
    request: PlanRequest, captures: list[Planning], seconds: float, cache: PlanCache | None
) -> tuple[list[str], str]:
    """Return a line for each variant that fits, the cheapest first, and the text to print if there is none."""

    def enough(planned: Sequence[Option]) -> bool:
        return sum(option.fits for option in planned) >= NUM_SHOWN

    options, untried = plan_variants(
        suggest_fixes(request), seconds, enough, captures, clock=time.process_time, cache=cache
    )
    best = sorted((option for option in options if option.fits), key=lambda option: option.price)
    left = f"; not planned (out of time): {'; '.join(untried)}" if untried else ""
    return [suggestion_line(option) for option in best], f"none of the {len(options)} that were planned fits{left}"


def suggestion_line(option: Option) -> str:
    """Format a change with the step time and peak memory that it leads to, if its plan is priced."""
    if not option.step_seconds:
        return option.what
    return f"{option.what}: step {format_seconds(option.step_seconds)}, peak {format_bytes(option.peak_bytes)}"


def suggest_fixes(request: PlanRequest) -> Iterator[Variant]:
    """Yield changes that may make a model fit, the smallest change first."""
    samples, batch = request.step_samples, request.example_samples
    micro_batch = request.training.micro_batch
    for part in (2, 4):
        if micro_batch and batch == samples and micro_batch % part == 0:
            yield _variant(
                request, f"smaller micro-batches (micro_batch={micro_batch // part})", micro_batch=micro_batch // part
            )
    if request.parallel.recompute != "auto":
        yield _variant(request, 'recompute in backward as much as needed (recompute="auto")', recompute="auto")
    if request.parallel.zero in (1, 2):
        yield _variant(request, "sharded parameters, all-gathered again in backward (zero=3)", zero=3)
    if samples and batch == samples and micro_batch is None:
        for parts in (2, 4, 8):
            if samples % parts == 0 and samples // parts >= 1:
                size = samples // parts
                what = f"the same batch in {parts} micro-batches (global_batch={samples}, micro_batch={size})"
                yield _variant(request, what, global_batch=samples, micro_batch=size)
    yield from _precision(request)
    yield from _states_on_host(request)
    yield from _stages(request)
    yield from _clusters(request)
    yield from _batches(request, (0.5, 0.25))


def suggest_changes(request: PlanRequest, plan: Plan) -> Iterator[Variant]:
    """Yield changes that may lower the price of a model that fits. Stages that ``stages="auto"`` chose are kept, except
    by the changes of stages themselves."""
    if request.parallel.stages == "auto":
        stages, schedule = (len(plan.stages), plan.schedule) if plan.is_pipeline else (None, None)
        request = request.varied(stages=stages, schedule=schedule)
    yield from _precision(request)
    yield from _batches(request, (2, 0.5))
    again = any(entry.again for entry in plan.operators) or any(entry.again for entry in plan.conversions)
    yield (
        _variant(request, 'recompute nothing (recompute="none")', recompute="none")
        if again
        else _variant(request, 'recompute blocks in backward (recompute="full")', recompute="full")
    )
    yield from _clusters(request, most=2)
    if request.parallel.mesh is None:
        stage_cluster = request.cluster.with_devices(plan.stages[0].mesh.num_devices)
        meshes = candidate_meshes(stage_cluster, request.search.max_mesh_axes)
        others = [mesh for mesh in meshes if any([*_sizes(mesh)] != [*_sizes(stage.mesh)] for stage in plan.stages)]
        for mesh in others[:_MOST_MESHES]:
            of = "another mesh for every stage" if plan.is_pipeline else "another mesh"
            yield f"{of} ({mesh.format_sizes()} devices)", replace(request, candidates=(mesh,))
    yield from _stages(request)


def _stages(request: PlanRequest) -> Iterator[Variant]:
    """Yield other numbers of stages, no stages, and other schedules on the same number of pipeline ranks."""
    stages, devices = request.parallel.stages, request.cluster.num_devices
    if request.parallel.mesh is not None or isinstance(stages, str):
        return
    if stages is None:
        for number in _PIPELINE_RANKS:
            if devices % number == 0 and (request.step_samples or 0) >= 2 * number:
                yield _variant(request, f"{number} stages (stages={number})", stages=number)
        return
    schedule = schedule_of(request.parallel.schedule or "1F1B")
    places = stages // schedule.stages_per_place
    for number in (places // 2, places * 2):
        if number > 1 and devices % number == 0:
            count = number * schedule.stages_per_place
            yield _variant(request, f"{count} stages (stages={count})", stages=count)
    yield _variant(request, "no stages (stages=None)", stages=None, schedule=None)
    for other in map(schedule_of, _SCHEDULES):
        if other.name != schedule.name:
            count = places * other.stages_per_place
            what = f'another schedule (schedule="{other.name}", stages={count})'
            yield _variant(request, what, stages=count, schedule=other.name)


def _sizes(mesh: Mesh) -> Iterator[int]:
    return (size for _, size in mesh.axes)


def plan_variants(
    variants: Iterator[Variant],
    seconds: float,
    enough: Callable[[Sequence[Option]], bool],
    captures: list[Planning] | None = None,
    clock: Callable[[], float] = time.monotonic,
    cache: PlanCache | None = None,
) -> tuple[list[Option], list[str]]:
    """Plan variants in order until ``seconds`` or an outer deadline have passed, or ``enough`` returns true. Return the
    options, and the names of those not tried. Variants with an error (a batch that does not divide, for example) are
    left out."""
    start, options, left = clock(), list[Option](), list[str]()
    for what, request in variants:
        if clock() - start > seconds or enough(options):
            left.append(what)
            continue
        try:
            options.append(try_request(request, what, captures, cache=cache))
        except STOPPED:
            stop_with(True)
            left.append(what)
        except ShardwiseError:
            continue
    return options, left


def _variant(request: PlanRequest, what: str, **changes: Any) -> Variant:
    return what, request.varied(**changes)


def _precision(request: PlanRequest) -> Iterator[Variant]:
    floats = {p.dtype for p in request.module.parameters() if p.is_floating_point()}
    if floats == {torch.float32} and request.training.precision is None:
        yield _variant(
            request,
            "computing in bfloat16 (precision=sw.Precision(compute=torch.bfloat16, parameter=torch.float32))",
            precision=Precision(compute=torch.bfloat16, parameter=torch.float32),
        )


def _states_on_host(request: PlanRequest) -> Iterator[Variant]:
    optimizer = request.training.optimizer
    if request.cluster.device.host_bandwidth and may_wait_on_host(optimizer):
        named = f"{optimizer}{ON_HOST}"
        yield _variant(request, f'the optimizer\'s states on the host (optimizer="{named}")', optimizer=named)


def _batches(request: PlanRequest, factors: Sequence[float]) -> Iterator[Variant]:
    batch = request.example_samples
    if not batch or batch != request.step_samples or request.training.micro_batch is not None:
        return
    for factor in factors:
        size = int(batch * factor)
        if size >= 1 and size == batch * factor:
            word = f"{factor:g} times the batch" if factor > 1 else f"1/{1 / factor:g} of the batch"
            changed = {} if request.training.global_batch is None else {"global_batch": size}
            yield _variant(request, f"{word} ({size} samples)", samples=size, **changed)


def _clusters(request: PlanRequest, most: int = _MOST_NODES) -> Iterator[Variant]:
    """Yield clusters with 2, 4, ... times the units of the outermost level."""
    sizes = [level.size for level in request.cluster.levels]
    if request.cluster.mixed or request.parallel.mesh is not None:
        return
    factor = 2
    while factor <= most:
        outer = [*sizes[:-1], sizes[-1] * factor]
        count = request.cluster.num_devices * factor
        larger = request.cluster.resized(outer).renamed(f"{request.cluster.name} x {factor}")
        yield _variant(request, f"{factor} times the devices ({count})", cluster=larger)
        factor *= 2
