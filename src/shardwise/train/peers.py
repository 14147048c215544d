"""The training state in memory that outlives processes, to survive the loss of ranks, and of machines.

Every few steps each rank copies its share of the state to files in its machine's memory: a checkpoint without checksums
and atomic renames, whose files are overwritten in place. As in a checkpoint, each replicated element is written by one
rank, in equal shares. Where machines may be lost, another machine keeps a copy of each file. If ranks of that machine
hold these elements (data-parallel replicas), they copy locally, without communication. Everything else is sent to the
corresponding rank of the next machine, overlapped with the following steps.

There are two alternating *slots*. A rank fills a slot only after all ranks have filled the other one (they synchronize
in between). A file is valid only while its *note* exists, which is deleted before filling and written afterwards. So
whenever ranks or a machine are lost, one slot is complete on the remaining machines.

==============================  ====================================================================
``NUMBER/tensors.json``         a checkpoint's manifest, without files
``NUMBER/NAME.json``            its part for one file of this machine: which elements that has
``NUMBER/NAME-SLOT``            the file, written by a rank of this machine
``NUMBER/NAME-SLOT.copy``       the copy of a file of a rank on another machine
``NUMBER/NAME-SLOT.note``       marks the file (``.copy.note``: the copy) complete, with the step and values
==============================  ====================================================================

From a GPU the copies run behind the step's kernels, into registered memory. A thread waits for them, sends what others
keep, and writes the notes, beside the next step: the ranks wait for it before they synchronize again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError, CollectiveError, PlanWarning, ShardwiseError, warn_user
from shardwise.layouts.boxes import Box
from shardwise.runtime.agree import connect_pairs, gather_values, raise_first, rank_and_world_size, rank_tree
from shardwise.runtime.host_copies import register, unregister
from shardwise.runtime.private import check_own_folder
from shardwise.runtime.rank_tree import SmallGroup
from shardwise.train.checkpoints import assign_writers
from shardwise.train.files import CheckpointReader, StagedFile
from shardwise.train.local_folder import LocalFolder
from shardwise.train.manifest import Cover, Covers, DataFile, Manifest, StoredTensor, parse_manifest, united
from shardwise.train.names import RANDOM
from shardwise.train.parts import TrainingState
from shardwise.train.sharing import PlannedFile, WritePiece, Writers, file_of, stored_in

_TENSORS, _PART, _NOTE, _COPY, _FETCHED = "tensors.json", ".json", ".note", ".copy", ".fetched"
_BLOCK_BYTES = 2**30  # the most that a manifest allows: nothing here is verified by block
_NUM_SLOTS = 2
_NO_KEEPER = -1


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """Settings for copies of the training state in the memory of other machines.

    Args:
        memory: a folder in this machine's shared memory (``"/dev/shm/run-7"``), the same for all its ranks, to which no
            other user may write. shardwise does not delete it.
        every: steps between copies; after a loss training repeats less than twice as many.

    Raises:
        ShardwiseError: ``every`` is not an integer of at least 1.
    """

    memory: str | Path
    every: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ShardwiseError(f"every must be a number of steps, 1 or more; got {self.every!r}")


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A file of the ``writer`` rank, copied by the ``keeper`` on another machine. ``is_sent``: whether it must be sent,
    because the keeper does not hold its elements; ``tag``: of the message, which no other has between the two."""

    file: PlannedFile
    writer: int
    keeper: int
    is_sent: bool
    tag: int = 0


@dataclass(frozen=True, slots=True)
class SurvivingState:
    """A state that is complete on the remaining machines."""

    step: int
    number: int
    slot: int
    checked: int


@dataclass(frozen=True)
class _Transfer:
    """A file's memory to send to a peer, or to receive from it: then with the note to write (``note``)."""

    memory: torch.Tensor
    peer: int
    tag: int
    note: Path | None = None


