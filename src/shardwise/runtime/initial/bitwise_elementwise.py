"""Elementwise operators whose result bits for an element do not depend on its position.

torch's CPU kernels process contiguous elements as vectors. They process the rest (at the end, of strided operands, and
of each thread's part) one by one, with other functions (``pow``, ``sigmoid``, ``exp2``, sums in bfloat16). Here all
elements are processed as vectors: operands are contiguous, padded to whole vectors, and too short for several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.runtime.initial.draws import in_threads

_VECTORS = 128  # elements of the two AVX-512 vectors that a kernel processes at once, for the smallest dtype
_GRAIN = 2**15 - _VECTORS  # elements; from 2**15 on torch's kernels use several threads


def apply_elementwise(
    target: OpOverload, operands: Sequence[Any], named: Mapping[str, Any], sizes: Sequence[int]
) -> torch.Tensor:
    """Return the result in contiguous memory of its own, of the given sizes. ``operands``: tensors among them are
    broadcast; an operand that the operator changes must belong to this function."""
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
    if not num_pieces:  # no tensors
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
