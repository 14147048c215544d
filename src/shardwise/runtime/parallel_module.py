"""Base of the modules that are sharded over ranks: a plan, this rank's shards, and random numbers from one seed for all
ranks that advances with every training call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from shardwise.errors import PlanWarning, warn_user
from shardwise.graph.custom_operators import splitmix64
from shardwise.graph.normalize_random import SEED
from shardwise.graph.trees import flatten_with_path, leaf_name, unflatten
from shardwise.layouts.layout import Layout
from shardwise.plans.plan import Plan
from shardwise.runtime.hooks import ShardedModule
from shardwise.runtime.original_module import OriginalModuleMonitor
from shardwise.runtime.program_cache import Inputs, Mode, ProgramCache
from shardwise.runtime.signatures import ParamFlags, Signature, mode_text, takes_gradient
from shardwise.runtime.state_dict_entries import KEY, Shard, check_entries, cut_entries, shard_metadata
from shardwise.runtime.tensor_table import TensorTable

MAX_RECOMPUTED = 4096  # calls whose backward may still recompute them
_SET_BY_CALLS = frozenset(
    {"_seed", "_failed", "_draws", "_latest", "_last_kind", "_circumstances", "_last_circumstances"}
)  # no parameters, no modules


class ParallelModule(ShardedModule):
    """A module that holds this rank's parts of another module's tensors, under the same names. Its state contains the
    seed once its programs have drawn random numbers."""

    plan: Plan
    inputs: Inputs
    _calls: ProgramCache
    _state: TensorTable

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_BY_CALLS:  # skip torch's checks for parameters and modules
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Apply ``fn`` as ``nn.Module.apply`` does, with a warning: it sees stand-ins of the model's submodules."""
        warn_user(
            "apply visits stand-ins of the model's submodules, which hold this rank's shards: change the model before "
            "sw.parallelize",
            PlanWarning,
        )
        return super().apply(fn)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode by the model's own ``train``, which decides which parts follow and which are frozen."""
        twin = self.original
        for path, part in self._state.modules.items():
            twin.get_submodule(path).training = part.training
        parts = dict(self.named_parameters(remove_duplicate=False))
        parameters = [(p, parts[n]) for n, p in twin.named_parameters(remove_duplicate=False) if n in parts]
        for parameter, own_part in parameters:
            parameter.requires_grad_(own_part.requires_grad)
        twin.train(mode)
        for path, part in self._state.modules.items():
            part.training = twin.get_submodule(path).training
        for parameter, own_part in parameters:
            own_part.requires_grad_(parameter.requires_grad)
        return self

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Map each parameter, buffer or input to its layout on the mesh of ``coordinates``."""
        return self.plan.layouts

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Return this rank's coordinate on each mesh axis."""
        raise NotImplementedError

    @property
    def device_number(self) -> int:
        """Return the number of this rank's device, the same on the mesh of every stage that it works on."""
        raise NotImplementedError

    @property
    def original(self) -> torch.nn.Module:
        """Return the original module, on meta."""
        return self._calls.model

    def stand_for(self, module: torch.nn.Module) -> None:
        """Become the sharded form of ``module`` and monitor later changes to it."""
        super().stand_for(module)
        self._template = OriginalModuleMonitor(module, self)

    def _start_from(self, seed: int | None, device: torch.device) -> None:
        """Set the initial state. Hash the seed, since later calls count up from it: jobs with neighbouring seeds must
        not draw the same numbers one call later."""
        self._seed = splitmix64(torch.tensor(seed or 0, dtype=torch.int64, device=device))
        self._failed = False  # whether the last call failed on this rank: other ranks may still be in it
        self._draws = False  # whether a call has drawn random numbers, here or before a checkpoint was loaded
        self._signatures: dict[Any, Signature] = {}
        self._last_kind: tuple[object, ...] | None = None
        self._circumstances: ParamFlags = ()  # of this call
        self._last_circumstances: ParamFlags = ()
        self._seeds: dict[int, torch.Tensor] = {}  # of recent calls, by the number that identifies a recomputation

    def _is_new(self, key: object) -> bool:
        """Return whether all ranks must compare their calls although a program exists: the last call failed on this
        rank or was of another kind."""
        return self._failed or (key, torch.is_grad_enabled()) != self._last_kind

    def _is_changed(self) -> bool:
        """Return whether ranks that hold the same tensors must compare: some were frozen or replaced since."""
        return self._circumstances != self._last_circumstances

    def _compared(self, key: object) -> None:
        """Record that the ranks have compared their calls where they had to."""
        self._last_kind, self._last_circumstances = (key, torch.is_grad_enabled()), self._circumstances
        self._failed = False

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore gradients, buffers and random state after trial steps."""
        buffers = [buffer.clone() for buffer in self.buffers()]
        gradients, seed, draws = [p.grad for p in self.parameters()], self._seed.clone(), self._draws
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters(), gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in zip(self.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            self._seed, self._draws = seed, draws

    def _signature(self, key: object, flat: Sequence[Any], spec: Any, mode: Mode) -> Signature:
        """Return the signature of a call, for comparison with the other ranks."""
        key = key, torch.is_grad_enabled(), self._circumstances
        if key not in self._signatures:
            named = [(leaf_name(path), x) for path, x in flatten_with_path(unflatten(flat, spec))[0]]
            words = mode_text(*mode) + ("" if torch.is_grad_enabled() else ", gradients off")
            self._signatures[key] = Signature.of(named, words, self._circumstances)
        return self._signatures[key]

    @staticmethod
    def _examples(flat: Sequence[Any], spec: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return the arguments of a call with meta tensors of the given shapes."""
        whole = iter(shapes)
        examples = [
            torch.empty(next(whole), dtype=x.dtype, device="meta", requires_grad=takes_gradient(x))
            if isinstance(x, torch.Tensor)
            else x
            for x in flat
        ]
        return unflatten(examples, spec)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._draws:
            destination[prefix + SEED] = self._seed.clone()
        metadata: dict[str, Any] = getattr(destination, "_metadata", {})
        metadata.setdefault(prefix[:-1], {})[KEY] = shard_metadata(self._shards, self.device_number)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        shards = {prefix + name: shard for name, shard in self._shards.items()}
        check_entries(local_metadata.get(KEY, {}), self._shards, self.device_number)
        state_dict |= cut_entries(state_dict, shards)  # torch's copy, which submodules read
        for name in self._elsewhere:
            state_dict.pop(prefix + name, None)
        seed = state_dict.get(prefix + SEED)
        if seed is not None:
            self._draws = True
            with torch.no_grad():
                self._seed.copy_(seed)
        rest = {k: v for k, v in state_dict.items() if k != prefix + SEED}
        super()._load_from_state_dict(rest, prefix, local_metadata, *others)

    @property
    def _elsewhere(self) -> frozenset[str]:
        """Return the names of tensors that only ranks of other stages hold."""
        return frozenset()

    @property
    def _shards(self) -> dict[str, Shard]:
        """Map every name of each sharded parameter or buffer to (layout, this rank's coordinates)."""
        tensors = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        layouts = {id(tensor): self.layouts[name] for name, tensor in tensors if name in self.layouts}
        layout_of = {name: layouts[id(tensor)] for name, tensor in tensors if id(tensor) in layouts}
        return {name: (layout, self.coordinates) for name, layout in layout_of.items() if layout.positions}

    def _seed_of_call(self, draws: bool) -> torch.Tensor:
        """Return the seed of the random numbers of this call; it advances with every training call.

        A call during backward is a recomputation (``torch.utils.checkpoint``) and must draw what the first call drew.
        It is recognized by a number from torch's generator, whose state the checkpoint restores. The seed is not
        derived from that number, since the generators of the ranks need not agree.
        """
        self._draws |= draws
        key = int(torch.randint(2**62, ())) if draws and self.training else None
        if key in self._seeds and torch._C._current_graph_task_id() != -1:
            return self._seeds[key]
        # Clone: backward draws the masks again after self._seed has advanced.
        seed = self._seed.clone() if draws else self._seed
        if key is not None:
            self._seeds[key] = seed
            if len(self._seeds) > MAX_RECOMPUTED:
                del self._seeds[next(iter(self._seeds))]
        if self.training:
            with torch.no_grad():
                self._seed += 1
        return seed
