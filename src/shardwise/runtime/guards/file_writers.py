"""Refuse files that would store one rank's part under the names of the whole.

``if rank == 0: torch.save(par.state_dict(), "model.pt")``, and what frameworks do instead, would silently lose the
other ranks' parts. A file is taken as meant for one rank if its path contains ``rank`` and the rank's number.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError, listed
from shardwise.runtime.guards.dcp import ShardIndex
from shardwise.runtime.guards.registry import Patch

_OF_SAFETENSORS = ("_flatten_as_ptr", "_flatten")  # used by save, save_file and save_model; the second in old versions
_PARTS_ARE_MEANT = ("torch.distributed.checkpoint", "shardwise.")  # they store where in the whole a part lies


def missing() -> list[str]:
    """Return what this version of torch lacks besides names."""
    is_first = "_check_save_filelike" in torch.save.__code__.co_names and hasattr(
        torch.serialization, "_check_save_filelike"
    )
    return [] if is_first and {"obj", "f"} <= {*torch.save.__code__.co_varnames} else ["the first check in torch.save"]


def _refuse_file(check_file: Callable[[Any], None], file: Any) -> None:
    """Run before the first check in ``torch.save``: before the file is opened, so that an existing one is kept."""
    frame = sys._getframe(2)
    _check(frame.f_locals["obj"], file, frame)
    check_file(file)


def _refuse_parts(flatten: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    frame = sys._getframe(2)
    _check(value, frame.f_locals.get("filename"), frame)
    return flatten(value, *args, **kwargs)


def _check(value: Any, file: Any, saves: FrameType) -> None:
    """Raise ShardwiseError if a file would store only a part. ``saves``: the frame of the function the user called."""
    caller = saves.f_back
    if caller is not None and str(caller.f_globals.get("__name__")).startswith(_PARTS_ARE_MEANT):
        return
    names = list(dict.fromkeys(record.name for record in ShardIndex().shards_in(value)))
    path = str(file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", ""))
    rank = dist.get_rank() if names else 0
    if names and not re.search(rf"rank[\W_]?0*{rank}(?!\d)", path, re.IGNORECASE):
        raise ShardwiseError(
            f"rank {rank} would save its shards of {listed(names)} under the names of whole tensors, without "
            "the shards of other ranks",
            fix="call get_model_state_dict(par, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) "
            "of torch.distributed.checkpoint.state_dict on every rank and save the result of rank 0; or call "
            "sw.save_checkpoint or sw.save_pretrained on every rank; for one file per rank, loaded by the same "
            f"rank, put the rank into the path (part-rank{rank}.pt)",
            section="saving-shards",
        )


PATCHES = (
    Patch(torch.serialization, "_check_save_filelike", _refuse_file),
    *(Patch(safetensors.torch, n, _refuse_parts) for n in _OF_SAFETENSORS if hasattr(safetensors.torch, n)),
)
