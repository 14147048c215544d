"""Infers the layout in which ranks hold a value from its numbers alone.

The program that computed them is not consulted. Along one mesh axis after the other, innermost first, ranks hold either
the same tensor, parts of a dim (perhaps block by block), or summands. The combination that gives the value of one
device is the layout. This works for any tensor of any tool, but only for correct values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import DTYPE_NAMES
from shardwise.proof.errors_by_tensor import magnitude, relative_difference

_MOST_BLOCKS = 8  # of a dim, each of which is split: 3 of a fused projection


@dataclass(frozen=True)
class InferredLayout:
    """A layout. ``splits``: (dim, axis, blocks), in the order in which the axes divide a dim; ``partial``: the kind of
    partial value per axis: ``sum@tp``; for scalars also ``avg@dp``, if ranks hold terms of a mean."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    splits: tuple[tuple[int, str, int], ...] = ()
    partial: tuple[str, ...] = ()

    @property
    def is_summand(self) -> bool:
        return any(part.startswith("sum") for part in self.partial)

    def __str__(self) -> str:
        dims = []
        for dim, size in enumerate(self.shape):
            splits = [(axis, blocks) for at, axis, blocks in self.splits if at == dim]
            axes = splits[0][0] if len(splits) == 1 else f"({','.join(axis for axis, _ in splits)})"
            blocks = max((blocks for _, blocks in splits), default=1)
            part = f"{size // blocks}@{axes}" if splits else str(size)
            dims.append(f"({blocks} {part})" if blocks > 1 else part)
        sums = f" partial({', '.join(self.partial)})" if self.partial else ""
        return f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))}[{', '.join(dims)}]{sums}"


def infer_layout(whole: Tensor, shards: Sequence[Tensor], mesh: Mesh, tolerance: float) -> InferredLayout | None:
    """Return the layout in which the ranks of ``mesh`` hold ``whole``, or None. ``shards``: per rank."""
    whole, shards = whole.detach(), [tensor.detach() for tensor in shards]
    scale = max(magnitude(whole), *(1e-3 * magnitude(tensor) for tensor in shards))
    axes = [(name, size) for name, size in mesh.axes if size > 1]
    for splits, partial, joined in _joined(shards, axes, whole):
        if tuple(joined.shape) == tuple(whole.shape) and relative_difference(whole, joined, scale) <= tolerance:
            return InferredLayout(whole.dtype, tuple(whole.shape), splits[::-1], partial[::-1])
    return None


def overcounted_factor(whole: Tensor, shard: Tensor, most: int, tolerance: float) -> int:
    """Return the integer factor from 2 to ``most`` by which ``shard`` is too large, or 0."""
    if whole.shape != shard.shape or not magnitude(whole):
        return 0
    for factor in range(2, most + 1):
        if relative_difference(whole * factor, shard, magnitude(shard)) <= tolerance:
            return factor
    return 0


_Option = tuple[tuple[tuple[int, str, int], ...], tuple[str, ...], Tensor]


def _joined(shards: Sequence[Tensor], axes: Sequence[tuple[str, int]], whole: Tensor) -> Iterator[_Option]:
    """Yield the possible combinations of the ranks' tensors: splits and sums, innermost axis first, and the value."""
    if not axes:
        if all(one.dim() == whole.dim() for one in shards):
            yield (), (), shards[0]
        return
    *outer, (name, size) = axes
    groups = [shards[start : start + size] for start in range(0, len(shards), size)]
    if all(_same(group) for group in groups):
        yield from _joined([group[0] for group in groups], outer, whole)
    for dim in range(whole.dim()):
        if all(_fits(group, dim, whole) for group in groups):
            for blocks in _blocks(groups, dim):
                together = [_along(group, dim, blocks) for group in groups]
                for splits, partial, value in _joined(together, outer, whole):
                    yield ((dim, name, blocks), *splits), partial, value
    if whole.is_floating_point() and all(len({one.shape for one in group}) == 1 for group in groups):
        for splits, partial, value in _joined([_sum(group) for group in groups], outer, whole):
            yield splits, (f"sum@{name}", *partial), value
        if whole.dim() == 0:
            for splits, partial, value in _joined([_sum(group) / size for group in groups], outer, whole):
                yield splits, (f"avg@{name}", *partial), value


def _same(group: Sequence[Tensor]) -> bool:
    return all(one.shape == group[0].shape and torch.equal(one, group[0]) for one in group[1:]) or (
        group[0].is_floating_point()
        and all(
            one.shape == group[0].shape and relative_difference(group[0], one, magnitude(group[0])) <= 1e-12
            for one in group[1:]
        )
    )


def _fits(group: Sequence[Tensor], dim: int, whole: Tensor) -> bool:
    if any(one.dim() != whole.dim() for one in group):
        return False
    others = {one.shape[:dim] + one.shape[dim + 1 :] for one in group}
    total = sum(one.shape[dim] for one in group)
    return len(others) == 1 and total <= whole.shape[dim] and whole.shape[dim] % max(total, 1) == 0


def _blocks(groups: Sequence[Sequence[Tensor]], dim: int) -> Iterator[int]:
    yield 1
    sizes = {one.shape[dim] for group in groups for one in group}
    if len(sizes) == 1:
        (size,) = sizes
        yield from (count for count in range(2, min(_MOST_BLOCKS, size) + 1) if size % count == 0)


def _along(group: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    if blocks == 1:
        return torch.cat(list(group), dim)
    pieces = [one.chunk(blocks, dim) for one in group]
    return torch.cat([piece[block] for block in range(blocks) for piece in pieces], dim)


def _sum(group: Sequence[Tensor]) -> Tensor:
    total = group[0].clone()
    for one in group[1:]:
        total += one
    return total


def whole_text(whole: Tensor) -> str:
    return str(InferredLayout(whole.dtype, tuple(whole.shape)))
