"""Multi-head attention with the layouts and masks of FlashAttentionScore."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.errors import problem
from shardwise.mindspore.checks import one_of

Tensor = torch.Tensor
LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
EVERYTHING = 2**31 - 1
CAUSAL, CAUSAL_AT_THE_END, BAND = 2, 3, 4  # sparse modes; in the others only the mask counts


def _heads(x: Tensor, width: int, layout: str) -> Tensor:
    """Reshape to (batch, heads, time, width)."""
    if layout == "BNSD":
        return x
    x = x.transpose(0, 1) if layout == "SBH" else x
    return x.reshape(*x.shape[:2], -1, width).transpose(1, 2)


def _left_out(mask: Tensor | None, rows: int, columns: int, mode: int, before: int, behind: int) -> Tensor | None:
    """Return a mask that is True for keys a query does not see, or None."""
    shift = columns - rows if mode in (CAUSAL_AT_THE_END, BAND) else 0
    ahead = torch.arange(columns) - torch.arange(rows).unsqueeze(1) - shift
    if mode in (CAUSAL, CAUSAL_AT_THE_END):
        return ahead > 0
    band = (ahead > behind) | (-ahead > before)
    if mode == BAND:
        return band
    if mask is None or min(before, behind) >= EVERYTHING:
        return None if mask is None else mask.bool()
    return mask.bool() | band


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, heads: int, others: tuple[Any, ...] = (),
    keep: float = 1.0, scale: float = 1.0, before: int = EVERYTHING, behind: int = EVERYTHING, layout: str = "BSH",
    mode: int = 0,
) -> Tensor:  # fmt: skip
    """Compute attention of ``heads`` heads; keys and values may have fewer. True in a mask hides a key. ``mode``: the
    reference's ``sparse_mode``: 0 and 1 by the mask, 2 and 3 causal, 4 a band from ``before`` keys back to ``behind``
    keys ahead. Raises NotImplementedError for other modes and arguments."""
    one_of(*LAYOUTS)("input_layout", layout)
    if mode not in range(5) or any(x is not None for x in others):
        what = f"sparse_mode={mode}, or one of real_shift, drop_mask, padding_mask and prefix"
        raise NotImplementedError(problem(what, op="FlashAttentionScore", fix="sparse_mode 0 to 4, and attn_mask"))
    width = query.shape[-1] if layout in ("BNSD", "BSND") else query.shape[-1] // heads
    q, k, v = (_heads(x, width, layout) for x in (query, key, value))
    k, v = (x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, columns = q.shape[2], k.shape[2]
    if rows == columns and mode in (CAUSAL, CAUSAL_AT_THE_END):
        out = F.scaled_dot_product_attention(q, k, v, None, 1 - keep, is_causal=True, scale=scale)
    else:
        hidden = _left_out(attn_mask, rows, columns, mode, before, behind)
        out = F.scaled_dot_product_attention(q, k, v, None if hidden is None else ~hidden, 1 - keep, scale=scale)
    if layout == "BNSD":
        return out
    out = out.transpose(1, 2).reshape(q.shape[0], rows, *query.shape[2:])
    return out.reshape(q.shape[0], rows, -1).transpose(0, 1) if layout == "SBH" else out
