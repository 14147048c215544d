"""An operator that works element by element, with the same bits for an element wherever it stands.

torch's CPU kernels take contiguous elements by vectors, and those that are left over at the end, of strided operands
and of each thread's part, one by one, with other functions (``pow``, ``sigmoid``, ``exp2``, sums in bfloat16). Here all
elements are taken by vectors: operands are contiguous, filled up to whole vectors, and too short for several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.runtime.initial.draws import in_threads

_VECTORS = 128  # elements of the two vectors of AVX-512 that a kernel takes at once, of the smallest dtype
_GRAIN = 2**15 - _VECTORS  # elements; from 2**15 on torch's kernels divide them between threads


def apply_elementwise(
    target: OpOverload, operands: Sequence[Any], named: Mapping[str, Any], sizes: Sequence[int]
) -> torch.Tensor:
    """The result, of these sizes, contiguous and in memory of its own. ``operands``: those that are tensors are
    broadcast; one that the operator changes is this function's to change."""
    count = prod(sizes)
    if not sizes or not count:
        result: torch.Tensor = target(*operands, **named)
        return result.expand(tuple(sizes)).contiguous()
    pieces = [_pieces(x, sizes) if isinstance(x, torch.Tensor) and x.dim() else None for x in operands]
    results: dict[int, torch.Tensor] = {}

    def run(places: Sequence[int]) -> None:
        with torch.no_grad():
            for place in places:
                pieces_here = (x if cut is None else cut[place] for x, cut in zip(operands, pieces, strict=True))
                results[place] = target(*pieces_here, **named)

    num_pieces = next((len(cut) for cut in pieces if cut is not None), 0)
    if not num_pieces:  # numbers alone
        result = target(*operands, **named)
        return result.expand(tuple(sizes)).contiguous()
    in_threads(run, range(num_pieces))
    return torch.cat([results[place] for place in range(num_pieces)])[:count].reshape(tuple(sizes))


def _pieces(operand: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    flat = operand.expand(tuple(sizes)).reshape(-1)
    missing = -flat.numel() % _VECTORS
    filled = torch.cat([flat, flat[:1].expand(missing)]) if missing else flat.contiguous()
    pieces: Sequence[torch.Tensor] = torch.split(filled, _GRAIN)
    return pieces


__all__ = ["apply_elementwise"]
