"""Ring attention: queries, keys and values are split alike along the sequence, and keys and values are passed around.

With N devices the sequence is N blocks. In step i the queries of block j meet the keys of block j - i; then every
device hands its keys and values to the next. Softmax is computed *online*: a running maximum, sum and result per row
are scaled as larger scores come (Milakov and Gimelshein 2018; Liu, Zaharia and Abbeel, Ring attention, 2023). No device
ever has all keys at a time in forward; autograd keeps those of every step for backward, which passes the gradients
around in the other direction.

In the language of rules a ring is nothing special: the blocks are a dim of N, and handing on is ``roll`` by one along
it, which exchanges windows of one block (``rules/windows.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

import torch
from torch import Tensor

from shardwise.rules.lowerings.attention import by_group, scaled_dot_product_attention
from shardwise.rules.lowerings.precision import cast, wide


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    runs: Sequence[int] = (),
) -> Tensor:
    """Scaled dot-product attention over equally many queries and keys. ``runs``: how many of them a device holds; all,
    where they do not divide, and there is no ring then."""
    length = query.shape[-2]
    run = runs[query.dim() - 2] if runs else length
    if not 0 < run < length:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    number = length // run
    q, k, v, mask = wide(query), wide(key), wide(value), attn_mask
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if grouped:
        q, k, v, mask = by_group(q, k, v, mask)
    q, k, v = (x.unflatten(-2, (number, run)) for x in (q, k, v))
    q = q * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    blocks = torch.arange(number, device=query.device)
    within = torch.arange(run, device=query.device)
    if mask is not None:
        mask = _in_blocks(mask, number, run, length)
    top = torch.full((), -inf, dtype=q.dtype, device=query.device)
    total = result = torch.zeros((), dtype=q.dtype, device=query.device)
    for step in range(number):
        if step:
            k, v = torch.roll(k, 1, -3), torch.roll(v, 1, -3)
        scores = torch.matmul(q, k.transpose(-2, -1))
        origin = torch.remainder(blocks - step, number)  # of the keys that a block of queries meets now
        if is_causal:
            rows = (blocks.unsqueeze(-1) * run + within).unsqueeze(-1)
            columns = (origin.unsqueeze(-1) * run + within).unsqueeze(-2)
            scores = scores.masked_fill(columns > rows, -inf)
        if mask is not None:
            mask_columns = _columns_of(mask, origin, number)
            scores = (
                scores.masked_fill(mask_columns.logical_not(), -inf)
                if mask_columns.dtype == torch.bool
                else scores + mask_columns
            )
        higher = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        settled = torch.where(higher == -inf, 0, higher)  # nothing seen yet: any number will do
        weights, kept = torch.exp(scores - settled), torch.exp(top - settled)
        total = total * kept + weights.sum(-1, keepdim=True)
        result = result * kept + torch.matmul(weights, v)
        top = higher
    result = result / torch.where(total == 0, 1, total)  # a row that sees nothing is 0, as in PyTorch
    result = result.flatten(-3, -2)
    return cast(result.flatten(-4, -3) if grouped else result, query.dtype)


def _in_blocks(mask: Tensor, number: int, run: int, length: int) -> Tensor:
    """``... t s -> ... (blocks of t) t (blocks of s) s``; 1 where the mask is broadcast."""
    columns = mask.unflatten(-1, (number, run) if mask.shape[-1] == length else (1, 1))
    blocks: Tensor = columns.unflatten(-3, (number, run) if mask.shape[-2] == length else (1, 1))
    return blocks


def _columns_of(mask: Tensor, origin: Tensor, number: int) -> Tensor:
    """The columns of the blocks of keys ``origin``, one for each block of rows."""
    if mask.shape[-2] == 1:
        return mask.squeeze(-2)
    chosen = torch.arange(number, device=mask.device) == origin.unsqueeze(-1)  # blocks of rows, blocks of columns
    chosen = chosen.unsqueeze(-2).unsqueeze(-1)
    if mask.dtype == torch.bool:
        allowed: Tensor = (mask & chosen).any(-2)
        return allowed
    return torch.where(chosen, mask, 0).sum(-2)
