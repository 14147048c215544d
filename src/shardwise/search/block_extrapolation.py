"""The step of a program of many equal blocks, extrapolated from programs of few of them.

Where consecutive blocks are equal, and a plan treats them equally, every further one adds the same seconds and bytes.
So a program with two blocks of each such run is simulated. For every run, a program with a third block shows what one
adds, unless another program has shown it. That is multiplied by the number of blocks beyond two. For the peak, the
bytes while each operator runs are extrapolated, as a short model may have its peak elsewhere. The growth is that of
most operators before the run, in it and behind it, as messages that several blocks share may be in flight a little
earlier or later. Blocks between the outermost ones hold no more than these, as the bytes change evenly from one to the
next.

The same holds for a *period* of several blocks that differ, or are treated differently, again and again: two of its
repetitions are simulated, and a third.

The estimate orders candidates; the one that is taken is built and simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median_high

from shardwise.costs.ledger import Peak
from shardwise.costs.timeline import SimulatedStep
from shardwise.graph.folding import Folding, GraphForm
from shardwise.graph.ir import Graph
from shardwise.programs.builder import Choice
from shardwise.rules.atoms import Factored
from shardwise.search.constants import (
    LONGEST_FOLDED_PERIOD,
    MAX_FOLDED_SHARE,
    MIN_OPERATORS_TO_FOLD,
    MIN_REPEATED_BLOCKS,
)
from shardwise.search.memory_policy import MemoryPolicy
from shardwise.search.planning_cache import PlanningCache

Simulate = Callable[[Graph, MemoryPolicy], SimulatedStep]


# What a block adds to a step whatever it holds.
_FIGURES = ("seconds", "compute", "communication", "exposed", "forward", "kept_bytes")


@dataclass(frozen=True)
class PerBlockCost:
    """The cost that one more block of a run adds to a step. ``figures``: those of a step; ``added_bytes``: bytes by
    phase and *region*: the blocks before the run, its first, its last, those behind it, and every operator outside of
    blocks."""

    figures: Mapping[str, float]
    added_bytes: Mapping[tuple[str, str], int]

    @staticmethod
    def of(two: SimulatedStep, three: SimulatedStep, region_of: Callable[[str], str]) -> PerBlockCost:
        """Return the difference of steps with two and with three blocks of a run. ``region_of``: of an operator."""
        added: dict[tuple[str, str], list[int]] = {}
        for (phase, op), size in two.held.items():
            added.setdefault((phase, region_of(op)), []).append(three.held.get((phase, op), size) - size)
        return PerBlockCost(
            {name: getattr(three, name) - getattr(two, name) for name in _FIGURES},
            {where: median_high(differences) for where, differences in added.items()},
        )


def shared_step(
    cache: PlanningCache,
    graph: Graph,
    factored: Factored,
    choice: Choice,
    memory_policy: MemoryPolicy,
    settings: Hashable,
    simulate: Callable[[], SimulatedStep],
) -> SimulatedStep:
    """Return the step of a choice for a short graph, under the names of its operators. Parts of a model that have other
    numbers of equal blocks share it. ``settings``: everything else that decides it."""
    form, cache = GraphForm.of(graph), cache.call
    numbers = cache.table("numbers of forms")
    number = numbers.setdefault(form.key, len(numbers))
    key = number, _choice_key(form, factored, choice), _policy_key(form, memory_policy), settings
    ops, step = cache.get("steps", key, lambda: (form.ops, replace(simulate(), events=())))
    return step if ops == form.ops else _renamed(step, dict(zip(ops, form.ops, strict=True)))


def _choice_key(form: GraphForm, factored: Factored, choice: Choice) -> Hashable:
    place = {name: number for number, name in enumerate(form.values)}
    ops = []
    for name in form.ops:
        rule = factored.rules[name]
        keyed = None if rule.keyed is None else (place.get(rule.keyed.keys), replace(rule.keyed, keys=""))
        ops.append((choice.strategies[name], rule.factors, rule.operands, rule.results, rule.linear, keyed))
    layouts = (choice.sources, choice.shared, choice.delivered)
    values = [(factored.atoms.get(name), *(of.get(name) for of in layouts)) for name in form.values]
    return tuple(ops), tuple(values)


def _policy_key(form: GraphForm, memory_policy: MemoryPolicy) -> Hashable:
    place = {name: number for number, name in enumerate(form.ops)}
    segments = (
        (segment.how, segment.messages, tuple(sorted(map(place.__getitem__, segment.operators))))
        for segment in memory_policy.segments
    )
    return memory_policy.reshard_mode, memory_policy.offloads, tuple(segments)


def _renamed(step: SimulatedStep, op_of: Mapping[str, str]) -> SimulatedStep:
    """Return a step with other names of operators; those inside of a lowering begin with its operator's."""

    def renamed(op: str) -> str:
        stem = op
        while stem and stem not in op_of:
            stem = stem.rpartition(".")[0]
        return op_of[stem] + op[len(stem) :] if stem else op

    return replace(step, held={(phase, renamed(op)): size for (phase, op), size in step.held.items()})


