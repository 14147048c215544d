"""``sw.Recovery``: resume a run after it was stopped or after ranks were lost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import PlanWarning
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.generation import Generation, current
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.runtime.replicas import ReplicaCheck
from shardwise.runtime.stage_replicas import PipelineCheck
from shardwise.train.agreement import gather_values, rank_and_world_size
from shardwise.train.checkpoints import (
    Optimizers,
    Resumable,
    Schedulers,
    Shares,
    TrainingState,
    as_list,
    assign_writers,
    state_of,
    values_of,
)
from shardwise.train.manifest import BLOCK_BYTES, Manifest
from shardwise.train.peers import PeerCopy, Peers, SurvivingState
from shardwise.train.resuming import Resumables, load_checkpoint, load_one
from shardwise.train.retention import checkpoints_in, rename_later_checkpoints
from shardwise.train.rounds import Rounds
from shardwise.train.snapshots import MemorySnapshot, SnapshotWriter, forget_generations, snapshots_in

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
        folder: folder of the run's checkpoints, which you save with ``sw.save_checkpoint``.
        peer_copy: where and how often other machines keep copies.

    Attributes:
        extra: the ``extra`` value of the state that ``resume`` loaded; None without one.
    """

    def __init__(
        self,
        par: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        folder: str | Path | None = None,
        schedulers: Schedulers = (),
        scaler: Resumable | None = None,
        data: Resumable | None = None,
        peer_copy: PeerCopy | None = None,
    ) -> None:
        self.par, self.folder = par, None if folder is None else Path(folder)
        self.extra: Any = None
        self._resumables = Resumables(as_list(optimizer), as_list(schedulers), scaler, data)
        stages = (
            tuple({stage.placement.ranks: None for stage in par.plan.stages}) if isinstance(par, ParallelModule) else ()
        )
        self._rounds = Rounds(next((p.device for p in par.parameters()), torch.device("cpu")), stages)
        self._generation = current.generation
        self._keeps = self._generation is not None and self._generation.num_machines == 1
        self._structure: object = None
        self._shares = Shares()
        self._writer: SnapshotWriter | None = None
        self._count = 0
        self._failed = False  # to write the latest snapshot
        self._step, self._checked, self._passed = 0, -1, 0
        self._stores = _stores(self._generation, peer_copy)

    def resume(self) -> int:
        """Load the newest state from memory or from the folder. Collective.

        If ranks held replicas that differ, this is the newest state that a replica check has passed.

        Returns:
            The number of steps that the state has finished; 0 without a state.

        Raises:
            CheckpointError, ShardwiseError: as ``sw.load_checkpoint``.
        """
        copies = [(number, kept) for number, store in enumerate(self._stores) for kept in store.whole_states()]
        snapshot, saved, limit, copy = self._choose(copies)
        checkpoint = None
        if copy is not None:
            store, kept = self._stores[copy[0]], copy[1]
            manifest = store.manifest(kept)
            what = "was kept in memory" if store.is_local else "other machines have copies of"
            self._say(f"goes on after step {kept.step}, which {what}")
            reader = partial(store.reader, kept)
            checkpoint = load_one(store.memory, lambda: manifest, reader, self.par, self._resumables, skips=False)
        elif snapshot is not None:
            self._say(f"goes on after step {snapshot.step}, which was kept in memory")
            checkpoint = load_one(
                snapshot.folder, snapshot.manifest, snapshot.reader, self.par, self._resumables, skips=False
            )
        elif saved is not None:
            assert self.folder is not None
            resumables = self._resumables
            checkpoint = load_checkpoint(
                self.folder,
                self.par,
                resumables.optimizers,
                schedulers=resumables.schedulers,
                scaler=resumables.scaler,
                data=resumables.data,
                not_after=limit,
            )
            self._say(f"goes on after step {checkpoint.step}, which was saved as {checkpoint.path.name}")
        elif self._generation is not None and self._generation.number:
            self._say("starts from the beginning: no step was kept or saved")
        self._step = 0 if checkpoint is None else checkpoint.step
        self.extra = None if checkpoint is None else checkpoint.extra
        gather_values(None)  # a barrier: all ranks have read
        for store in self._stores:
            store.forget_after(self._step)
        if rank_and_world_size()[0] == 0:
            if self.folder is not None and self.folder.is_dir():
                rename_later_checkpoints(self.folder, self._step)
            for later in self._snapshots():
                if later.step > self._step:
                    later.forget()
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
        state = self._state(step, extra) if self._keeps or due else None
        structure = self._structure if state is None else _structure(state)
        changed = structure != self._structure
        self._land()
        stops, renews, fails = self._rounds.meet(stopping, changed, self._failed)
        if fails:
            self._stop_keeping()
            self._stop_copying()
        if state is not None and renews:
            if self._keeps:
                self._renew(state)
            for store in self._stores:
                store.outdated = True
        self._structure = structure
        self._see_checked()
        if state is not None and self._keeps:
            self._fill(state, step)
        for store in due:
            if state is not None and store in self._stores:
                self._copy(store, state, step)
        self._step = step
        trail.step_done(step)
        self._rounds.skip()
        return stops

    # ------------------------------------------------------------------------------------------------------- to resume

    def _snapshots(self) -> list[MemorySnapshot]:
        return [] if self._generation is None else snapshots_in(Path(self._generation.memory))

    def _choose(self, copies: Sequence[_Copy]) -> tuple[MemorySnapshot | None, int | None, int | None, _Copy | None]:
        """Return (the snapshot to load, else the step of the newest checkpoint, the last step that may be loaded, a
        state on several machines if it is newer than both). Rank 0 decides. Collective."""
        choice: tuple[MemorySnapshot | None, int | None, int | None, _Copy | None] = (None, None, None, None)
        if rank_and_world_size()[0] == 0:
            snapshots, steps = self._snapshots(), list[int]()
            suspect = self._generation is not None and self._generation.suspect
            copies = sorted(copies, key=lambda kept: -kept[1].step)
            checked = [*(state.checked for state in snapshots[:1]), *(state.checked for _, state in copies[:1])]
            limit = max(checked, default=-1) if suspect else None
            if self.folder is not None and self.folder.is_dir():
                steps = [manifest.step for manifest in checkpoints_in(self.folder)[0].values()]
            fitting = [snapshot for snapshot in snapshots if limit is None or snapshot.step <= limit]
            saved = max((step for step in steps if limit is None or step <= limit), default=None)
            newest = fitting[0] if fitting and (saved is None or fitting[0].step >= saved) else None
            latest = max(-1 if saved is None else saved, -1 if newest is None else newest.step)
            fits = (kept for kept in copies if (limit is None or kept[1].step <= limit) and kept[1].step > latest)
            copy = next(fits, None)
            choice = newest, saved, limit, copy
        return gather_values(choice)[0]

    def _say(self, text: str) -> None:
        if rank_and_world_size()[0] == 0 and (self._generation is not None or self._stores):
            print(f"shardwise: training {text}", flush=True)

    # --------------------------------------------------------------------------------------------------------- to keep

    def _state(self, step: int, extra: Any) -> TrainingState:
        resumables = self._resumables
        state = state_of(self.par, resumables.optimizers, rank_and_world_size()[0])
        state.values.update(values_of(step, resumables.schedulers, resumables.scaler, resumables.data, extra, None))
        return state

    def _renew(self, state: TrainingState) -> None:
        """Reassign the writers and create a new snapshot writer after the tensors of a rank changed."""
        assert self._generation is not None
        memory = Path(self._generation.memory)
        if self._writer is not None:
            self._writer.close()
        self._shares, self._count = assign_writers(state), 0
        manifest = Manifest(
            step=0,
            num_ranks=rank_and_world_size()[1],
            plan="",
            metrics={},
            block_bytes=BLOCK_BYTES,
            files={},
            tensors=self._shares.stored,
            tied=self._shares.model_names(),
            values={"names": self._shares.names},
        )
        fault = ""
        try:
            self._writer = SnapshotWriter(memory / str(self._generation.number), self._shares.files, manifest)
        except OSError as error:
            fault = str(error)
        faults = [text for text in gather_values(fault) if text]
        if faults:
            self._stop_keeping(faults[0])

    def _fill(self, state: TrainingState, step: int) -> None:
        if self._writer is None:
            return
        assert self._generation is not None
        note = {
            "step": step,
            "checked": self._checked,
            "plain": state.plain,
            "values": state.values if rank_and_world_size()[0] == 0 else {},
        }
        try:
            self._writer.fill(state.parts, note)
        except OSError:
            self._failed = True  # `meet` tells the other ranks after the next step
        self._count += 1
        if self._count == 2 and rank_and_world_size()[0] == 0:  # all ranks have filled a slot
            forget_generations(Path(self._generation.memory), self._generation.number)

    def _see_checked(self) -> None:
        check = getattr(self.par, "_replicas", None)
        if isinstance(check, (ReplicaCheck, PipelineCheck)) and check.passed > self._passed:
            self._passed, self._checked = check.passed, self._step  # it saw the state before this step

    def _land(self) -> None:
        try:
            for store in self._stores:
                store.land()
        except OSError:
            self._failed = True  # `meet` tells the other ranks

    def _copy(self, store: Peers, state: TrainingState, step: int) -> None:
        if store.outdated and (fault := store.renew(state)):
            self._stop_copying(fault, [store])
            return
        try:
            store.fill(state, step, self._checked)
        except OSError:
            self._failed = True

    def _stop_copying(self, reason: str = "a rank could not write", stores: Sequence[Peers] | None = None) -> None:
        ended = self._stores if stores is None else stores
        self._stores = [store for store in self._stores if store not in ended]
        for store in ended:
            if rank_and_world_size()[0] == 0:
                who = "steps are not kept in memory" if store.is_local else "no other machine keeps copies of the state"
                what = f"{who} any more ({reason}); give {store.memory} more space"
                warnings.warn(what, PlanWarning, stacklevel=5)

    def _stop_keeping(self, reason: str = "a rank could not write") -> None:
        if not self._keeps:
            return
        self._keeps = False
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        if rank_and_world_size()[0] == 0:
            warnings.warn(
                f"steps are not kept in memory any more ({reason}): after a loss training continues from the last "
                "checkpoint; give /dev/shm more space",
                PlanWarning,
                stacklevel=4,
            )


def _stores(generation: Generation | None, peer_copy: PeerCopy | None) -> list[Peers]:
    """Create the stores of states across machines: each rank's own share of every step, and copies on peers."""
    stores: list[Peers] = []
    if generation is not None and generation.num_machines > 1:
        memory = Path(generation.memory)
        stores = [Peers(PeerCopy(memory / "steps"), is_local=True)]
        if peer_copy is None:
            stores.append(Peers(PeerCopy(memory / "copies", _DEFAULT_EVERY), between_machines=True))
    return stores if peer_copy is None else [*stores, Peers(peer_copy)]


def _structure(state: TrainingState) -> object:
    """Return the properties of a state that determine the assignment of writers."""
    return [(name, part.tensor.shape, part.tensor.dtype) for name, part in state.parts.items()]


__all__ = ["Recovery"]
