"""Attention of some of the queries: what a rank computes of causal attention when the queries are split, of groups of
heads where a device's kernels do not know them, and in one step of a ring (``rules/ring.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.graph.attention_within import attend
from shardwise.graph.custom_operators import global_indices
from shardwise.graph.flash import (
    Attended,
    Columns,
    Differentiated,
    RowTiles,
    Tiles,
    Visibility,
    attend_by_tiles,
    blocks_of,
    causal_rows,
    in_heads,
    row_ranges,
    runs_of,
)
from shardwise.graph.operator_library import composite
from shardwise.graph.schema import AnyCall, arguments


def scale_of(scale: float | None, query: Tensor) -> float:
    return 1 / sqrt(query.shape[-1]) if scale is None else scale


# ---------------------------------------------------------------------------------------------------- some of the rows


def _attention_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
    *atoms: Sequence[int],
) -> Tensor:
    """Return the given rows of scaled dot-product attention. Under a causal mask, adjacent rows see all keys before the
    first of them, and are causal from there on; rows that lie apart get booleans that say which keys they see."""
    sizes, _, lengths = atoms
    if not is_causal or prod(lengths) == prod(sizes):
        return attend(query, key, value, attn_mask, is_causal, enable_gqa, scale)
    runs = runs_of(*atoms)
    if runs is None:
        rows = global_indices(*atoms, device=query.device).flatten()
        seen = torch.arange(key.shape[-2], device=query.device) <= rows.unsqueeze(-1)
        return attend(query, key, value, seen, False, enable_gqa, scale)
    tiles = Tiles(blocks_of([tuple(causal_rows(runs, key.shape[-2]))], [0]), scale_of(scale, query))
    return attend_by_tiles(tiles, query, key, value, Visibility())


# ---------------------------------------------------------------------------------------------------- steps of a ring


def ring_rows(
    step: int, number: int, block: int, run: int, chunks: int, causal: bool, band: Sequence[int] | None, most: int
) -> tuple[RowTiles, ...]:
    """Return the tiles of a block of ``run`` queries that meets the keys of the block ``step`` before it.

    Args:
        step: How many blocks before it the keys come from, turning round.
        number: Of blocks.
        block: Which block of queries.
        run: Queries and keys of a block.
        chunks: Of a block: 1, or 2 where block i has chunks i and 2 * number - 1 - i of the sequence.
        causal: Whether later keys are hidden, and nothing else is.
        band: Where a mask or intervals hide keys: the distances key - query at which one may be seen.
        most: Rows of a tile under a mask.
    """
    origin = (block - step) % number
    if band is None:
        half = run // 2
        if not causal or (origin < block and chunks == 1):
            return (RowTiles(0, run, (Columns(0, run),)),)
        if origin == block:  # the chunks of a block are in the order of the sequence
            return (RowTiles(0, run, (Columns(0, run, True),)),)
        if chunks == 1:
            return (RowTiles(0, run, ()),)
        if origin < block:  # both chunks see the first one of a device before this one, and neither its last one
            return (RowTiles(0, run, (Columns(0, half),)),)
        return RowTiles(0, half, ()), RowTiles(half, run, (Columns(0, run),))
    shift = (block - origin) * run
    tiles = []
    for begin, end in row_ranges(run, most):
        first, last = max(begin + band[0] + shift, 0), min(end + band[1] + shift, run)
        tiles.append(RowTiles(begin, end, (Columns(first, last),) if first < last else ()))
    return tuple(tiles)


def _rows_of_tiles(q: Sequence[int], heads_of_mask: int) -> int:
    """Return the most rows of a tile under a mask: its mask has no more elements than the queries of a block. ``q``:
    [..., blocks, rows, width]."""
    return prod(q[:-3]) * q[-1] // max(heads_of_mask, 1)


def busiest_block(call: AnyCall, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return which block computes most in a step of a ring, and how many pairs of a query and a key that is."""
    args = arguments(call)
    number, run = args["number"], shapes["q"][-2]
    limits = args["band"] if {"mask", "first", "end"} & shapes.keys() else None
    most = _rows_of_tiles(shapes["q"], prod(shapes["mask"][:-4]) if "mask" in shapes else 1)

    def num_pairs(block: int) -> float:
        tiles = ring_rows(args["step"], number, block, run, args["chunks"], args["causal"], limits, most)
        return sum(
            (rows.end - rows.begin) * (end - begin) * (0.5 if causal else 1.0)
            for rows in tiles
            for begin, end, causal in rows.columns
        )

    pairs, block = max((num_pairs(block), block) for block in range(number))
    return block, int(pairs)