@dataclass(frozen=True, eq=False)
class FoldedSteps:
    """The steps of one model's plans. ``known``: key of a short program with two blocks of every run -> its step;
    ``further``: key of a block -> the cost that another one like it adds."""

    graph: Graph
    known: dict[Hashable, SimulatedStep | None] = field(default_factory=dict)
    further: dict[Hashable, PerBlockCost] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)

    @cached_property
    def folding(self) -> Folding:
        return Folding.of(self.graph)

    def step(
        self, choice: Choice, memory_policy: MemoryPolicy, settings: Hashable, simulate: Simulate
    ) -> SimulatedStep | None:
        """Return the step of a choice, from short programs that ``simulate`` builds, or None if that is not worth it,
        or if the model cannot be shortened. ``settings``: what else decides it: the mesh, and settings of messages."""
        if len(self.graph.ops) < MIN_OPERATORS_TO_FOLD:
            return None
        keys = self.keys(choice, memory_policy)
        runs = self.folding.runs(keys.__getitem__, MIN_REPEATED_BLOCKS, LONGEST_FOLDED_PERIOD)
        long = [run for run in runs if len(run) >= MIN_REPEATED_BLOCKS]
        removed = {number for run in long for number in range(run[1], run[-1])}
        periods = {run: tuple(map(keys.__getitem__, range(run[0], run[1]))) for run in long}
        kept = tuple((periods[run],) if run in long else tuple(map(keys.__getitem__, run)) for run in runs)
        on = settings, memory_policy.reshard_mode, memory_policy.offloads
        key = *on, self._outside(choice, memory_policy), kept
        short = len(self.graph.ops) - self._num_operators(removed)
        unknown = {periods[run]: range(run[0], run[1]) for run in long if (*on, periods[run]) not in self.further}
        longer = [short + self._num_operators(period) for period in unknown.values()]
        if not long or short * (key not in self.known) + sum(longer) > MAX_FOLDED_SHARE * len(self.graph.ops):
            return None
        if key not in self.known:
            self.known[key] = self.simulated(removed, memory_policy, simulate)
        two = self.known[key]
        if two is None:
            return None
        more = []
        for run in long:
            block, region_of = (*on, periods[run]), partial(self.region, run)
            if block not in self.further:
                three = self.simulated(removed - {*range(run[1], run[2])}, memory_policy, simulate)
                if three is None:
                    return None
                self.further[block] = PerBlockCost.of(two, three, region_of)
            more.append((len(run) - 2, self.further[block], region_of))
        return extended(two, more)

    def simulated(
        self, removed: Collection[int], memory_policy: MemoryPolicy, simulate: Simulate
    ) -> SimulatedStep | None:
        graph = self.folding.without(removed)
        return None if graph is None else simulate(graph, _among(memory_policy, graph))

    def _num_operators(self, blocks: Iterable[int]) -> int:
        return sum(len(self.folding.blocks[number].ops) for number in blocks)

    @cached_property
    def _block_of(self) -> dict[str, int]:
        return {op.name: number for number, block in enumerate(self.folding.blocks) for op in block.ops}

    def region(self, run: range, op: str) -> str:
        """Return the region of an operator relative to a run of blocks; outside of blocks it is a region of its own."""
        number = self._block_of.get(op)
        if number is None:
            return op
        if number < run.start:
            return "before"
        if number >= run.stop:
            return "behind"
        return "first" if number < run[1] else "last"

    def keys(self, choice: Choice, memory_policy: MemoryPolicy) -> list[int]:
        """Return, for every block, a number for what a choice makes of it."""
        policy_of = _policy_by_operator(memory_policy)
        keys = []
        for kind, block in zip(self.folding.kinds, self.folding.blocks, strict=True):
            names = [op.name for op in block.ops]
            content = (
                kind,
                tuple(choice.strategies[name] for name in names),
                tuple(policy_of.get(name) for name in names),
                tuple(choice.sources[name] for name in block.sources),
                tuple((i, choice.shared[name]) for i, name in enumerate(block.made) if name in choice.shared),
            )
            keys.append(self.numbers.setdefault(content, len(self.numbers)))
        return keys

    def _outside(self, choice: Choice, memory_policy: MemoryPolicy) -> int:
        """Return a number for what a choice makes of everything outside of blocks."""
        policy_of, home = _policy_by_operator(memory_policy), self.folding.home
        names = [op.name for op in self.folding.outside]
        content = (
            tuple((choice.strategies[name], policy_of.get(name)) for name in names),
            tuple(layout for name, layout in choice.sources.items() if name not in home),
            tuple(pair for pair in choice.shared.items() if pair[0] not in home),
        )
        return self.numbers.setdefault(content, len(self.numbers))


def _policy_by_operator(memory_policy: MemoryPolicy) -> Mapping[str, Hashable]:
    return {name: (segment.how, segment.messages) for segment in memory_policy.segments for name in segment.operators}


def _among(memory_policy: MemoryPolicy, graph: Graph) -> MemoryPolicy:
    names = graph.op_by_name.keys()
    segments = (replace(segment, operators=segment.operators & names) for segment in memory_policy.segments)
    return replace(memory_policy, segments=tuple(segment for segment in segments if segment.operators))


def extended(two: SimulatedStep, more: Sequence[tuple[int, PerBlockCost, Callable[[str], str]]]) -> SimulatedStep:
    num_bytes_at = {
        (phase, op): num_bytes
        + sum(count * block.added_bytes.get((phase, region_of(op)), 0) for count, block, region_of in more)
        for (phase, op), num_bytes in two.held.items()
    }
    phase, op = max(num_bytes_at, key=num_bytes_at.__getitem__)
    figures = {
        name: getattr(two, name) + sum(count * block.figures[name] for count, block, _ in more) for name in _FIGURES
    }
    peak = Peak(num_bytes_at[phase, op], phase, op, {})
    return replace(two, **figures, peak=peak, events=(), held=num_bytes_at, rests={})
