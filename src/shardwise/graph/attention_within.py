"""``shardwise::attention_within``: attention of queries that each see an interval of keys, without a full mask.

Query q sees the keys first[q] <= k < end[q], except keys that no query sees (padding). The work goes block by block:
some queries with the keys that at least one of them sees. Each block computes its own mask from positions, and backward
recomputes it. So neither memory nor arithmetic grows with the product of both lengths if intervals are short: a window
of 4,096 over 131,072 positions takes 32 masks of 4,096 by 8,192, one at a time, where a full mask takes 16 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Final

import torch
from torch import Tensor

from shardwise.graph.operator_library import composite
from shardwise.graph.predicates import Intervals

aten = torch.ops.aten

MOST_BLOCKS = 32  # of a call: each is a kernel with a mask


def _attention_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    end: Tensor | None,
    seen: Tensor | None,
    enable_gqa: bool,
    scale: float | None,
    *blocks: Sequence[int],
) -> Tensor:
    """Compute attention block by block. ``first``, ``end``: int64 [queries], None: no bound. ``seen``: booleans [...,
    1, keys], False for keys that no query sees. Blocks: a number of
    queries, and the keys from one up to another."""
    parts, start = [], 0
    for number, lowest, highest in zip(*blocks, strict=True):
        begins, stops = (None if x is None else x.narrow(0, start, number) for x in (first, end))
        of_keys = None if seen is None else seen.narrow(-1, lowest, highest - lowest)
        mask = interval_mask(torch.arange(lowest, highest, device=query.device), begins, stops, of_keys)
        keys, values = (x.narrow(-2, lowest, highest - lowest) for x in (key, value))
        parts.append(attend(query.narrow(-2, start, number), keys, values, mask, False, enable_gqa, scale))
        start += number
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


ATTENTION_WITHIN: Final = composite(_attention_within, "int[] rows, int[] firsts, int[] ends")


def interval_mask(keys: Tensor, first: Tensor | None, end: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """Return booleans over (query, key) for positions of keys, or None if every query sees every key."""
    conditions = [] if first is None else [keys >= first.unsqueeze(-1)]
    conditions += [] if end is None else [keys < end.unsqueeze(-1)]
    conditions += [] if seen is None else [seen]
    return reduce(torch.logical_and, conditions) if conditions else None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
) -> Tensor:
    """Compute scaled dot-product attention. Keys and values are repeated for groups of heads if the device's fused
    kernels do not support groups, because the fallback would materialize all scores."""
    # PyTorch's fused kernels know groups on a CPU; on a GPU (flash attention) in half precision and without a mask.
    knows_groups = query.device.type == "cpu" or (mask is None and query.dtype in (torch.float16, torch.bfloat16))
    if enable_gqa and not knows_groups:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        enable_gqa = False
    result: Tensor = aten.scaled_dot_product_attention.default(
        query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result


def is_large(seen: Intervals, query: tuple[int, ...], key: tuple[int, ...], itemsize: int) -> bool:
    """Return whether a full mask takes more memory than the queries and keys of a sample. ``query``, ``key``: shapes
    ``... heads positions width``; ``itemsize``: bytes per element."""
    of_sample = (prod(query[-3:]) + prod(key[-3:])) * itemsize
    return len(seen.lo) * seen.num_keys > of_sample


def blocks_of(
    seen: Intervals, query: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return ``rows, firsts, ends`` of the blocks. A block has as many queries as one of them sees keys at most, so
    that a block of a window meets two windows of keys; fewer if its mask would take more memory than a sample's
    queries."""
    number = len(seen.lo)
    widest = int((seen.hi - seen.lo).max())
    of_position = prod(query[-3:]) * itemsize // number
    size = max(min(widest, of_position), -(-number // MOST_BLOCKS), 1)
    rows, firsts, ends = [], [], []
    for start in range(0, number, size):
        lo, hi = seen.lo[start : start + size], seen.hi[start : start + size]
        some = lo < hi
        rows.append(len(lo))
        firsts.append(int(lo[some].min()) if bool(some.any()) else 0)
        ends.append(int(hi[some].max()) if bool(some.any()) else 1)  # kernels take at least one key
    return tuple(rows), tuple(firsts), tuple(ends)


def num_pairs(rows: Sequence[int], firsts: Sequence[int], ends: Sequence[int]) -> int:
    """Return the number of (query, key) pairs in the blocks."""
    return sum(number * (end - first) for number, first, end in zip(rows, firsts, ends, strict=True))


def blocks_at(
    index: Tensor, rows: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the blocks of some of the queries, given their indices in ascending runs."""
    block = torch.searchsorted(torch.tensor(rows).cumsum(0), index, right=True)
    which, counts = torch.unique_consecutive(block, return_counts=True)
    return (tuple(counts.tolist()), tuple(firsts[i] for i in which.tolist()), tuple(ends[i] for i in which.tolist()))
