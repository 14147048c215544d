"""Attention tile by tile with the fused kernels of the device, merged by the log-sum-exp of the scores.

A *tile* is some rows of queries with some columns of keys. A kernel returns the attended values ``o`` of a tile and the
log-sum-exp ``l`` of the scores of each row. Two tiles of the same rows are one tile with the columns of both:

    w = sigmoid(l2 - l1),  o = o1 + w (o2 - o1),  l = log(exp(l1) + exp(l2))

Backward calls the kernel's backward per tile, with the result and the log-sum-exp over *all* columns: then its weights
``exp(score - l)`` and its row sums of ``cotangent * result`` are those of the whole softmax, and the gradients of the
tiles add up (Liu, Zaharia and Abbeel, Ring attention, 2023; Dao, FlashAttention-2, 2023). Nothing of the size of all
scores is kept or computed at once.

The kernels are PyTorch's: flash attention on CPUs; on GPUs flash attention for half precision without a mask, the
memory-efficient one for float32 and under masks. The gradient of a learned mask, and float64 on GPUs, have no kernel:
there the scores of one tile at a time are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.graph.precision import wide

aten = torch.ops.aten

_MOST_RUNS: Final = 32  # of adjacent queries: each has kernels of its own
_MOST_ROW_TILES: Final = 32  # of a block of queries under a mask: each is a kernel with a mask


class Columns(NamedTuple):
    """Keys ``begin`` up to ``end`` of a block. ``causal``: row i of as many rows sees them up to column i."""

    begin: int
    end: int
    causal: bool = False


class RowTiles(NamedTuple):
    """Queries ``begin`` up to ``end`` of a block, and the keys of each of their tiles."""

    begin: int
    end: int
    columns: tuple[Columns, ...]


class Blocks(NamedTuple):
    """Adjacent blocks of queries with equal tiles. ``origins``: the position of the first key that each one meets."""

    origins: tuple[int, ...]
    rows: tuple[RowTiles, ...]


class Visibility(NamedTuple):
    """Which keys queries see, of those in their tiles. ``mask``: booleans, or numbers that are added to scores [blocks,
    batch, heads, rows, columns], of size 1 where it is broadcast; ``first``, ``end``: each query sees the positions
    from one up to the other [blocks, rows]."""

    mask: Tensor | None = None
    first: Tensor | None = None
    end: Tensor | None = None

    @property
    def is_full(self) -> bool:
        return all(x is None for x in self)


class Attended(NamedTuple):
    """Attended values [blocks, batch, heads, rows, width], and the log-sum-exp of the scores, without the width."""

    out: Tensor
    log_sum: Tensor


def blocks_of(rows: Iterable[tuple[RowTiles, ...]], origins: Sequence[int]) -> tuple[Blocks, ...]:
    """Put adjacent blocks with equal rows together."""
    members = (list(same) for _, same in groupby(zip(rows, origins, strict=True), lambda one: one[0]))
    return tuple(Blocks(tuple(origin for _, origin in same), same[0][0]) for same in members)


def row_ranges(count: int, most: int) -> list[tuple[int, int]]:
    """Cut ``count`` rows into ranges of at most ``most`` of them, but not into very many ranges."""
    size = max(min(count, most), -(-count // _MOST_ROW_TILES), 1)
    return [(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True, slots=True)
class Tiles:
    """All tiles of one call, and the scale of its scores. Queries are [blocks, batch, heads, rows, width], keys and
    values [blocks, batch, groups, columns, width]."""

    blocks: tuple[Blocks, ...]
    scale: float

    def attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Visibility, before: Attended | None) -> Attended:
        """Return what the queries get from the keys of their tiles together with ``before``."""
        of_blocks = []
        for some, blocks in self._numbered():
            of_rows = []
            for rows in blocks.rows:
                state = None if before is None else Attended(*(_cut(x, some, rows) for x in before))
                for columns in rows.columns:
                    bias = _bias(seen, some, blocks.origins, rows, columns, q)
                    now = _forward(_tile((q, k, v), some, rows, columns), bias, columns.causal, self.scale)
                    state = now if state is None else _merged(state, now)
                of_rows.append(state or _nothing(_cut(q, some, rows), v.shape[-1]))
            of_blocks.append([_joined(parts, 3) for parts in zip(*of_rows, strict=True)])
        return Attended(*(_joined(parts, 0) for parts in zip(*of_blocks, strict=True)))

    def gradients(
        self, cotangent: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Visibility, whole: Attended, of_mask: bool
    ) -> tuple[Tensor | None, ...]:
        """Return what the tiles add to the gradients of q, k, v and (``of_mask``) of the mask. ``whole``: the result
        and the log-sum-exp over the columns of the tiles of all calls."""
        totals = [_Total(x) for x in (q, k, v)]
        mask = _Total(seen.mask) if of_mask and seen.mask is not None else None
        log_sum = whole.log_sum
        if not seen.is_full:  # a row that sees nothing has weights of 0
            log_sum = log_sum.masked_fill(log_sum == -inf, inf)
        for some, blocks in self._numbered():
            for rows in blocks.rows:
                above = [_cut(x, some, rows) for x in (cotangent, whole.out, log_sum)]
                for columns in rows.columns:
                    bias = _bias(seen, some, blocks.origins, rows, columns, q)
                    tile = _tile((q, k, v), some, rows, columns)
                    computed = _backward(above, tile, bias, columns.causal, self.scale, mask is not None)
                    queries, keys = slice(*rows[:2]), slice(*columns[:2])
                    for total, gradient, place in zip(totals, computed, (queries, keys, keys), strict=False):
                        total.add(gradient, (some, slice(None), slice(None), place))
                    if mask is not None:
                        mask.add(computed[3], (some, slice(None), slice(None), queries, keys))
        return *(total.sum() for total in totals), None if mask is None else mask.sum()

    def _numbered(self) -> Iterable[tuple[slice, Blocks]]:
        start = 0
        for blocks in self.blocks:
            yield slice(start, start + len(blocks.origins)), blocks
            start += len(blocks.origins)


class _Total:
    """A gradient that tiles add to. That of a tile which covers all is not copied."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None

    def add(self, part: Tensor, place: tuple[slice, ...]) -> None:
        if self.total is None and part.shape == self.like.shape:
            self.total = part
            return
        sizes = self.like.shape
        index = tuple(slice(None) if size == 1 else one for size, one in zip(sizes, place, strict=False))
        target = self._or_zeros()[index]
        target += part.sum_to_size(target.shape)

    def _or_zeros(self) -> Tensor:
        if self.total is None:
            self.total = torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device)
        return self.total

    def sum(self) -> Tensor:
        return self._or_zeros()


