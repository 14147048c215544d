"""The program of a rank: its operators with local shapes, and between them its collectives and local steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.mindspore import library
from shardwise.mindspore.communication.management import gnu_hash, group_name, group_ranks_name
from shardwise.mindspore.ir.page import Origins, Page, Shape, Strategy, attribute, tensor_text

COLLECTIVES = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_to_all": "AlltoAll",
    "collective_permute": "NeighborExchange", "halo_exchange": "NeighborExchangeV2",
}  # fmt: skip
Step = tuple[library.Conversion, str, str, library.Move]  # the value that it changes, its result, and how


class Execution:
    """The printed program of a rank."""

    def __init__(self, program: library.LocalProgram, strategies_of: dict[str, Strategy], origins: Origins) -> None:
        self.spmd, self.rank, self.origins = program.spmd, program.rank, origins
        self.coordinates = self.spmd.mesh.coordinates(self.rank)
        self.page = Page(self.spmd.graph, self._shape, strategies_of, origins)
        num_buckets = 0
        for instruction in program.instructions:
            if isinstance(instruction, library.LocalOp):
                self._call(instruction)
                continue
            is_alone = isinstance(instruction, library.Conversion)
            num_buckets += not is_alone
            self._convert(instruction.conversions, fusion=0 if is_alone else num_buckets)

    def text(self) -> Iterator[str]:
        yield from self.page.text(self.spmd.outputs)
        yield from backward(self.spmd, self.rank)

    def _shape(self, name: str) -> Shape:
        return self.spmd.layouts[name].local_shape(self.coordinates)

    def _call(self, local: library.LocalOp) -> None:
        call = local.call
        here = replace(self.spmd.graph.op_by_name[local.op], target=call.target, args=call.args, kwargs=call.kwargs)
        args = (*call.args, *(arg for _, arg in call.kwargs if arg is not None))
        self.page.call(here, args, tuple(map(self._shape, local.results)))

    def _convert(self, conversions: Sequence[library.Conversion], fusion: int) -> None:
        """Print one line per message and per local step that changes anything."""
        values = [conversion.value for conversion in conversions]
        for number, moves in enumerate(zip(*(conversion.moves for conversion in conversions), strict=True)):
            results = [f"{conversion.result}, after move {number}" for conversion in conversions]
            steps = [*zip(conversions, values, results, moves, strict=True)]
            if library.local_move(moves[0], self.coordinates, backward=False).kind is not None:
                self._message(steps, number, fusion)
            else:
                for step in steps:
                    self._local(step, number)
            values = results
        for conversion, value in zip(conversions, values, strict=True):
            self.page.same(conversion.result, value)

    def _message(self, steps: list[Step], number: int, fusion: int) -> None:
        move = steps[0][3]
        local = library.local_move(move, self.coordinates, backward=False)
        assert local.kind is not None, "a message"
        operator = COLLECTIVES[local.kind]
        is_forward = move.cell[0].startswith("P")
        attrs = {**group_attrs(self.spmd, move.axes, self.rank), "fusion": fusion, "index": number}
        if local.kind in ("all_reduce", "reduce_scatter"):
            attrs["op"] = local.reduction
        if local.kind == "halo_exchange":
            attrs["send_bytes"] = sum(map(self._halo_bytes, steps))
        for name, layout in (("concat_dim", move.source), ("split_dim", move.target)):
            if dims := sorted({layout.positions[axis][0] for axis in move.axes if axis in layout.positions}):
                attrs[name] = dims[0] if len(dims) == 1 else tuple(dims)
        self._add(operator, steps, number, attrs, "forward_op" if is_forward else "redistribution_op")

    def _halo_bytes(self, step: Step) -> int:
        """Return the bytes that this rank sends from the edges of its part."""
        conversion, _, _, move = step
        before = torch.empty(move.source.local_shape(self.coordinates), device="meta")
        pieces = library.local_move(move, self.coordinates, backward=False).pack(before)
        return conversion.itemsize * sum(piece.numel() for piece in pieces)

    def _local(self, step: Step, number: int) -> None:
        conversion, value, result, move = step
        primitive = move.entry.forward
        if library.local_move(move, self.coordinates, backward=False).is_identity:
            self.page.same(result, value)
        elif primitive == "slice":
            cuts = [*slicing(library.OverlapPart(move.source, self.coordinates, move.target, self.coordinates))]
            for count, (operator, args, shape) in enumerate(cuts, 1):
                name = result if count == len(cuts) else f"{result}, step {count}"
                attrs = {"input_names": SLICING_INPUTS[operator], "output_names": ["output"]}
                self._add(operator, [(conversion, value, name, move)], number, attrs, args=args, shape=shape)
                value = name
        else:
            words = ("Zeros", "Like") if primitive == "keep_one" else map(str.capitalize, primitive.split("_"))
            self._add("".join(words), [step], number, {})

    def _add(
        self, operator: str, steps: list[Step], number: int, attrs: dict[str, Any], role: str = "redistribution_op",
        args: tuple[Any, ...] = (), shape: Shape | None = None,
    ) -> None:  # fmt: skip
        """Print an operator of the ``number``-th moves of conversions. ``shape``: that of its result, if it is not that
        of the move. The number in its name is the same on every rank and in every run."""
        of, values, results, moves = zip(*steps, strict=True)
        hashed = gnu_hash(" ".join([*(conversion.result for conversion in of), str(number)]).encode())
        dtypes = [self.spmd.graph.by_name[conversion.origin].dtype for conversion in of]
        shapes = [move.target.local_shape(self.coordinates) if shape is None else shape for move in moves]
        types = map(tensor_text, dtypes, shapes)
        self.page.add(
            operator, (*map(library.Ref, values), *args), dict(zip(results, types, strict=True)),
            self.origins.scope(of[0].op), attrs=attrs, variable="-".join(conversion.origin for conversion in of),
            instance=f"{role}_{hashed}{operator if role == 'redistribution_op' else ''}",
        )  # fmt: skip


SLICING_INPUTS = {"StridedSlice": ["x", "begin", "end", "strides"], "Reshape": ["tensor", "shape"],
                  "Gather": ["input_params", "input_indices", "axis"]}  # fmt: skip


def slicing(part: library.OverlapPart) -> Iterator[tuple[str, tuple[Any, ...], Shape]]:
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


def group_attrs(spmd: library.SpmdProgram, axes: tuple[str, ...], rank: int) -> dict[str, Any]:
    """Return the attributes of a collective's group on this rank."""
    members = tuple(sorted(spmd.mesh.group(axes, rank)))
    group, ranks = group_name(members), group_ranks_name(members)
    return {"group": group, "rank_list": members, "group_ranks": ranks, "group_rank_ids": tuple(range(len(members)))}


def backward(spmd: library.SpmdProgram, rank: int) -> Iterator[str]:
    """Yield the collectives of backward, in order, as comments. Autograd derives them from the operators."""
    if spmd.loss is None:
        first = next((output for output in spmd.outputs if isinstance(output, library.Ref)), None)
        spmd = replace(spmd, loss=None if first is None else first.name)
    yield "# Backward: its collectives, in order."
    for collective in spmd.backward_collectives():
        inner = ", ".join(f"{k}: {attribute(v)}" for k, v in group_attrs(spmd, collective.axes, rank).items())
        yield f"#   {COLLECTIVES[collective.kind]} {{{inner}}} {collective.num_bytes} bytes"
