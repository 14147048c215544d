"""Snapshots of the training state in memory after every step, to survive the loss of ranks.

A snapshot is a checkpoint in memory that outlives processes, without checksums and atomic renames: its files are
overwritten in place. There are two alternating *slots*. A rank fills a slot only after all ranks have filled the other
one (they synchronize in between). A slot is valid for a rank only while its *note* exists, which is deleted before
filling and written afterwards. So whenever ranks are killed, one slot is complete: that of the last step, or of the
step before.

==========================  ========================================================================
``GENERATION/tensors.json`` a checkpoint's manifest, without values: which file has which elements
``GENERATION/NAME-SLOT``    a file of the manifest
``GENERATION/note-R-SLOT``  rank R has filled its files of a slot: the step, and values of that step
==========================  ========================================================================

As in a checkpoint, each replicated element is written by one rank, in equal shares.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.train.agreement import rank_and_world_size
from shardwise.train.files import CheckpointReader, StagedFile
from shardwise.train.manifest import BLOCK_BYTES, DataFile, Manifest, parse_manifest
from shardwise.train.parts import TensorPart
from shardwise.train.sharing import PlannedFile

_NUM_SLOTS = 2
_TENSORS = "tensors.json"


class SnapshotWriter:
    """Fills the slots of one generation. ``files``: of all ranks. Raises OSError if memory is full."""

    def __init__(self, folder: Path, files: Sequence[Sequence[PlannedFile]], manifest: Manifest) -> None:
        self.folder, self.rank = folder, rank_and_world_size()[0]
        self.files, self.slot = files[self.rank], 0
        folder.mkdir(exist_ok=True)
        self.staged = [[StagedFile(file, self._map(file, slot)) for file in self.files] for slot in range(_NUM_SLOTS)]
        if self.rank == 0:
            every = (entry for rank_files in files for entry in rank_files)
            data = {entry.name: DataFile(0, entry.num_bytes, no_checksums(entry.num_bytes)) for entry in every}
            write_atomically(folder / _TENSORS, replace(manifest, files=data).to_text())

    def _map(self, file: PlannedFile, slot: int) -> torch.Tensor:
        path = self.folder / f"{file.name}-{slot}"
        with path.open("wb") as opened:
            if file.num_bytes:  # reserve now: a later write to full memory would kill the process (SIGBUS)
                os.posix_fallocate(opened.fileno(), 0, file.num_bytes)
        return torch.from_file(str(path), shared=True, size=file.num_bytes, dtype=torch.uint8)

    def fill(self, parts: Mapping[str, TensorPart], note: Mapping[str, Any]) -> None:
        """Copy this rank's parts to the next slot. All ranks must have filled the previous one. Raises OSError."""
        slot, self.slot = self.slot, (self.slot + 1) % _NUM_SLOTS
        path = self.folder / f"note-{self.rank}-{slot}"
        path.unlink(missing_ok=True)
        for staged in self.staged[slot]:
            staged.fill(parts)
        write_atomically(path, json.dumps(note))

    def close(self) -> None:
        """Delete this rank's files."""
        self.staged = []
        for path in [self.folder / f"note-{self.rank}-{slot}" for slot in range(_NUM_SLOTS)]:
            path.unlink(missing_ok=True)
        for file in self.files:
            for slot in range(_NUM_SLOTS):
                (self.folder / f"{file.name}-{slot}").unlink(missing_ok=True)


@dataclass(frozen=True)
class MemorySnapshot:
    """A slot that all ranks have filled. ``checked``: the last step whose replicas had been compared and were equal."""

    folder: Path
    slot: int
    step: int
    checked: int

    def manifest(self) -> Manifest:
        """Return the manifest with the values of the step. Raises ShardwiseError or OSError if it is invalid."""
        manifest = parse_manifest((self.folder / _TENSORS).read_text())
        notes = _notes(self.folder, self.slot, manifest.num_ranks)
        plain = {name: kept for note in notes.values() for name, kept in note["plain"].items()}
        values = {**manifest.values, **notes[0]["values"], "plain": plain}
        return replace(manifest, step=self.step, values=values)

    def reader(self, manifest: Manifest) -> CheckpointReader:
        return _SlotReader(self.folder, manifest, self.slot)

    def forget(self) -> None:
        for path in self.folder.glob(f"note-*-{self.slot}"):
            path.unlink(missing_ok=True)


class _SlotReader(CheckpointReader):
    """Reads a slot. Copies between memories need no checksums."""

    def __init__(self, folder: Path, manifest: Manifest, slot: int) -> None:
        super().__init__(folder, manifest)
        self._slot = slot

    def path(self, file: str) -> Path:
        return self.folder / f"{file}-{self._slot}"

    def _verify_blocks(self, *_: Any) -> None:
        pass


def snapshots_in(memory: Path) -> list[MemorySnapshot]:
    """Return the complete snapshots of all generations, newest first."""
    snapshots: list[MemorySnapshot] = []
    for folder in memory.iterdir():
        with contextlib.suppress(OSError, ShardwiseError):  # the generation ended before its first step
            count = parse_manifest((folder / _TENSORS).read_text()).num_ranks
            for slot in range(_NUM_SLOTS):
                notes = _notes(folder, slot, count)
                steps = {note["step"] for note in notes.values()}
                if len(notes) == count and len(steps) == 1:
                    snapshots.append(
                        MemorySnapshot(folder, slot, steps.pop(), min(note["checked"] for note in notes.values()))
                    )
    return sorted(snapshots, key=lambda snapshot: -snapshot.step)


def no_checksums(num_bytes: int) -> str:
    return "00000000" * -(-num_bytes // BLOCK_BYTES)


def _notes(folder: Path, slot: int, count: int) -> dict[int, Any]:
    notes: dict[int, Any] = {}
    for rank in range(count):
        with contextlib.suppress(FileNotFoundError):
            notes[rank] = json.loads((folder / f"note-{rank}-{slot}").read_text())
    return notes


def forget_generations(memory: Path, before: int) -> None:
    """Delete the snapshots of earlier generations."""
    for folder in memory.iterdir():
        if folder.name.isdigit() and int(folder.name) < before:
            shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.rename(part, path)


__all__ = ["MemorySnapshot", "SnapshotWriter", "forget_generations", "no_checksums", "snapshots_in", "write_atomically"]
