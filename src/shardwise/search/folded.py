"""A step of a program of many equal blocks, from programs of few of them.

Where blocks that follow each other are equal, and a plan treats them alike, every further one adds the same seconds and
the same bytes. So a program with two of each such run is simulated, and for every run one with a third; what the third
adds counts as often as there are blocks beyond two. Of the peak it is the bytes while each operator runs that are
carried on, as the peak of a short model may be somewhere else; in a block by what most of its operators show, since
messages that several blocks share may be on their way a little earlier or later. What is between the outermost blocks
holds no more than these do, as what they hold changes evenly from one to the next.

The estimate orders candidates; the one that is taken is built and simulated as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_high

from shardwise.costs.ledger import Peak
from shardwise.costs.timeline import SimulatedStep
from shardwise.graph.folding import Folding
from shardwise.graph.ir import Graph
from shardwise.graph.segments import block_of
from shardwise.layouts.mesh import Mesh
from shardwise.programs.spmd import Choice
from shardwise.search.levers import Levers

LEAST_RUN = 4
LEAST_OPERATORS = 400  # smaller models are simulated as they are
WORTH = 1.0  # of the model's operators, at most so many in all the programs that stand for it

Simulate = Callable[[Graph, Levers], SimulatedStep]


@dataclass(frozen=True, eq=False)
class Folded:
    """The steps of one model's plans. ``known``: what decides a short program -> its steps, with two blocks of every
    run, and with a third of each."""

    graph: Graph
    known: dict[Hashable, tuple[SimulatedStep, ...]] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)

    @cached_property
    def folding(self) -> Folding:
        return Folding.of(self.graph)

    def step(self, choice: Choice, levers: Levers, mesh: Mesh, simulate: Simulate) -> SimulatedStep | None:
        """The step of a choice, from short programs that ``simulate`` builds; None: that is not worth it, or the model
        cannot be shortened."""
        if len(self.graph.ops) < LEAST_OPERATORS:
            return None
        keys = self._keys(choice, levers)
        runs = self.folding.runs(keys.__getitem__)
        long = [run for run in runs if len(run) >= LEAST_RUN]
        removed = {number for run in long for number in run[1:-1]}
        sizes = {run: len(self.folding.blocks[run[0]].ops) for run in long}
        short = len(self.graph.ops) - sum(len(self.folding.blocks[number].ops) for number in removed)
        if not long or short * (1 + len(long)) + sum(sizes.values()) > WORTH * len(self.graph.ops):
            return None
        kept = tuple(keys[run[0]] if run in long else tuple(map(keys.__getitem__, run)) for run in runs)
        key = mesh, levers.gathered, levers.offloads, self._outside(choice, levers), kept
        if key not in self.known:
            graphs = [self.folding.without(removed - {run[1]} if run else removed) for run in (None, *long)]
            if any(graph is None for graph in graphs):
                return None
            self.known[key] = tuple(simulate(own, _among(levers, own)) for own in graphs if own is not None)
        base, *thirds = self.known[key]
        return _extended(base, [(len(run) - 2, third) for run, third in zip(long, thirds, strict=True)])

    def _keys(self, choice: Choice, levers: Levers) -> list[int]:
        """For every block a number for what a choice makes of it."""
        lever_of = _lever_of(levers)
        keys = []
        for block in self.folding.blocks:
            names = [op.name for op in block.ops]
            own = (
                tuple(choice.strategies[name] for name in names),
                tuple(lever_of.get(name) for name in names),
                tuple(choice.sources[name] for name in block.sources),
                tuple((i, choice.shared[name]) for i, name in enumerate(block.made) if name in choice.shared),
            )
            keys.append(self.numbers.setdefault(own, len(self.numbers)))
        return keys

    def _outside(self, choice: Choice, levers: Levers) -> int:
        """A number for what a choice makes of all else."""
        lever_of, home = _lever_of(levers), self.folding.home
        names = [op.name for op in self.folding.outside]
        own = (
            tuple((choice.strategies[name], lever_of.get(name)) for name in names),
            tuple(layout for name, layout in choice.sources.items() if name not in home),
            tuple(pair for pair in choice.shared.items() if pair[0] not in home),
        )
        return self.numbers.setdefault(own, len(self.numbers))


def _lever_of(levers: Levers) -> Mapping[str, Hashable]:
    return {name: (own.how, own.messages) for own in levers.segments for name in own.operators}


def _among(levers: Levers, graph: Graph) -> Levers:
    """The levers for the operators of a graph."""
    names = graph.op_by_name.keys()
    own = (replace(segment, operators=segment.operators & names) for segment in levers.segments)
    return replace(levers, segments=tuple(segment for segment in own if segment.operators))


def _extended(base: SimulatedStep, more: list[tuple[int, SimulatedStep]]) -> SimulatedStep:
    """A step with so many more of what further steps have beyond the first."""

    def total(of: Callable[[SimulatedStep], float]) -> float:
        return of(base) + sum(count * (of(third) - of(base)) for count, third in more)

    held = Counter(base.held)
    for count, third in more:
        added: dict[tuple[str, str], list[int]] = {}
        for (phase, op), own in base.held.items():
            added.setdefault((phase, block_of(op) or op), []).append(third.held.get((phase, op), own) - own)
        for phase, op in held:
            held[phase, op] += count * median_high(added[phase, block_of(op) or op])
    phase, op = max(held, key=held.__getitem__)
    return SimulatedStep(
        total(lambda step: step.seconds),
        total(lambda step: step.compute),
        total(lambda step: step.communication),
        total(lambda step: step.exposed),
        Peak(held[phase, op], phase, op, {}),
        total(lambda step: step.forward),
        held=held,
        kept_bytes=int(total(lambda step: step.kept_bytes)),
    )


__all__ = ["Folded"]
