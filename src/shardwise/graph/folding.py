"""Detection of equal graphs and of equal blocks of a graph, and removal of some of these.

Equal graphs have equal canonical forms, without the names of operators and values (``GraphForm``).

A *block* is a repeated part of a model (``segments.block_of``: ``layers.3``). Two consecutive blocks are *equal* if
their operators are equal one by one, and each operand is made by the block itself, by the block before, or is a
parameter of the block alone, or the same value. Costs of a program grow by the same amount with every block of a run of
equal ones, so they are known from programs of two and of three blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from shardwise.graph.ir import Graph, Op, Ref, map_operands, map_refs, refs
from shardwise.graph.segments import block_of


@dataclass(frozen=True, eq=False)
class GraphForm:
    """``key``: equal for graphs that differ only in names, if their operators are in blocks and annotated calls of the
    same extent; ``ops``, ``values``: the names, in the order of the graph."""

    key: Hashable
    ops: tuple[str, ...]
    values: tuple[str, ...]

    @staticmethod
    def of(graph: Graph) -> GraphForm:
        names = [*(source.value for source in graph.sources), *(name for op in graph.ops for name in op.results)]
        place = {name: number for number, name in enumerate(names)}
        blocks, scopes = {"": 0}, {"": 0}

        def renamed(name: str) -> Ref:
            return Ref(str(place[name]))

        ops = tuple(
            (
                op.target,
                map_refs(op.args, renamed),
                map_refs(op.kwargs, renamed),
                len(op.results),
                scopes.setdefault(op.scope, len(scopes)),
                blocks.setdefault(block_of(op.name), len(blocks)),
            )
            for op in graph.ops
        )
        key = (
            tuple((source.kind, source.trainable) for source in graph.sources),
            tuple(replace(graph.by_name[name], name="") for name in names),
            ops,
            map_refs(graph.outputs, renamed),
            None if graph.loss is None else place[graph.loss],
            tuple((place[buffer], place[value]) for buffer, value in graph.mutations),
            tuple((place[name], text) for name, text in graph.constraints),
            None if graph.cotangents is None else tuple(place[name] for name in graph.cotangents),
        )
        return GraphForm(key, tuple(op.name for op in graph.ops), tuple(names))

    def renaming(self, other: GraphForm) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return maps from names of operators, and of values, of this graph to those of an equal one."""
        assert self.key == other.key, "the graphs differ"
        return dict(zip(self.ops, other.ops, strict=True)), dict(zip(self.values, other.values, strict=True))