class Differentiated(torch.autograd.Function):
    """Returns attended values that were computed without gradients. Backward computes what the tiles of this call add
    to the gradients of q, k, v and the mask, and the gradient of sinks."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, log_sum: Tensor, tiles: Tiles, sinks: Tensor | None, *attended: Tensor | None
    ) -> Tensor:
        """``sinks``: scores [1, 1, heads, 1] that ``log_sum`` counts beside those of keys; ``attended``: q, k, v and
        the parts of a ``Visibility``."""
        ctx.save_for_backward(out, log_sum, sinks, *attended)
        ctx.tiles = tiles
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        out, log_sum, sinks, q, k, v, *seen = ctx.saved_tensors
        whole, of_mask = Attended(out, log_sum), ctx.needs_input_grad[7]
        gradients = ctx.tiles.gradients(cotangent, q, k, v, Visibility(*seen), whole, of_mask)
        of_sinks = None
        if sinks is not None:
            weights = (wide(sinks) - log_sum).exp()
            of_sinks = -(weights * (cotangent * out).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)
        return cotangent, None, None, of_sinks, *gradients, None, None


# -------------------------------------------------------------------------------------------------- rows and heads


def runs_of(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the runs of adjacent indices of a shard, as (first, length); None: they are very many."""
    runs = [(0, 1)]
    for size, offset, length in zip(sizes, offsets, lengths, strict=True):
        if length == size:
            runs = [(first * size, count * size) for first, count in runs]
        elif sum(count for _, count in runs) > _MOST_RUNS:
            return None
        else:
            runs = [((first + i) * size + offset, length) for first, count in runs for i in range(count)]
    return [run for run in runs if run[1]]


