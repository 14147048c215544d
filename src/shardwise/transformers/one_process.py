"""Make transformers and accelerate see the job as one process with all of the data.

With several ranks a Trainer gives each a part of every batch, wraps the model in DDP, and divides and gathers its
statistics. Under shardwise the ranks together are one device: each reads the whole batch and runs the same loop, and
only the model is split. So accelerate's state is set to one process. The process index stays the rank: rank 0 writes
files and logs.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError
from shardwise.graph.trees import bytes_of
from shardwise.launch.ranks import init_ranks
from shardwise.runtime.agree import gather_values, rank_and_world_size

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def become_one_process() -> None:
    """Join the other ranks if necessary, and set accelerate's state to one process."""
    state = PartialState()
    init_ranks()
    rank = rank_and_world_size()[0]
    state.distributed_type = DistributedType.NO
    state.num_processes = 1
    if state.process_index != rank:  # the script has created the process group itself
        state.process_index = state.local_process_index = rank
    AcceleratorState._reset_state()  # copies by an earlier Trainer or the script


def check_same(value: Any, what: str, fix: str) -> None:
    """Raise ShardwiseError, on every rank, if a tree of tensors and other values differs from rank 0's."""
    everywhere = gather_values([_digest(leaf) for leaf in pytree.tree_leaves(value)])
    differing = [rank for rank, digests in enumerate(everywhere) if digests != everywhere[0]]
    if differing:
        raise ShardwiseError(f"rank {differing[0]} has {what} than rank 0", fix=fix)


def _digest(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return _ADDRESS.sub("", repr(leaf))  # objects that differ only in their address count as equal
    return f"{leaf.dtype} {tuple(leaf.shape)} {hashlib.sha256(bytes_of(leaf)).hexdigest()}"
