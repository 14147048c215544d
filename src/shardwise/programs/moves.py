"""Executes moves as local tensor arithmetic around one exchange with the other ranks.

``local_move`` precomputes everything that does not depend on tensor values (which part goes where, shapes, members)
once per move and rank; a step only packs, exchanges and unpacks. Real ranks and the virtual cluster use the same
``LocalMove`` and differ only in the implementation of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import torch

from shardwise.layouts.conversions import WINDOW_CELLS, Cell, Move, collective_of
from shardwise.layouts.holdings import held_rows, num_exchanged, segments
from shardwise.layouts.layout import Layout, Windows
from shardwise.programs.forms import Form
from shardwise.programs.keyed_rows import RowExchange
from shardwise.rules.keyed_rows import copies_of

LARGE = 2**18  # elements from which on a tensor is sent between two gloo ranks without a copy
Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute", "halo_exchange", "row_exchange"
]


@dataclass(frozen=True, slots=True)
class LocalMove:
    """One direction of a move on one rank.

    ``kind``: the collective, or None for a local step: then only ``unpack`` is called, on ``[tensor]``. ``pack``: maps
    the tensor to the tensors to send: one for all_gather and all_reduce, else one for every member of the group.
    ``unpack``: maps the received tensors to the result: one tensor for all_reduce and reduce_scatter, else one from
    every member, of the shapes ``received``. Members are the ranks that differ along ``axes`` only, in ascending order.

    ``sends_memory``: the messages of ``pack`` are equal, consecutive parts of the tensor's memory; ``receives_memory``:
    the received ones are consecutive parts of the result, of shape ``shape``. Most moves of a leading dim are such and
    need no copy. ``with_own``: ``unpack`` takes the rank's own tensor as its last argument. ``rows``: what packs and
    unpacks instead, of a row_exchange.
    """

    kind: Kind | None
    axes: tuple[str, ...]
    reduction: str
    pack: Callable[[torch.Tensor], list[torch.Tensor]]
    unpack: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    received: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    sends_memory: bool = False
    receives_memory: bool = False
    with_own: bool = False
    rows: RowExchange | None = None

    @property
    def is_identity(self) -> bool:
        return self.unpack is _first and self.kind is None


def local_move(move: Move, coordinates: Mapping[str, int], *, backward: bool) -> LocalMove:
    """Return one direction of a move on the rank at ``coordinates``.

    In forward a tensor goes from ``move.source`` to ``move.target``; in backward the cotangent goes from the layout of
    the target to that of the source.
    """
    if move.reverse is not None:
        return local_move(move.reverse, coordinates, backward=not backward)
    primitive, (before, after) = move.primitive(backward), move.ends(backward)
    shape = after.local_shape(coordinates)
    if move.is_keyed:
        outward = not before.keyed_axes
        rows = RowExchange(outward, max(map(copies_of, move.cell)))
        return LocalMove("row_exchange", move.axes, "sum", _alone, _first, (), shape, rows=rows)
    if move.cut is not None:
        return _window_move(move, move.cut, coordinates, shape, backward)

    def local(step: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> LocalMove:
        return LocalMove(None, move.axes, "sum", _alone, step, (), shape)

    if primitive == "none":
        return local(_first)
    if primitive == "keep_one":
        return local(_first if all(coordinates[axis] == 0 for axis in move.axes) else _zeros)
    if primitive == "slice":
        kept_part = OverlapPart(before, coordinates, after, coordinates)
        return local(lambda tensors: kept_part.read(tensors[0]))
    if primitive == "zero_pad":
        place = OverlapPart(after, coordinates, before, coordinates)
        return local(lambda tensors: place.write(tensors[0].new_zeros(shape), tensors[0]))
    if primitive == "all_reduce":
        return LocalMove("all_reduce", move.axes, move.reduction, _alone, _first, (shape,), shape, True, True)
    members = _members(move, coordinates)
    sent = [OverlapPart(before, coordinates, after, member) for member in members]
    kept = [OverlapPart(after, coordinates, before, member) for member in members]
    shapes = tuple(part.shape for part in kept)

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.read(tensor) for part in sent]

    if primitive == "reduce_scatter":
        in_order = _lie_in_order(sent) and len({part.shape for part in sent}) == 1
        return LocalMove("reduce_scatter", move.axes, "sum", pack, _first, (shape,), shape, in_order, True)
    joined = _join_along(kept)
    in_order = _lie_in_order(kept)

    def unpack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if joined is not None:
            opened = [tensor.reshape(part.opened) for part, tensor in zip(kept, tensors, strict=True)]
            return torch.cat(opened, joined).reshape(shape)
        result = tensors[0].new_empty(shape)
        for part, tensor in zip(kept, tensors, strict=True):
            if tensor.numel():
                part.write(result, tensor)
        return result

    if primitive == "all_gather":
        return LocalMove("all_gather", move.axes, "sum", _alone, unpack, shapes, shape, True, in_order)
    assert primitive == "all_to_all", primitive
    kind: Kind = "collective_permute" if num_exchanged(before, after)[1] else "all_to_all"
    return LocalMove(kind, move.axes, "sum", pack, unpack, shapes, shape, False, in_order)


def sharing_buffers(
    moves: Sequence[Move], coordinates: Mapping[str, int], *, backward: bool, on_gloo: bool
) -> list[list[int]]:
    """Return the tensors of a message, by position, in lists that share buffers; small tensors, if any, come first.

    Usually all share one buffer. But two gloo ranks send and receive large tensors in place, because concatenating and
    splitting takes longer than additional transfers.
    """
    first = moves[0].primitive(backward)
    together = list(range(len(moves)))
    pairs = moves[0].source.mesh.size_of(moves[0].axes) == 2
    if not (on_gloo and pairs and first in ("all_gather", "reduce_scatter")):
        return [together]
    alone = [  # by the larger side of a move: the whole tensor, equal on all members
        i
        for i in together
        if max(prod(layout.local_shape(coordinates)) for layout in (moves[i].source, moves[i].target)) >= LARGE
    ]
    small = [i for i in together if i not in alone]
    return [*([small] if small else ()), *([i] for i in alone)]


def _window_move(
    move: Move, cut: Windows, coordinates: Mapping[str, int], shape: tuple[int, ...], backward: bool
) -> LocalMove:
    """Return the move from slices (or the whole) to windows: rows come from the ranks that hold them. In backward their
    cotangents return there, and a row that was in several windows gets the sum."""
    atoms = move.source.local_atoms(coordinates), move.target.local_atoms(coordinates)
    opened = [_opened(sizes, cut) for sizes in (atoms[::-1] if backward else atoms)]  # (before, after)
    dim, size = cut.dim + cut.atom, move.source.dims[cut.dim][cut.atom].size
    index = move.target.index_along(cut.dim, cut.atom, coordinates)
    spread = bool(move.source.dims[cut.dim][cut.atom].axes)
    count = len(cut.ranges) if spread else 1
    group = _members(move, coordinates) if spread else []
    members = [move.target.index_along(cut.dim, cut.atom, member) for member in group]
    me = index if spread else 0
    first_row = me * size // count  # of this rank's slice
    mine = segments(cut.ranges[index], size, count)

    def rows_of(device: int, owner: int) -> list[tuple[int, int]]:
        """Return the runs (row, length) that the window of a device takes from the slice of another, in order."""
        return [(start, stop - start) for at, start, stop in segments(cut.ranges[device], size, count) if at == owner]

    # The segments of this rank's window by owner, as positions in it; and the runs that others take of its slice.
    in_window: dict[int, list[tuple[int, int]]] = {}
    position = 0
    for owner, start, stop in mine:
        in_window.setdefault(owner, []).append((position, stop - start))
        position += stop - start
    of_slice = {m: [(row - first_row, n) for row, n in rows_of(m, me)] if m != me else [] for m in members}
    of_window = {m: in_window.get(m, []) if m != me else [] for m in members}
    own_slice = [(start - first_row, stop - start) for owner, start, stop in mine if owner == me]
    own_window = in_window.get(me, [])

    def into_window(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = tensors[-1].reshape(opened[0])
        sources = dict(zip(members, tensors[:-1], strict=True)) | {me: _taken(tensor, dim, own_slice)}
        used = dict.fromkeys(sources, 0)
        parts = []
        for owner, start, stop in mine:
            parts.append(sources[owner].narrow(dim, used[owner], stop - start))
            used[owner] += stop - start
        return _joined(parts, tensor, dim).reshape(shape)

    def into_slice(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = tensors[-1].reshape(opened[0])
        result = tensor.new_zeros(opened[1])
        received = [(of_slice[m], part) for m, part in zip(members, tensors[:-1], strict=True)]
        for runs, part in [(own_slice, _taken(tensor, dim, own_window)), *received]:
            position = 0
            for start, length in runs:
                result.narrow(dim, start, length).add_(part.narrow(dim, position, length))
                position += length
        return result.reshape(shape)

    unpack, sent, kept = (into_slice, of_window, of_slice) if backward else (into_window, of_slice, of_window)
    if move.entry is WINDOW_CELLS["local"]:
        members = []
        return LocalMove(None, move.axes, "sum", _alone, unpack, (), shape)

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.reshape(opened[0])
        return [_taken(tensor, dim, sent[member]) for member in members]

    widths = (sum(length for _, length in kept[member]) for member in members)
    received = tuple((*opened[1][:dim], width, *opened[1][dim + 1 :]) for width in widths)
    return LocalMove("halo_exchange", move.axes, "sum", pack, unpack, received, shape, with_own=True)


def _taken(tensor: torch.Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    return _joined([tensor.narrow(dim, start, length) for start, length in runs], tensor, dim)


def _joined(parts: Sequence[torch.Tensor], tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the parts of a tensor, one after the other."""
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0] if parts else tensor.narrow(dim, 0, 0)


