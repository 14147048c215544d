"""What a rank holds when a module is split: its part of every parameter and buffer, one tensor after the other."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from shardwise.layouts.boxes import boxes
from shardwise.layouts.layout import Layout
from shardwise.plans.plan import Plan
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.hosted import HOST
from shardwise.runtime.initial.materialize import Init, full_tensors
from shardwise.runtime.initial.weights import Weights
from shardwise.runtime.replicas import Fingerprint
from shardwise.runtime.shards import shard


class InitialShards:
    """``held``: this rank's parts by canonical names. ``prints``: numbers that must be alike on all ranks, of the whole
    initial values, or of the files that they are in. ``host``: names of tables that stay on the CPU."""

    def __init__(self, plan: Plan, ranks: Communicator, device: torch.device, host: Collection[str]) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.prints: dict[str, int] = {}
        self._plan, self._ranks, self._device, self._host = plan, ranks, device, host

    def fill(self, module: torch.nn.Module, seed: int | None, init: Init | None, weights: str | Path | None) -> None:
        """Raises ShardwiseError for values that are missing or do not fit."""
        parameters = dict(module.named_parameters())
        tensors = {**parameters, **dict(module.named_buffers())}
        stored = self._plan.precision.stored
        dtypes = {name: stored(x.dtype) if name in parameters else x.dtype for name, x in tensors.items()}
        if weights is not None:
            with Weights(weights, module, complete=init is None) as files:
                for name in files.found:
                    layout = self.layout(name, tensors[name])
                    shape = layout.local_shape(self._ranks.coordinates)
                    local = torch.empty(shape, dtype=dtypes[name], device=self._device_of(name))
                    self.held[name] = files.read(name, local, boxes(layout, self._ranks.coordinates))
                self.prints |= files.prints
            if self._ranks.rank == 0:
                files.announce()
        fingerprints: dict[torch.device, Fingerprint] = {}
        for name, full in full_tensors(module, seed, init, known=tuple(self.held)):
            if full.device not in fingerprints:
                fingerprints[full.device] = Fingerprint(full.device)
            self.prints[name] = int(fingerprints[full.device](full))
            own = shard(full, self.layout(name, full), self._ranks.coordinates).detach()
            self.held[name] = own.to(self._device_of(name), dtypes[name]).clone()

    def layout(self, name: str, full: torch.Tensor) -> Layout:
        """In which a tensor is held; whole on every rank where the plan does not say."""
        return self._plan.layouts.get(name) or Layout.whole(self._plan.mesh, tuple(full.shape))

    def _device_of(self, name: str) -> torch.device:
        return HOST if name in self._host else self._device


__all__ = ["InitialShards"]
