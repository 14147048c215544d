"""Attention of some of the queries: what a rank computes of causal attention when the queries are split, and of groups
of heads where a device's kernels do not know them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from shardwise.graph.attention_within import attend
from shardwise.rules.arguments import block_offset
from shardwise.rules.local_kernels import _ATOMS, _define, global_index
from shardwise.rules.rule import Piece


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
    """Return the given rows of scaled dot-product attention. Under a causal mask, keys that none of them sees are left
    out; what begins at the first row is causal again, other rows get booleans that say which keys they see."""
    sizes, _, lengths = atoms
    if is_causal and prod(lengths) < prod(sizes):
        pieces = tuple(map(Piece, *atoms))
        first, device, last = block_offset(pieces), query.device, 0
        for piece in pieces:
            last = last * piece.size + piece.offset + piece.length - 1
        seen = min(max(last, 0) + 1, key.shape[-2])
        if first is None:
            rows = global_index(device, *atoms)
        else:
            rows = torch.arange(first, first + prod(lengths), device=device)
        key, value = key.narrow(-2, 0, seen), value.narrow(-2, 0, seen)
        is_causal = first == 0
        attn_mask = None if is_causal else torch.arange(seen, device=device) <= rows.unsqueeze(-1)
    return attend(query, key, value, attn_mask, is_causal, enable_gqa, scale)


ATTENTION_ROWS: Final = _define(
    "attention_rows(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, bool enable_gqa, "
    f"float? scale, {_ATOMS}) -> Tensor",
    _attention_rows,
)
