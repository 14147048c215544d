"""Detection of equal blocks of a graph, and removal of some of them.

A *block* is a repeated part of a model (``segments.block_of``: ``layers.3``). Two consecutive blocks are *equal* if
their operators are equal one by one, and each operand is made by the block itself, by the block before, or is a
parameter of the block alone, or the same value. Costs of a program grow by the same amount with every block of a run of
equal ones, so they are known from programs of two and of three blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

from shardwise.graph.ir import Graph, Op, Ref, map_operands, map_refs, refs
from shardwise.graph.segments import block_of


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

    def runs(self, key: Callable[[int], Hashable]) -> tuple[range, ...]:
        """Return the numbers of the blocks in maximal runs of equal ones. ``key``: what else must be equal."""
        keys = [(kind, key(number)) for number, kind in enumerate(self.kinds)]
        starts = [0, *(n for n, (key, next_key) in enumerate(pairwise(keys), 1) if key != next_key), len(keys)]
        return tuple(range(start, stop) for start, stop in pairwise(starts) if start < stop)

    @cached_property
    def home(self) -> dict[str, int]:
        """Return a map from the values that blocks make, and the blocks' own sources, to block numbers."""
        return {name: i for i, block in enumerate(self.blocks) for name in (*block.made, *block.sources)}

    def without(self, removed: Collection[int]) -> Graph | None:
        """Return the graph without some blocks; each must have a remaining block of its kind before it. None if the
        model returns a removed block's value, or if an operator behind the next block reads it."""
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
        while before in removed and before and self.kinds[before - 1] == self.kinds[number]:
            before -= 1
        is_next = bool(reader.results) and self.home.get(reader.results[0]) == number + 1
        if not is_next or before in removed or name not in self.blocks[number].made:
            return None
        return self.blocks[before].made[self.blocks[number].made.index(name)]


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
