"""Moves as local tensor arithmetic around one exchange with the other ranks.

Each primitive is a generator: it yields the one ``Exchange`` it needs (or none) and receives the tensors of the group,
so that real ranks and the virtual cluster run the same code and differ only in who performs the exchange.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from shardwise.layouts.conversions import Move, Primitive
from shardwise.layouts.layout import Layout


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request to the communicator on behalf of one rank.

    ``kind``: ``all_gather`` (every member receives the list of all members' ``tensors[0]``), ``reduce_scatter`` (member
    i receives the sum of everybody's ``tensors[i]``), ``all_reduce`` (the ``reduction`` of everybody's ``tensors[0]``),
    ``all_to_all`` (member i receives everybody's ``tensors[i]``). ``shapes``: the shapes that arrive, one per received
    tensor. Members are ordered along ``axes``, major first.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    axes: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    reduction: str = "sum"

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole message on this rank: the gathered tensor of an all_gather, the input of the others."""
        if self.kind == "all_gather":
            count = sum(prod(shape) for shape in self.shapes)
        else:
            count = sum(tensor.numel() for tensor in self.tensors)
        return count * self.tensors[0].element_size()


Steps = Generator[Exchange, list[torch.Tensor], torch.Tensor]


def run_primitive(
    primitive: Primitive, move: Move, tensor: torch.Tensor, coordinates: Mapping[str, int], *, backward: bool
) -> Steps:
    """Apply one primitive of a move to the local tensor of the rank at ``coordinates``.

    In forward the tensor goes from ``move.source`` to ``move.target``; in backward the cotangent goes from the layout
    of the target to that of the source.
    """
    before, after = (move.target, move.source) if backward else (move.source, move.target)
    if primitive == "none":
        return tensor
    if primitive == "keep_one":
        first = all(coordinates[axis] == 0 for axis in move.axes)
        return tensor if first else torch.zeros_like(tensor)
    if primitive == "slice":
        return _slice(tensor, before, after, move.axes, coordinates)
    if primitive == "zero_pad":
        return _zero_pad(tensor, before, after, move.axes, coordinates)
    if primitive == "all_reduce":
        shape = tuple(tensor.shape)
        (result,) = yield Exchange("all_reduce", move.axes, (tensor,), (shape,), move.reduction)
        return result
    members = _members(move, coordinates)
    if primitive == "reduce_scatter":
        parts = tuple(_slice(tensor, before, after, move.axes, member) for member in members)
        (result,) = yield Exchange("reduce_scatter", move.axes, parts, (after.local_shape(coordinates),))
        return result
    dim, atom = before.positions[move.axes[0]]
    held = [before.local_atoms(member) for member in members]
    if primitive == "all_gather":
        sent: tuple[torch.Tensor, ...] = (tensor,)
    else:
        assert primitive == "all_to_all", primitive
        sent = tuple(_slice(tensor, before, after, move.axes, member, holder=coordinates) for member in members)
        to_dim, to_atom = after.positions[move.axes[0]]
        wanted = after.atom_pieces(to_dim, to_atom, coordinates)[1]
        held = [_with_size(atoms, to_dim, to_atom, wanted) for atoms in held]
    pieces = yield Exchange(primitive, move.axes, sent, tuple(tuple(map(prod, atoms)) for atoms in held))
    return _join(pieces, held, dim, atom)


def _members(move: Move, coordinates: Mapping[str, int]) -> list[dict[str, int]]:
    """Coordinates of the group's members, in order."""
    members = []
    for index in range(move.source.mesh.size_of(move.axes)):
        member = dict(coordinates)
        for axis in reversed(move.axes):
            index, member[axis] = divmod(index, move.source.mesh.sizes[axis])
        members.append(member)
    return members


def _slice(
    tensor: torch.Tensor,
    before: Layout,
    after: Layout,
    axes: tuple[str, ...],
    member: Mapping[str, int],
    holder: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """What ``member`` holds in ``after``, cut out of the tensor that ``holder`` (by default the member itself) has in
    ``before``; ``after`` shards one more atom over ``axes``."""
    dim, atom = after.positions[axes[0]]
    base, _ = before.atom_pieces(dim, atom, holder or member)
    start, length = after.atom_pieces(dim, atom, member)
    atoms = before.local_atoms(holder or member)
    cut = _open(tensor, atoms, dim).narrow(dim + atom, start - base, length)
    return _close(cut, dim, len(atoms[dim]))


def _zero_pad(
    tensor: torch.Tensor, before: Layout, after: Layout, axes: tuple[str, ...], member: Mapping[str, int]
) -> torch.Tensor:
    """The tensor in ``before`` (which shards one more atom over ``axes``), placed in zeros of its size in ``after``."""
    dim, atom = before.positions[axes[0]]
    base, _ = after.atom_pieces(dim, atom, member)
    start, length = before.atom_pieces(dim, atom, member)
    atoms = after.local_atoms(member)
    whole = _open(tensor.new_zeros(tuple(map(prod, atoms))), atoms, dim)
    whole.narrow(dim + atom, start - base, length).copy_(_open(tensor, before.local_atoms(member), dim))
    return _close(whole, dim, len(atoms[dim]))


def _join(pieces: list[torch.Tensor], held: list[tuple[tuple[int, ...], ...]], dim: int, atom: int) -> torch.Tensor:
    """Concatenate pieces along one atom of one dim; ``held``: the local atom sizes of each piece."""
    opened = [_open(piece, atoms, dim) for piece, atoms in zip(pieces, held, strict=True)]
    return _close(torch.cat(opened, dim + atom), dim, len(held[0][dim]))


def _open(tensor: torch.Tensor, atoms: tuple[tuple[int, ...], ...], dim: int) -> torch.Tensor:
    """The tensor with one dim unfolded into its atoms."""
    if len(atoms[dim]) == 1:
        return tensor
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], *atoms[dim], *shape[dim + 1 :])


def _close(tensor: torch.Tensor, dim: int, num_atoms: int) -> torch.Tensor:
    """The inverse of ``_open``."""
    if num_atoms == 1:
        return tensor
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], prod(shape[dim : dim + num_atoms]), *shape[dim + num_atoms :])


def _with_size(atoms: tuple[tuple[int, ...], ...], dim: int, atom: int, size: int) -> tuple[tuple[int, ...], ...]:
    changed = tuple(size if i == atom else own for i, own in enumerate(atoms[dim]))
    return (*atoms[:dim], changed, *atoms[dim + 1 :])
