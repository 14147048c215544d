"""Error messages for failed exchanges between pipeline stages: which rank waited where, and which did not come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardwise.costs.pipeline_simulation import Action
from shardwise.errors import CollectiveError, ShardwiseError
from shardwise.plans.plan import Plan
from shardwise.runtime.communicator import Communicator, backend_of
from shardwise.runtime.faults import BlockedRank, exchange_failed, failure_store
from shardwise.runtime.gpu_watcher import gpu_watcher
from shardwise.runtime.torch_schedules import Scheduled


@dataclass(frozen=True)
class StageFaults:
    """Errors of a rank that works on ``stages`` as device number ``position`` of each. ``everyone``: all ranks."""

    plan: Plan
    stages: Sequence[int]
    position: int
    everyone: Communicator

    def watch(self, scheduled: Scheduled) -> None:
        """Watch the messages of a schedule between GPUs, whose failure no call reports."""
        if backend_of() == "nccl":
            call = self.everyone.calls
            scheduled.watch(lambda action: gpu_watcher.started(lambda error: self.explained(error, action, call)))

    def explained(self, error: Exception, action: Action | None, call: int) -> ShardwiseError | None:
        """Return the error to raise for a schedule that failed ahead of an action (None: at its end) in a ``call``: a
        stage's own error, or a stage that waits in vain for another. Returns None, and adds a note of the location, if
        the error speaks for itself."""
        where = "the end of the step" if action is None else f"stage {action.stage}, {action}"
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, CollectiveError):
                return CollectiveError(f"{cause}\n  stage:  rank {self.everyone.rank} is at {where}", cause.blames)
            if isinstance(cause, ShardwiseError):
                return cause
            cause = cause.__cause__
        sending = "send" in str(error).lower()
        if action is None or sending or action.kind == "weight":
            peers = {peer for number in self.stages for peer in (number - 1, number + 1)}
        else:
            peers = {action.stage + (-1 if action.kind == "forward" else 1)}
        peers = {peer for peer in peers if 0 <= peer < len(self.plan.stages)} - set(self.stages)
        ranks = {peer: self.plan.stages[peer].placement.ranks[self.position] for peer in sorted(peers)}
        others = " or ".join(f"stage {peer} (rank {rank})" for peer, rank in ranks.items())
        what = f"rank {self.everyone.rank} at {where}: the exchange with {others}"
        explanation = self._lost(error, what, ranks.values(), call)
        if explanation is None:
            error.add_note(f"on rank {self.everyone.rank}, at {where}")
        return explanation

    def _lost(self, error: Exception, what: str, ranks: Iterable[int], call: int) -> ShardwiseError | None:
        """Return the error to raise for a failed exchange with ``ranks``, preferably one that another rank has
        published; None if the network is not the cause."""
        rank = self.everyone.rank
        waiting = BlockedRank(f"{self.everyone.name}'s pipeline", call, what, (rank, *ranks))
        failure = exchange_failed(error, rank, waiting, what, "", "", [("pass", f"call {call}")])
        if failure is None:
            return None
        reported = failure_store.explained()
        return (
            CollectiveError(f"{what} failed: {reported}", reported.blames)
            if isinstance(reported, CollectiveError)
            else reported or failure
        )

    @contextmanager
    def exchange(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """Run an exchange after the schedule. Raises CollectiveError naming the ranks that do not take part."""
        what, call = f"rank {self.everyone.rank}: {what}", self.everyone.calls
        try:
            yield
            if backend_of() == "nccl":
                gpu_watcher.started(lambda error: self._lost(error, what, ranks, call))
        except RuntimeError as error:
            if (failure := self._lost(error, what, ranks, call)) is None:
                raise
            raise failure from error
