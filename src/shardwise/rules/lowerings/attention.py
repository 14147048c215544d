"""Attention whose queries, keys and head width can be split."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

import torch
from torch import Tensor

from shardwise.graph.attention_within import interval_mask
from shardwise.rules.lowerings.precision import cast, wide
from shardwise.rules.lowerings.softmax import safe_softmax


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as matrix products and a softmax, so that queries, keys and head width can be split.

    The causal mask compares positions, which are generated per part; grouped queries get a dim of their own.
    """
    assert dropout_p == 0.0, "attention dropout is separated by the graph's normalisation"
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    q, k, v = wide(query), wide(key), wide(value)
    if grouped:
        q, k, v, attn_mask = by_group(q, k, v, attn_mask)
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(q * factor, k.transpose(-2, -1))
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows, -inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), -inf) if boolean else scores + attn_mask
    result = torch.matmul(safe_softmax(scores, -1), v)
    return cast(result.flatten(-4, -3) if grouped else result, query.dtype)


def attention_within(
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
    """Attention of queries that each see an interval of keys, with all scores."""
    mask = interval_mask(torch.arange(key.shape[-2], device=key.device), first, end, seen)
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


def by_group(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Grouped queries: heads ``h g`` of queries, ``h 1`` of keys and values, and either in a mask that has heads."""
    shape = (key.shape[-3], query.shape[-3] // key.shape[-3])
    if mask is not None and mask.dim() > 2:
        mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else torch.unflatten(mask, -3, shape)
    return torch.unflatten(query, -3, shape), key.unsqueeze(-3), value.unsqueeze(-3), mask
