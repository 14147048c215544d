"""The first verdict on a request, soon after its capture: from arithmetic, and from one mesh under two memory policies.

Two bounds hold for every plan: the even share of what stays from step to step, and the products at the rates that their
kernels reach. One plan that fits is the other end of both intervals. Its mesh divides the samples as far as possible,
and its policy is the first or the last of the ladder: the one that repeats nothing, else the one that keeps least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from shardwise.errors import PlanError
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.plans.auto_stages import LowerBound
from shardwise.plans.micro_batch_search import Example, MicroBatchOptions
from shardwise.plans.nothing_fits import ResidentBytes
from shardwise.plans.quantities import format_bytes, format_seconds
from shardwise.plans.request import PlanRequest
from shardwise.plans.stage_planner import PipelineConfig, memory_planner
from shardwise.programs.micro_batches import Passes
from shardwise.search.memory_policy import MemoryPolicy
from shardwise.search.planner import StagePlan
from shardwise.search.planning_cache import PlanningCache
from shardwise.search.quick_plan import QuickPlan, ShortModel, quick_plan

MEMORY_MARGIN = 1.01  # of bytes that are extrapolated from few blocks


@dataclass(frozen=True, eq=False)
class FirstPlan:
    """A plan whose program is not built.

    Attributes:
        config: The configuration, with its mesh alone.
        call: The call.
        whole: The graph of a step.
        size, count: Samples of a micro-batch, and micro-batches of a step.
        plan: The plan of a micro-batch.
    """

    config: PipelineConfig
    call: Example
    whole: Graph
    size: int
    count: int
    plan: QuickPlan

    @cached_property
    def passes(self) -> Passes:
        return _passes(self.call, self.whole, self.size, self.count)

    @property
    def num_bytes(self) -> float:
        """Return the bytes of the fullest device."""
        return MEMORY_MARGIN * self.plan.num_bytes

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.plan.seconds * self.count

    def searched(self, least_seconds: float) -> StagePlan:
        """Return the best plan on this mesh under this memory policy. ``least_seconds``: a lower bound of a step."""
        graph, policy = self.passes.graphs[self.passes.sizes[0]], self.plan.memory_policy
        planner = memory_planner(self.config, graph, self.config.limit, PlanningCache(self.call.cache))
        if self.config.parallel.recompute == "auto":
            segments, offload = planner.settings.memory_policy.segments, policy.offload
            planner = planner.under(MemoryPolicy.of(graph, segments, policy.recompute, policy.reshard_mode, offload))
        return planner.plan().with_bound(least_seconds / self.count)

    def __str__(self) -> str:
        batches = f", {self.count} micro-batches of {self.size}" if self.count > 1 else ""
        return f"{describe_policy(self.plan.memory_policy)} on {self.plan.search.mesh.format_sizes()} devices{batches}"


@dataclass(frozen=True)
class FirstVerdict:
    """What is known of a request before its search.

    Attributes:
        least_bytes: No plan holds fewer bytes on its fullest device.
        least_seconds: No plan has a shorter step.
        limit: Bytes that a device may hold.
        plan: A plan, which may need more than the limit; None: none was found so soon.
    """

    least_bytes: float
    least_seconds: float
    limit: float
    plan: FirstPlan | None = None

    @property
    def most_bytes(self) -> float:
        """Return bytes within which some plan stays."""
        return inf if self.plan is None else self.plan.num_bytes

    @property
    def most_seconds(self) -> float:
        """Return the seconds of the step of a plan that fits; infinite if none is known."""
        return self.plan.seconds if self.plan is not None and self.fits else inf

    @property
    def fits(self) -> bool | None:
        """Return whether a plan fits; None: not decided yet. What a division refuses has no first verdict."""
        return True if self.most_bytes <= self.limit else None

    def __str__(self) -> str:
        step = f"a step takes at least {format_seconds(self.least_seconds)}"
        allowed = "" if self.limit == inf else f", {format_bytes(int(self.limit))} are allowed"
        if self.plan is None:
            return f"not decided yet: at least {format_bytes(int(self.least_bytes))} stay on a device{allowed}; {step}"
        needed = f"{format_bytes(int(self.least_bytes))} to {format_bytes(int(self.most_bytes))}"
        memory = f"the least memory of a device is {needed}{allowed}"
        if not self.fits:
            return f"not decided yet: {memory} (most: {self.plan}); {step}"
        return f"fits: {memory}; {step} and at most {format_seconds(self.most_seconds)} ({self.plan})"


def describe_policy(policy: MemoryPolicy) -> str:
    """Format a memory policy: ``recompute full, parameters gathered again``."""
    gathers = {"again": "parameters gathered again in backward", "held": "", "once": "gradients reduced once"}
    parts = (f"recompute {policy.recompute}" if policy.recompute else "no recomputation", gathers[policy.reshard_mode])
    return ", ".join(filter(None, (*parts, "offloaded" if policy.offloads else "")))


def first_verdict(
    request: PlanRequest, call: Example, graph: Graph, batches: MicroBatchOptions | None, config: PipelineConfig | None
) -> FirstVerdict:
    """Return the first verdict.

    Args:
        request: What is planned.
        call: The call.
        graph: Its graph.
        batches: The sizes of a micro-batch that may be chosen; None: one pass.
        config: The configuration of a plan without stages; None: the request leaves none.
    """
    cluster = request.cluster
    samples = request.example_samples or 1
    step = batches.step if batches is not None else samples
    staged = config is None or request.parallel.stages is not None
    resident = ResidentBytes.of(graph, request.training.optimizer, cluster.device, staged=staged)
    bound = LowerBound.of(graph, step / samples, cluster)
    verdict = FirstVerdict(resident.on_each(cluster.num_devices), bound.seconds, request.limit)
    if config is None:
        return verdict
    whole = graph if step == samples else call.graph(step)
    is_plain = not (config.annotations or config.settings.layouts)  # which name operators
    short = ShortModel.of(whole, shortened=is_plain)
    sizes = _sizes(batches, cluster.num_devices) or (step,)

    def with_size(size: int, model: ShortModel, *, only_fitting: bool) -> FirstVerdict:
        of_size = _config_for(config, size, count := step // size)
        planner = memory_planner(of_size, model.graph, inf, PlanningCache(call.cache))
        parallel, limit = config.parallel, config.limit / MEMORY_MARGIN
        fixed = parallel.recompute != "auto"
        quick = quick_plan(planner, model, limit, parallel.reshard_mode, fixed=fixed, only_fitting=only_fitting)
        plan = None if quick is None else FirstPlan(of_size, call, whole, size, count, quick)
        return replace(verdict, plan=plan) if plan is not None and plan.num_bytes < verdict.most_bytes else verdict

    last: tuple[int, ShortModel] | None = None
    for size in sizes:
        count = step // size
        try:
            model = short if count == 1 else short.micro_batch(size)
            if model is None:
                model = ShortModel.of(_passes(call, whole, size, count).graphs[size], shortened=is_plain)
        except PlanError:  # the loss is no sum over micro-batches
            continue
        last = size, model
        verdict = with_size(*last, only_fitting=size != sizes[-1])
        if verdict.fits:
            break
    if verdict.plan is None and last is not None and last[0] != sizes[-1]:  # smaller ones cannot run
        verdict = with_size(*last, only_fitting=False)
    return verdict


def _passes(call: Example, whole: Graph, size: int, count: int) -> Passes:
    return Passes.single(whole) if count == 1 else call.passes(whole, size, staged=False)


def _config_for(config: PipelineConfig, size: int, count: int) -> PipelineConfig:
    """Return the configuration of micro-batches on the mesh that divides their samples as far as possible."""
    mesh = max(config.meshes, key=lambda mesh: (_parts(mesh, size), -len(mesh.axes)))
    return replace(config, settings=replace(config.settings, passes=count), meshes=(mesh,))


def _sizes(batches: MicroBatchOptions | None, num_devices: int) -> tuple[int, ...]:
    """Return the largest size, and the smallest that gives every device a sample."""
    if batches is None:
        return ()
    largest, *others = batches.candidates
    least = min((size for size in others if size >= num_devices), default=min(others, default=largest))
    return tuple(dict.fromkeys((largest, least)))


def _parts(mesh: Mesh, samples: int) -> int:
    """Return into how many parts an axis of the mesh divides the samples."""
    return max((size for _, size in mesh.axes if samples % size == 0), default=1)
