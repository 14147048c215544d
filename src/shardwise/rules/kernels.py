"""Local operators that ATen lacks: what a rank computes on its part of an indexed or a generated dim.

A rank's part of a factor is given as ``sizes, offsets, lengths``, one entry per atom, major first: local index
``(l0, l1)`` of atoms of sizes ``(n0, n1)`` is global index ``(l0 + o0) * n1 + (l1 + o1)``. Every kernel is a
composition of ATen calls (CompositeImplicitAutograd), so gradients, meta tensors and ``torch.compile`` work without
more code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.rules.calls import broadcast_shape

_library: Any = torch.library  # its functions are not typed
LIBRARY: Final[Any] = _library.Library("shardwise", "FRAGMENT")


def _define(schema: str, function: Callable[..., Any]) -> Any:
    """Register ``shardwise::<schema>`` and return its overload."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.shardwise, name).default


def global_index(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], device: Any) -> Tensor:
    """The global indices of a shard, int64 ``[prod(lengths)]``."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, length in zip(sizes, offsets, lengths, strict=True):
        digit = torch.arange(offset, offset + length, dtype=torch.int64, device=device)
        index = (index.unsqueeze(-1) * size + digit).flatten()
    return index.reshape(prod(lengths))


def local_index(
    index: Tensor, sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Global indices -> (local indices, which of them this rank holds). Where it does not, the local index is 0.

    An index outside the factor stays outside on every rank, so that the lookup fails as it does on one device.
    """
    total = prod(sizes)
    inside = (index >= 0) & (index < total)
    local, mine = torch.zeros_like(index), inside
    stride = total
    for size, offset, length in zip(sizes, offsets, lengths, strict=True):
        stride //= size
        digit = (index // stride) % size - offset
        mine = mine & (digit >= 0) & (digit < length)
        local = local * length + digit
    return torch.where(mine, local, torch.where(inside, 0, total)), mine


def _embedding_rows(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    if weight.shape[0] == 0:
        return weight.sum(0).expand(*indices.shape, weight.shape[1])
    local, mine = local_index(indices, sizes, offsets, lengths)
    rows = torch.nn.functional.embedding(local, weight)
    if padding_idx >= 0:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(mine.unsqueeze(-1), rows, 0)


def _gather_rows(
    x: Tensor, dim: int, index: Tensor, sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    if x.shape[dim] == 0:
        for other, size in enumerate(index.shape):  # the index may be shorter than x
            x = x if other == dim else x.narrow(other, 0, size)
        return x.sum(dim, keepdim=True, dtype=x.dtype).expand(index.shape)
    local, mine = local_index(index, sizes, offsets, lengths)
    return torch.where(mine, torch.gather(x, dim, local), 0)


def _take_rows(
    x: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    shape = broadcast_shape(_without(x, dim), _without(indices, dim))
    whole = [*shape[:dim], -1, *shape[dim + 1 :]]
    return _gather_rows(x.expand(whole), dim, indices.expand(whole), sizes, offsets, lengths)


def _without(x: Tensor, dim: int) -> list[int]:
    return [1 if i == dim else size for i, size in enumerate(x.shape)]


def _index_select_rows(
    x: Tensor, dim: int, index: Tensor, sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    if x.shape[dim] == 0:
        shape = [index.numel() if i == dim else size for i, size in enumerate(x.shape)]
        return x.sum(dim, keepdim=True, dtype=x.dtype).expand(shape)
    local, mine = local_index(index.reshape(-1), sizes, offsets, lengths)
    rows = torch.index_select(x, dim, local)
    return torch.where(mine.reshape([-1 if i == dim else 1 for i in range(x.dim())]), rows, 0)


def _index_rows(
    x: Tensor,
    indices: Sequence[Tensor],
    first_dim: int,
    counts: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """``x[:, ..., indices[0], ...]`` from ``first_dim`` on; ``counts``: how many atoms each indexed dim has."""
    indexed = range(first_dim, first_dim + len(indices))
    if any(x.shape[dim] == 0 for dim in indexed):
        shape = broadcast_shape(*(index.shape for index in indices))
        kept = x.sum(list(indexed), dtype=x.dtype).reshape(
            [*x.shape[:first_dim], *(1 for _ in shape), *x.shape[first_dim + len(indices) :]]
        )
        return kept.expand([*x.shape[:first_dim], *shape, *x.shape[first_dim + len(indices) :]])
    locals_: list[Tensor] = []
    everything = torch.ones((), dtype=torch.bool, device=x.device)
    start = 0
    for index, count in zip(indices, counts, strict=True):
        own = slice(start, start + count)
        wrapped = torch.where(index < 0, index + prod(sizes[own]), index)
        local, mine = local_index(wrapped, sizes[own], offsets[own], lengths[own])
        locals_.append(local)
        everything = everything & mine
        start += count
    rows = x[(slice(None),) * first_dim + tuple(locals_)]
    trailing = x.dim() - first_dim - len(indices)
    return torch.where(everything.reshape([*everything.shape, *(1,) * trailing]), rows, 0)


def _one_hot_classes(index: Tensor, sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return (index.unsqueeze(-1) == global_index(sizes, offsets, lengths, index.device)).to(torch.int64)


def _triangle(
    x: Tensor,
    diagonal: int,
    upper: bool,
    row_sizes: Sequence[int],
    row_offsets: Sequence[int],
    row_lengths: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """tril or triu of the shard whose last two dims hold the given rows and columns."""
    rows = global_index(row_sizes, row_offsets, row_lengths, x.device).unsqueeze(-1)
    columns = global_index(sizes, offsets, lengths, x.device)
    dropped = columns - rows < diagonal if upper else columns - rows > diagonal
    return x.masked_fill(dropped, 0)  # (where would turn booleans into integers)


def _eye_block(
    row_sizes: Sequence[int],
    row_offsets: Sequence[int],
    row_lengths: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: Any,
) -> Tensor:
    rows = global_index(row_sizes, row_offsets, row_lengths, device).unsqueeze(-1)
    return (rows == global_index(sizes, offsets, lengths, device)).to(dtype)


def _range_block(
    start: float,
    step: float,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: Any,
) -> Tensor:
    index = global_index(sizes, offsets, lengths, device)
    if dtype.is_floating_point:
        return (index.to(torch.float64) * step + start).to(dtype)
    return (index * int(step) + int(start)).to(dtype)


def _linspace_block(
    start: float,
    end: float,
    steps: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: Any,
) -> Tensor:
    whole = torch.linspace(start, end, steps, dtype=dtype, device=device)
    return whole[global_index(sizes, offsets, lengths, device)]


def _cumulated(
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    row_sizes: Sequence[int],
    row_offsets: Sequence[int],
    row_lengths: Sequence[int],
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """What the addends given by sizes, offsets, lengths contribute to the given rows of a cumulative sum."""
    total = torch.cumsum(x, dim, dtype=dtype)
    total = torch.cat([total.new_zeros([1 if i == dim else n for i, n in enumerate(total.shape)]), total], dim)
    addends = global_index(sizes, offsets, lengths, x.device)
    rows = global_index(row_sizes, row_offsets, row_lengths, x.device)
    return torch.index_select(total, dim, torch.searchsorted(addends, rows, right=True))


def _nothing(
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    ranks: Sequence[int],
    indices: Sequence[bool],
    differentiable: Sequence[bool],
) -> list[Tensor]:
    """Zeros whose shapes stand one after the other in ``sizes``: int64 for indices, else of the first operand's type.

    Zeros flow back through the differentiable ones.
    """
    zero = torch.stack([x.flatten()[:0].sum() for x in operands if x.is_floating_point()]).sum()
    results: list[Tensor] = []
    start = 0
    for rank, index, flows in zip(ranks, indices, differentiable, strict=True):
        plain = operands[0].new_zeros(sizes[start : start + rank], dtype=torch.int64 if index else None)
        results.append(plain + zero if flows else plain)
        start += rank
    return results


_ATOMS = "int[] sizes, int[] offsets, int[] lengths"
_ROWS = "int[] row_sizes, int[] row_offsets, int[] row_lengths"

EMBEDDING_ROWS: Final = _define(
    f"embedding_rows(Tensor weight, Tensor indices, int padding_idx, {_ATOMS}) -> Tensor", _embedding_rows
)
GATHER_ROWS: Final = _define(f"gather_rows(Tensor x, int dim, Tensor index, {_ATOMS}) -> Tensor", _gather_rows)
TAKE_ROWS: Final = _define(f"take_rows(Tensor x, int dim, Tensor indices, {_ATOMS}) -> Tensor", _take_rows)
INDEX_SELECT_ROWS: Final = _define(
    f"index_select_rows(Tensor x, int dim, Tensor index, {_ATOMS}) -> Tensor", _index_select_rows
)
INDEX_ROWS: Final = _define(
    f"index_rows(Tensor x, Tensor[] indices, int first_dim, int[] counts, {_ATOMS}) -> Tensor", _index_rows
)
ONE_HOT_CLASSES: Final = _define(f"one_hot_classes(Tensor index, {_ATOMS}) -> Tensor", _one_hot_classes)
TRIANGLE: Final = _define(f"triangle(Tensor x, int diagonal, bool upper, {_ROWS}, {_ATOMS}) -> Tensor", _triangle)
EYE_BLOCK: Final = _define(f"eye_block({_ROWS}, {_ATOMS}, ScalarType dtype, Device? device) -> Tensor", _eye_block)
RANGE_BLOCK: Final = _define(
    f"range_block(Scalar start, Scalar step, {_ATOMS}, ScalarType dtype, Device? device) -> Tensor", _range_block
)
LINSPACE_BLOCK: Final = _define(
    f"linspace_block(Scalar start, Scalar end, int steps, {_ATOMS}, ScalarType dtype, Device? device) -> Tensor",
    _linspace_block,
)
CUMULATED: Final = _define(f"cumulated(Tensor x, int dim, ScalarType dtype, {_ROWS}, {_ATOMS}) -> Tensor", _cumulated)
NOTHING: Final = _define(
    "nothing(Tensor[] operands, int[] sizes, int[] ranks, bool[] indices, bool[] differentiable) -> Tensor[]", _nothing
)
