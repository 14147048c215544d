"""Joint search over the number of stages, the schedule and the micro-batch size.

For every such *setting* the price-based searches choose the rest: the mesh of a stage, strategies, storage layouts,
recomputation and offloading. Where the stages of a setting begin is decided in ``search.stage_partition``.

Settings are planned in the order of an estimate of their step. A setting is skipped if its *lower bound* is not below
the best step so far. The bound is the time of the step's products at the rates that kernels reach. A pipeline adds
the time to fill and drain. Planning of a setting stops early if its prices are clearly above the best step
(``search.fit_memory``). Within the accuracy of prices, the result is that of planning all settings. The exception is a
model with more settings than the limit (``tries_of``): its settings are planned only while their estimate is below the
best step. The settings left out are printed with their bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import TypeVar

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.flops import FLOPS, flops_of
from shardwise.costs.kernels import fastest_rate
from shardwise.errors import PlanError, listed
from shardwise.graph.attention_within import ATTENTION_WITHIN, num_pairs
from shardwise.graph.cut import free_values
from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import arguments, operator_name
from shardwise.graph.stage_marks import marks_of
from shardwise.layouts.text import format_dtype
from shardwise.plans.micro_batch_search import MicroBatchOptions
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import figures
from shardwise.plans.quantities import format_bytes, format_bytes_interval, format_seconds, format_seconds_interval
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.plans.schedule import Schedule, schedule_of
from shardwise.progress import STOPPED, elapsed_share, report_best, report_progress, stop_with
from shardwise.rules.attention_bands import EVERYTHING, band_between, band_of
from shardwise.search.constants import (
    ESTIMATING_SHARE,
    MAX_PLANNED_OPERATORS,
    MAX_PLANNED_SETTINGS,
    MAX_REFINED_ESTIMATES,
    ROUGH_STEP_FACTOR,
)
from shardwise.search.memory_policy import blocks_of, ends_of

SCHEDULES = (  # if the user names none
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "Interleaved1F1B:3",
    "Interleaved1F1B:4",
    "Interleaved1F1B:8",
    "ZBVZeroBubble",
)
_AnyPlan = TypeVar("_AnyPlan", bound=Plan | PlanningResult)


@dataclass(frozen=True, slots=True)
class StageConfig:
    """A setting of the joint search.

    Attributes:
        stages: Number of stages in the whole pipeline; 1: no pipeline.
        schedule: Name of the schedule; "" without a pipeline.
        micro_batch: Samples of a micro-batch.
        passes: Micro-batches of a step.
    """

    stages: int
    schedule: str
    micro_batch: int
    passes: int

    @property
    def places(self) -> int:
        """Return the number of pipeline ranks."""
        return self.stages // schedule_of(self.schedule).stages_per_place if self.stages > 1 else 1

    def __str__(self) -> str:
        stages = f"{self.stages} stages, {self.schedule}" if self.stages > 1 else "1 stage"
        return f"{stages}, micro-batch {self.micro_batch} ({self.passes} passes)"


@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """A setting and its outcome: planned, refused, pruned, or left out.

    If ``step_seconds``, ``refused`` and ``pruned`` are not set, it was left out: the limit on plans was reached, or its
    estimate is not below the best step.

    Attributes:
        setting: The setting.
        bound: Lower bound of its step, in seconds.
        step_seconds: Seconds of a step of its plan.
        num_bytes: Bytes of the device that holds most under its plan.
        refused: Why it has no plan.
        pruned: Seconds of an earlier plan's step, which the bound is not below.
        estimate: Estimated seconds of a step (0: not estimated; infinite: nothing seems to fit).
        text: Step and memory of its plan, with intervals.
    """

    setting: StageConfig
    bound: float
    step_seconds: float = 0.0
    num_bytes: float = 0.0
    refused: str = ""
    pruned: float = 0.0
    estimate: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        if self.step_seconds:
            what = self.text or f"step {format_seconds(self.step_seconds)}, memory {format_bytes(int(self.num_bytes))}"
        elif self.pruned:
            what = f"not planned: no step below {format_seconds(self.bound)}, {format_seconds(self.pruned)} was found"
        elif self.refused:
            what = self.refused
        else:
            about = "nothing seems to fit" if self.estimate == inf else f"about {format_seconds(self.estimate)}"
            what = f"left out: {about + ', ' if self.estimate else ''}no step below {format_seconds(self.bound)}"
        return f"{self.setting}: {what}"


@dataclass(frozen=True)
class AutoStagesReport:
    """The settings of a joint search in the order in which they were considered, and the one with the best plan."""

    considered: tuple[SettingOutcome, ...]
    taken: StageConfig

    @property
    def bound(self) -> float:
        """Return the lower bound of the step, in seconds, over all these settings."""
        return min(trial.bound for trial in self.considered)

    @property
    def is_complete(self) -> bool:
        """Return whether no setting was left out."""
        return all(trial.step_seconds or trial.refused or trial.pruned for trial in self.considered)

    def __str__(self) -> str:
        planned = sorted((t for t in self.considered if t.step_seconds), key=lambda t: t.step_seconds)
        others = [t for t in self.considered if not t.step_seconds]
        best = planned[0]
        lines = [f"{best.setting}, of {len(self.considered)} settings: {len(planned)} were planned (eager steps)"]
        if len(planned) > 1:
            slower = planned[1].step_seconds / best.step_seconds - 1
            lines[0] += f"; the next best is {100 * slower:.1f}% slower"
        lines += [f"  {t}" for t in (*planned, *others)]
        rest = "" if self.is_complete else "; plans of what was left out may be faster than the best"
        return "\n".join([*lines, f"no step of these settings is below {format_seconds(self.bound)}{rest}"])


@dataclass(frozen=True)
class LowerBound:
    """Figures of a model from which the step of any setting is bounded and roughly estimated.

    Attributes:
        seconds: Seconds of the products of a step on all devices together, at the rates that their kernels reach.
        kernels: Operators of a micro-batch, forward and backward.
        parameter_bytes: Bytes of all parameters.
        blocks: Number of repeated blocks. ``estimate`` assumes that every stage has whole blocks. ``bound`` does not,
            because a cut may split a block (``search.stage_partition``).
        at_peak: Seconds of the products at the peak of all devices, for ``estimate``; 0: as ``seconds``.
    """

    seconds: float
    kernels: int
    parameter_bytes: float
    blocks: int = 0
    at_peak: float = 0.0

    @staticmethod
    def of(graph: Graph, share: float, cluster: Cluster) -> LowerBound:
        """Return the figures of a graph. ``share``: samples of a step divided by samples of the graph."""
        device = cluster.device
        seconds = at_peak = 0.0
        for op in graph.ops:
            if op.target in FLOPS:
                flops, dtype = _least_flops(op, graph), format_dtype(graph.by_name[op.operands[0]].dtype)
                seconds += flops / fastest_rate(device, operator_name(op.target), dtype)
                at_peak += flops / device.peak_flops(dtype)
        parameter_bytes = sum(graph.by_name[s.value].num_bytes for s in graph.sources if s.kind == "parameter")
        share /= cluster.num_devices
        blocks = len(blocks_of(graph))
        return LowerBound(share * seconds, 3 * len(graph.ops), float(parameter_bytes), blocks, share * at_peak)

    def bound(self, setting: StageConfig) -> float:
        """Return a lower bound of the step of a setting, in seconds, over all divisions of the work among stages.

        A pipeline rank waits for the first micro-batch to arrive, and for the cotangents of the last one to leave
        (``least_share``). Schedules that split backward can fill this wait with weight gradients. For them, and without
        a pipeline, the wait is not counted.
        """
        if setting.stages == 1 or schedule_of(setting.schedule).splits_backward:
            return self.seconds
        places, passes = setting.places, setting.passes
        return self.seconds * places / passes * least_share(places, setting.stages, passes)

    def estimate(self, setting: StageConfig, cluster: Cluster) -> float:
        """Return the rough estimate of a step, in seconds: the largest of three times, extended by the bubbles.

        These are the products, one reduction of the gradients, and the kernel launches. Two factors scale the products.
        One is for messages, if more devices share a sample than the innermost level has. The other is for whole blocks:
        if they do not divide evenly among stages, all stages wait for those with more.
        """
        places, stages = setting.places, setting.stages
        per_place = stages // places
        level = cluster.levels[-1]
        bandwidth = level.link_bandwidth(level.size) / level.shared_by if cluster.num_devices > 1 else inf
        within = cluster.levels[0].size if len(cluster.levels) > 1 else 1  # these first reduce among themselves
        reduced = 2 * self.parameter_bytes / stages / within / bandwidth
        started = setting.passes * self.kernels / places * cluster.device.kernel_latency
        sharing = cluster.num_devices / places / setting.micro_batch / cluster.levels[0].size
        uneven = stages * ceil(self.blocks / stages) / self.blocks if self.blocks else 1.0
        products = ROUGH_STEP_FACTOR * (self.at_peak or self.seconds) * max(1.0, sharing) * uneven
        seconds = max(products, reduced, started) * (1 + (places - 1) / (per_place * setting.passes))
        return max(seconds, self.bound(setting))


def least_share(places: int, stages: int, passes: int) -> float:
    """Return the least step of stages that together take one second per micro-batch, over all divisions of the second.

    There are at least two pipeline ranks (``places``), and stage i runs on rank i modulo ``places``. The first
    micro-batch reaches stage i after all earlier stages. The cotangents of the last one go back through them. In
    between, the rank runs all micro-batches through stage i and its own later stages. With t[i] seconds of stage i, a
    step therefore takes at least, for every i::

        f(i) = t[0] + ... + t[i - 1] + passes * (t[i] + t[i + places] + t[i + 2 * places] + ...)

    The largest f is least if all are equal. The last ``places`` stages are the last round. There f(i) = f(i + 1), and
    in earlier rounds f(i) = f(i + places). So, from the last stage backwards::

        t[i] = t[i + 1] * passes / (passes - 1)                         in the last round
        t[i] = (t[i + 1] + ... + t[i + places - 1]) / (passes - 1)      in earlier rounds

    The result is f of the last stage, if the t[i] are scaled to the sum 1.
    """
    if passes == 1:
        return 1.0
    shares = [1.0]  # t, the last stage first, up to a factor
    while len(shares) < stages:
        in_last_round = len(shares) < places
        shares.append((shares[-1] * passes if in_last_round else sum(shares[1 - places :])) / (passes - 1))
    return 1.0 + (passes - 1) * shares[0] / sum(shares)


def _least_flops(op: Op, graph: Graph) -> float:
    """Return the least FLOPs of a product, forward and backward.

    Attention counts only the pairs that its mask lets through, since ring attention skips the others. It counts every
    score once, though kernels compute scores again in backward.
    """
    operands, results = ([graph.by_name[name] for name in names] for names in (op.operands, op.results))
    forward_flops = flops_of(op, tuple(v.shape for v in operands), tuple(v.shape for v in results))
    flowing = [value.requires_grad for value in operands]
    if "attention" not in operator_name(op.target):
        return forward_flops * (1.0 + min(sum(flowing), 2))
    query, key, value = flowing[:3]
    backward = (query + key + value + (query or key)) / 2  # relative to forward, which has two products
    return forward_flops * _visible_share(op, graph) * (1.0 + backward)


def _visible_share(op: Op, graph: Graph) -> float:
    """Return the share of the scores that attention cannot skip, by its mask."""
    named, (query, key) = arguments(op), (graph.by_name[name].shape for name in op.operands[:2])
    if op.target is ATTENTION_WITHIN:  # its FLOPs count the pairs of its blocks only
        counted = num_pairs(named["rows"], named["firsts"], named["ends"]) / (query[-2] * key[-2])
        return min(1.0, band_between(named["first"], named["end"], graph).share(query[-2], key[-2]) / counted)
    mask = named.get("attn_mask")
    band = band_of(mask.name, graph) if isinstance(mask, Ref) else EVERYTHING
    return band.share(query[-2], key[-2]) * (0.5 if named.get("is_causal") else 1.0)


def tries_of(graph: Graph) -> int:
    """Return the largest number of settings of a model that are planned."""
    return min(MAX_PLANNED_SETTINGS, max(2, MAX_PLANNED_OPERATORS // len(graph.ops)))


def check_joint(module: torch.nn.Module, *, by_price: bool) -> None:
    """Raise PlanError if there is nothing to choose: no prices, or stages that are marked."""
    if not by_price:
        raise PlanError(
            'stages="auto" compares plans by price, and this mode or search has none',
            fix='mode="auto" with search="dynamic_programming", or a number of stages',
        )
    if marks := marks_of(module):
        raise PlanError(
            f'stages="auto" chooses the cuts, but modules are marked: {listed(list(marks))}',
            fix='stages="marked", or leave out the marks',
        )


def settings_of(
    graph: Graph, batches: MicroBatchOptions, num_devices: int, schedule: str | None, mesh_devices: int | None
) -> tuple[StageConfig, ...]:
    """Return all settings: numbers of pipeline ranks, schedules, and micro-batch sizes.

    The number of pipeline ranks divides the devices, and the micro-batches fill the schedule. There are at most as many
    stages as repeated blocks, plus one each for the operators before and after them if these read parameters. In a
    model without blocks, the limit is the number of operators that read parameters. It limits the number only: where
    stages begin is decided later (``search.stage_partition``).

    Args:
        graph: The model's graph.
        batches: The samples of a step, and the candidates for a micro-batch.
        num_devices: Devices of the cluster.
        schedule: The user's schedule, or None for all of SCHEDULES.
        mesh_devices: Devices of the user's mesh of a stage, or None.
    """
    parameters = {s.value for s in graph.sources if s.kind == "parameter"}
    free = free_values(graph)
    readers = [op for op in graph.ops if parameters.intersection(op.operands) and not free.issuperset(op.results)]
    blocks = len(blocks_of(graph))
    most = blocks + sum(map(bool, ends_of(graph))) if blocks else len(readers)
    schedules = [schedule_of(name) for name in ((schedule,) if schedule is not None else SCHEDULES)]
    settings = []
    for size in batches.candidates:
        passes = batches.step // size
        if mesh_devices in (None, num_devices):
            settings.append(StageConfig(1, "", size, passes))
        for candidate in schedules:
            settings += [
                StageConfig(places * candidate.stages_per_place, candidate.name, size, passes)
                for places in range(2, num_devices + 1)
                if num_devices % places == 0
                and places * candidate.stages_per_place <= most
                and mesh_devices in (None, num_devices // places)
                and not candidate.fault(places, passes)
                and not _is_needless(candidate, places, passes, schedules)
            ]
    return tuple(settings)


def _is_needless(schedule: Schedule, places: int, passes: int, schedules: Sequence[Schedule]) -> bool:
    """Return whether another schedule is as fast and holds less: 1F1B in place of GPipe."""
    others = [other for other in schedules if other.name == "1F1B"]
    return schedule.name == "GPipe" and any(not other.fault(places, passes) for other in others)


def joint_search(
    settings: Sequence[StageConfig],
    floor: LowerBound,
    cluster: Cluster,
    plan_setting: Callable[[StageConfig, float], _AnyPlan],
    *,
    tries: int = MAX_PLANNED_SETTINGS,
    estimates: Sequence[Callable[[StageConfig], float]] = (),
) -> tuple[_AnyPlan, AutoStagesReport]:
    """Return the plan with the shortest step over all settings, and a report of the settings that were considered.

    Args:
        settings: The settings.
        floor: The figures of the model, for bounds and rough estimates.
        cluster: The cluster.
        plan_setting: Plans a setting, given the seconds of the best step so far. It raises PlanError if there is no
            plan, or if no plan can be expected to be faster.
        tries: The largest number of settings that are planned.
        estimates: Estimates of the seconds of a step, from the cheapest to the most accurate
            (``plans.stage_estimator``). A setting is planned when its last estimate is the least of all, and below the
            best step: steps were 0.90 to 1.13 times their last estimates. They are used only if there are more settings
            than tries.

    Raises:
        PlanError: No setting has a plan.
    """
    best: tuple[float, StageConfig, _AnyPlan] | None = None
    failure: PlanError | None = None
    seen: list[SettingOutcome] = []
    least = min(map(floor.bound, settings), default=0.0)
    queue = _Queue(settings, floor, cluster, estimates if len(settings) > tries else ())
    while queue.heap:
        try:
            setting, estimate = queue.pop(refines=best is None or tries > 0, first=best is None)
        except STOPPED:
            stop_with(best is not None)
            tries = 0
            continue
        trial = SettingOutcome(setting, floor.bound(setting), estimate=estimate)
        if best is not None and trial.bound >= best[0]:
            seen.append(replace(trial, pruned=best[0]))
            continue
        if best is not None and (tries <= 0 or estimate >= best[0]):
            if not queue.has_last_below(best[0]):
                tries = 0  # the others have higher estimates
            seen.append(trial)
            continue
        tries -= 1
        try:
            report_progress(f"planning {setting}")
            plan = plan_setting(setting, inf if best is None else best[0])
        except STOPPED:
            stop_with(best is not None)
            seen.append(trial)
            tries = 0
            continue
        except PlanError as error:
            failure = failure or error
            seen.append(replace(trial, refused=str(error).partition("\n")[0]))
            continue
        predicted = figures(plan_of(plan))
        assert predicted is not None, "a plan of a search has a prediction"
        seconds, num_bytes = predicted
        told = f"step {format_seconds_interval(seconds, cluster)}, memory {format_bytes_interval(num_bytes, cluster)}"
        seen.append(replace(trial, step_seconds=seconds, num_bytes=num_bytes, text=told))
        if best is None or seconds < best[0]:
            best = seconds, setting, plan
            report_best(seconds, least)
    if best is None:
        raise failure or PlanError(
            "there is no setting to plan", fix="give a mesh whose number of devices divides the cluster's"
        )
    return best[2], AutoStagesReport(tuple(seen), best[1])


class _Queue:
    """Priority queue of settings by their estimated step.

    A setting enters with its rough estimate. When it is the least, it gets the next of ``estimates`` and is queued
    again. It is returned once it is the least with its last estimate. A setting is returned after all others if its
    estimate is infinite, or if too many sizes were estimated before it.

    Attributes:
        settings: All settings, those of few stages and micro-batches first.
        sizes: The (pipeline ranks, samples of a micro-batch) that were estimated, at most MAX_REFINED_ESTIMATES.
        heap: (comes last, seconds, number of the setting, how many of ``estimates`` it has had).
    """

    def __init__(
        self,
        settings: Sequence[StageConfig],
        floor: LowerBound,
        cluster: Cluster,
        estimates: Sequence[Callable[[StageConfig], float]],
    ) -> None:
        self.settings = sorted(settings, key=lambda setting: (setting.stages, setting.passes))
        self.estimates = estimates
        self.sizes: set[tuple[int, int]] = set()
        self.heap = [(False, floor.estimate(setting, cluster), i, 0) for i, setting in enumerate(self.settings)]
        heapify(self.heap)

    def pop(self, *, refines: bool, first: bool) -> tuple[StageConfig, float]:
        """Return the next setting and its last estimate, or 0 if it has not had all of ``estimates``.

        Args:
            refines: Whether to compute further estimates. If not, return the least setting as it is.
            first: Nothing was planned yet. Late before a deadline, return the best of those that have had most of
                ``estimates``.
        """
        while True:
            if first and elapsed_share() > ESTIMATING_SHARE:
                item = min(self.heap, key=lambda item: (item[0], -item[3], item[1]))
                self.heap.remove(item)
                heapify(self.heap)
                return self.settings[item[2]], item[1] if item[3] == len(self.estimates) else 0.0
            is_last, seconds, number, done = heappop(self.heap)
            setting = self.settings[number]
            if is_last or done == len(self.estimates) or not refines:
                is_settled = done and (is_last or done == len(self.estimates))
                return setting, seconds if is_settled else 0.0
            if done + 1 == len(self.estimates):
                sizes = self.sizes | {(setting.places, setting.micro_batch)}
                if len(sizes) > MAX_REFINED_ESTIMATES:
                    heappush(self.heap, (True, seconds, number, done))
                    continue
                self.sizes = sizes
            try:
                report_progress(f"estimating {setting}")
                seconds = self.estimates[done](setting)
            except STOPPED:
                heappush(self.heap, (is_last, seconds, number, done))
                raise
            heappush(self.heap, (seconds == inf, seconds, number, done + 1))

    def has_last_below(self, seconds: float) -> bool:
        """Return whether a setting that comes after all others is estimated to be faster."""
        return any(is_last and estimate < seconds for is_last, estimate, _, _ in self.heap)
