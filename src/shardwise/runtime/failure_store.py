"""Propagate failures through the TCPStore: a failing rank publishes its error, and blocked ranks poll for it.

A rank publishes a status when it leaves a call with an error, and when it asks the others to agree on a call that they
may not be making (``runtime.signatures``). Without failures nothing is written or read: only a rank that has waited for
a second polls, once a second. Without this store a rank's failure is known only when collectives time out.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.errors import CollectiveError, ShardwiseError, problem
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.generation import process_state

_PATIENCE_SECONDS = 1.0  # between looks into the store
_WAIT = timedelta(seconds=0.1)  # between looks whether the generation has ended
_RAISED = "shardwise/hands-raised"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The published status of a rank. ``call``: the number of its call, among all calls of parallel modules; ``text``:
    the error with which it ``left``, or what it ``asks`` to agree on."""

    call: int
    kind: Literal["left", "asks"]
    text: str


class FailureStore:
    """The failure store of this rank. ``call``: the number of its current call, the same on all ranks; ``caller``: the
    thread that makes it."""

    def __init__(self) -> None:
        self.call, self.caller = 0, 0
        self._asked: set[int] = set()  # the calls that this rank asked the others to agree on
        # By default group, whose store they are of: the numbers of the published statuses that this rank has read, and
        # rank -> its latest status, possibly of a later call.
        self._heard: WeakKeyDictionary[Any, tuple[set[int], dict[int, RankStatus]]] = WeakKeyDictionary()

    def begin(self) -> None:
        """Begin a call of a parallel module, in this thread."""
        self.call, self.caller = self.call + 1, threading.get_ident()

    def ask(self, text: str) -> None:
        """Ask all ranks to agree on the current call; the caller then waits for them."""
        self._asked.add(self.call)
        self._raise(RankStatus(self.call, "asks", text))

    def leave(self, error: BaseException) -> None:
        """Publish that this rank leaves the call with an error. A CollectiveError is not published: other ranks get it
        too and find the missing ranks themselves."""
        if isinstance(error, Exception) and not isinstance(error, CollectiveError):
            notes = getattr(error, "__notes__", [])  # where in a schedule, whose errors only wrap others
            while not isinstance(error, ShardwiseError) and isinstance(error.__cause__, Exception):
                error = error.__cause__
            first = str(error).strip().partition("\n")[0]
            text = f"{type(error).__name__}: {first}" if first else type(error).__name__
            self._raise(RankStatus(self.call, "left", ", ".join([text, *notes])))

    def wait(self, work: Any) -> None:
        """Wait for a gloo collective. Raises its error, CollectiveError if a rank has left this call, and
        ShardwiseError if one asks about another call."""
        asked = time.monotonic()
        while True:
            try:
                work.wait(_WAIT)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or has just finished
                    trail.check()
                    work.wait()
                    return
            trail.check()
            if (now := time.monotonic()) > asked + _PATIENCE_SECONDS:
                asked = now
                if (error := self.explained()) is not None:
                    raise error

    def _raise(self, status: RankStatus) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        with suppress(RuntimeError):  # torch's DistError: the store's rank is gone, and will be named
            store = dist.distributed_c10d._get_default_store()
            store.set(_key(store.add(_RAISED, 1)), json.dumps([dist.get_rank(), asdict(status)]))

    def explained(self, call: int | None = None) -> ShardwiseError | None:
        """Return the error that explains why others do not arrive in a call (None: the current one): a rank has left
        it, or asks about another."""
        call = self.call if call is None else call
        statuses: dict[int, RankStatus] = {}
        with suppress(RuntimeError):  # as above
            store = dist.distributed_c10d._get_default_store()
            read, statuses = self._heard.setdefault(dist.group.WORLD, (set(), {}))
            raised = store.add(_RAISED, 0)
            # One request for each that is new: among n ranks, all would ask for n. One may be missing: its rank died.
            for number in sorted({*range(1, raised + 1)} - read):
                if store.check([_key(number)]):
                    read.add(number)
                    rank, published = json.loads(store.get(_key(number)))
                    if rank != dist.get_rank():
                        statuses[rank] = RankStatus(**published)
        latest = sorted(statuses.items())
        for rank, status in latest:
            if status.call == call and status.kind == "left":
                fix = f"see the error of rank {rank}; it does not take part in this call"
                return CollectiveError(problem(f"rank {rank} has left this call: {status.text}", fix=fix), [rank])
        for rank, status in latest:
            if status.call == call and call not in self._asked and status.kind == "asks":
                return ShardwiseError(
                    f"ranks make different calls: rank {rank} changed its call, but rank {dist.get_rank()} "
                    f"repeats its last one: {status.text}",
                    fix="make equal train(), eval(), step() and predict() calls on all ranks",
                )
        return None


def _key(number: int) -> str:
    return f"shardwise/hand-{number}"


# Not a cache: a process is one rank.
failure_store = FailureStore()
process_state.at_end(failure_store.__init__)  # type: ignore[misc]