class _Background:
    """A function that runs in a thread, which ends with the process."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="shardwise-copies")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait for its end. Raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error


@dataclass(eq=False)
class Peers:
    """The copies of one job. All ranks create and use it together. ``is_local``: keep only each rank's own share on its
    machine, to survive the loss of ranks but not of machines; ``between_machines``: do nothing on a single machine."""

    how: PeerCopy
    is_local: bool = False
    between_machines: bool = False
    mirrored: Sequence[Mirrored] = ()  # that this rank writes or keeps
    num_files: int = 0  # of all ranks
    staged: dict[Path, StagedFile] = field(default_factory=dict)
    registered: list[torch.Tensor] = field(default_factory=list)  # memory of ``staged``, for copies from a GPU
    under_way: _Background | None = None  # the copies of the latest step
    number: int = -1
    outdated: bool = True  # ``renew`` is due
    slot: int = 0
    filled: int = 0

    def __post_init__(self) -> None:
        self.rank, self.num_ranks = rank_and_world_size()
        if self.num_ranks == 1 and not self.is_local and not self.between_machines:
            what = "peer_copy= keeps the state on other ranks, but there is only one rank"
            raise ShardwiseError(what, fix="start more ranks, or leave it out")
        self.memory = Path(self.how.memory)
        refused = ""
        try:
            self.memory.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own_folder(self.memory)
        except OSError as error:
            refused = str(error)
        place = hashlib.blake2b(f"{platform.node()}:{self.memory.resolve()}".encode(), digest_size=8)
        places = gather_values((place.digest(), refused))  # every rank gets those of all machines
        if refused := next((text for _, text in places if text), ""):
            what = f"copies of the state cannot be kept in {self.memory}: {refused}"
            raise ShardwiseError(what, fix="give a new folder, or one to which only you may write (chmod 700)")
        first = dict(zip(reversed(places), reversed(range(self.num_ranks)), strict=True))
        self.machine_of = [first[found] for found in places]  # by its first rank
        self.shares_folder, is_one = self.machine_of, len({*self.machine_of}) == 1
        self._is_first = self.shares_folder[self.rank] == self.rank
        self.is_idle = self.between_machines and is_one
        self.connected: dict[int, SmallGroup] = {}  # rank -> the group with it, for what it keeps or has kept for it
        if is_one:  # protect against the loss of single ranks
            self.machine_of = [*range(self.num_ranks)]

    def is_due(self, step: int) -> bool:
        return step % self.how.every == 0 and not self.is_idle

    # -- to keep -------------------------------------------------------------------------------------------------------

    def renew(self, state: TrainingState) -> str:
        """Set up new files after the tensors of a rank changed. Return an error text if a rank has no memory."""
        shares = assign_writers(state)
        if self.is_local:
            files = shares.writers.files_of(self.rank)
            self.mirrored = [Mirrored(file, self.rank, _NO_KEEPER, False) for file in files]
        else:
            self.mirrored = assign_keepers(shares.writers, self.machine_of, self.rank)
        self.num_files = sum(gather_values(sum(mirror.writer == self.rank for mirror in self.mirrored)))
        self.connected = connect_pairs((mirror.writer, mirror.keeper) for mirror in self.mirrored if mirror.is_sent)
        common = Manifest(
            num_ranks=self.num_ranks,
            block_bytes=_BLOCK_BYTES,
            tensors=shares.writers.tensors(),
            tied=shares.model_names(),
            values={"names": shares.names},
        )
        self.outdated = False
        self.memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        numbers = gather_values([int(path.name) for path in self.memory.iterdir() if path.name.isdigit()])
        self.number, self.slot, self.filled = 1 + max((n for part in numbers for n in part), default=-1), 0, 0
        self._forget_staged()
        fault, refused, on_gpu = "", "", any(part.tensor.is_cuda for part in state.parts.values())
        try:
            self.folder.mkdir(exist_ok=True)
            for mirror in self.mirrored:
                self._write_part(mirror)
                for slot in range(_NUM_SLOTS):
                    for copy in (False, True):
                        if self.rank == (mirror.keeper if copy else mirror.writer):
                            path = self._path(mirror, slot, copy=copy)
                            memory = _map(path, mirror.file.num_bytes)
                            self.staged[path] = StagedFile(mirror.file, memory)
                            if on_gpu and memory.nbytes:
                                refused = refused or register(memory)
                                if not refused:
                                    self.registered.append(memory)
            if self._is_first:
                _write(self.folder / _TENSORS, common.to_text())
        except OSError as error:
            fault = str(error)
        faults, refusals = zip(*gather_values((fault, refused)), strict=True)
        if self.rank == 0 and (text := next(filter(None, refusals), "")):
            what = f"the host waits for the copies of each state: their memory cannot be pinned ({text})"
            warn_user(f"{what}; raise the limit of locked memory (ulimit -l)", PlanWarning)
        return next(filter(None, faults), "")

    def _write_part(self, mirror: Mirrored) -> None:
        """Write which elements a file has, once for each machine that has it."""
        if self.rank == mirror.writer or self.shares_folder[mirror.writer] != self.shares_folder[self.rank]:
            size = mirror.file.num_bytes
            files = {mirror.file.name: DataFile(0, size, "00000000" * -(-size // _BLOCK_BYTES))}
            part = Manifest(
                num_ranks=self.num_ranks, block_bytes=_BLOCK_BYTES, files=files, tensors=stored_in([mirror.file])
            )
            _write(self.folder / f"{mirror.file.name}{_PART}", part.to_text())

    def land(self) -> None:
        """Wait for the copies of the previous step, before the ranks synchronize. Raises CollectiveError if one does
        not arrive, and OSError if a note cannot be written."""
        if self.under_way is not None:
            try:
                self.under_way.wait()
            except Exception:  # an interrupt leaves it under way
                self.under_way = None
                raise
            self.under_way = None
        if self.filled == _NUM_SLOTS and self._is_first:
            self.filled += 1  # once
            for folder in self.memory.iterdir():
                if folder.name.isdigit() and int(folder.name) < self.number:
                    shutil.rmtree(folder, ignore_errors=True)

    def fill(self, state: TrainingState, step: int, checked: int) -> None:
        """Copy this rank's share to the next slot, and start sending the files that others keep. Call it after ``land``
        and a synchronization of all ranks. Raises OSError if a note cannot be written."""
        slot, self.slot = self.slot, (self.slot + 1) % _NUM_SLOTS
        values, plain = state.values, dict(state.plain)
        if not self.is_local:  # any machine's notes must be enough
            everywhere = rank_tree().gather(plain) if self.num_ranks > 1 else [plain]  # on the host, beside GPUs
            plain = {name: kept for rank_states in everywhere for name, kept in rank_states.items()}
        elif self.rank:
            values = {}
        note = {"step": step, "checked": checked, "of": self.num_files, "values": values, "plain": plain}
        text = json.dumps(note)
        filled: list[Path] = []
        for mirror in self.mirrored:
            for copy, rank in ((False, mirror.writer), (True, mirror.keeper)):
                if rank == self.rank:
                    path = self._path(mirror, slot, copy=copy)
                    _note(path).unlink(missing_ok=True)
                    if not (copy and mirror.is_sent):
                        self.staged[path].fill(state.parts)
                        filled.append(path)
        transfers: list[_Transfer] = []
        for mirror in self.mirrored:
            if mirror.is_sent and mirror.writer == self.rank:
                transfers.append(_Transfer(self.staged[self._path(mirror, slot)].buffer, mirror.keeper, mirror.tag))
            elif mirror.is_sent and mirror.keeper == self.rank:
                path = self._path(mirror, slot, copy=True)
                transfers.append(_Transfer(self.staged[path].buffer, mirror.writer, mirror.tag, _note(path)))
        self.filled += self.filled < _NUM_SLOTS
        device = next((part.tensor.device for part in state.parts.values() if part.tensor.is_cuda), None)
        if device is not None:
            copied = torch.cuda.current_stream().record_event()
            self.under_way = _Background(partial(self._finish, device, copied, filled, transfers, text))
            return
        fault = self._note(filled, text)
        if transfers:
            self.under_way = _Background(partial(self._transfer, transfers, text))
        if fault is not None:
            raise fault

    def _finish(
        self,
        device: torch.device,
        copied: torch.cuda.Event,
        filled: Sequence[Path],
        transfers: Sequence[_Transfer],
        text: str,
    ) -> None:
        """Mark the ``filled`` files complete once they are ``copied``, and then transfer."""
        torch.cuda.set_device(device)  # of this thread, which would use GPU 0
        copied.synchronize()
        fault = self._note(filled, text)
        self._transfer(transfers, text)
        if fault is not None:
            raise fault

    def _note(self, filled: Sequence[Path], text: str) -> OSError | None:
        """Mark files complete. Return an error to raise behind the transfers, for which other ranks wait."""
        try:
            for path in filled:
                _write(_note(path), text)
        except OSError as error:
            return error
        return None

    def _transfer(self, transfers: Sequence[_Transfer], text: str) -> None:
        """Send and receive, and mark the received files complete."""
        works: list[Any] = []
        for transfer in transfers:
            group = self.connected[transfer.peer]
            start = group.send if transfer.note is None else group.receive
            works.append(start(transfer.memory, transfer.peer, transfer.tag))
        for transfer, work in zip(transfers, works, strict=True):
            peer = transfer.peer
            try:
                work.wait()
            except RuntimeError as error:
                what = f"the copy of a state on its way between this rank and rank {peer} did not arrive: {error}"
                raise CollectiveError(what, (peer,)) from error
            if transfer.note is not None:
                _write(transfer.note, text)

    def _forget_staged(self) -> None:
        assert self.under_way is None, "the copies have landed"
        for memory in self.registered:
            unregister(memory)
        self.staged, self.registered = {}, []

    @property
    def folder(self) -> Path:
        return self.memory / str(self.number)

    def _path(self, mirror: Mirrored, slot: int, *, copy: bool = False) -> Path:
        return self.folder / f"{mirror.file.name}-{slot}{_COPY * copy}"

    def close(self) -> None:
        """Delete this rank's files."""
        for path in self.staged:
            _note(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        self._forget_staged()

    # -- to resume -----------------------------------------------------------------------------------------------------

    def whole_states(self) -> list[SurvivingState]:
        """Return the complete states, newest first, on rank 0, which alone hears of all files; [] on others.
        Collective."""
        notes = self._notes()
        everywhere = rank_tree().gather(notes, to_all=False) if self.num_ranks > 1 else [notes]
        if self.rank:
            return []
        seen: dict[tuple[int, int, int], dict[str, tuple[int, int]]] = defaultdict(dict)
        for number, slot, file, step, checked, num_files in (note for have in everywhere for note in have):
            seen[step, number, slot][file] = checked, num_files
        return [
            SurvivingState(*key, min(checked for checked, _ in files.values()))
            for key, files in sorted(seen.items(), reverse=True)
            if {num_files for _, num_files in files.values()} == {len(files)}
        ]

    def _notes(self) -> list[tuple[int, int, str, int, int, int]]:
        notes = []
        for path in self.memory.glob(f"*/*{_NOTE}") if self._is_first else ():
            file, _, slot = path.name.removesuffix(_NOTE).removesuffix(_COPY).rpartition("-")
            if note := _read(path):
                with contextlib.suppress(ValueError, KeyError):
                    notes.append((int(path.parent.name), int(slot), file, note["step"], note["checked"], note["of"]))
        return notes

    def manifest(self, kept: SurvivingState) -> Manifest:
        """Return the manifest of a state without its files, from a machine that has it. Collective. Raises
        ShardwiseError if none has."""
        found = [content for content in gather_values(self._content(kept)) if content is not None]
        if not found:
            raise ShardwiseError(f"no machine has the manifest of step {kept.step}")
        manifest, values, plain = found[0][0], dict[str, Any](), dict[str, Any]()
        for _, notes in found:
            for note in notes:
                values |= note["values"]
                plain |= note["plain"]
        return replace(manifest, step=kept.step, values={**manifest.values, **values, "plain": plain})

    def _content(self, kept: SurvivingState) -> tuple[Manifest, list[Any]] | None:
        """Return the manifest and the notes of a state on this machine, on its first rank, if there are any. (A machine
        may keep no file, and some files of the slot may be of another step.) The others get it parsed, which costs an
        eighth of parsing it."""
        folder = self.memory / str(kept.number)
        paths = (path for end in ("", _COPY) for path in folder.glob(f"*-{kept.slot}{end}{_NOTE}"))
        notes = [note for note in map(_read, paths if self._is_first else ()) if note.get("step") == kept.step]
        if notes:
            with contextlib.suppress(OSError, ShardwiseError):
                return parse_manifest((folder / _TENSORS).read_text()), notes
        return None

    def parts(self, kept: SurvivingState) -> dict[str, tuple[Covers, int, Manifest]]:
        """Return, on this machine's first rank, file -> (boxes around what it has, this rank, the manifest's part) of a
        state's files here."""
        parts: dict[str, tuple[Covers, int, Manifest]] = {}
        for number, slot, file, step, *_ in self._notes():
            if (step, number, slot) == (kept.step, kept.number, kept.slot):
                path = self.memory / str(number) / f"{file}{_PART}"
                try:
                    part = parse_manifest(path.read_text())
                except (OSError, ShardwiseError) as error:
                    why = str(error).partition("\n")[0]
                    warn_user(f"what {path} describes is not taken from here: {why}", PlanWarning)
                    continue
                parts[file] = part.covers(), self.rank, part
        return parts

    def forget_after(self, step: int) -> None:
        """Delete the notes of states after ``step``, from which training continues, and the fetched files."""
        for path in self.memory.glob(f"*/*{_NOTE}"):
            if _read(path).get("step", step) > step:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        for path in self.memory.glob(f"*/*{_FETCHED}"):
            path.unlink(missing_ok=True)


class PeerReader(CheckpointReader):
    """Reads a state whose files may be on other machines; files that ranks of this machine need are fetched. Before
    ``prepare`` it only notes what is wanted: no rank knows all files."""

    def __init__(self, peers: Peers, kept: SurvivingState, manifest: Manifest) -> None:
        self.memory = peers.memory / str(kept.number)
        super().__init__(LocalFolder(self.memory), manifest)
        self._peers, self._kept = peers, kept
        self._wanted: list[tuple[str, list[Box]]] = []
        self._source = -1  # the rank whose generators are wanted
        self._needed: set[str] = set()

    def verify(self, parts: Iterable[tuple[str, Iterable[Box]]]) -> None:
        self._wanted += [(name, list(boxes)) for name, boxes in parts]

    def random_of(self, rank: int) -> StoredTensor | None:
        self._source = rank
        return self.manifest.tensors.get(f"{RANDOM}{rank}")

    def file_name(self, file: str) -> str:
        return self.path(file).name

    def path(self, file: str) -> Path:
        base = self.memory / f"{file}-{self._kept.slot}"
        local = [path for path in (base, Path(f"{base}{_COPY}")) if self._is_whole(path)]
        return local[0] if local else Path(f"{base}{_FETCHED}")

    def _is_whole(self, path: Path) -> bool:
        """Return whether a file is of the right step: the next one may have been in transfer at the loss."""
        return bool(_read(_note(path)).get("step") == self._kept.step)

    def _verify_blocks(self, file: str, touched: Any) -> None:
        self._needed.add(file)

    def prepare(self) -> None:
        """Find the files that have what is wanted, and fetch the missing ones, once per machine, from a machine that
        has them. Collective. Raises CheckpointError on all ranks if a rank does not find all that it wants."""
        peers, fault, rank = self._peers, None, self._peers.rank
        around = [(name, Cover(box.offsets, box.sizes, box.numel)) for name, boxes in self._wanted for box in boxes]
        parts = _routed(peers.parts(self._kept), united([*around, (RANDOM, _only(self._source))]))
        try:
            self.manifest = self.manifest.with_parts({file: part for file, (_, _, part) in parts.items()})
            if (generators := self.random_of(self._source)) is not None:
                self._wanted.append((f"{RANDOM}{self._source}", [Box.whole(generators.shape)]))
            super().verify(self._wanted)
        except ShardwiseError as error:
            fault = error
        raise_first(CheckpointError, fault)
        first, asked = peers.shares_folder[rank], {}
        for file in (file for file in self._needed if not self._is_whole(self.path(file))):
            _, owner, part = parts[file]
            ends = {"from": _only(owner), "to": _only(first)}
            asked[file, first] = (ends, owner, part.files[file].num_bytes)
        asked = _routed(asked, {"from": _only(rank), "to": _only(rank)})
        fetches = [(*key, owner, size) for key, (_, owner, size) in sorted(asked.items()) if rank in (owner, key[1])]
        connected = connect_pairs((owner, to) for _, to, owner, _ in fetches)
        tags, works = defaultdict[tuple[int, int], Iterator[int]](count), list[Any]()
        for file, to, owner, size in fetches:
            tag = 2 * next(tags[owner, to]) + (owner < to)  # two ranks may have files for each other
            if rank == owner:
                works.append(connected[to].send(self._content(file).data, to, tag))
            else:
                path = Path(f"{self.memory / file}-{self._kept.slot}{_FETCHED}")
                path.parent.mkdir(exist_ok=True)
                works.append(connected[owner].receive(_map(path, size), owner, tag))
        for work in works:
            work.wait()
        gather_values(None)  # a barrier: the other ranks of this machine read what its first rank fetched


def _only(rank: int) -> Cover:
    return Cover((rank,), (1,), 1)


def _routed(offered: Mapping[Any, Any], wanted: Covers) -> dict[Any, Any]:
    """Return, of what all ranks offer, what overlaps what this rank wants, and some more. Collective. ``offered``:
    tuples that begin with covers."""
    if rank_and_world_size()[1] == 1:
        return dict(offered)
    return rank_tree().route(
        offered, wanted, lambda every: united(pair for covers in every for pair in covers.items()),
        lambda value, wants: any(name in wants and wants[name].meets(cover) for name, cover in value[0].items()),
    )  # fmt: skip


def assign_keepers(writers: Writers, machine_of: Sequence[int], rank: int) -> list[Mirrored]:
    """Return the files that a rank writes or keeps. Those of each writer are split so that each file has one keeper on
    another machine: of the ranks that hold all of it, if there are some, else of all ranks (``_keepers``)."""
    everyone = tuple(range(len(machine_of)))
    keepers_of = {ranks: _keepers(ranks, machine_of) for ranks in {everyone, *writers.held_by(rank)}}
    kept = {writer for keepers in keepers_of.values() for writer, keeper in keepers.items() if keeper == rank}
    mirrors: list[Mirrored] = []
    for writer in sorted({rank, *kept}):
        holders, numbers = dict(writers.pieces_of(writer)), count()
        for file in writers.files_of(writer):
            groups: dict[tuple[int, bool], list[WritePiece]] = defaultdict(list)
            for _, piece in file.pieces:
                ranks = holders[piece]
                if ranks not in keepers_of:
                    keepers_of[ranks] = _keepers(ranks, machine_of)
                keepers = keepers_of[ranks]
                groups[(keepers or keepers_of[everyone])[writer], not keepers].append(piece)
            base = file.name.removesuffix(".safetensors")
            for (keeper, is_sent), pieces in groups.items():
                named = f"{base}-for-{keeper:05}{'-sent' * is_sent}.safetensors"
                tag = 2 * next(numbers) + (writer < keeper)  # two ranks may keep copies of each other
                if rank in (writer, keeper):
                    mirrors.append(Mirrored(file_of(named, pieces), writer, keeper, is_sent, tag))
    return mirrors


def _keepers(ranks: Sequence[int], machine_of: Sequence[int]) -> dict[int, int]:
    """Return, for each of some ranks, the corresponding one of the next machine that has some; {} if one has all. So a
    rank finds those that it keeps without looking at what other ranks hold."""
    by_machine: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        by_machine[machine_of[rank]].append(rank)
    machines = list(by_machine.values())
    pairs = zip(machines, [*machines[1:], machines[0]], strict=True) if len(machines) > 1 else ()
    return {rank: after[at % len(after)] for here, after in pairs for at, rank in enumerate(here)}


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    with path.open("wb") as opened:
        if num_bytes:  # reserve now: a later write to full memory would kill the process (SIGBUS)
            os.posix_fallocate(opened.fileno(), 0, num_bytes)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def _note(path: Path) -> Path:
    return path.with_name(path.name + _NOTE)


def _read(note: Path) -> dict[str, Any]:
    """Return the content of a note; {} if there is none, or it is torn."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(note.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.rename(part, path)
