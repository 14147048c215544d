"""The steps of a partitioned program: operators in their layouts, and conversions of values between them. Each has
``operands``, ``results`` and ``conversions``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from shardwise.graph.ir import Graph
from shardwise.layouts.conversions import Collective, Move, collective_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.redistribute import redistribute
from shardwise.programs.lower import PlacedOp

_CHUNK = re.compile(r"\./chunk(\d+\.\d+)")


def chunk_of(name: str) -> str:
    """Return the chunk of rows that a value belongs to (``programs.row_chunks``); empty if it belongs to none."""
    found = _CHUNK.search(name)
    return found.group(1) if found else ""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of ``value`` from its layout ``source`` to ``target`` by ``moves``, under the name ``result``.

    ``origin``: the value of the graph (``value`` itself, unless that is a conversion's result); ``op``: the consumer
    that first needs it; ``itemsize``, ``grad_itemsize``: bytes of an element in messages, forward and backward.
    ``ways``: of a conversion of keyed rows, the values that say which rows go where (``programs.builder``). ``scale``:
    of a gather in float8, the largest number of the whole weight (``programs.float8_gathers``).
    """

    value: str
    origin: str
    result: str
    source: Layout
    target: Layout
    moves: tuple[Move, ...]
    differentiable: bool
    itemsize: int
    grad_itemsize: int
    op: str
    ways: tuple[str, ...] = ()
    scale: str = ""

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        return (self,)

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.value, *self.ways)

    @property
    def results(self) -> tuple[str, ...]:
        return (self.result,)

    def collectives(self, *, backward: bool = False) -> tuple[Collective, ...]:
        """Return its collectives in the order of execution."""
        if backward and not self.differentiable:
            return ()
        moves = self.moves[::-1] if backward else self.moves
        itemsize = self.grad_itemsize if backward else self.itemsize
        collectives = (collective_of(move, itemsize, backward=backward) for move in moves)
        return tuple(collective for collective in collectives if collective is not None)


def collectives_of(conversions: tuple[Conversion, ...], *, backward: bool) -> tuple[Collective, ...]:
    """Return the messages of conversions that share them, in order."""
    members = [conversion.collectives(backward=backward) for conversion in conversions]
    return tuple(
        Collective(together[0].kind, together[0].axes, sum(collective.num_bytes for collective in together))
        for together in zip(*members, strict=True)
    )


def legs_of(conversions: tuple[Conversion, ...], *, backward: bool) -> list[tuple[Conversion, ...]]:
    """Split conversions that share messages into one leg per message, in the order of execution: each leg has the moves
    from its message up to the next one, the first also those before. Without a message there is one leg."""
    moves = conversions[0].moves[::-1] if backward else conversions[0].moves
    sends = [i for i, move in enumerate(moves) if collective_of(move, 1, backward=backward) is not None]
    ends = [*sends[1:], len(moves)]
    legs = []
    for begin, end in pairwise([0, *ends]):
        part = slice(len(moves) - end, len(moves) - begin) if backward else slice(begin, end)
        legs.append(tuple(_part(conversion, conversion.moves[part]) for conversion in conversions))
    return legs


def _part(conversion: Conversion, moves: tuple[Move, ...]) -> Conversion:
    return replace(conversion, source=moves[0].source, target=moves[-1].target, moves=moves) if moves else conversion


@dataclass(frozen=True, slots=True)
class OpStep:
    """An operator over converted operands. ``operands`` follow ``placed.op.operands``."""

    placed: PlacedOp
    operands: tuple[str, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    conversions: ClassVar[tuple[Conversion, ...]] = ()

    @property
    def results(self) -> tuple[str, ...]:
        return self.placed.op.results

    def largest(self, graph: Graph) -> Conversion:
        """Return the conversion of the largest cotangents that ranks find in their parts of the result to those of all
        ranks (``OpRule.largest``)."""
        (name,), (layout,), over = self.results, self.result_layouts, self.placed.rule.largest
        assert over is not None, f"backward of {self.placed.op.name} needs no largest cotangent"
        dims = [dim for i, dim in enumerate(layout.dims) if i not in over]
        kept = {axis for dim in dims for atom in dim for axis in atom.axes}
        parts = [(axis, "Pmax") for axis in layout.mesh.sub_axes if axis in layout.positions and axis not in kept]
        source, target = Layout(layout.mesh, tuple(dims), tuple(parts)), Layout(layout.mesh, tuple(dims))
        moves = redistribute(source, target, differentiable=False)
        size = max(graph.by_name[name].dtype.itemsize, torch.float32.itemsize)
        return Conversion(
            f"{name}'", name, f"{name}'all", source, target, moves, False, size, size, self.placed.op.name
        )
