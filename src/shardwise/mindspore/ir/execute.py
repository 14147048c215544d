"""The program of a rank: its operators with local shapes, and between them its collectives and local steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.mindspore.communication.management import group_name, group_ranks_name
from shardwise.mindspore.ir.origins import Origins
from shardwise.mindspore.ir.page import COLLECTIVES, Page, Shape, Strategy, attribute, hashed
from shardwise.mindspore.library import (
    Bucket,
    Conversion,
    LocalOp,
    LocalProgram,
    Move,
    OverlapPart,
    Ref,
    SpmdProgram,
    local_move,
)


class Execution:
    """The printed program of a rank."""

    def __init__(self, program: LocalProgram, strategies_of: dict[str, Strategy], origins: Origins) -> None:
        self.spmd, self.rank = program.spmd, program.rank
        self.coordinates = self.spmd.mesh.coordinates(self.rank)
        graph = self.spmd.graph
        shapes = {source.value: self._shape(source.value) for source in graph.sources}
        self.page, self.origins = Page(graph, shapes, strategies_of, origins), origins
        self._buckets = 0
        for instruction in program.instructions:
            if isinstance(instruction, LocalOp):
                self._call(instruction)
            else:
                self._convert(instruction)

    def text(self) -> Iterator[str]:
        yield from self.page.text(self.spmd.outputs)
        yield from backward(self.spmd, self.rank)

    def _shape(self, name: str) -> Shape:
        return self.spmd.layouts[name].local_shape(self.coordinates)

    def _call(self, local: LocalOp) -> None:
        op, call = self.spmd.graph.op_by_name[local.op], local.call
        here = replace(op, target=call.target, args=call.args, kwargs=call.kwargs)
        args = (*call.args, *(arg for _, arg in call.kwargs if arg is not None))
        self.page.call(here, args, tuple(map(self._shape, local.results)))

    def _convert(self, step: Conversion | Bucket) -> None:
        """Print one line per message and per local step that changes anything."""
        conversions, is_bucket = step.conversions, isinstance(step, Bucket)
        self._buckets += is_bucket
        fusion = self._buckets if is_bucket else 0
        at = [conversion.value for conversion in conversions]
        for number, together in enumerate(zip(*(conversion.moves for conversion in conversions), strict=True)):
            results = [f"{conversion.result}, after move {number}" for conversion in conversions]
            if local_move(together[0], self.coordinates, backward=False).kind is not None:
                self._message(conversions, at, results, together, fusion, number)
            else:
                for conversion, value, result, move in zip(conversions, at, results, together, strict=True):
                    self._local(conversion, value, result, move)
            at = results
        for conversion, value in zip(conversions, at, strict=True):
            self.page.same(conversion.result, value)

    def _message(
        self, conversions: Sequence[Conversion], values: Sequence[str], results: Sequence[str], moves: Sequence[Move],
        fusion: int, number: int,
    ) -> None:  # fmt: skip
        local, move = local_move(moves[0], self.coordinates, backward=False), moves[0]
        assert local.kind is not None, "a message"
        operator = COLLECTIVES[local.kind]
        role = "forward_op" if move.cell[0].startswith("P") else "redistribution_op"
        suffix = operator if role == "redistribution_op" else ""
        attrs = {**group_attrs(self.spmd, move.axes, self.rank), "fusion": fusion, "index": number}
        if local.kind in ("all_reduce", "reduce_scatter"):
            attrs["op"] = local.reduction
        if local.kind == "halo_exchange":
            attrs["send_bytes"] = sum(map(self._halo_bytes, conversions, moves))
        instance = f"{role}_{_number(conversions, number)}{suffix}"
        self._add(operator, conversions, values, results, moves, instance, attrs | _dims(move))

    def _halo_bytes(self, conversion: Conversion, move: Move) -> int:
        """Return the bytes that this rank sends from the edges of its part."""
        local = local_move(move, self.coordinates, backward=False)
        before = torch.empty(move.source.local_shape(self.coordinates), device="meta")
        return conversion.itemsize * sum(piece.numel() for piece in local.pack(before))

    def _add(
        self, operator: str, conversions: Sequence[Conversion], values: Sequence[str], results: Sequence[str],
        moves: Sequence[Move], instance: str, attrs: dict[str, Any],
    ) -> None:  # fmt: skip
        dtypes = tuple(self.spmd.graph.by_name[conversion.origin].dtype for conversion in conversions)
        shapes = tuple(move.target.local_shape(self.coordinates) for move in moves)
        self.page.add(
            operator, tuple(map(Ref, values)), tuple(results), dtypes, shapes, self.origins.scope(conversions[0].op),
            instance=instance, attrs=attrs, variable=_variable(conversions),
        )  # fmt: skip

    def _local(self, conversion: Conversion, value: str, result: str, move: Move) -> None:
        local = local_move(move, self.coordinates, backward=False)
        if local.is_identity:
            self.page.same(result, value)
            return
        primitive = move.entry.forward
        number = conversion.moves.index(move)
        if primitive == "slice":
            self._slice(conversion, value, result, move, number)
            return
        operator = "ZerosLike" if primitive == "keep_one" else "".join(p.capitalize() for p in primitive.split("_"))
        instance = f"redistribution_op_{_number([conversion], number)}{operator}"
        self._add(operator, [conversion], [value], [result], [move], instance, {})

    def _slice(self, conversion: Conversion, value: str, result: str, move: Move, number: int) -> None:
        """Print the operators that slice the rank's part of a tensor."""
        dtype, scope = self.spmd.graph.by_name[conversion.origin].dtype, self.origins.scope(conversion.op)
        steps = list(slicing(OverlapPart(move.source, self.coordinates, move.target, self.coordinates)))
        for count, (operator, args, shape) in enumerate(steps, 1):
            name = result if count == len(steps) else f"{result}, step {count}"
            attrs = {"input_names": list(SLICING_INPUTS[operator]), "output_names": ["output"]}
            instance = f"redistribution_op_{_number([conversion], number)}{operator}"
            self.page.add(
                operator, (Ref(value), *args), (name,), (dtype,), (shape,), scope, instance=instance, attrs=attrs,
                variable=_variable([conversion]),
            )  # fmt: skip
            value = name


