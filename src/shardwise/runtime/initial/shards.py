"""Initial shards of a rank: its part of every parameter and buffer, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.errors import PlanWarning, listed, warn_user
from shardwise.graph.step_precision import Precision
from shardwise.layouts.boxes import boxes
from shardwise.layouts.layout import Layout
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.cpu_embedding import HOST
from shardwise.runtime.initial.materialize import Init, PartialTensor, initial_values
from shardwise.runtime.initial.partial_values import NotByParts
from shardwise.runtime.initial.weights import WeightFiles
from shardwise.runtime.local_shards import shard
from shardwise.runtime.replicas import fingerprint_on

# Size in each dim of the box by which ranks compare a tensor that none of them has whole.
_PRINTED = 64
# Elements from which a tensor that each rank computes whole causes a warning.
_LARGE = 2**22


@dataclass(frozen=True)
class ShardMaterializer:
    """The shards that this rank holds. ``layouts``: by name, over the mesh of ``ranks``; ``everyone``: all ranks of the
    job. ``host``: names of the tables that stay on the CPU, whose collectives ``host_ranks`` runs. ``only``: names of
    the parameters and buffers of this rank's stages; None: it has a part of all."""

    layouts: Mapping[str, Layout]
    ranks: Communicator
    everyone: Communicator
    host: frozenset[str]
    host_ranks: Communicator
    only: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        return self.only is None or name in self.only

    def layout(self, name: str, tensor: torch.Tensor) -> Layout:
        """Return the layout of a parameter or buffer; whole if the plan does not name it."""
        return self.layouts.get(name) or Layout.whole(self.ranks.mesh, tuple(tensor.shape))


class InitialShards:
    """The initial ``parts`` of this rank, by canonical names. ``prints``: numbers that must be equal on all ranks:
    fingerprints of values (of the first elements, if ranks compute only their parts) or sizes of the files' tensors."""

    def __init__(self, holder: ShardMaterializer, precision: Precision, device: torch.device) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self.prints: dict[str, int] = {}
        self._holder, self._stored, self._device = holder, precision.stored, device

    def fill(self, module: torch.nn.Module, seed: int | None, init: Init | None, weights: str | Path | None) -> None:
        """Compute or read all parts. Raises ShardwiseError for values that are missing or do not fit."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        tensors = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
        dtypes = {name: self._stored(x.dtype) if name in parameters else x.dtype for name, x in tensors.items()}
        coordinates = self._holder.ranks.coordinates
        known: tuple[str, ...] = ()
        if weights is not None:
            with WeightFiles(weights, module, complete=init is None) as files:
                known = tuple(files.stored_names)
                for name in filter(self._holder.has, known):
                    layout = self._holder.layout(name, tensors[name])
                    shape = layout.local_shape(coordinates)
                    local = torch.empty(shape, dtype=dtypes[name], device=self._device_of(name))
                    self.parts[name] = files.read(name, local, boxes(layout, coordinates))
                self.prints |= files.prints
            if self._holder.everyone.rank == 0:
                files.announce()
        whole: list[str] = []
        for name, value in initial_values(module, seed, init, known=known):
            layout = self._holder.layout(name, tensors[name])
            by_parts = self._parts(name, value, layout) if isinstance(value, PartialTensor) else None
            if by_parts is None:
                full = value.whole() if isinstance(value, PartialTensor) else value
                part, printed = shard(full, layout, coordinates).detach(), full
                if isinstance(value, PartialTensor):  # another rank may compute its part alone
                    printed = full[tuple(slice(_PRINTED) for _ in full.shape)]
                    whole += [name] if full.numel() >= _LARGE else []
            else:
                part, printed = by_parts
            self.prints[name] = int(fingerprint_on(printed.device)(printed))
            if self._holder.has(name):
                self.parts[name] = part.to(self._device_of(name), dtypes[name]).clone()

        if whole and self._holder.everyone.rank == 0:
            what = f"every rank computes these whole initial values to get its shard: {listed(whole)}"
            fix = "their initialiser is not element-wise; init= can provide the values instead"
            warn_user(f"{what} ({fix})", PlanWarning)

    def _parts(self, name: str, value: PartialTensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (this rank's part of a tensor, its first elements, which are equal on all ranks); None if it cannot be
        computed by parts."""
        coordinates, shape = self._holder.ranks.coordinates, value.ref.shape
        try:
            first = value.box((0,) * len(shape), tuple(min(size, _PRINTED) for size in shape))
            part = torch.empty(layout.local_shape(coordinates), dtype=value.dtype)
            for box in boxes(layout, coordinates) if self._holder.has(name) else ():
                part[box.local_rows].copy_(value.box(box.offsets, box.sizes))
        except NotByParts:
            return None
        return part, first

    def _device_of(self, name: str) -> torch.device:
        return HOST if name in self._holder.host else self._device