@dataclass(frozen=True)
class GraphBlock:
    """``path``: of the module; ``ops``: in order; ``made``: the values that they make, in order; ``sources``: those
    read by no operator outside the block, in order of first use."""

    path: str
    ops: tuple[Op, ...]
    made: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Folding:
    """The blocks of a graph in the order in which they begin, with a number per kind: blocks of one kind are equal.
    ``outside``: the operators of no block."""

    graph: Graph
    blocks: tuple[GraphBlock, ...]
    kinds: tuple[int, ...]
    outside: tuple[Op, ...]

    @staticmethod
    def of(graph: Graph) -> Folding:
        members: dict[str, list[Op]] = {}
        for op in graph.ops:
            members.setdefault(block_of(op.name), []).append(op)
        outside = tuple(members.pop("", ()))
        blocks = tuple(_block(graph, path, ops) for path, ops in members.items())
        numbers: dict[Hashable, int] = {}
        kinds = [
            numbers.setdefault(_signature(graph, block, before), len(numbers))
            for before, block in zip((None, *blocks), blocks, strict=False)
        ]
        return Folding(graph, blocks, tuple(kinds), outside)

    def runs(self, key: Callable[[int], Hashable], least: int = 1, longest_period: int = 1) -> tuple[range, ...]:
        """Return the numbers of the blocks in runs, one behind the other, that repeat one block or a *period* of
        several: the step of a range.

        Args:
            key: What else must be equal.
            least: How often a period of several blocks is repeated at least.
            longest_period: The largest number of blocks of a period.
        """
        keys = [(kind, key(number)) for number, kind in enumerate(self.kinds)]
        runs: list[range] = []
        while (start := runs[-1].stop if runs else 0) < len(keys):
            found = [_repeated(keys, start, period) for period in range(1, longest_period + 1)]
            found = [run for run in found if run.step == 1 or len(run) >= least]
            runs.append(max(found, key=lambda run: (len(run) - 2) * run.step))
        return tuple(runs)

    @cached_property
    def home(self) -> dict[str, int]:
        """Return a map from the values that blocks make, and the blocks' own sources, to block numbers."""
        return {name: i for i, block in enumerate(self.blocks) for name in (*block.made, *block.sources)}

    def without(self, removed: Collection[int]) -> Graph | None:
        """Return the graph without some blocks. None if the last remaining block before a removed one that a remaining
        one follows is of another kind, if the model returns a removed block's value, or if an operator behind the next
        block reads it."""
        if not removed:
            return self.graph
        gone = {name for i in removed for name in (*self.blocks[i].made, *self.blocks[i].sources)}
        graph, mutations = self.graph, []
        for buffer, value in graph.mutations:
            if buffer not in gone and value not in gone:
                mutations.append((buffer, value))
            elif buffer not in gone or value not in gone:
                return None
        delivered = {*refs(graph.outputs), *graph.differentiated}
        if not gone.isdisjoint(delivered):
            return None
        dropped = {op.name for i in removed for op in self.blocks[i].ops}
        ops = [op for op in graph.ops if op.name not in dropped]
        for position, op in enumerate(ops):
            named = {name: self._before(name, op, removed) for name in op.operands if name in gone}
            if None in named.values():
                return None
            if named:
                ops[position] = map_operands(op, partial(_renamed, named))
        return replace(
            graph,
            values=tuple(value for value in graph.values if value.name not in gone),
            sources=tuple(source for source in graph.sources if source.value not in gone),
            ops=tuple(ops),
            mutations=tuple(mutations),
            constraints=tuple(constraint for constraint in graph.constraints if constraint[0] not in gone),
            terms=tuple(term for term in graph.terms if term[0] not in gone),
        )

    def _before(self, name: str, reader: Op, removed: Collection[int]) -> str | None:
        """Return the value that its reader gets in place of a removed block's: that of the last block before it."""
        number = before = self.home[name]
        while before in removed and before:
            before -= 1
        is_next = bool(reader.results) and self.home.get(reader.results[0]) == number + 1
        is_equal = before not in removed and self.kinds[before] == self.kinds[number]
        if not is_next or not is_equal or name not in self.blocks[number].made:
            return None
        return self.blocks[before].made[self.blocks[number].made.index(name)]


def _repeated(keys: Sequence[Hashable], start: int, period: int) -> range:
    """Return the longest run from a position on that repeats its first ``period`` keys."""
    stop = start + period
    while stop + period <= len(keys) and keys[stop : stop + period] == keys[start : start + period]:
        stop += period
    return range(start, stop, period)


def _renamed(names: Mapping[str, str | None], name: str) -> Ref:
    return Ref(names.get(name) or name)


def _block(graph: Graph, path: str, ops: Sequence[Op]) -> GraphBlock:
    names = {op.name for op in ops}
    sources = dict.fromkeys(
        name
        for op in ops
        for name in op.operands
        if name in graph.source_of and names.issuperset(reader.name for reader in graph.consumers[name])
    )
    return GraphBlock(path, tuple(ops), tuple(name for op in ops for name in op.results), tuple(sources))


def _signature(graph: Graph, block: GraphBlock, before: GraphBlock | None) -> Hashable:
    place: dict[str, Hashable] = {} if before is None else {name: ("before", i) for i, name in enumerate(before.made)}
    place |= {name: ("own", i) for i, name in enumerate(block.made)}
    place |= {name: ("source", i) for i, name in enumerate(block.sources)}

    def key_of(name: str) -> Hashable:
        return ("ref", place.get(name, name))

    values = [replace(graph.by_name[name], name="") for name in (*block.made, *block.sources)]
    sources = [(graph.source_of[name].kind, graph.source_of[name].trainable) for name in block.sources]
    ops = [(op.target, map_refs((op.args, op.kwargs), key_of), op.scope) for op in block.ops]
    return tuple(ops), tuple(values), tuple(sources)
