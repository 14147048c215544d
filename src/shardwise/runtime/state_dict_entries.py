"""Record and check which rank's shards the entries of a module's or optimizer's ``state_dict`` are.

Shards of another rank have the right shapes and the wrong elements. A state therefore records which elements of the
whole each entry holds: a module's in torch's ``_metadata`` (also in files), an optimizer's under its own key. Whole
tensors, as one device saves them, are cut. Entries that were copied into another dict cannot be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from shardwise.errors import ShardwiseError, listed
from shardwise.layouts.boxes import boxes
from shardwise.runtime.guards.registry import ShardRecord
from shardwise.runtime.local_shards import shard

KEY = "shards"
K = TypeVar("K", str, int)


def shard_metadata(shards: Mapping[K, ShardRecord], rank: int) -> dict[str, Any]:
    """Return the record of which elements the entries hold, as plain numbers and strings. ``shards``: by the keys of
    the state."""
    return {"rank": rank, "boxes": {key: _boxes(shard) for key, shard in shards.items()}}


def check_entries(
    record: Mapping[str, Any], shards: Mapping[K, ShardRecord], rank: int, name_of: Callable[[K], str] = str
) -> None:
    """Raise ShardwiseError for entries that hold other elements than this rank's. ``record``: that of the state, or
    an empty mapping."""
    boxes = record.get("boxes", {})
    foreign = [name_of(key) for key, shard in shards.items() if key in boxes and boxes[key] != _boxes(shard)]
    if foreign:
        whose = "were sharded differently" if record["rank"] == rank else f"are the shards of rank {record['rank']}"
        raise ShardwiseError(
            f"{listed(foreign)} of this state {whose}, but rank {rank} holds other elements of them",
            fix="load the state on the rank that stored it; states of sw.save_checkpoint and "
            "torch.distributed.checkpoint can be loaded by any rank and plan",
        )


def cut_entries(state: Mapping[str, Any], shards: Mapping[str, ShardRecord]) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the entries that are whole tensors, by the keys of ``shards``."""
    return {
        key: shard(state[key], record.layout, record.ranks.coordinates).clone()
        for key, record in shards.items()
        if isinstance(state.get(key), torch.Tensor) and tuple(state[key].shape) == record.layout.shape
    }


def _boxes(record: ShardRecord) -> list[list[list[int]]]:
    """Return the boxes of a shard as nested lists, which files preserve."""
    return [
        [list(box.offsets), list(box.sizes), list(box.at)] for box in boxes(record.layout, record.ranks.coordinates)
    ]
