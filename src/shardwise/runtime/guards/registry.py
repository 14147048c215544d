"""Register the tensors of this process that are shards, for all code that expects whole parameters or gradients.

Optimizers and torch's functions get bare parameters and gradients, without their module. Modules made by
``parallelize`` are therefore registered here, weakly. Their parameters are read again each time, because a converted
module (``par.to(...)``) may hold new Parameter objects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from shardwise.errors import ShardwiseError, listed
from shardwise.layouts.boxes import boxes
from shardwise.layouts.layout import Layout
from shardwise.runtime.communicator import Communicator, rank_device
from shardwise.runtime.hooks import gather_whole
from shardwise.runtime.local_shards import shard


class Patch(NamedTuple):
    """A function of torch that ``wrap(function, *args, **kwargs)`` replaces for the rest of the process; None: it only
    has to exist."""

    place: Any
    name: str
    wrap: Callable[..., Any] | None = None


def bind_wrapper(function: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``wrap`` with ``function`` as its first argument, under the name and signature of ``function``."""

    @wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrap(function, *args, **kwargs)

    return patched


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """The part of a parameter or buffer that this rank holds. Among the ranks with the same elements, one (at
    coordinate 0 on every axis that does not shard it) ``counts`` them. ``ranks``: those that hold parts of it;
    ``in_stage``: whether ranks of other stages do not hold it."""

    name: str
    layout: Layout
    counts: bool
    ranks: Communicator
    in_stage: bool = False

    @property
    def is_shard(self) -> bool:
        """Return whether other ranks hold other elements; otherwise all hold the whole, and the same gradient."""
        return self.in_stage or bool(self.layout.positions)

    def cut(self, value: Any) -> Any:
        """Return a copy of this rank's part of the whole tensor; anything of another shape as it is."""
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != self.layout.shape:
            return value
        return shard(value, self.layout, self.ranks.coordinates).clone()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of which the ranks hold parts, detached. Collective if they hold different ones."""
        if not self.layout.positions:
            return part.detach().clone()
        sent = part.detach().to(rank_device())  # NCCL has no messages of a tensor on the host
        return gather_whole(sent, self.layout, f"the whole of {self.name}", self.ranks).to(part.device)


# Not a cache: torch's functions are global, so this registry must be too. Guards see only modules that hold shards.
_holders: WeakKeyDictionary[torch.nn.Module, Mapping[str, ShardRecord]] = WeakKeyDictionary()
_whole: WeakKeyDictionary[torch.nn.Module, Mapping[str, ShardRecord]] = WeakKeyDictionary()  # the others
# Modules of which this rank holds some stages -> all ranks that hold a stage.
_everyone: WeakKeyDictionary[torch.nn.Module, Communicator] = WeakKeyDictionary()


def are_over_ranks(records: Sequence[ShardRecord | None]) -> bool:
    """Return whether ranks hold different parts of the tensors with these records, or different ones of them: of some
    parameters of a model in stages, a rank may hold none."""
    if any(record is not None and record.is_shard for record in records):
        return True
    return bool(_everyone) and None not in records


def shard_records(
    module: torch.nn.Module,
    layouts: Mapping[str, Layout],
    ranks: Communicator,
    counted_elsewhere: frozenset[str] | None = None,
) -> dict[str, ShardRecord]:
    """Return the records of a module's tensors, by name. ``ranks``: those on the layouts' mesh; ``counted_elsewhere``:
    None without stages; else the names that other stages' ranks hold too, and count."""
    records: dict[str, ShardRecord] = {}
    for name, _ in tensors_of(module):
        layout = layouts.get(name)
        if layout is None:  # another name of a tied parameter: the plan has the first
            continue
        assert not layout.states, f"what is stored is sharded or invariant, and {name} is {layout}"
        counts = not any(ranks.coordinates[axis] for axis in layout.mesh.sub_axes if axis not in layout.positions)
        counts = counts and name not in (counted_elsewhere or ())
        records[name] = ShardRecord(name, layout, counts, ranks, counted_elsewhere is not None)
    return records


def register_module(
    module: torch.nn.Module, records: Mapping[str, ShardRecord], everyone: Communicator | None = None
) -> bool:
    """Register a module if it holds shards; return whether it does. ``everyone``: all ranks, if split into stages."""
    if everyone is not None:
        _everyone[module] = everyone
    elif not any(held_tensor.is_shard for held_tensor in records.values()):
        _whole[module] = records
        return False
    _holders[module] = records
    return True


def ranks_of_stages(module: torch.nn.Module | None) -> Communicator | None:
    """Return all ranks of the job if a module is, or contains, one with stages on several ranks."""
    modules = () if module is None else module.modules()
    return next((_everyone[part] for part in modules if part in _everyone), None)


def held_parameters() -> Iterator[tuple[torch.nn.Parameter, ShardRecord]]:
    """Yield the parameters of all living modules that hold shards, with their records."""
    return ((tensor, record) for tensor, record in held_tensors() if isinstance(tensor, torch.nn.Parameter))


def records_of(tensors: Iterable[torch.Tensor]) -> list[ShardRecord | None]:
    """Return the record of each tensor that a living module holds; None for any other."""
    held = {id(tensor): record for tensor, record in held_tensors()}
    return [held.get(id(tensor)) for tensor in tensors]


def held_tensors(*, with_whole: bool = False) -> Iterator[tuple[torch.Tensor, ShardRecord]]:
    """Yield the parameters and buffers of all living modules that hold shards, with their records. ``with_whole``: of
    all parallel modules."""
    for module, records in [*_holders.items(), *(_whole.items() if with_whole else ())]:
        for name, tensor in tensors_of(module):
            if name in records:
                yield tensor, records[name]


def held_shards() -> Iterator[tuple[torch.Tensor, ShardRecord]]:
    """Yield the parameters and buffers of all living modules that are shards."""
    return ((tensor, record) for tensor, record in held_tensors() if record.is_shard)


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, tied ones under each of their names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Return whether a parameter or buffer is in the module's state dict."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return key in owner._parameters or key not in owner._non_persistent_buffers_set


class Owners:
    """An index of the memory of tensors, to recognize a ``detach()``, a view or an entry of a ``state_dict()``."""

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, ShardRecord]]) -> None:
        places = [(*memory_range(tensor), record) for tensor, record in tensors if tensor.numel()]
        self._places = sorted(places, key=lambda place: place[0])
        self._starts = [start for start, _, _ in self._places]

    def of(self, tensor: torch.Tensor) -> ShardRecord | None:
        """Return the record of the given tensor that shares memory with a tensor, if any."""
        if not tensor.numel():
            return None
        start, end = memory_range(tensor)
        before = bisect_left(self._starts, end) - 1  # the last one that begins before the tensor ends
        if before >= 0 and self._places[before][1] > start:
            return self._places[before][2]
        return None


def memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which a tensor starts and ends. Gradients of one bucket share one storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


# -------------------------------------------------------------------------------------------- entries of a state dict
# Shards of another rank have the right shapes and the wrong elements. A state therefore records which elements of the
# whole each entry holds: a module's in torch's ``_metadata`` (also in files), an optimizer's under its own key. Entries
# that were copied into another dict cannot be checked.

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


def _boxes(record: ShardRecord) -> list[list[list[int]]]:
    """Return the boxes of a shard as nested lists, which files preserve."""
    return [
        [list(box.offsets), list(box.sizes), list(box.at)] for box in boxes(record.layout, record.ranks.coordinates)
    ]