SLICING_INPUTS = {"StridedSlice": ("x", "begin", "end", "strides"), "Reshape": ("tensor", "shape"),
                  "Gather": ("input_params", "input_indices", "axis")}  # fmt: skip


def slicing(part: OverlapPart) -> Iterator[tuple[str, tuple[Any, ...], Shape]]:
    """Yield the operators that cut a part out of a tensor, their arguments besides the tensor, and result shapes. Dims
    that are split inside are reshaped into their factors; rows that are not contiguous are gathered."""
    if part.is_open:
        yield "Reshape", (part.whole,), part.whole
    begins, ends = [0] * len(part.whole), list(part.whole)
    for dim, start, length in part.narrow:
        begins[dim], ends[dim] = start, start + length
    shape = tuple(end - start for start, end in zip(begins, ends, strict=True))
    if part.narrow or not part.index:
        yield "StridedSlice", (tuple(begins), tuple(ends), (1,) * len(shape)), shape
    for dim, rows in part.index:
        shape = tuple(len(rows) if i == dim else size for i, size in enumerate(shape))
        yield "Gather", (tuple(rows.tolist()), dim), shape
    if part.is_open:
        yield "Reshape", (part.shape,), part.shape


def group_attrs(spmd: SpmdProgram, axes: tuple[str, ...], rank: int) -> dict[str, Any]:
    """Return the attributes of a collective's group on this rank."""
    members = tuple(sorted(spmd.mesh.group(axes, rank)))
    group, ranks = group_name(members), group_ranks_name(members)
    return {"group": group, "rank_list": members, "group_ranks": ranks, "group_rank_ids": tuple(range(len(members)))}


def backward(spmd: SpmdProgram, rank: int) -> Iterator[str]:
    """Yield the collectives of backward, in order, as comments. Autograd derives them from the operators."""
    if spmd.loss is None:
        first = next((output for output in spmd.outputs if isinstance(output, Ref)), None)
        spmd = replace(spmd, loss=None if first is None else first.name)
    yield "# Backward: its collectives, in order."
    for collective in spmd.backward_collectives():
        inner = ", ".join(f"{k}: {attribute(v)}" for k, v in group_attrs(spmd, collective.axes, rank).items())
        yield f"#   {COLLECTIVES[collective.kind]} {{{inner}}} {collective.num_bytes} bytes"


def _dims(move: Move) -> dict[str, Any]:
    before, after = move.source.positions, move.target.positions
    gathered = sorted({before[axis][0] for axis in move.axes if axis in before})
    split = sorted({after[axis][0] for axis in move.axes if axis in after})
    attributes = {"concat_dim": gathered, "split_dim": split}
    return {name: dims[0] if len(dims) == 1 else tuple(dims) for name, dims in attributes.items() if dims}


def _number(conversions: Sequence[Conversion], number: int) -> int:
    return hashed(*(conversion.result for conversion in conversions), number)


def _variable(conversions: Sequence[Conversion]) -> str:
    return "-".join(conversion.origin for conversion in conversions)
