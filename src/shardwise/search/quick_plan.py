"""A plan of a model of many equal blocks, from a model with three of them: soon, exact, and seldom the fastest.

Every run of equal blocks is shortened to its first, second and last. What is chosen for these is chosen for the whole:
each further block is treated as the second one. The step and the peak of the whole follow from programs of two and of
three blocks (``search.block_extrapolation``). The second must be treated as the first or the last, so that what lies
between two further blocks is in the program of three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from shardwise.costs.timeline import SimulatedStep, simulate_program
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.programs.builder import Choice
from shardwise.programs.micro_batches import Passes
from shardwise.progress import report_progress
from shardwise.search.auto import MeshSearch, run_search
from shardwise.search.block_extrapolation import FoldedSteps, PerBlockCost, Simulate, extended
from shardwise.search.constants import CLEARLY_OVER_LIMIT, LONGEST_FOLDED_PERIOD, MIN_REPEATED_BLOCKS
from shardwise.search.cost_graph import bytes_of_variables
from shardwise.search.decide import apply_layouts
from shardwise.search.dynamic_programming import DoesNotFit
from shardwise.search.fit_memory import memory_policies
from shardwise.search.memory_policy import MemoryPolicy, ReshardMode
from shardwise.search.planner import Planner
from shardwise.search.stored_program import build_program


@dataclass(frozen=True, eq=False)
class ShortModel:
    """A model with three periods of each long run of equal blocks.

    Attributes:
        whole: The model, whose gradients share buckets.
        steps: Of the short model.
        runs: Its runs of three periods, as numbers of their first blocks.
        counts: How many periods each of these runs has in the whole.
    """

    whole: Graph
    steps: FoldedSteps
    runs: tuple[range, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def graph(self) -> Graph:
        return self.steps.graph

    @staticmethod
    def of(graph: Graph, *, shortened: bool = True) -> ShortModel:
        """Return the short form of a model; of one that cannot be ``shortened``, the model."""
        if not shortened:
            return ShortModel(graph, FoldedSteps(graph))
        folding = Folding.of(graph)
        runs = folding.runs(lambda number: 0, MIN_REPEATED_BLOCKS, LONGEST_FOLDED_PERIOD)
        runs = tuple(run for run in runs if len(run) >= MIN_REPEATED_BLOCKS)
        gone = {number for run in runs for number in range(run[2], run[-1])}
        short = folding.without(gone) if runs else None
        if short is None:
            return ShortModel(graph, FoldedSteps(graph))
        place = {number: i for i, number in enumerate(n for n in range(len(folding.blocks)) if n not in gone)}
        shortened_runs = (range(place[run[0]], place[run[0]] + 3 * run.step, run.step) for run in runs)
        return ShortModel(graph, FoldedSteps(short), tuple(shortened_runs), tuple(map(len, runs)))

    def micro_batch(self, size: int) -> ShortModel | None:
        """Return the short form of a micro-batch; None if it needs captures of its own, or has other blocks. Raises
        PlanError if the loss is no sum over micro-batches."""
        if self.whole.terms:
            return None
        try:
            graph = Passes.of(self.graph, size, _refuse_capture).graphs[size]
        except _NeedsCapture:
            return None
        steps = FoldedSteps(graph)
        paths, before = ([block.path for block in s.folding.blocks] for s in (steps, self.steps))
        return replace(self, steps=steps) if paths == before else None

    def additive_bytes(self, search: MeshSearch) -> float:
        """Return the additive bytes of the whole model, if its further blocks are treated as the second ones."""
        times = {
            name: count - 2
            for run, count in zip(self.runs, self.counts, strict=True)
            for block in self.steps.folding.blocks[run[1] : run[2]]
            for name in (*(op.name for op in block.ops), *block.sources, *block.made)
        }
        num_bytes = bytes_of_variables(search.cost, search.outcome.assignment)
        return sum(size * times.get(name, 1) for (_, name), size in num_bytes.items())

    def step(self, choice: Choice, memory_policy: MemoryPolicy, simulate: Simulate) -> SimulatedStep | None:
        """Return the step of the whole model under a choice for the short one; None if the second block of a run is
        treated as neither the first nor the last, or if the model cannot be shortened to two."""
        if not self._can_be_repeated(choice, memory_policy):
            return None
        second = [set(range(run[1], run[2])) for run in self.runs]
        removed = set[int]().union(*second)
        two = self.steps.simulated(removed, memory_policy, simulate)
        if two is None:
            return None
        more = []
        for run, count, added in zip(self.runs, self.counts, second, strict=True):
            region_of = partial(self.steps.region, run)
            three = self.steps.simulated(removed - added, memory_policy, simulate)
            if three is None:
                return None
            more.append((count - 2, PerBlockCost.of(two, three, region_of), region_of))
        return extended(two, more) if more else two

    def _can_be_repeated(self, choice: Choice, memory_policy: MemoryPolicy) -> bool:
        keys = self.steps.keys(choice, memory_policy)
        for run in self.runs:
            first, second, last = (keys[start : start + run.step] for start in run)
            if second not in (first, last):
                return False
        return True


class _NeedsCapture(Exception):
    """Raised where a micro-batch has operators that only its own capture has."""


def _refuse_capture(size: int) -> Graph:
    raise _NeedsCapture


@dataclass(frozen=True, eq=False)
class QuickPlan:
    """A plan: its mesh and memory policy, the seconds of a micro-batch, and the bytes of the fullest device."""

    search: MeshSearch
    memory_policy: MemoryPolicy
    seconds: float
    num_bytes: float


def quick_plan(
    planner: Planner,
    short: ShortModel,
    limit: float,
    reshard_mode: ReshardMode | None,
    *,
    fixed: bool,
    only_fitting: bool = False,
) -> QuickPlan | None:
    """Return the first of a few plans that fits, else the one of the fewest bytes whose program was built; None if
    there is none.

    They are the fastest plan under the memory policy that repeats least, and the fastest and the smallest under the one
    that keeps least without the host. A program is built of each whose additive bytes are not clearly over the limit.
    Where all are over it or none can be repeated, one is built (unless ``only_fitting``): of the fewest additive bytes
    of those that can be repeated; another plan may have the lower peak.

    Args:
        planner: The planner of the short model on one mesh, whose limit does not count.
        short: The model.
        limit: Bytes of a device.
        reshard_mode: As for ``fit_memory``.
        fixed: Whether the planner's policy is the only one.
        only_fitting: Whether plans that are clearly over the limit are not needed at all.
    """
    planners = [planner]
    if not fixed:
        policies = [policy.planner for policy in memory_policies(planner, reshard_mode)]
        on_device = [p for p in policies if not p.settings.memory_policy.offloads]
        planners = [policies[0], (on_device or policies)[-1]]
    best: QuickPlan | None = None
    large: list[tuple[float, Planner, MeshSearch]] = []
    most = CLEARLY_OVER_LIMIT * limit if planner.settings.zero is None else inf  # which stores less than was searched
    for under in planners:
        for search in _searches(under, with_least=under is planners[-1]):
            report_progress("first verdict")
            if (num_bytes := short.additive_bytes(search)) > most:
                large.append((num_bytes, under, search))
                continue
            plan = _simulated(under, short, search)
            if plan is not None and (best is None or plan.num_bytes < best.num_bytes):
                best = plan
            if best is not None and best.num_bytes <= limit:
                return best
    if best is not None or only_fitting:
        return best
    plans = (_simulated(under, short, search) for _, under, search in sorted(large, key=lambda plan: plan[0]))
    return next((plan for plan in plans if plan is not None), None)


def _searches(planner: Planner, *, with_least: bool) -> Iterator[MeshSearch]:
    """Yield the fastest plan without a limit, and the one of the fewest bytes."""
    cost, name = planner.cost_graph(planner.meshes[0]), planner.settings.search
    yield run_search(cost, name, inf)
    if with_least:
        try:
            run_search(cost, name, 0.0)
        except DoesNotFit as error:
            yield run_search(cost, name, error.num_bytes)


def _simulated(planner: Planner, short: ShortModel, search: MeshSearch) -> QuickPlan | None:
    settings, rules = planner.settings, planner.factored.rules
    choice = apply_layouts(search.choice(), settings.layouts, planner.graph, planner.factored, search.mesh)
    prices = search.cost.domains.prices.with_buckets(short.whole, settings.bucket_bytes)

    def simulate(graph: Graph, memory_policy: MemoryPolicy) -> SimulatedStep:
        under = replace(settings, memory_policy=memory_policy)
        program = build_program(graph, rules, choice, search.mesh, under, planner.cache.vjp_cache)
        return simulate_program(program.busiest, prices)

    step = short.step(choice, settings.memory_policy, simulate)
    return None if step is None else QuickPlan(search, settings.memory_policy, step.seconds, float(step.peak.num_bytes))
