"""What a rank holds when a module is split: its part of every parameter and buffer, one tensor after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.graph.precision import Precision
from shardwise.layouts.boxes import boxes
from shardwise.layouts.layout import Layout
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.hosted import HOST
from shardwise.runtime.initial.materialize import Init, full_tensors
from shardwise.runtime.initial.weights import Weights
from shardwise.runtime.replicas import Fingerprint
from shardwise.runtime.shards import shard


@dataclass(frozen=True)
class Own:
    """What this rank holds. ``layouts``: by name, over the mesh of ``ranks``; ``everyone``: all ranks of the job.
    ``host``: names of the tables that stay on the CPU, whose collectives ``host_ranks`` performs. ``only``: the names
    of the parameters and buffers of this rank's stages; None: it has a part of all."""

    layouts: Mapping[str, Layout]
    ranks: Communicator
    everyone: Communicator
    host: frozenset[str]
    host_ranks: Communicator
    only: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        return self.only is None or name in self.only

    def layout(self, name: str, tensor: torch.Tensor) -> Layout:
        """The layout of a parameter or buffer; whole where the plan does not name it."""
        return self.layouts.get(name) or Layout.whole(self.ranks.mesh, tuple(tensor.shape))


class InitialShards:
    """``held``: this rank's parts by canonical names. ``prints``: numbers that must be alike on all ranks, of the whole
    initial values, or of the files that they are in."""

    def __init__(self, own: Own, precision: Precision, device: torch.device) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.prints: dict[str, int] = {}
        self._own, self._stored, self._device = own, precision.stored, device

    def fill(self, module: torch.nn.Module, seed: int | None, init: Init | None, weights: str | Path | None) -> None:
        """Raises ShardwiseError for values that are missing or do not fit."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        tensors = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
        dtypes = {name: self._stored(x.dtype) if name in parameters else x.dtype for name, x in tensors.items()}
        coordinates = self._own.ranks.coordinates
        known: tuple[str, ...] = ()
        if weights is not None:
            with Weights(weights, module, complete=init is None) as files:
                known = tuple(files.found)
                for name in filter(self._own.has, known):
                    layout = self._own.layout(name, tensors[name])
                    shape = layout.local_shape(coordinates)
                    local = torch.empty(shape, dtype=dtypes[name], device=self._device_of(name))
                    self.held[name] = files.read(name, local, boxes(layout, coordinates))
                self.prints |= files.prints
            if self._own.everyone.rank == 0:
                files.announce()
        fingerprints: dict[torch.device, Fingerprint] = {}
        for name, full in full_tensors(module, seed, init, known=known):
            if full.device not in fingerprints:
                fingerprints[full.device] = Fingerprint(full.device)
            self.prints[name] = int(fingerprints[full.device](full))
            if self._own.has(name):
                part = shard(full, self._own.layout(name, full), coordinates).detach()
                self.held[name] = part.to(self._device_of(name), dtypes[name]).clone()

    def _device_of(self, name: str) -> torch.device:
        return HOST if name in self._own.host else self._device


__all__ = ["InitialShards", "Own"]
