"""A rank that does not come along says so in the ranks' store, and ranks that wait look there.

A rank *raises its hand* when it leaves a call with an error, and when it asks the others to agree on a call that they
may not be making (``runtime.signatures``). Where nothing goes wrong nothing is written or read: only who has waited for
a second looks, once a second. Without this a rank that fails by itself is known when collectives time out.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from shardwise.errors import CollectiveError, ShardwiseError, problem

_PATIENCE = timedelta(seconds=1)
_RAISED = "shardwise/hands-raised"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """``call``: of all calls of parallel modules that the rank has made, the number; ``text``: the error with which it
    ``left``, or what it ``asks`` to agree on."""

    call: int
    kind: Literal["left", "asks"]
    text: str


class FailureStore:
    """Of this rank. ``call``: the number of the call that it makes; ranks count alike, since they call alike."""

    def __init__(self) -> None:
        self.call = 0
        self._asked = 0  # the call that the others were asked to agree on last
        self._known = 0  # of all hands raised, when this rank read them
        self._hands: list[tuple[int, RankStatus]] = []  # rank, the latest: of a call, maybe, that this rank makes later

    def begin(self) -> None:
        """A call begins."""
        self.call += 1

    def ask(self, text: str) -> None:
        """This rank asks all to agree on the call, and waits for them."""
        self._asked = self.call
        self._raise(RankStatus(self.call, "asks", text))

    def leave(self, error: BaseException) -> None:
        """This rank leaves the call with an error that others may not have. One of a collective they have as well, and
        see for themselves who did not arrive."""
        if isinstance(error, Exception) and not isinstance(error, CollectiveError):
            notes = getattr(error, "__notes__", [])  # of where in a schedule, whose own errors only wrap another
            while not isinstance(error, ShardwiseError) and isinstance(error.__cause__, Exception):
                error = error.__cause__
            first = str(error).strip().partition("\n")[0]
            text = f"{type(error).__name__}: {first}" if first else type(error).__name__
            self._raise(RankStatus(self.call, "left", ", ".join([text, *notes])))

    def wait(self, work: Any) -> None:
        """Wait for a collective of gloo's. Raises its error; CollectiveError where a rank has left this call, and
        ShardwiseError where one asks about another."""
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:
                if work.is_completed():  # the error is its own, or it has just come
                    work.wait()
                    return
            if (error := self.explained()) is not None:
                raise error

    def _raise(self, hand: RankStatus) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        with suppress(RuntimeError):  # torch's DistError: the store is gone, and with it a rank, which is named then
            store = dist.distributed_c10d._get_default_store()
            store.set(_key(dist.get_rank()), json.dumps(asdict(hand)))
            store.add(_RAISED, 1)

    def explained(self) -> ShardwiseError | None:
        """Why others do not come, if they said so: a rank has left this call, or asks about another."""
        with suppress(RuntimeError):  # as above
            store = dist.distributed_c10d._get_default_store()
            raised = store.add(_RAISED, 0)
            if raised != self._known:
                others = (rank for rank in range(dist.get_world_size()) if rank != dist.get_rank())
                known = (rank for rank in others if store.check([_key(rank)]))
                self._hands = [(rank, RankStatus(**json.loads(store.get(_key(rank))))) for rank in known]
                self._known = raised
        for rank, hand in self._hands:
            if hand.call == self.call and hand.kind == "left":
                fix = f"see the error of rank {rank}; it does not take part in this call"
                return CollectiveError(problem(f"rank {rank} has left this call: {hand.text}", fix=fix), [rank])
        for rank, hand in self._hands:
            if hand.call == self.call != self._asked and hand.kind == "asks":
                return ShardwiseError(
                    problem(
                        f"ranks make different calls: rank {rank} makes another one than rank {dist.get_rank()}, which "
                        f"goes on as in its last call: {hand.text}",
                        fix="call train(), eval(), step() and predict() alike on every rank, with the same arguments",
                    )
                )
        return None


def _key(rank: int) -> str:
    return f"shardwise/hand-{rank}"


# Not a cache: a process is one rank.
hands = FailureStore()

__all__ = ["FailureStore", "RankStatus", "hands"]
