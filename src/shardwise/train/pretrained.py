"""``sw.save_pretrained``: write a folder that ``from_pretrained`` of transformers and peft can read.

The ranks first write a temporary checkpoint of their parts, in parallel. Then they divide the target files among them,
and each assembles its own from the checkpoint, some rows of a tensor at a time. So no rank ever needs memory for a
whole tensor beside its part, under any plan.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.layouts.boxes import Box
from shardwise.runtime.agree import raise_first, rank_and_world_size
from shardwise.runtime.initial.weights import INDEX
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.train.checkpoints import save_checkpoint
from shardwise.train.files import CheckpointReader
from shardwise.train.local_folder import AT_ONCE_BYTES, LocalFolder, Lock, lock
from shardwise.train.manifest import read_manifest
from shardwise.train.parts import MODEL, TensorPart, is_seed
from shardwise.train.sharing import WritePiece, cut_rows, safetensors_header
from shardwise.train.stores import folder_of

T = TypeVar("T")
_PARTS = ".parts"  # the temporary checkpoint in the folder


def save_pretrained(
    par: torch.nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, max_file_bytes: int = 5 * 10**9
) -> None:
    """Write the unsharded weights to a folder, as safetensors files under the original names. Call it on every rank.

    A transformers model's configuration is written as well. Of a peft model only the adapters are written. Tied weights
    are written once, and non-persistent buffers are left out. Needs about 10 MB of host memory per rank.

    Args:
        par: a parallel module, or any module that every rank holds whole.
        folder: the target folder, on a file system that all ranks share; it must not contain weights.
        dtype: dtype of floating-point tensors in the files; by default unchanged.
        max_file_bytes: maximum size of a file, unless one tensor is larger; several files get an index.

    Raises:
        CheckpointError: on all ranks, if the folder cannot be written, has weights already, or is being written by
            another process.
        ShardwiseError: ``dtype`` is not a floating-point dtype.
    """
    place = folder_of(folder)
    if not isinstance(place, LocalFolder):
        what = f"save_pretrained writes to a folder, and {folder} is in a store"
        raise CheckpointError(what, fix="write it to a folder, and copy that; sw.save_checkpoint writes to stores")
    with locked(place.path, place.path):
        _save(par, place.path, dtype, max_file_bytes)


@contextmanager
def locked(folder: Path, path: Path) -> Iterator[None]:
    """Hold rank 0's lock of ``path``, in or beside a folder to write. Collective. Raises CheckpointError on all ranks
    if another process holds it."""

    def begin() -> Lock:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        return lock(path)

    folder_lock = on_rank_zero(folder, begin)
    try:
        yield
    finally:
        if folder_lock is not None:
            folder_lock.release()


def on_rank_zero(folder: Path, act: Callable[[], T]) -> T | None:
    """Return the result of ``act``, which writes to a folder, on rank 0, and None on others. Collective. Raises
    CheckpointError on all ranks if it fails."""
    result: T | None = None
    fault: CheckpointError | None = None
    if rank_and_world_size()[0] == 0:
        try:
            result = act()
        except (OSError, ValueError) as error:
            fault = error if isinstance(error, CheckpointError) else _unwritten(folder, error)
    raise_first(CheckpointError, fault)
    return result


def _save(par: torch.nn.Module, folder: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    """Do the work of ``save_pretrained``, with the folder locked."""
    rank, num_ranks = rank_and_world_size()
    original = par.original if isinstance(par, ParallelModule) else par
    fault: ShardwiseError | None = None
    try:
        if any(folder.glob("*.safetensors")):
            what = f"{folder} has weights already"
            raise CheckpointError(what, fix="give a new folder, or delete those")
        if dtype is not None and not dtype.is_floating_point:
            raise ShardwiseError(f"dtype must be a floating-point dtype, got {dtype}")
        if rank == 0:
            shutil.rmtree(folder / _PARTS, ignore_errors=True)  # of an attempt that was killed
    except ShardwiseError as error:
        fault = error
    raise_first(ShardwiseError, fault)
    save_checkpoint(folder / _PARTS, par, step=0)
    try:
        parts = LocalFolder(folder / _PARTS)
        reader = CheckpointReader(parts, read_manifest(parts))
        names, stem = _names(original, reader)
        files = _files(reader, names, dtype, max_file_bytes)
        for position, pieces in enumerate(files):
            if position % num_ranks == rank:
                _write(folder / f"{_file_name(stem, position, len(files))}.part", pieces, reader, names)
    except (OSError, ShardwiseError) as error:
        fault = _unwritten(folder, error)
    try:
        raise_first(CheckpointError, fault)
        on_rank_zero(folder, lambda: _finish(folder, original, files, stem))  # others return when it is complete
    finally:
        if rank == 0:
            shutil.rmtree(folder / _PARTS, ignore_errors=True)
            for left in folder.glob("*.part"):
                left.unlink()


def _unwritten(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be written: {error}", fix="free space, or give another folder")


def _names(original: torch.nn.Module, reader: CheckpointReader) -> tuple[dict[str, str], str]:
    """Return (name in the files -> name in the module, prefix of the file names). A peft model's adapters have other
    names in the files."""
    tensors = (name for name in reader.manifest.tensors if name.startswith(MODEL) and not is_seed(name))
    stored = {name.removeprefix(MODEL) for name in tensors}
    in_module = dict.fromkeys(name for name, _ in (*original.named_parameters(), *original.named_buffers()))
    ordered = [*(name for name in in_module if name in stored), *sorted(stored - in_module.keys())]
    if not hasattr(original, "peft_config"):
        return {name: name for name in ordered}, "model"
    from peft import get_peft_model_state_dict

    marks = {name: torch.empty(0, device="meta") for name in ordered}
    by_mark = {id(mark): name for name, mark in marks.items()}
    adapters = get_peft_model_state_dict(original, state_dict=marks, save_embedding_layers=False)
    return {name: by_mark[id(mark)] for name, mark in adapters.items()}, "adapter_model"


def _files(
    reader: CheckpointReader, names: Mapping[str, str], dtype: torch.dtype | None, max_file_bytes: int
) -> list[list[tuple[int, WritePiece]]]:
    files: list[list[WritePiece]] = [[]]
    size = 0
    for name, stored_name in names.items():
        stored = reader.manifest.tensors[MODEL + stored_name]
        kind = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        piece = WritePiece(name, kind, stored.shape, (0,) * len(stored.shape), stored.shape)
        if files[-1] and size + piece.num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.num_bytes
    placed: list[list[tuple[int, WritePiece]]] = []
    for pieces in files:
        start, placed_pieces = 0, []
        for piece in sorted(pieces, key=lambda item: -item.dtype.itemsize):
            placed_pieces.append((start, piece))
            start += piece.num_bytes
        placed.append(placed_pieces)
    return placed


def _in_rows(piece: WritePiece) -> Iterator[WritePiece]:
    """Cut a piece into rows that fit in memory at once, where rows do."""
    rows = piece.sizes[0] if piece.sizes else 1
    count = max(1, min(-(-piece.num_bytes // AT_ONCE_BYTES), rows))
    return (cut_rows(piece, at * rows // count, (at + 1) * rows // count) for at in range(count))


def _write(
    path: Path, pieces: Sequence[tuple[int, WritePiece]], reader: CheckpointReader, names: Mapping[str, str]
) -> None:
    with path.open("wb") as file:
        file.write(safetensors_header({"__metadata__": {"format": "pt"}}, pieces))
        for some in (some for _, piece in pieces for some in _in_rows(piece)):
            stored, rows = MODEL + names[some.name], Box(some.offsets, some.sizes, (0,) * len(some.sizes))
            part = TensorPart(torch.empty(some.sizes, dtype=some.dtype), some.shape, (rows,))
            reader.verify([(stored, part.boxes)])
            reader.read(stored, part)
            file.write(part.tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _finish(
    folder: Path, original: torch.nn.Module, files: Sequence[Sequence[tuple[int, WritePiece]]], stem: str
) -> None:
    """Write the configuration, rename the files, and write the index. Raises OSError."""
    if stem == "model":
        for config in (getattr(original, "config", None), getattr(original, "generation_config", None)):
            if config is not None and hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)
    else:
        peft_config: Any = original.peft_config
        for config in peft_config.values():
            config.save_pretrained(str(folder))
    file_names = [_file_name(stem, position, len(files)) for position in range(len(files))]
    for name in file_names:
        (folder / f"{name}.part").rename(folder / name)
    if len(files) > 1:
        places = {piece.name: name for name, pieces in zip(file_names, files, strict=True) for _, piece in pieces}
        total = sum(piece.num_bytes for pieces in files for _, piece in pieces)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX.replace("model", stem, 1)).write_text(json.dumps(index, indent=2))


def _file_name(stem: str, position: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{position + 1:05}-of-{count:05}.safetensors"
