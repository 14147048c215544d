"""Gather whole states of a module whose stages are on several ranks, each with its own stages' entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.runtime.agree import gather_objects
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.guards.registry import ShardRecord
from shardwise.runtime.hooks import gather_whole

Path = tuple[str, ...]  # keys on the way to a leaf of a state dict
HeldOf = Callable[[Tensor, Path], ShardRecord | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a state, as ranks describe it to each other. ``parts``: the ranks that must gather it; ``source``:
    the first that has it; ``tied``: the path of an earlier entry in the same memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    source: int
    tied: Path | None


class Gathering:
    """Brings a state dict that is spread over stages to rank ``target``, or to all (None), one tensor at a time."""

    def __init__(self, held_of: HeldOf, everyone: Communicator, target: int | None) -> None:
        self._held_of, self._everyone, self._target = held_of, everyone, target
        self._tensors: dict[Path, tuple[Tensor, ShardRecord | None]] = {}
        self._first: dict[tuple[int, torch.Size], Path] = {}
        self._whole: dict[Path, Tensor | None] = {}
        backend = dist.get_backend()
        self._wire = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def of_all_stages(self, state: Any) -> Any:
        """Return the state of all stages. Raises ShardwiseError if ranks differ in common entries."""
        described = self._described(state, ())
        every = gather_objects(described, self._everyone, self._wire, "the names of a whole state")
        return self._brought(_merged(list(enumerate(every)), ()), (), lambda _: True)

    def of_rank_0(self, state: Any, keeps: Callable[[Path], bool]) -> Any:
        """Return rank 0's state on all ranks, with None for tensors that this rank does not keep."""
        described = self._described(state if dist.get_rank() == 0 else None, ())
        every = gather_objects(described, self._everyone, self._wire, "the names of a whole state")
        return self._brought(every[0], (), keeps)

    def _described(self, node: Any, path: Path) -> Any:
        if isinstance(node, Mapping):
            return {key: self._described(value, (*path, str(key))) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self._described(value, (*path, str(i))) for i, value in enumerate(node))
        if not isinstance(node, Tensor):
            return node
        record = self._held_of(node, path)
        if record is None and not node.dim():
            return node.detach().cpu()
        self._tensors[path] = node.detach(), record
        first = self._first.setdefault((node.data_ptr(), node.shape), path) if node.numel() else path
        is_split = record is not None and bool(record.layout.positions)
        shape = record.layout.shape if record is not None and is_split else tuple(node.shape)
        parts = record.ranks.place.ranks if record is not None and is_split else ()
        return Entry(node.dtype, shape, parts, dist.get_rank(), None if first == path else first)

    def _brought(self, node: Any, path: Path, keeps: Callable[[Path], bool]) -> Any:
        if isinstance(node, Mapping):
            return {key: self._brought(value, (*path, str(key)), keeps) for key, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self._brought(value, (*path, str(i)), keeps) for i, value in enumerate(node))
        if not isinstance(node, Entry):
            return node
        if node.tied is None:
            self._whole[path] = self._received(node, path, keeps)
        return self._whole[node.tied or path]

    def _received(self, node: Entry, path: Path, keeps: Callable[[Path], bool]) -> Tensor | None:
        what = f"the whole of {'.'.join(path)}"
        tensor, record = self._tensors.get(path, (None, None))
        if tensor is not None and record is not None and dist.get_rank() in node.parts:
            tensor = gather_whole(tensor.to(self._wire), record.layout, what, record.ranks)
        if dist.get_rank() != node.source:
            is_target = self._target in (None, dist.get_rank())
            tensor = torch.empty(node.shape if is_target else 0, dtype=node.dtype, device=self._wire)
        assert tensor is not None, "the source has it"
        tensor = self._everyone.bring(tensor.to(self._wire), node.source, self._target, what)
        if (self._target is not None and dist.get_rank() != self._target) or not keeps(path):
            return None
        kept = tensor if self._target is None else tensor.cpu()
        mine = self._tensors.get(path)
        return kept.clone() if mine is not None and kept.data_ptr() == mine[0].data_ptr() else kept


def _merged(nodes: Sequence[tuple[int, Any]], path: Path) -> Any:
    """Merge the ranks' descriptions of a state: (rank, node) pairs. Raises ShardwiseError for differences."""
    (rank, first), *others = nodes
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for _, node in nodes for key in node)
        return {key: _merged([(r, node[key]) for r, node in nodes if key in node], (*path, str(key))) for key in keys}
    if isinstance(first, list):
        if path[-1] == "params":  # the names of a group's parameters
            return list(dict.fromkeys(name for _, node in nodes for name in node))
        length = max(len(node) for _, node in nodes)
        return [_merged([(r, node[i]) for r, node in nodes if i < len(node)], (*path, str(i))) for i in range(length)]
    if isinstance(first, Entry):
        missing = set(first.parts) - {rank for rank, _ in nodes}
        shapes = [(f"{node.dtype} of shape {list(node.shape)}", r) for r, node in nodes]
        what = f"rank {min(missing)} has none, and rank {rank} does" if missing else ""
        if len({text for text, _ in shapes}) > 1:
            what = ", ".join(f"{text} on rank {r}" for text, r in shapes)
    else:
        differing = [r for r, node in others if not _is_equal(node, first)]
        what = f"rank {differing[0]} has a different value than rank {rank}" if differing else ""
    if what:
        fix = "create the same optimizer on every rank, and call its step and scheduler on all ranks"
        raise ShardwiseError(f"ranks disagree on {'.'.join(path)} of the whole state: {what}", fix=fix)
    return first


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second or first != first)