def _opened(atoms: tuple[tuple[int, ...], ...], cut: Windows) -> tuple[int, ...]:
    """Return a local shape in which the dim of the windows is replaced by its atoms."""
    return tuple(size for d, sizes in enumerate(atoms) for size in (sizes if d == cut.dim else (prod(sizes),)))


class OverlapPart:
    """The overlap of a rank's tensor in one layout with the tensor of a (maybe different) rank in another layout: its
    position in the first tensor. Both ranks enumerate its elements in the same order."""

    def __init__(self, have: Layout, holder: Mapping[str, int], other: Layout, member: Mapping[str, int]) -> None:
        local = have.local_atoms(holder)
        self.opened: tuple[int, ...] = ()  # shape of the part, with the dims that are cut inside opened into atoms
        self.whole: tuple[int, ...] = ()  # shape of the tensor, opened in the same way
        self.narrow: list[tuple[int, int, int]] = []  # (opened dim, start, length)
        self.index: list[tuple[int, torch.Tensor]] = []  # (opened dim, rows), where atoms do not nest
        shape: list[int] = []
        for d, sizes in enumerate(local):
            at = len(self.whole)
            if have.atoms[d] != other.atoms[d]:
                local_rows = held_rows(have, d, holder)
                common = sorted(set(local_rows) & set(held_rows(other, d, member)))
                where = {row: i for i, row in enumerate(local_rows)}
                self.index.append((at, torch.tensor([where[row] for row in common], dtype=torch.int64)))
                self.opened += (len(common),)
                self.whole += (len(local_rows),)
                shape.append(len(common))
                continue
            cuts = []
            for i, length in enumerate(sizes):
                base, _ = have.atom_pieces(d, i, holder)
                start, count = other.atom_pieces(d, i, member)
                begin, end = max(base, start), min(base + length, start + count)
                cuts.append((begin - base, end - begin) if end > begin else (0, 0))
            shape.append(prod(count for _, count in cuts))
            if all(cut == (0, length) for cut, length in zip(cuts, sizes, strict=True)):
                self.opened += (prod(sizes),)
                self.whole += (prod(sizes),)
                continue
            self.opened += tuple(count for _, count in cuts)
            self.whole += tuple(sizes)
            self.narrow += [
                (at + i, *cut) for i, (cut, length) in enumerate(zip(cuts, sizes, strict=True)) if cut != (0, length)
            ]
        self.shape = tuple(shape)
        self.is_open = len(self.whole) > len(self.shape)
        self._index_on: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part, of shape ``shape``, as a view if possible."""
        if self.is_open:
            tensor = tensor.reshape(self.whole)
        for dim, start, length in self.narrow:
            tensor = tensor.narrow(dim, start, length)
        for dim, index in self._index_for(tensor):
            tensor = tensor.index_select(dim, index)
        return tensor.reshape(self.shape) if self.is_open else tensor

    def _index_for(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return ``index`` on the device of a tensor: copied to a GPU once, since the host waits for such a copy."""
        device = tensor.device
        if device not in self._index_on:
            moved = [(dim, index.to(device)) for dim, index in self.index]
            if type(tensor) is not torch.Tensor:  # a tensor without data, and so are these
                return moved
            self._index_on[device] = moved
        return self._index_on[device]

    def write(self, tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Write the part into a contiguous tensor and return that tensor."""
        view = tensor.view(self.whole) if self.is_open else tensor
        for dim, start, length in self.narrow:
            view = view.narrow(dim, start, length)
        part = part.reshape(self.opened)
        if not self.index:
            view.copy_(part)
            return tensor
        where: list[torch.Tensor | slice] = [slice(None)] * view.ndim
        places = self._index_for(tensor)
        for count, (dim, index) in enumerate(places):
            where[dim] = index.view(-1, *[1] * sum(1 for later, _ in places[count + 1 :] if later > dim))
        if len(places) == 1:
            view.index_copy_(places[0][0], places[0][1], part)
            return tensor
        # With several indexed dims, these must come first, in their order.
        dims = [dim for dim, _ in places]
        rest = [dim for dim in range(view.ndim) if dim not in dims]
        turned = view.permute(*dims, *rest)
        turned[tuple(where[dim] for dim in dims)] = part.permute(*dims, *rest)
        return tensor


def _join_along(parts: list[OverlapPart]) -> int | None:
    """Return the (opened) dim along which the parts are consecutive and otherwise whole; None if there is none."""
    dims = {tuple(dim for dim, _, _ in part.narrow) for part in parts if part.narrow or part.index}
    if len(dims) != 1 or any(part.index for part in parts) or any(len(part.narrow) != 1 for part in parts):
        return None
    ((dim,),) = dims
    end = 0
    for part in parts:
        _, start, length = part.narrow[0]
        if length and start != end:
            return None
        end += length
    return dim if end == parts[0].whole[dim] else None


def _lie_in_order(parts: list[OverlapPart]) -> bool:
    """Return whether the parts, concatenated in memory, are the contiguous tensor."""
    dim = _join_along(parts)
    return dim is not None and prod(parts[0].whole[:dim]) == 1


def _members(move: Move, coordinates: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the coordinates of the group's members, in the order of their ranks."""
    mesh = move.source.mesh
    group = sorted(mesh.group(move.axes, mesh.rank_of(coordinates)))
    return [mesh.coordinates(rank) for rank in group]


def _alone(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor]


def _first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _zeros(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.zeros_like(tensors[0])


def converted_form(
    moves: Sequence[Move], coordinates: Mapping[str, int], form: Form, *, backward: bool
) -> tuple[Form, bool, bool]:
    """Return (form of a tensor after the moves on one rank, whether it shares the operand's memory, whether it is the
    operand). Results of exchanges are contiguous; local steps run on meta tensors, once for equal moves."""
    entries = tuple(move.entry for move in moves)
    return _converted_form(tuple(moves), entries, tuple(coordinates.items()), form, backward)


@lru_cache(maxsize=4096)
def _converted_form(
    moves: tuple[Move, ...],
    entries: tuple[Cell, ...],  # of the moves: part of the key
    coordinates_of: tuple[tuple[str, int], ...],
    form: Form,
    backward: bool,
) -> tuple[Form, bool, bool]:
    coordinates = dict(coordinates_of)
    windows = False  # a rank's own rows in a window may be a view of its slice
    tensor = operand = form.with_gradient(False).empty("meta")
    for move in reversed(moves) if backward else moves:
        if collective_of(move, 1, backward=backward) is not None:
            windows |= move.cut is not None or move.reverse is not None
            after = move.source if backward else move.target
            tensor = torch.empty(after.local_shape(coordinates), dtype=form.dtype, device="meta")
            continue
        local = local_move(move, coordinates, backward=backward)
        if not local.is_identity:
            tensor = local.unpack([tensor])
    same_memory = tensor.untyped_storage()._cdata == operand.untyped_storage()._cdata
    return Form.of(tensor), same_memory or windows, tensor is operand
