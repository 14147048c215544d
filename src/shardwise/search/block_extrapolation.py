"""The step of a program of many equal blocks, extrapolated from programs of few of them.

Where consecutive blocks are equal, and a plan treats them equally, every further one adds the same seconds and bytes.
So a program with two blocks of each such run is simulated. For every run, a program with a third block shows what one
adds, unless another program has shown it. That is multiplied by the number of blocks beyond two. For the peak, the
bytes while each operator runs are extrapolated, as a short model may have its peak elsewhere. The growth is that of
most operators before the run, in it and behind it, as messages that several blocks share may be in flight a little
earlier or later. Blocks between the outermost ones hold no more than these, as the bytes change evenly from one to the
next.

The estimate orders candidates; the one that is taken is built and simulated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median_high

from shardwise.costs.ledger import Peak
from shardwise.costs.timeline import SimulatedStep
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.layouts.mesh import Mesh
from shardwise.programs.spmd import Choice
from shardwise.search.constants import MAX_FOLDED_SHARE, MIN_OPERATORS_TO_FOLD, MIN_REPEATED_BLOCKS
from shardwise.search.memory_policy import MemoryPolicy

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

    def step(self, choice: Choice, memory_policy: MemoryPolicy, mesh: Mesh, simulate: Simulate) -> SimulatedStep | None:
        """Return the step of a choice, from short programs that ``simulate`` builds, or None if that is not worth it,
        or if the model cannot be shortened."""
        if len(self.graph.ops) < MIN_OPERATORS_TO_FOLD:
            return None
        keys = self._keys(choice, memory_policy)
        runs = self.folding.runs(keys.__getitem__)
        long = [run for run in runs if len(run) >= MIN_REPEATED_BLOCKS]
        removed = {number for run in long for number in run[1:-1]}
        sizes = {run: len(self.folding.blocks[run[0]].ops) for run in long}
        short = len(self.graph.ops) - sum(len(self.folding.blocks[number].ops) for number in removed)
        if not long or short * (1 + len(long)) + sum(sizes.values()) > MAX_FOLDED_SHARE * len(self.graph.ops):
            return None
        kept = tuple(keys[run[0]] if run in long else tuple(map(keys.__getitem__, run)) for run in runs)
        on = mesh, memory_policy.reshard_mode, memory_policy.offloads
        key = *on, self._outside(choice, memory_policy), kept
        if key not in self.known:
            self.known[key] = self._simulated(removed, memory_policy, simulate)
        two = self.known[key]
        if two is None:
            return None
        more = []
        for run in long:
            block, region_of = (*on, keys[run[0]]), partial(self._region, run)
            if block not in self.further:
                three = self._simulated(removed - {run[1]}, memory_policy, simulate)
                if three is None:
                    return None
                self.further[block] = PerBlockCost.of(two, three, region_of)
            more.append((len(run) - 2, self.further[block], region_of))
        return _extended(two, more)

    def _simulated(
        self, removed: Collection[int], memory_policy: MemoryPolicy, simulate: Simulate
    ) -> SimulatedStep | None:
        graph = self.folding.without(removed)
        return None if graph is None else simulate(graph, _among(memory_policy, graph))

    @cached_property
    def _block_of(self) -> dict[str, int]:
        return {op.name: number for number, block in enumerate(self.folding.blocks) for op in block.ops}

    def _region(self, run: range, op: str) -> str:
        """Return the region of an operator relative to a run of blocks; outside of blocks it is a region of its own."""
        number = self._block_of.get(op)
        if number is None:
            return op
        if number < run[0]:
            return "before"
        if number > run[-1]:
            return "behind"
        return "first" if number == run[0] else "last"

    def _keys(self, choice: Choice, memory_policy: MemoryPolicy) -> list[int]:
        """Return, for every block, a number for what a choice makes of it."""
        policy_of = _policy_by_operator(memory_policy)
        keys = []
        for block in self.folding.blocks:
            names = [op.name for op in block.ops]
            content = (
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


def _extended(two: SimulatedStep, more: Sequence[tuple[int, PerBlockCost, Callable[[str], str]]]) -> SimulatedStep:
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
