"""A tree of small groups over all ranks, for what all of them must know: a few messages of each rank.

Gloo's collectives over n ranks are rings: n - 1 messages of every rank, one after the other, and a connection from each
rank to each. Here eight successive ranks form a group, the first ranks of eight groups form the next one, and so on up
to one group. Values go up to it and come down again.

The groups are not torch's: its list of groups needs none of them.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

FANOUT = 8
_LENGTH_BYTES, _FIRST_BYTES = 8, 256  # of a content's length, and of the first message, which begins with it


class RankTree:
    """The groups of this rank, the lowest first. All ranks create it together. ``name``: no other tree has it."""

    def __init__(self, name: str, timeout: timedelta | None, fanout: int = FANOUT) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._groups: list[SmallGroup] = []
        self._num_led = 0  # groups in which this rank gets, or passes on, what comes from above
        stride = 1
        while stride < num_ranks and rank % stride == 0:
            first = rank - rank % (stride * fanout)
            ranks = range(first, min(first + stride * fanout, num_ranks), stride)
            if len(ranks) > 1:
                self._groups.append(SmallGroup(name, ranks, timeout))
            stride *= fanout
            self._num_led = len(self._groups) - (stride >= num_ranks)

    def gather(self, value: Any, *, to_all: bool = True) -> list[Any]:
        """Return the values of all ranks, by rank; on rank 0 only without ``to_all``. Collective. Equal values travel
        once, and are one object in the list."""
        values = RankValues.of(value)
        for group in self._groups:
            values = RankValues.joined([RankValues.unpacked(part) for part in group.gather(values.packed())])
        content = values.packed()
        for group in reversed(self._groups[: self._num_led * to_all]):
            content = group.from_first(content)
        return RankValues.unpacked(content).by_rank

    def route(
        self, offered: Mapping[Any, Any], wanted: Any, joined: Callable[[Any], Any], fits: Callable[[Any, Any], bool]
    ) -> dict[Any, Any]:
        """Return, of what all ranks offer, what fits what any rank of this one's lowest group wants; the first ranks of
        groups get more. Of equal keys the first rank's counts. Collective. ``joined``: of what several want."""
        wants: list[Any] = []
        for group in self._groups:
            every = [pickle.loads(part) for part in group.gather(pickle.dumps((offered, wanted)))]
            offered = {key: value for have, _ in reversed(every) for key, value in have.items()}
            wanted = joined([want for _, want in every])
            wants.append(wanted)
        for group, want in reversed(list(zip(self._groups, wants, strict=True))[: self._num_led]):
            chosen = {key: value for key, value in offered.items() if fits(value, want)}
            offered = pickle.loads(group.from_first(pickle.dumps(chosen)))
        return dict(offered)

    def largest(self, row: torch.Tensor, wait: Callable[[Any], None]) -> torch.Tensor:
        """Return the largest value of each column of the ranks' rows, in ``row``. Collective. ``wait``: waits for a
        message under way."""
        for group in self._groups:
            wait(group.backend.allreduce([row], dist.ReduceOp.MAX))
        for group in reversed(self._groups[: self._num_led]):
            wait(group.backend.broadcast(row, 0))
        return row


@dataclass(frozen=True)
class RankValues:
    """The values of successive ranks. Most of what ranks agree on is equal on many: ``contents`` holds each value once,
    pickled, and ``which`` the index of every rank's."""

    contents: list[bytes]
    which: list[int]

    @staticmethod
    def of(value: Any) -> RankValues:
        return RankValues([pickle.dumps(value)], [0])

    @staticmethod
    def joined(parts: Sequence[RankValues]) -> RankValues:
        position: dict[bytes, int] = {}
        which: list[int] = []
        for part in parts:
            places = [position.setdefault(content, len(position)) for content in part.contents]
            which += [places[index] for index in part.which]
        return RankValues(list(position), which)

    def packed(self) -> bytes:
        """Return it as bytes. Indices repeat as meshes do: those of 16,384 ranks take a few hundred bytes."""
        return pickle.dumps((self.contents, zlib.compress(array("I", self.which).tobytes())))

    @staticmethod
    def unpacked(content: bytes) -> RankValues:
        contents, which = pickle.loads(content)
        return RankValues(contents, array("I", zlib.decompress(which)).tolist())

    @cached_property
    def by_rank(self) -> list[Any]:
        values = list(map(pickle.loads, self.contents))
        return [values[index] for index in self.which]


class SmallGroup:
    """A group of gloo that torch does not list: its members create it, in the same order as other groups that they have
    in common. ``name``: no other group of these ranks has it."""

    def __init__(self, name: str, ranks: Sequence[int], timeout: timedelta | None) -> None:
        self.ranks = ranks
        distributed: Any = dist
        whole_name = f"shardwise/{name}/{ranks[1] - ranks[0]}/{ranks[0]}"
        store = distributed.PrefixStore(whole_name, dist.distributed_c10d._get_default_store())
        options = {} if timeout is None else {"timeout": timeout}
        self.backend = distributed.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), **options)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to send, and return the handle."""
        return self.backend.send([tensor], self.ranks.index(peer), tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to receive, and return the handle."""
        return self.backend.recv([tensor], self.ranks.index(peer), tag)

    def gather(self, content: bytes) -> list[bytes]:
        """Return the bytes of all members. Collective."""
        return self._exchange(content, self._gather)

    def from_first(self, content: bytes) -> bytes:
        """Return the bytes of the first member. Collective."""
        return self._exchange(content, self._from_first)[0]

    @staticmethod
    def _exchange(content: bytes, exchange: Callable[[bytes], list[bytes]]) -> list[bytes]:
        """Exchange contents of any length. Most are short: they are sent with their length, and cost one message."""
        content = len(content).to_bytes(_LENGTH_BYTES, "little") + content
        rows = exchange(content[:_FIRST_BYTES].ljust(_FIRST_BYTES))
        ends = [_LENGTH_BYTES + int.from_bytes(row[:_LENGTH_BYTES], "little") for row in rows]
        if (longest := max(ends)) > _FIRST_BYTES:
            rest = exchange(content[_FIRST_BYTES:longest].ljust(longest - _FIRST_BYTES))
            rows = [first + more for first, more in zip(rows, rest, strict=True)]
        return [row[_LENGTH_BYTES:end] for row, end in zip(rows, ends, strict=True)]

    def _gather(self, content: bytes) -> list[bytes]:
        rows = torch.empty(len(self.ranks), len(content), dtype=torch.uint8)
        self.backend.allgather([list(rows)], [_as_tensor(content)]).wait()
        return [row.tobytes() for row in rows.numpy()]

    def _from_first(self, content: bytes) -> list[bytes]:
        row = _as_tensor(content)
        self.backend.broadcast(row, 0).wait()
        return [row.numpy().tobytes()]


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