def causal_rows(runs: Sequence[tuple[int, int]], num_keys: int) -> Iterator[RowTiles]:
    """Yield the tiles of runs of rows under a causal mask, of which row i sees the keys up to the i-th."""
    begin = 0
    for first, count in runs:
        causal = min(count, max(num_keys - first, 0))
        if causal:
            ahead = (Columns(0, first),) if first else ()
            yield RowTiles(begin, begin + causal, (*ahead, Columns(first, first + causal, True)))
        if causal < count:  # behind the last key
            yield RowTiles(begin + causal, begin + count, (Columns(0, num_keys),))
        begin += count


def in_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """``... heads blocks rows width -> blocks batch heads rows width``, and the dims of the result before the blocks.
    Several heads of the queries may share one of the keys."""
    q, k, v = (x.movedim(-3, 0) for x in (q, k, v))
    if not len(q) == len(k) == len(v):  # PyTorch's kernels read beyond the end
        raise ValueError(f"{len(q)} blocks of queries, {len(k)} of keys and {len(v)} of values")
    has_heads = max(x.dim() for x in (q, k, v)) > 3
    rank = max(4, *(x.dim() for x in (q, k, v)))
    q, k, v = (x.reshape(x.shape[0], *(1,) * (rank - x.dim()), *x.shape[1:]) for x in (q, k, v))
    batch = torch.broadcast_shapes(*(x.shape[1:-3] for x in (q, k, v)))
    groups = max(k.shape[-3], v.shape[-3])
    heads = max(q.shape[-3], groups)
    q, k, v = (
        x.expand(-1, *batch, number, -1, -1).reshape(x.shape[0], prod(batch), number, *x.shape[-2:])
        for x, number in ((q, heads), (k, groups), (v, groups))
    )
    return q, k, v, (*batch, heads) if has_heads else ()


# --------------------------------------------------------------------------------------------------------- one tile


def attend_by_tiles(
    tiles: Tiles, query: Tensor, key: Tensor, value: Tensor, seen: Visibility, sinks: Tensor | None = None
) -> Tensor:
    """Return attended values [..., rows, width]. ``sinks``: [heads], one more score of every row."""
    q, k, v, lead = in_heads(*(x.unsqueeze(-3) for x in (query, key, value)))
    of_sinks = None if sinks is None else sinks.reshape(1, 1, -1, 1)
    with torch.no_grad():
        before = None
        if of_sinks is not None:
            nothing = wide(v.new_zeros(())).expand(*q.shape[:-1], v.shape[-1])
            before = Attended(nothing, wide(of_sinks).expand(q.shape[:-1]))
        out, log_sum = tiles.attended(q, k, v, seen, before)
        out = out.to(query.dtype)
    attended: Tensor = Differentiated.apply(out, log_sum, tiles, of_sinks, q, k, v, *seen)  # type: ignore[no-untyped-call]
    return attended.reshape(*lead, *attended.shape[-2:])


def _cut(x: Tensor, some: slice, place: RowTiles | Columns, dim: int = 3) -> Tensor:
    x = x if some.stop - some.start == x.shape[0] else x[some]
    begin, end = place[:2]
    return x if end - begin == x.shape[dim] else x.narrow(dim, begin, end - begin)


def _tile(qkv: tuple[Tensor, ...], some: slice, rows: RowTiles, columns: Columns) -> tuple[Tensor, ...]:
    places: tuple[RowTiles | Columns, ...] = (rows, columns, columns)
    return tuple(_cut(x, some, place) for x, place in zip(qkv, places, strict=True))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


