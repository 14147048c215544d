"""Make torch's distributed checkpoints handle shards correctly.

``torch.distributed.checkpoint`` takes a plain tensor for a whole one: it stores it once, from one rank, and loads it on
all ranks. A shard is a plain tensor too. It is recognized by its memory, which an entry of ``par.state_dict()`` or of
an optimizer's state shares with the shard. Torch then gets a tensor in the same memory that implements torch's chunk
protocol (the three methods that ``DTensor`` has). It reports which boxes of the global tensor the shard holds. Writing
and reading chunks is then correct for any layout, and under another plan.

``get_model_state_dict`` and its relatives return this rank's shards, as for other sharded modules, or whole tensors
with ``full_state_dict``. The functions that set states cut whole tensors.

Cases that would still go wrong are refused: views of a shard; writers that keep one chunk of a name per rank when a
rank holds several; and staging of ``async_save`` that copies tensors without their chunk methods. A copy cannot be
noticed: ``{name: t.clone() for name, t in par.state_dict().items()}``.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as of_modules
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager

from shardwise.errors import ShardwiseError
from shardwise.layouts.boxes import Box, boxes
from shardwise.layouts.text import format_layout
from shardwise.runtime.agree import gather_objects
from shardwise.runtime.communicator import Communicator, rank_device
from shardwise.runtime.guards.registry import Owners, Patch, ShardRecord, held_shards, ranks_of_stages
from shardwise.runtime.hooks import gather_whole

Path = tuple[str, ...]  # keys on the way to a leaf of a state dict


# ------------------------------------------------------------------------------------------------------ chunk protocol


@dataclass(frozen=True)
class Chunks:
    """Torch's chunk protocol for a part of a global tensor. Copies of the tensor keep it. ``several``: whether some
    rank holds several boxes."""

    tensor: Tensor
    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    several: bool

    def attach(self) -> Tensor:
        """Attach the chunk protocol to the tensor."""
        tagged: Any = self.tensor
        tagged.__create_write_items__ = self.write_items
        tagged.__create_chunk_list__ = self.chunk_list
        tagged.__get_tensor_shard__ = self.tensor_shard
        return self.tensor

    @staticmethod
    def of(tensor: Any) -> Chunks | None:
        """Return the chunks attached to a tensor, if any."""
        chunks = getattr(getattr(tensor, "__create_chunk_list__", None), "__self__", None)
        return chunks if isinstance(chunks, Chunks) else None

    def write_items(self, name: str, tensor: Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(tensor)
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(chunk.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in self.chunk_list()
        ]

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def tensor_shard(self, index: MetadataIndex) -> Tensor:
        (box,) = (box for box in self.boxes if box.offsets == tuple(index.offset or ()))
        return self.tensor[box.local_rows]


def _telling(tensor: Tensor, record: ShardRecord) -> Tensor:
    """Return a tensor in the same memory with the chunk protocol attached."""
    layout, mesh = record.layout, record.layout.mesh
    several = any(len(boxes(layout, mesh.coordinates(device))) > 1 for device in range(mesh.num_devices))
    here = boxes(layout, record.ranks.coordinates)
    return Chunks(tensor.detach(), record.name, layout.shape, here, several).attach()


def _tell_stages(function: Callable[..., Any], state_dict: Any) -> Any:
    index = ShardIndex()
    tagged = index.replaced(function(state_dict), lambda tensor, record, _: _telling(tensor, record))
    if index.seen:
        _check_stage(index)
    return tagged


def _check_stage(index: ShardIndex) -> None:
    """Raise ShardwiseError in an ``async_save`` whose copies would lose the chunk protocol."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _body(saver.async_save):
        frame = frame.f_back
    if frame is None:
        return
    stager, kind = frame.f_locals.get("async_stager"), frame.f_locals.get("async_checkpointer_type")
    if type(stager) is not DefaultStager or kind is saver.AsyncCheckpointerType.PROCESS:
        index.refuse(
            "this async_save copies tensors without their position in the whole tensor",
            "omit storage_writer= (give checkpoint_id=) and the process-based checkpointer, or use "
            "sw.save_checkpoint(..., blocking=False)",
        )


