"""``sw.Recovery``: resume a run after it was stopped or after ranks were lost."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwise.errors import PlanWarning, ShardwiseError, StragglerWarning
from shardwise.plans.plan import Plan
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.runtime.agree import from_rank_zero, gather_values, rank_and_world_size, rank_tree
from shardwise.runtime.communicator import rank_device
from shardwise.runtime.faults import failure_store
from shardwise.runtime.generation import current, plan_file, process_state
from shardwise.runtime.heartbeat_file import trail
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.runtime.replicas import ReplicaCheck
from shardwise.train.checkpoints import Optimizers, Resumable, Resumables, Schedulers, values_of
from shardwise.train.local_folder import LocalFolder
from shardwise.train.parts import TrainingState, state_of
from shardwise.train.peers import PeerCopy, PeerReader, Peers, SurvivingState
from shardwise.train.resuming import load_newest, load_one
from shardwise.train.retention import checkpoints_in, rename_later_checkpoints
from shardwise.train.stores import Place, folder_of

_DEFAULT_EVERY = 10  # steps between copies on other machines, in an elastic job on several
_Copy = tuple[int, SurvivingState]  # (index of the store, a surviving state in it)


class Recovery:
    """Resumes a run, and keeps its latest state. All ranks create and use it together.

    Under ``shardwise run --elastic`` the state of every step is kept in memory that outlives the ranks. Under other
    launchers ``keep`` only synchronizes the ranks. With ``peer_copy`` other machines keep copies, under any launcher;
    in an elastic job on several machines they do so every ten steps by default.

    Args:
        par: the module, as for ``sw.save_checkpoint``; the same holds for ``optimizer``, ``schedulers``, ``scaler`` and
            ``data``.
        folder: folder or URL of the run's checkpoints, which you save with ``sw.save_checkpoint``.
        peer_copy: where and how often other machines keep copies.

    Attributes:
        extra: the ``extra`` value of the state that ``resume`` loaded; None without one.
    """

    def __init__(
        self,
        par: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        folder: Place | None = None,
        schedulers: Schedulers = (),
        scaler: Resumable | None = None,
        data: Resumable | None = None,
        peer_copy: PeerCopy | None = None,
    ) -> None:
        self.par, self.folder = par, None if folder is None else folder_of(folder)
        self.extra: Any = None
        self._resumables = Resumables.of(optimizer, schedulers, scaler, data)
        stages = (
            tuple({stage.placement.ranks: None for stage in par.plan.stages}) if isinstance(par, ParallelModule) else ()
        )
        self._rounds = Rounds(stages)
        self._generation = current.generation
        self._structure: object = None
        self._failed = False  # to write the latest state
        self._step, self._checked, self._passed = 0, -1, 0
        self._stores: list[Peers] = []
        if self._generation is not None:
            memory = Path(self._generation.memory)
            self._stores = [Peers(PeerCopy(memory / "steps"), is_local=True)]
            if self._generation.num_machines > 1 and peer_copy is None:
                self._stores.append(Peers(PeerCopy(memory / "copies", _DEFAULT_EVERY), between_machines=True))
        if peer_copy is not None:
            self._stores.append(Peers(peer_copy))

    def resume(self) -> int:
        """Load the newest state from memory or from the folder. Collective.

        If ranks held replicas that differ, this is the newest state that a replica check has passed.

        Returns:
            The number of steps that the state has finished; 0 without a state.

        Raises:
            CheckpointError, ShardwiseError: as ``sw.load_checkpoint``.
        """
        self._land()  # a note that is written behind this would be of a step that is given up
        copy, saved, limit = self._choose()
        checkpoint = None
        if copy is not None:
            store, kept = self._stores[copy[0]], copy[1]
            manifest = store.manifest(kept)
            what = "was kept in memory" if store.is_local else "other machines have copies of"
            self._say(f"goes on after step {kept.step}, which {what}")
            reader = partial(PeerReader, store, kept)
            checkpoint = load_one(
                LocalFolder(store.memory), lambda: manifest, reader, self.par, self._resumables, skips=False
            )
        elif saved is not None:
            assert self.folder is not None
            checkpoint = load_newest(self.folder, self.par, self._resumables, not_after=limit)
            self._say(
                f"goes on after step {checkpoint.step}, which was saved as {str(checkpoint.path).rpartition('/')[2]}"
            )
        elif self._generation is not None and self._generation.number:
            self._say("starts from the beginning: no step was kept or saved")
        self._step = 0 if checkpoint is None else checkpoint.step
        self.extra = None if checkpoint is None else checkpoint.extra
        gather_values(None)  # a barrier: all ranks have read
        for store in self._stores:
            store.forget_after(self._step)
        if self.folder is not None:
            from_rank_zero(partial(rename_later_checkpoints, self.folder, self._step))
        self._rounds.skip()
        return self._step

    def keep(self, step: int, *, extra: Any = None, stopping: bool = False) -> bool:
        """Keep the state after a step. Collective: call it on every rank after the same steps.

        Costs one small message. Under ``--elastic`` also a copy of this rank's share of the state; with ``peer_copy``
        another copy every few steps, sent to another machine during the next step. A rank that stays slower than the
        others is named in a StragglerWarning.

        Args:
            step: number of finished optimizer steps.
            extra: other values to keep, as for ``sw.save_checkpoint``.
            stopping: whether this rank wants to stop.

        Returns:
            Whether any rank wants to stop.
        """
        due = [store for store in self._stores if store.is_due(step)]
        state: TrainingState | None = None
        if due:
            state = state_of(self.par, self._resumables.optimizers, rank_and_world_size()[0])
            state.values.update(values_of(step, self._resumables, extra))
        structure = self._structure
        if state is not None:
            structure = [(name, part.tensor.shape, part.tensor.dtype) for name, part in state.parts.items()]
        changed = structure != self._structure
        self._land()
        stops, renews, fails = self._rounds.meet(stopping, changed, self._failed)
        if fails:
            self._stop_keeping(self._stores, "a rank could not write")
        if state is not None and renews:
            for store in self._stores:
                store.outdated = True
        self._structure = structure
        check = getattr(self.par, "_replicas", None)
        if isinstance(check, ReplicaCheck) and check.passed > self._passed:
            self._passed, self._checked = check.passed, self._step  # it saw the state before this step
        for store in due:
            if state is not None and store in self._stores:
                self._copy(store, state, step)
        self._step = step
        trail.step_done(step)
        self._rounds.skip()
        return stops

    def _choose(self) -> tuple[_Copy | None, int | None, int | None]:
        """Return (the state in memory to load, else the step of the newest checkpoint, the last step that may be
        loaded). Rank 0 decides. Collective. Raises ShardwiseError on all ranks if the folder cannot be read."""
        copies = [(number, kept) for number, store in enumerate(self._stores) for kept in store.whole_states()]
        copies.sort(key=lambda copy: -copy[1].step)

        def choose() -> tuple[_Copy | None, int | None, int | None]:
            limit = None
            if self._generation is not None and self._generation.suspect:
                limit = copies[0][1].checked if copies else -1
            steps: list[int] = []
            if self.folder is not None:
                steps = [manifest.step for manifest in checkpoints_in(self.folder)[0].values()]
            saved = max((step for step in steps if limit is None or step <= limit), default=None)
            for copy in copies:
                number, kept = copy
                least = -1 if saved is None else saved + (not self._stores[number].is_local)  # others may have to send
                if (limit is None or kept.step <= limit) and kept.step >= least:
                    return copy, saved, limit
            return None, saved, limit

        return from_rank_zero(choose)

    def _say(self, text: str) -> None:
        if rank_and_world_size()[0] == 0 and (self._generation is not None or self._stores):
            print(f"shardwise: training {text}", flush=True)

    def _land(self) -> None:
        for store in self._stores:
            try:
                store.land()
            except OSError:
                self._failed = True  # `meet` tells the other ranks

    def _copy(self, store: Peers, state: TrainingState, step: int) -> None:
        if store.outdated and (fault := store.renew(state)):
            self._stop_keeping([store], fault)
            return
        try:
            store.fill(state, step, self._checked)
        except OSError:
            self._failed = True  # `meet` tells the other ranks after the next step

    def _stop_keeping(self, ended: Sequence[Peers], reason: str) -> None:
        self._stores = [store for store in self._stores if store not in ended]
        for store in ended:
            if store.is_local:  # other machines' last copies, and those in the user's folder, may still be needed
                store.close()
            if rank_and_world_size()[0] == 0:
                kept, then = "no other machine keeps copies of the state", ""
                if store.is_local:
                    kept = "steps are not kept in memory"
                    then = ": after a loss training continues from the last checkpoint or copy"
                what = f"{kept} any more ({reason}){then}; give {store.memory} more space"
                warnings.warn(what, PlanWarning, stacklevel=5)


# ----------------------------------------------------------------------------------------------------------------------
# Synchronization of the ranks after every step: they agree on flags, and rank 0 learns how long each was busy. Busy
# time is the time between two synchronizations without waiting for other ranks. All ranks wait for the slowest, so a
# straggler costs all of them; it is named after a while. Only ranks with the same work are compared: all ranks, or
# those of a stage (a plan may have unequal stages). Times are host times: with a GPU they only show when kernels were
# queued, so no rank is named.

_WINDOW = 20  # steps that are compared together
_SLOWER = 1.2  # busy time of a straggler, relative to the median of the other ranks
_SHARE = 0.8  # fraction of the window's steps in which it must be slower
_LEAST_SECONDS = 0.001  # difference per step; less is noise


class Rounds:
    """Synchronizes the ranks of a run. ``stages``: the ranks of each stage, if any."""

    def __init__(self, stages: Sequence[Sequence[int]] = ()) -> None:
        self._stages = stages
        self._on_host = rank_device().type == "cpu"
        # Of gloo: flags are the host's, and a message through the GPU would wait for its kernels.
        self._tree = rank_tree() if rank_and_world_size()[1] > 1 else None
        self.skip()
        self._seconds: list[float] = []  # busy time of this rank, per step
        self._busy: list[list[float]] = []  # on rank 0: per step of the last window, of every rank
        self._named: set[int] = set()

    def meet(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, whether any rank sets it. Collective, after every step."""
        now, waited = time.perf_counter(), trail.waited_seconds
        busy = now - self._began - (waited - self._waited)
        if self._tree is not None:
            row = torch.tensor([0, *flags], dtype=torch.int8)  # a message even without flags
            if self._on_host:
                self._seconds.append(busy)
            with trail.waiting(b"the ranks meet after a step"):
                _, *columns = self._tree.largest(row, failure_store.wait).tolist()
                flags = tuple(map(bool, columns))
                if len(self._seconds) == _WINDOW:
                    everywhere, self._seconds = self._tree.gather(self._seconds, to_all=False), []
                    if rank_and_world_size()[0] == 0:
                        self._busy = [list(step) for step in zip(*everywhere, strict=True)]
                        self._name_stragglers()
        self.skip()
        return flags

    def skip(self) -> None:
        """Restart the busy time: the work since the last synchronization was not part of a step."""
        self._began, self._waited = time.perf_counter(), trail.waited_seconds

    def _name_stragglers(self) -> None:
        slow: dict[int, tuple[float, float]] = {}
        for ranks in self._stages or [range(len(self._busy[0]))]:
            busy = [[seconds[rank] for rank in ranks] for seconds in self._busy]
            least = sum(sorted(seconds)[max(0, len(ranks) // 2 - 1)] for seconds in busy)  # at most the others' medians
            late = [at for at in range(len(ranks)) if sum(seconds[at] for seconds in busy) > _SLOWER * least]
            slow |= {ranks[at]: pace for at in late if (pace := slowness(busy, at))}
        for rank in slow.keys() - self._named:
            seconds, others = slow[rank]
            warnings.warn(
                f"rank {rank} is {seconds / others - 1:.0%} slower than the others: in the last {_WINDOW} steps it was "
                f"busy for {seconds:.4f} s of each, the others for {others:.4f} s in the median: all wait for it",
                StragglerWarning,
                stacklevel=4,
            )
        self._named = set(slow)


def slowness(busy: list[list[float]], rank: int) -> tuple[float, float] | None:
    """Return (seconds per step of a rank, median of the others' seconds) if it is a straggler, else None. ``busy``: per
    step the seconds of every rank."""
    if len(busy[0]) == 1:
        return None
    others = [median(seconds[:rank] + seconds[rank + 1 :]) for seconds in busy]
    rank_seconds = [seconds[rank] for seconds in busy]
    late = sum(seconds > _SLOWER * usual for seconds, usual in zip(rank_seconds, others, strict=True))
    average, usual = sum(rank_seconds) / len(rank_seconds), sum(others) / len(others)
    is_slow = average > _SLOWER * usual and average - usual > _LEAST_SECONDS and late >= _SHARE * len(busy)
    return (average, usual) if is_slow else None


# ----------------------------------------------------------------------------------------------------------------------
# ``sw.planned``: plan once per number of ranks in an elastic job, and ahead of time for the next loss.

_turns = count()  # of this generation: a script may have several plans


@process_state.at_end
def _reset_turns() -> None:
    global _turns
    _turns = count()


def planned(make: Callable[[], Plan | PlanningResult]) -> Plan | PlanningResult | None:
    """Return the plan of ``make()`` on rank 0, and None on other ranks, as ``sw.parallelize`` takes it.

    Under ``shardwise run --elastic`` the plan is made once per job and number of ranks, and later generations reuse it.
    During training a low-priority process runs the script up to this call, as rank 0 of the number of ranks after the
    next loss, so that the plan is ready by then. Call this after ``sw.init_ranks``.

    Args:
        make: returns a plan for ``sw.world_size()`` ranks.

    Returns:
        The plan on rank 0, None on other ranks.
    """
    generation, turn = current.generation, next(_turns)
    rank, num_ranks = rank_and_world_size()
    if rank:
        return None
    if generation is None:
        return make()
    path = Path(generation.memory, plan_file(generation.rehearses or num_ranks, turn))
    plan: Plan | None = None
    if path.exists():
        try:
            plan = Plan.load(path)
        except ShardwiseError:  # shardwise was updated during the job
            path.unlink()
    if plan is None:
        plan = plan_of(make())
        part = path.with_suffix(f".{os.getpid()}")
        plan.save(part)
        part.rename(path)
    if generation.rehearses:
        sys.exit(0)
    return plan
