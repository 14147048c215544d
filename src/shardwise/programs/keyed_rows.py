"""Rows that follow keys, in the step: how many there are, and their exchange with the owners of the keys.

Only the step knows the numbers of rows. The devices tell each other in an exchange of equal sizes, and the host reads
the result in one copy, which all exchanges of rows of these keys share, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


class RowCounts:
    """How many rows of each key a device sends to every device and receives from it.

    On a GPU the copy to the host starts with the object, and the host waits for it at the first exchange of rows.
    """

    def __init__(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        devices, keys = received.shape[0], received.shape[-1]
        both = torch.cat((sent.flatten(), received.flatten())).view(2, devices, keys)
        self._event: torch.cuda.Event | None = None
        if both.is_cuda:
            device, both = both, torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            both.copy_(device, non_blocking=True)
            self._event = event = torch.cuda.Event()
            event.record()
        self._both = both

    @cached_property
    def _by_device(self) -> tuple[list[list[int]], list[list[int]]]:
        """Rows sent and received, [device][key]."""
        if self._event is not None:
            self._event.synchronize()
        sent, received = self._both.tolist()
        return sent, received

    @cached_property
    def sent(self) -> list[int]:
        """Rows sent to every device."""
        return list(map(sum, self._by_device[0]))

    @cached_property
    def received(self) -> list[int]:
        """Rows received from every device."""
        return list(map(sum, self._by_device[1]))

    @cached_property
    def _blocks(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """The runs of rows of one key from one device: their lengths as they arrive, the position of each in the order
        of the keys; the lengths in that order, and the position of each among the arrivals."""
        received = self._by_device[1]
        at = [(device, key) for device, row in enumerate(received) for key, count in enumerate(row) if count]
        arriving = [received[device][key] for device, key in at]
        by_key = sorted(range(len(at)), key=lambda i: (at[i][1], at[i][0]))
        place = sorted(range(len(at)), key=by_key.__getitem__)
        return arriving, by_key, [arriving[i] for i in by_key], place

    def by_key(self, arrived: torch.Tensor) -> torch.Tensor:
        """Return rows in the order of their keys, from the order in which they arrive: by device, then by key."""
        lengths, order, *_ = self._blocks
        return _permuted(arrived, lengths, order)

    def by_device(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in the order in which they arrived."""
        *_, lengths, order = self._blocks
        return _permuted(rows, lengths, order)


def _permuted(rows: torch.Tensor, lengths: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Return the rows with their runs of some lengths in another order."""
    if order == list(range(len(order))):
        return rows.contiguous()
    runs = rows.split(list(lengths))
    return torch.cat([runs[i] for i in order])


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """Maps the counts of rows sent and received to ``RowCounts``."""

    def __call__(self, sent: torch.Tensor, received: torch.Tensor) -> RowCounts:
        return RowCounts(sent, received)


@dataclass(frozen=True, slots=True)
class CountRows:
    """Maps a tensor to ``times`` its number of rows, which kernels read that were traced for another number."""

    times: int

    def __call__(self, tensor: torch.Tensor) -> int:
        return self.times * tensor.shape[0]


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Rows that go to the owners of their keys (``outward``), or return from there.

    The owners have them in the order of their keys. ``copies``: the keys of a row; cotangents of its copies add up.
    ``ways`` of a call: the positions of a rank's keys in the order in which their rows are sent (sorted by key), and
    the ``RowCounts`` (``programs.builder``).
    """

    outward: bool
    copies: int

    def counts(self, ways: Sequence[Any]) -> tuple[list[int], list[int]]:
        """Return how many rows the rank sends to and receives from every member."""
        counts: RowCounts = ways[1]
        return (counts.sent, counts.received) if self.outward else (counts.received, counts.sent)

    def pack(self, tensor: torch.Tensor, ways: Sequence[Any]) -> torch.Tensor:
        """Return the rows to send, member by member."""
        if self.outward:
            return tensor.index_select(0, self._positions(ways[0]))
        counts: RowCounts = ways[1]
        return counts.by_device(tensor)

    def unpack(self, rows: torch.Tensor, ways: Sequence[Any]) -> torch.Tensor:
        """Return the result from the rows received, member by member."""
        order, counts = ways
        if self.outward:
            by_key: torch.Tensor = counts.by_key(rows)
            return by_key
        if self.copies == 1:
            return torch.empty_like(rows).index_copy_(0, order, rows)
        result = rows.new_zeros(rows.shape[0] // self.copies, *rows.shape[1:])
        return result.index_add_(0, self._positions(order), rows)

    def _positions(self, order: torch.Tensor) -> torch.Tensor:
        return order if self.copies == 1 else order // self.copies
