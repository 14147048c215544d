"""Attention whose queries, keys and head width can be split."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

import torch
from torch import Tensor

from shardwise.graph.attention_within import interval_mask
from shardwise.graph.precision import cast, wide
from shardwise.rules.lowerings.reductions import safe_softmax


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
    q, k, v, mask = scaled_operands(query, key, value, attn_mask, scale, enable_gqa)
    scores = torch.matmul(q, k.transpose(-2, -1))
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows, -inf)
    return as_queries(torch.matmul(safe_softmax(masked(scores, mask), -1), v), query)


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


def attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None,
    band: Sequence[int],
    enable_gqa: bool,
    scale: float,
    *rows: Sequence[int],
) -> Tensor:
    """Attention with one more score per head in the sums of its softmax, with all scores."""
    q, k, v, mask = scaled_operands(query, key, value, attn_mask, scale, enable_gqa)
    scores = masked(torch.matmul(q, k.transpose(-2, -1)), mask)
    if band:
        distance = torch.arange(key.shape[-2], device=key.device) - torch.arange(
            query.shape[-2], device=key.device
        ).unsqueeze(-1)
        scores = scores.masked_fill((distance < band[0]) | (distance > band[1]), -inf)
    of_heads = wide(sinks).reshape(*scores.shape[1:-2], 1, 1)
    top = torch.maximum(scores.detach().amax(-1, keepdim=True), of_heads.detach())
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (of_heads - top).exp()
    return as_queries(torch.matmul(weights, v) / total, query)


def scaled_operands(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scaled queries, keys, values and mask in the precision of scores. Grouped queries have heads ``h g``, keys and
    values ``h 1``, and a mask that has heads either."""
    q, k, v = wide(query), wide(key), wide(value)
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        shape = (key.shape[-3], query.shape[-3] // key.shape[-3])
        if mask is not None and mask.dim() > 2:
            mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else torch.unflatten(mask, -3, shape)
        q, k, v = torch.unflatten(q, -3, shape), k.unsqueeze(-3), v.unsqueeze(-3)
    return q * (1 / sqrt(query.shape[-1]) if scale is None else scale), k, v, mask


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(mask.logical_not(), -inf) if mask.dtype == torch.bool else scores + mask


def as_queries(result: Tensor, query: Tensor) -> Tensor:
    """A result with the heads and the dtype of the queries."""
    return cast(result.flatten(-4, -3) if result.dim() > query.dim() else result, query.dtype)