def _nothing(q: Tensor, width: int) -> Attended:
    zero = wide(q.new_zeros(()))
    return Attended(zero.expand(*q.shape[:-1], width).clone(), torch.full_like(zero, -inf).expand(q.shape[:-1]).clone())


def _merged(one: Attended, other: Attended) -> Attended:
    share = torch.sigmoid(other.log_sum - one.log_sum)
    share = torch.where(other.log_sum == -inf, 0, share)  # also where neither saw anything
    out = torch.lerp(one.out, other.out.to(one.out.dtype), share.unsqueeze(-1))
    return Attended(out, torch.logaddexp(one.log_sum, other.log_sum))


def _bias(
    seen: Visibility, some: slice, origins: Sequence[int], rows: RowTiles, columns: Columns, q: Tensor
) -> Tensor | None:
    """Return what is added to the scores of a tile."""
    if seen.is_full:
        return None
    conditions, added = [], None
    if seen.mask is not None:
        mask = seen.mask if seen.mask.shape[0] == 1 else seen.mask[some]
        mask = mask if mask.shape[-2] == 1 else mask[..., slice(*rows[:2]), :]
        mask = mask if mask.shape[-1] == 1 else mask[..., slice(*columns[:2])]
        if mask.dtype == torch.bool:
            conditions.append(mask)
        else:
            added = mask.to(q.dtype)
    if seen.first is not None or seen.end is not None:
        ranges = [torch.arange(o + columns.begin, o + columns.end, device=q.device) for o in origins]
        keys = torch.stack(ranges)[:, None, None, None]
        first, end = (None if x is None else x[some, slice(*rows[:2]), None][:, None, None] for x in seen[1:])
        conditions += [] if first is None else [keys >= first]
        conditions += [] if end is None else [keys < end]
    for condition in conditions:
        hidden = torch.where(condition, 0, -inf).to(q.dtype)
        added = hidden if added is None else added + hidden
    return added


def _forward(tile: Sequence[Tensor], bias: Tensor | None, causal: bool, scale: float) -> Attended:
    kernel = _Kernel.of(tile, bias)
    q, k, v = kernel.operands(tile)
    mask = kernel.mask(bias, q, k)
    if kernel.name == "cpu":
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif kernel.name == "flash":
        out, log_sum = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, scale=scale)[:2]
    elif kernel.name == "efficient":
        out, log_sum = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, mask, True, 0.0, causal, scale=scale
        )[:2]
        log_sum = log_sum[..., : q.shape[2]]
    else:
        scores = _scores(q, k, mask, causal, scale)
        log_sum = torch.logsumexp(scores, -1)
        out = (scores - log_sum.masked_fill(log_sum == -inf, inf).unsqueeze(-1)).exp() @ v
    shape = tile[0].shape[:-1]
    out, log_sum = out[..., : tile[2].shape[-1]].reshape(*shape, -1), log_sum.reshape(shape)
    if bias is not None:  # of rows that see nothing kernels return different numbers
        sees = (bias > -inf).any(-1).expand(shape)
        out = torch.where(sees.unsqueeze(-1), out, 0)
        log_sum = torch.where(sees, log_sum, -inf)
    return Attended(wide(out), log_sum)


