"""Find whose memory a tensor lies in, to recognize a ``detach()``, a view or an entry of a ``state_dict()``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch

from shardwise.runtime.guards.registry import ShardRecord


class Owners:
    """An index of the memory of given tensors."""

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, ShardRecord]]) -> None:
        places = [(*_extent(tensor), record) for tensor, record in tensors if tensor.numel()]
        self._places = sorted(places, key=lambda place: place[0])
        self._starts = [start for start, _, _ in self._places]

    def of(self, tensor: torch.Tensor) -> ShardRecord | None:
        """Return the record of the given tensor that shares memory with a tensor, if any."""
        if not tensor.numel():
            return None
        start, end = _extent(tensor)
        before = bisect_left(self._starts, end) - 1  # the last one that begins before the tensor ends
        if before >= 0 and self._places[before][1] > start:
            return self._places[before][2]
        return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which a tensor starts and ends. Gradients of one bucket share one storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