def _body(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def _tell_writers(
    function: Callable[..., Any], state_dict: Any, storage_writer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    tagged = ShardIndex().replaced(state_dict, lambda tensor, record, _: _telling(tensor, record))
    if isinstance(storage_writer, HuggingFaceStorageWriter):
        parts = filter(None, map(Chunks.of, _tensors_in(tagged)))
        several = next((part.name for part in parts if part.several), None)
        if several is not None:
            what = f"this writer stores one chunk per name and rank, but ranks hold several chunks of {several}"
            fix = "sw.save_pretrained(par, folder) writes such files, for any layout"
            raise ShardwiseError(what, fix=fix)
    return function(tagged, storage_writer, *args, **kwargs)


def _tell_readers(function: Callable[..., Any], state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """Load into the caller's dicts: their tensors are filled in place, other values are replaced."""

    def tag(tensor: Tensor, record: ShardRecord, place: tuple[Any, Any]) -> Tensor:
        alias: Any = _telling(tensor, record)
        alias.size = lambda: torch.Size(record.layout.shape)  # torch compares this with the file
        before.append((*place, tensor))
        place[0][place[1]] = alias
        return tensor

    before: list[tuple[Any, Any, Tensor]] = []
    try:
        ShardIndex().replaced(state_dict, tag)
        return function(state_dict, *args, **kwargs)
    finally:
        for container, key, tensor in before:
            container[key] = tensor


# ------------------------------------------------------------------------------------------------------- whole tensors


_module: ContextVar[torch.nn.Module | None] = ContextVar("module", default=None)  # the module whose state is requested


def _note_module(function: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    before = _module.set(model)
    try:
        return function(model, *args, **kwargs)
    finally:
        _module.reset(before)


def _gather(function: Callable[..., Any], state_dict: Any, info: Any) -> Any:
    if not info.full_state_dict:
        tagged = ShardIndex().replaced(state_dict, lambda tensor, record, _: _telling(tensor, record))
        return _retold(function(state_dict, info), tagged) if info.cpu_offload else state_dict
    target = 0 if info.cpu_offload else None  # as in torch: with cpu_offload only rank 0 gets it
    everyone = ranks_of_stages(_module.get())
    if everyone is not None:
        return function(Gathering(everyone, target).of_all_stages(state_dict), info)
    whole = ShardIndex().replaced(state_dict, lambda tensor, record, _: _whole(tensor, record, target))
    return function(whole, info)


def _whole(tensor: Tensor, record: ShardRecord, target: int | None) -> Tensor:
    """Gather the whole of a shard; on ranks other than ``target`` it is dropped at once."""
    tensor = record.gather(tensor)
    if target is None:
        return tensor
    return tensor.cpu() if dist.get_rank() == target else tensor.new_empty(0)


def _from_rank_0(
    function: Callable[..., Any], model: torch.nn.Module, optimizers: Any, state_dict: Any, info: Any
) -> Any:
    """Replace ``_load_optim_state_dict``. Torch drops entries that rank 0 lacks before it broadcasts: under stages, all
    entries of the other stages."""
    everyone = ranks_of_stages(model)
    if everyone is None or not info.broadcast_from_rank0:
        return function(model, optimizers, state_dict, info)
    names = {name for name in info.fqn_param_mapping if isinstance(name, str)}
    starts = tuple(f"state.{name}." for name in names)  # of a flattened state

    def keeps(path: Path) -> bool:
        return not names.isdisjoint(path) or path[0].startswith(starts)

    whole = Gathering(everyone, None).of_rank_0(state_dict, keeps)
    info.broadcast_from_rank0 = False
    try:
        return function(model, optimizers, whole, info)
    finally:
        info.broadcast_from_rank0 = True


def _retold(copies: Any, tagged: Any) -> Any:
    """Attach the chunks of the original tensors to their copies."""
    if isinstance(copies, dict):
        return {key: _retold(copy, tagged[key]) for key, copy in copies.items()}
    if isinstance(copies, (list, tuple)):
        return type(copies)(_retold(copy, tagged_part) for copy, tagged_part in zip(copies, tagged, strict=True))
    part = Chunks.of(tagged)
    return copies if part is None else replace(part, tensor=copies).attach()


def _cut(function: Callable[..., Any], full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    shards: dict[str, ShardRecord] = {}
    ShardIndex().replaced(local, lambda tensor, record, place: shards.setdefault(place[1], record) and tensor)
    result = function(full, local, *args, **kwargs)
    for key, record in shards.items():
        if key in local:  # torch removes those that it misses
            local[key] = record.cut(local[key])
    return result


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

    def __init__(self, everyone: Communicator, target: int | None) -> None:
        self._held_of, self._everyone, self._target = ShardIndex().of, everyone, target
        self._tensors: dict[Path, tuple[Tensor, ShardRecord | None]] = {}
        self._first: dict[tuple[int, torch.Size], Path] = {}
        self._whole: dict[Path, Tensor | None] = {}
        self._wire = rank_device()

    def of_all_stages(self, state: Any) -> Any:
        """Return the state of all stages. Raises ShardwiseError if ranks differ in common entries."""
        return self._brought(_merged(list(enumerate(self._described_by_all(state))), ()), lambda _: True)

    def of_rank_0(self, state: Any, keeps: Callable[[Path], bool]) -> Any:
        """Return rank 0's state on all ranks, with None for tensors that this rank does not keep."""
        return self._brought(self._described_by_all(state if dist.get_rank() == 0 else None)[0], keeps)

    def _described_by_all(self, state: Any) -> list[Any]:
        """Return what each rank has in its state, with an Entry for each tensor. Collective."""
        described = _mapped(state, lambda value, path, _: self._described(value, path))
        return gather_objects(described, self._everyone, self._wire, "the names of a whole state")

    def _described(self, value: Any, path: Path) -> Any:
        if not isinstance(value, Tensor):
            return value
        record = self._held_of(value, path)
        if record is None and not value.dim():
            return value.detach().cpu()
        self._tensors[path] = value.detach(), record
        first = self._first.setdefault((value.data_ptr(), value.shape), path) if value.numel() else path
        is_split = record is not None and bool(record.layout.positions)
        shape = record.layout.shape if record is not None and is_split else tuple(value.shape)
        parts = record.ranks.place.ranks if record is not None and is_split else ()
        return Entry(value.dtype, shape, parts, dist.get_rank(), None if first == path else first)

    def _brought(self, described: Any, keeps: Callable[[Path], bool]) -> Any:
        def leaf(value: Any, path: Path, _: Any) -> Any:
            if not isinstance(value, Entry):
                return value
            if value.tied is None:
                self._whole[path] = self._received(value, path, keeps)
            return self._whole[value.tied or path]

        return _mapped(described, leaf)

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


def _mapped(
    node: Any, leaf: Callable[[Any, Path, tuple[Any, Any]], Any], path: Path = (), place: tuple[Any, Any] = (None, None)
) -> Any:
    """Return a state with ``leaf(value, path, (container, key))`` for each value in mappings, lists and tuples."""
    if isinstance(node, Mapping):
        return {key: _mapped(value, leaf, (*path, str(key)), (node, key)) for key, value in list(node.items())}
    if type(node) in (list, tuple):
        return type(node)(_mapped(value, leaf, (*path, str(i)), (node, i)) for i, value in enumerate(node))
    return leaf(node, path, place)


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


# --------------------------------------------------------------------------------------------------- shard recognition


class ShardIndex:
    """The shards of this process at one moment: parameters, buffers, gradients and optimizer states."""

    def __init__(self) -> None:
        shards = list(held_shards())
        states = list(optimizer_states(shards))
        every = [*shards, *_gradients(shards), *((state, record) for state, record, is_part in states if is_part)]
        self._odd = {
            memory_place(x): record for x, record, is_part in states if not is_part and record.layout.positions
        }
        self._owners = Owners(every)
        self._of_one_rank = Owners((x, record) for x, record, is_part in states if not is_part and record.is_shard)
        self._exact = {memory_place(tensor): record for tensor, record in every if tensor.numel()}
        # An empty shard is recognized by shape and name.
        self._empty: dict[torch.Size, list[ShardRecord]] = defaultdict(list)
        for tensor, record in every:
            if not tensor.numel():
                self._empty[tensor.shape].append(record)
        self.seen: list[ShardRecord] = []

    def shards_in(self, value: Any) -> Iterator[ShardRecord]:
        """Yield the shards whose memory a value (containers, modules, optimizers) uses."""
        for tensor in _tensors_in(value):
            if type(tensor) in (Tensor, torch.nn.Parameter):
                record = self._owners.of(tensor) or self._of_one_rank.of(tensor)
                if record is not None:
                    yield record

    def replaced(self, tree: Any, replace: Callable[[Tensor, ShardRecord, tuple[Any, Any]], Any]) -> Any:
        """Return the tree with every shard replaced by ``replace(tensor, record, (container, key))``. Raises
        ShardwiseError for a view of one."""
        if not self._exact and not self._empty:
            return tree

        def leaf(value: Any, path: Path, place: tuple[Any, Any]) -> Any:
            if type(value) not in (Tensor, torch.nn.Parameter) or hasattr(value, "__create_chunk_list__"):
                return value
            record = self.of(value, path)
            if record is None:
                return value
            self.seen.append(record)
            return replace(value, record, place)

        return _mapped(tree, leaf)

    def of(self, tensor: Tensor, path: Path) -> ShardRecord | None:
        """Return the record of a tensor at a path of a state, or None. Raises ShardwiseError for a view of a shard."""
        if not tensor.numel():
            candidates = self._empty.get(tensor.shape, [])
            named = [record for record in candidates if any(f".{record.name}." in f".{key}." for key in path)]
            return max(named or candidates, key=lambda record: len(record.name), default=None)
        exact, odd = self._exact.get(memory_place(tensor)), self._odd.get(memory_place(tensor))
        if odd is not None:
            what = f"an optimizer keeps {list(tensor.shape)} for this rank's shard of {odd.name}; it is unknown which "
            fix = "use an optimizer whose states have the parameter's shape or are single numbers"
            self.refuse(f"{what}part of the whole that is", fix, odd)
        partly = self._owners.of(tensor) if exact is None else None
        if partly is not None:
            self.refuse(
                f"torch.distributed.checkpoint gets a view of this rank's shard of {partly.name}; it is unknown "
                "which part of the whole that is",
                "pass it the entries of par.state_dict(), or use sw.save_checkpoint(folder, par, optimizer, step=...)",
                partly,
            )
        return exact

    def refuse(self, what: str, fix: str, record: ShardRecord | None = None) -> NoReturn:
        record = record or self.seen[0]
        raise ShardwiseError(what, source=f"{record.name}: {format_layout(record.layout)}", fix=fix)


def memory_place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _gradients(shards: Iterable[tuple[Tensor, ShardRecord]]) -> Iterator[tuple[Tensor, ShardRecord]]:
    return ((tensor.grad, record) for tensor, record in shards if tensor.grad is not None)


def optimizer_states(shards: Iterable[tuple[Tensor, ShardRecord]]) -> Iterator[tuple[Tensor, ShardRecord, bool]]:
    """Yield optimizer states of shards, and whether each has the shard's shape. Optimizers are found through ``gc``,
    because a new one has states as soon as it loads them, before its first step."""
    held_by_id = {id(tensor): record for tensor, record in shards}
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        states: Mapping[Tensor, Any] = optimizer.state
        for parameter, state in states.items():
            record = held_by_id.get(id(parameter))
            if record is not None:
                kept = (x for x in _tensors_in(state) if x.dim() or not parameter.dim())
                yield from ((x, record, x.shape == parameter.shape) for x in kept)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, modules and optimizers. Unlike pytrees, mappings may be of any class."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, torch.nn.Module):
        value = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        value = value.state
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in values:
        yield from _tensors_in(item)


# All of torch's functions use these: save, async_save and save_state_dict; load and load_state_dict; and the six that
# get and set the states of modules and optimizers.
PATCHES = (
    Patch(saver, "_stateful_to_state_dict", _tell_stages),
    Patch(saver, "_save_state_dict", _tell_writers),
    Patch(saver, "async_save"),
    Patch(saver, "AsyncCheckpointerType"),
    Patch(loader, "_load_state_dict", _tell_readers),
    Patch(of_modules, "_maybe_full_or_cpu_state_dict", _gather),
    Patch(of_modules, "_distribute_state_dict", _cut),
    Patch(of_modules, "_broadcast_state_dict", _cut),
    Patch(of_modules, "_get_model_state_dict", _note_module),
    Patch(of_modules, "_get_optim_state_dict", _note_module),
    Patch(of_modules, "_load_optim_state_dict", _from_rank_0),
)
