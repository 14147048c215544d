"""Updates at indices that combine with the present values: max, min, product, quotient, sum and difference.

``tensor_scatter_*`` and ``scatter_nd_*`` address elements (or slices) by the last dim of ``indices``, ``scatter_*``
slices along dim 0. ``unsorted_segment_*`` reduce slices that share an id.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch

from shardwise.mindspore.named import Function

Tensor = torch.Tensor
# Name -> torch's reduction, and the function applied to the updates.
_KINDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "add": ("sum", lambda x: x),
    "sub": ("sum", torch.neg),
    "mul": ("prod", lambda x: x),
    "div": ("prod", torch.reciprocal),
    "max": ("amax", lambda x: x),
    "min": ("amin", lambda x: x),
}


def _combined(rows: Tensor, numbers: Tensor, updates: Tensor, kind: str) -> Tensor:
    """Combine the rows ``numbers`` (m) of ``rows`` (n, ...) with ``updates`` (m, ...)."""
    reduction, change = _KINDS[kind]
    index = numbers.long().reshape(-1, *(1,) * (rows.dim() - 1)).expand(-1, *rows.shape[1:])
    return rows.scatter_reduce(0, index, change(updates).to(rows), reduction)


def _at_rows(input_x: Tensor, indices: Tensor, updates: Tensor, kind: str = "add") -> Tensor:
    return _combined(input_x, indices.reshape(-1), updates.reshape(-1, *input_x.shape[1:]), kind)


def _at_elements(input_x: Tensor, indices: Tensor, updates: Tensor, kind: str = "add") -> Tensor:
    depth = indices.shape[-1]
    sizes, rest = input_x.shape[:depth], input_x.shape[depth:]
    strides = torch.tensor([prod(sizes[place + 1 :]) for place in range(depth)])
    numbers = (indices.long() * strides).sum(-1).reshape(-1)
    rows = _combined(input_x.reshape(prod(sizes), -1), numbers, updates.reshape(len(numbers), -1), kind)
    return rows.reshape(*sizes, *rest)


def _segments(input_x: Tensor, segment_ids: Tensor, num_segments: Any, kind: str = "max") -> Tensor:
    """Reduce segments. Empty ones hold the least number of the dtype for "max", the largest for "min", 1 for "mul"."""
    slices = input_x.shape[segment_ids.dim() :]
    info = torch.finfo(input_x.dtype) if input_x.is_floating_point() else torch.iinfo(input_x.dtype)
    start = {"max": info.min, "min": info.max, "mul": 1}[kind]
    return _at_rows(input_x.new_full((int(num_segments), *slices), start), segment_ids, input_x, kind)


TENSOR_SCATTERS: dict[str, Function] = {
    **{f"tensor_scatter_{kind}": partial(_at_elements, kind=kind) for kind in _KINDS if kind != "add"},
    "unsorted_segment_max": partial(_segments, kind="max"),
    "unsorted_segment_min": partial(_segments, kind="min"),
    "unsorted_segment_prod": partial(_segments, kind="mul"),
}
SCATTERS: dict[str, Function] = {  # these change a parameter
    **{f"scatter_{kind}": partial(_at_rows, kind=kind) for kind in _KINDS if kind != "add"},
    **{f"scatter_nd_{kind}": partial(_at_elements, kind=kind) for kind in _KINDS},
}