def _backward(
    above: Sequence[Tensor], tile: Sequence[Tensor], bias: Tensor | None, causal: bool, scale: float, of_mask: bool
) -> list[Tensor]:
    """Return the gradients of a tile of q, k, v and (``of_mask``) of its scores. ``above``: the cotangent of the
    result, the result and its log-sum-exp."""
    kernel = _Kernel("scores", 1) if of_mask else _Kernel.of(tile, bias)
    q, k, v = kernel.operands(tile)
    mask = kernel.mask(bias, q, k)
    cotangent, out = (kernel.widened(x, v.shape[-1]).flatten(0, 1) for x in above[:2])
    cotangent = cotangent if cotangent.stride(-1) == 1 else cotangent.contiguous()
    log_sum = above[2].flatten(0, 1)
    of_scores = []
    if kernel.name == "cpu":
        computed = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            cotangent, q, k, v, out, log_sum, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif kernel.name == "flash":
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the seeds of dropout
        computed = aten._scaled_dot_product_flash_attention_backward.default(
            cotangent, q, k, v, out, log_sum.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            unused, unused, scale=scale,
        )  # fmt: skip
    elif kernel.name == "efficient":
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = F.pad(log_sum, (0, -q.shape[2] % 32), value=inf).contiguous()
        computed = aten._scaled_dot_product_efficient_attention_backward.default(
            cotangent, q, k, v, mask, out, padded, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    else:
        weights = (_scores(q, k, mask, causal, scale) - log_sum.unsqueeze(-1)).exp()
        of_scores = [weights * (cotangent @ v.transpose(-1, -2) - (cotangent * out).sum(-1, keepdim=True))]
        computed = (
            of_scores[0] @ k * scale,
            of_scores[0].transpose(-1, -2) @ q * scale,
            weights.transpose(-1, -2) @ cotangent,
        )
        of_scores = [of_scores[0].reshape(*tile[0].shape[:-1], -1)]
    gradients = []
    for x, gradient in zip(tile, computed, strict=True):
        gradient = gradient.unflatten(0, x.shape[:2])[..., : x.shape[-1]]
        if gradient.shape[2] != x.shape[2]:  # of keys that the kernel has repeated for groups of heads
            gradient = gradient.unflatten(2, (x.shape[2], -1)).sum(3)
        gradients.append(gradient)
    return gradients + of_scores


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        places = torch.arange(scores.shape[-1], device=q.device)
        scores = scores.masked_fill(places > places.unsqueeze(-1), -inf)
    return scores if mask is None else scores + mask


class _Kernel(NamedTuple):
    """A kernel of attention. ``multiple``: of the widths that it takes, which are equal (0: they need not be)."""

    name: str
    multiple: int

    @classmethod
    def of(cls, tile: Sequence[Tensor], bias: Tensor | None) -> _Kernel:
        """Return the kernel that takes these operands on their device."""
        q, _, v = tile
        if q.device.type != "cuda":
            return cls("cpu", 1)
        if q.dtype in (torch.float16, torch.bfloat16) and bias is None and max(q.shape[-1], v.shape[-1]) <= 256:
            return cls("flash", 8)
        return cls("scores", 0) if q.dtype == torch.float64 else cls("efficient", 0)

    def widened(self, x: Tensor, width: int = 0) -> Tensor:
        """Fill up with zeros to a width that the kernel takes."""
        if not self.multiple:
            return x
        width = -(-max(width, x.shape[-1]) // self.multiple) * self.multiple
        return x if width == x.shape[-1] else F.pad(x, (0, width - x.shape[-1]))

    def operands(self, tile: Sequence[Tensor]) -> list[Tensor]:
        """Return q, k and v [batch, heads, rows, width]."""
        width = max(x.shape[-1] for x in tile)
        q, k, v = (self.widened(x, width).flatten(0, 1) for x in tile)
        if q.shape[1] != k.shape[1] and self.name not in ("cpu", "flash"):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return [q, k, v]

    def mask(self, bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the bias [batch, heads, rows, columns], in memory that the kernel can read."""
        if bias is None:
            return None
        rows, columns, batch = q.shape[2], k.shape[2], q.shape[0]
        if self.name == "efficient":  # rows start at multiples of 16 bytes
            bias = F.pad(bias.expand(*bias.shape[:-1], columns), (0, -columns % 8))[..., :columns]
        bias = bias.expand(*bias.shape[:-2], rows, columns)
        if bias.shape[0] * bias.shape[1] == 1:
            bias = bias[0]
        else:
            blocks = batch // bias.shape[1] if bias.shape[1] > 1 else bias.shape[0]
            bias = bias.expand(blocks, batch // blocks, *bias.shape[2:]).flatten(0, 1)
        return bias.expand(batch, q.shape[1], rows, columns)