def _mask_in_heads(mask: Tensor, lead: tuple[int, ...], step: int, number: int, blocks: Sequence[int]) -> Tensor:
    """``... heads blocks rows origins columns -> blocks batch heads rows columns``, of the columns that each block
    meets now. ``lead``: the dims before the blocks; those of size 1 are broadcast."""
    if mask.shape[-2] > 1:
        several = mask.shape[-4] > 1
        chosen = [
            mask.select(-4, i if several else 0).select(-2, (block - step) % number) for i, block in enumerate(blocks)
        ]
        mask = torch.stack(chosen) if len(chosen) > 1 else chosen[0].unsqueeze(0)
    else:
        mask = mask.squeeze(-2).movedim(-3, 0)
    lead = lead or (1,)
    mask = mask.reshape(mask.shape[0], *(1,) * (len(lead) + 3 - mask.dim()), *mask.shape[1:])
    batch = mask.shape[1:-3] if prod(mask.shape[1:-3]) == 1 else lead[:-1]
    mask = mask.expand(-1, *batch, *mask.shape[-3:])
    return mask.reshape(mask.shape[0], prod(batch), *mask.shape[-3:])


def _ring_call(call: Sequence[Any]) -> tuple[Tiles, tuple[Tensor, Tensor, Tensor], Visibility, tuple[int, ...]]:
    """Return the tiles of a step of a ring, the operands and what hides keys as tiles take them, and the dims of the
    result before the blocks. ``call``: the operator's arguments (``_RING_CALL``)."""
    q, k, v, mask, first, end, causal, scale, band, step, number, chunks, blocks = call
    *qkv, lead = in_heads(q, k, v)
    mask = None if mask is None else _mask_in_heads(mask, lead, step, number, blocks)
    seen = Visibility(mask, first, end)
    run, limits = q.shape[-2], None if seen.is_full else band
    most = _rows_of_tiles(q.shape, 1 if mask is None else prod(mask.shape[1:3]))
    rows = [ring_rows(step, number, block, run, chunks, causal, limits, most) for block in blocks]
    tiles = Tiles(blocks_of(rows, [(block - step) % number * run for block in blocks]), scale)
    return tiles, (qkv[0], qkv[1], qkv[2]), seen, lead


def _ring_step(out: Tensor | None, log_sum: Tensor | None, *call: Any) -> tuple[Tensor, Tensor]:
    """Return attended values and the log-sum-exp of the scores, after ``out`` and ``log_sum`` of the steps before."""
    with torch.no_grad():
        tiles, qkv, seen, lead = _ring_call(call)
        before = None if out is None or log_sum is None else _blocks_first(out, log_sum)
        now = tiles.attended(*qkv, seen, before)
        result = [x.reshape(x.shape[0], *lead, *x.shape[3:]).movedim(0, len(lead)) for x in now]
    return result[0], result[1]


def _ring_gradients(out: Tensor, log_sum: Tensor, *call: Any) -> Tensor:
    """Return attended values as they are. Backward adds to the gradients what a step of the ring contributes."""
    tiles, qkv, seen, lead = _ring_call(call)
    whole = _blocks_first(out, log_sum)
    if not whole.out.shape[:-1] == whole.log_sum.shape == qkv[0].shape[:-1]:
        raise ValueError(
            f"results of shape {tuple(out.shape)} are not those of queries of shape {tuple(call[0].shape)}"
        )
    attended: Tensor = Differentiated.apply(*whole, tiles, None, *qkv, *seen)  # type: ignore[no-untyped-call]
    return attended.reshape(out.shape[-3], *lead, *out.shape[-2:]).movedim(0, len(lead)).reshape(out.shape)


def _blocks_first(out: Tensor, log_sum: Tensor) -> Attended:
    """``... heads blocks rows (width) -> blocks batch heads rows (width)``"""
    heads = out.shape[-4] if out.dim() > 3 else 1
    return Attended(
        out.movedim(-3, 0).reshape(out.shape[-3], -1, heads, *out.shape[-2:]),
        log_sum.movedim(-2, 0).reshape(out.shape[-3], -1, heads, out.shape[-2]),
    )


ATTENTION_ROWS: Final = composite(_attention_rows)
_RING_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? first, Tensor? end, bool causal, float scale, int[] band, "
    "int step, int number, int chunks, int[] blocks"
)
RING_STEP: Final = composite(_ring_step, _RING_CALL)
RING_GRADIENTS: Final = composite(
    _ring_gradients, schema=f"ring_gradients(Tensor(a) out, Tensor log_sum, {_RING_CALL}) -> Tensor(a)"
)
