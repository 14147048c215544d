"""Local operators that ATen lacks: what a rank computes on its part of an indexed or a generated dim.

A rank's part of a factor is given as ``atoms``: ``sizes, offsets, lengths``, one entry per atom, major first. Local
index ``(l0, l1)`` of atoms of sizes ``(n0, n1)`` is global index ``(l0 + o0) * n1 + (l1 + o1)``. Every kernel is a
composition of ATen calls (CompositeImplicitAutograd), so gradients, meta tensors and ``torch.compile`` work without
more code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.graph.custom_operators import global_indices
from shardwise.graph.operator_library import ATOMS, Scalar, composite
from shardwise.rules.arguments import broadcast_shape


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


def _embedding_rows(weight: Tensor, indices: Tensor, padding_idx: int, *atoms: Sequence[int]) -> Tensor:
    if weight.shape[0] == 0:
        return weight.sum(0, dtype=weight.dtype).expand(*indices.shape, weight.shape[1])
    local, mine = local_index(indices, *atoms)
    rows = torch.nn.functional.embedding(local, weight)
    if padding_idx >= 0:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(mine.unsqueeze(-1), rows, 0)


def _gather_rows(x: Tensor, dim: int, index: Tensor, *atoms: Sequence[int]) -> Tensor:
    if x.shape[dim] == 0:
        for other, size in enumerate(index.shape):  # the index may be shorter than x
            x = x if other == dim else x.narrow(other, 0, size)
        return x.sum(dim, keepdim=True, dtype=x.dtype).expand(index.shape)
    local, mine = local_index(index, *atoms)
    return torch.where(mine, torch.gather(x, dim, local), 0)


def _index_select_rows(x: Tensor, dim: int, index: Tensor, *atoms: Sequence[int]) -> Tensor:
    if x.shape[dim] == 0:
        shape = [index.numel() if i == dim else size for i, size in enumerate(x.shape)]
        return x.sum(dim, keepdim=True, dtype=x.dtype).expand(shape)
    local, mine = local_index(index.reshape(-1), *atoms)
    rows = torch.index_select(x, dim, local)
    return torch.where(mine.reshape([-1 if i == dim else 1 for i in range(x.dim())]), rows, 0)


def _index_rows(
    x: Tensor, indices: Sequence[Tensor], dims: Sequence[int], counts: Sequence[int], *atoms: Sequence[int]
) -> Tensor:
    """``x`` indexed in ``dims``; ``counts``: how many atoms each of them has."""
    # The indices' dims are in place of adjacent dims, in front of scattered ones.
    place = dims[0] if list(dims) == list(range(dims[0], dims[0] + len(dims))) else 0
    if any(x.shape[dim] == 0 for dim in dims):
        shape = broadcast_shape(*(index.shape for index in indices))
        kept = x.sum(list(dims), dtype=x.dtype)
        opened = kept.reshape([*kept.shape[:place], *(1 for _ in shape), *kept.shape[place:]])
        return opened.expand([*kept.shape[:place], *shape, *kept.shape[place:]])
    local_indices = _local_indices(indices, counts, atoms)
    everywhere = _all_of([mine for _, mine in local_indices])
    rows = x[_selector(x.dim(), dims, [local for local, _ in local_indices], slice(None))]
    trailing = rows.dim() - place - everywhere.dim()
    return torch.where(everywhere.reshape([*everywhere.shape, *(1,) * trailing]), rows, 0)


def _selector(rank: int, dims: Sequence[int], indices: Sequence[Tensor], others: slice | None) -> tuple[Any, ...]:
    chosen = dict(zip(dims, indices, strict=True))
    return tuple(chosen.get(dim, others) for dim in range(rank))


def _all_of(conditions: Sequence[Tensor]) -> Tensor:
    return reduce(torch.logical_and, conditions)


def _local_indices(
    indices: Sequence[Tensor], counts: Sequence[int], atoms: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """``local_index`` of every indexed dim, which has ``counts`` atoms. Negative indices count from the end."""
    local_indices: list[tuple[Tensor, Tensor]] = []
    start = 0
    for index, count in zip(indices, counts, strict=True):
        of_dim = [numbers[start : start + count] for numbers in atoms]
        local_indices.append(local_index(_from_front(index, prod(of_dim[0])), *of_dim))
        start += count
    return local_indices


def _from_front(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)


# -- updates: what goes to rows of other ranks goes to a spare row behind the own ones, which is then dropped ----------


def _with_spare(x: Tensor, dims: Sequence[int]) -> Tensor:
    """``x`` with one more row in each of ``dims``."""
    wider = [(0, int(dim in dims)) for dim in reversed(range(x.dim()))]
    return torch.constant_pad_nd(x, [size for pair in wider for size in pair])


def _spare_row(local: Tensor, mine: Tensor, spare: int) -> Tensor:
    """Return the result of ``local_index``, with row ``spare`` for rows of other ranks and the one behind it for
    indices in no row (so that it fails as on one device)."""
    return torch.where(mine, local, torch.where(local == 0, spare, spare + 1))


def _scatter_rows(
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | None,
    value: Scalar,
    how: str,
    include_self: bool,
    from_end: bool,
    *atoms: Sequence[int],
) -> Tensor:
    """scatter, or scatter_reduce (``how`` not empty), of ``src`` times ``value``, or of ``value``.

    ``index`` has the dims of x, or ``dim`` alone, and ``src`` then those of x, or none. ``from_end``: negative indices
    count from the end.
    """
    if index.dim() < 2:
        shape = [index.numel() if d == dim else size for d, size in enumerate(x.shape)]
        index = index.reshape([-1 if d == dim else 1 for d in range(x.dim())]).expand(shape)
        src = None if src is None else src.expand(shape)
    count = prod(atoms[2])
    index = _from_front(index, prod(atoms[0])) if from_end else index
    places = _spare_row(*local_index(index, *atoms), count)
    if src is None:
        src = torch.full(index.shape, value, dtype=x.dtype, device=x.device)
    elif value != 1:
        src = src * value
    wide = _with_spare(x, [dim])
    if how == "sum" and include_self:  # of complex numbers too
        wide = torch.scatter_add(wide, dim, places, src)
    elif how:
        wide = torch.scatter_reduce(wide, dim, places, src, how, include_self=include_self)
    else:
        wide = torch.scatter(wide, dim, places, src)
    return wide.narrow(dim, 0, count)


def _scattered_sum(src: Tensor, dim: int, index: Tensor, *atoms: Sequence[int]) -> Tensor:
    """Rows of zeros to which ``src`` is added along ``dim``. ``index``: with the dims of ``src``, or of ``dim``
    alone."""
    count = prod(atoms[2])
    places = _spare_row(*local_index(index, *atoms), count)
    if places.dim() < 2:
        places = places.reshape([-1 if d == dim else 1 for d in range(src.dim())]).expand(src.shape)
    zeros = src.new_zeros([count + 1 if d == dim else size for d, size in enumerate(src.shape)])
    return torch.scatter_add(zeros, dim, places, src).narrow(dim, 0, count)


def _index_put_rows(
    x: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    accumulate: bool,
    dims: Sequence[int],
    counts: Sequence[int],
    *atoms: Sequence[int],
) -> Tensor:
    """``x`` with ``values`` put at ``indices`` in ``dims``; ``counts``: how many atoms each of them has."""
    local_indices = _local_indices(indices, counts, atoms)
    everywhere = _all_of([mine for _, mine in local_indices])
    places = [
        torch.where(everywhere | ~mine, _spare_row(local, mine, x.shape[dim]), x.shape[dim])
        for dim, (local, mine) in zip(dims, local_indices, strict=True)
    ]
    selected = list(_selector(x.dim(), dims, places, None))
    wide: Tensor = torch.ops.aten.index_put.default(_with_spare(x, dims), selected, values, accumulate)
    for dim in dims:
        wide = wide.narrow(dim, 0, x.shape[dim])
    return wide


def _one_hot_classes(index: Tensor, *atoms: Sequence[int]) -> Tensor:
    # gather raises for a class outside, as one_hot does: without a wait on GPUs, and also when compiled
    classes = torch.arange(prod(atoms[0]), device=index.device).gather(0, index.flatten()).reshape(index.shape)
    return (classes.unsqueeze(-1) == global_indices(*atoms, device=index.device).flatten()).to(torch.int64)


def _triangle(x: Tensor, diagonal: int, upper: bool, *atoms: Sequence[int]) -> Tensor:
    """tril or triu of the shard whose last two dims hold the given rows and columns."""
    rows = global_indices(*atoms[:3], device=x.device).flatten().unsqueeze(-1)
    columns = global_indices(*atoms[3:], device=x.device).flatten()
    dropped = columns - rows < diagonal if upper else columns - rows > diagonal
    return x.masked_fill(dropped, 0)  # (where would turn booleans into integers)


def _eye_block(*args: Any) -> Tensor:
    *atoms, dtype, device = args
    rows, columns = (global_indices(*atoms[i : i + 3], device=device).flatten() for i in (0, 3))
    return (rows.unsqueeze(-1) == columns).to(dtype)


def _range_block(start: Scalar, step: Scalar, *args: Any) -> Tensor:
    *atoms, dtype, device = args
    index = global_indices(*atoms, device=device).flatten()
    if dtype.is_floating_point:
        return (index.to(torch.float64) * step + start).to(dtype)
    return (index * int(step) + int(start)).to(dtype)


def _linspace_block(start: Scalar, end: Scalar, steps: int, *args: Any) -> Tensor:
    *atoms, dtype, device = args
    whole = torch.linspace(start, end, steps, dtype=dtype, device=device)
    return whole[global_indices(*atoms, device=device).flatten()]


def _cumulated(x: Tensor, dim: int, dtype: torch.dtype, *atoms: Sequence[int]) -> Tensor:
    """Return what the addends (the last atoms) contribute to the rows (the first) of a cumulative sum."""
    total = torch.cumsum(x, dim, dtype=dtype)
    total = torch.cat([total.new_zeros([1 if i == dim else n for i, n in enumerate(total.shape)]), total], dim)
    addends = global_indices(*atoms[3:], device=x.device).flatten()
    rows = global_indices(*atoms[:3], device=x.device).flatten()
    return torch.index_select(total, dim, torch.searchsorted(addends, rows, right=True))


def _nothing(
    operands: Sequence[Tensor],
    sizes: Sequence[int],
    ranks: Sequence[int],
    dtypes: Sequence[str],
    differentiable: Sequence[bool],
) -> list[Tensor]:
    """Zeros of ``dtypes``, whose shapes stand one after the other in ``sizes``. Zeros flow back through the
    differentiable ones, to all operands with a gradient. Dtypes by their names: torch 2.11 hands those of a list on as
    numbers."""
    parts = [x.flatten()[:0].sum() for x in operands if x.is_floating_point() or x.is_complex()]
    results: list[Tensor] = []
    start = 0
    for rank, name, flows in zip(ranks, dtypes, differentiable, strict=True):
        dtype: torch.dtype = getattr(torch, name)
        zeros = operands[0].new_zeros(sizes[start : start + rank], dtype=dtype)
        for part in parts if flows else ():
            zeros = zeros + (torch.real(part) if part.is_complex() and not dtype.is_complex else part).to(dtype)
        results.append(zeros)
        start += rank
    return results


_ROWS = "int[] row_sizes, int[] row_offsets, int[] row_lengths"

EMBEDDING_ROWS: Final = composite(_embedding_rows)
GATHER_ROWS: Final = composite(_gather_rows)
INDEX_SELECT_ROWS: Final = composite(_index_select_rows)
INDEX_ROWS: Final = composite(_index_rows)
SCATTER_ROWS: Final = composite(_scatter_rows)
SCATTERED_SUM: Final = composite(_scattered_sum)
INDEX_PUT_ROWS: Final = composite(_index_put_rows)
ONE_HOT_CLASSES: Final = composite(_one_hot_classes)
TRIANGLE: Final = composite(_triangle, f"{_ROWS}, {ATOMS}")
EYE_BLOCK: Final = composite(_eye_block, f"{_ROWS}, {ATOMS}, ScalarType dtype, Device? device")
RANGE_BLOCK: Final = composite(_range_block, f"{ATOMS}, ScalarType dtype, Device? device")
LINSPACE_BLOCK: Final = composite(_linspace_block, f"{ATOMS}, ScalarType dtype, Device? device")
CUMULATED: Final = composite(_cumulated, f"{_ROWS}, {ATOMS}")
NOTHING: Final = composite(_nothing)
