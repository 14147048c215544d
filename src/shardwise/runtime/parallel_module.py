"""What every module that is split over ranks has: a plan, a part of the tensors, and random numbers from one seed for
all ranks, another one for every call in training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from shardwise.errors import PlanWarning
from shardwise.graph.normalize_random import SEED
from shardwise.graph.operators import splitmix64
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
    """A module that holds this rank's parts of another one's tensors, under their names. The seed is in its state once
    its programs have drawn."""

    plan: Plan
    inputs: Inputs
    _calls: ProgramCache
    _state: TensorTable

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_BY_CALLS:  # torch asks of every value whether it is a parameter or a module
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """As of every module; ``fn`` meets what stands for the model's submodules, and is told so."""
        warnings.warn(
            "apply meets stand-ins of the model's submodules, which hold this rank's shards: change the model before "
            "sw.parallelize",
            PlanWarning,
            stacklevel=2,
        )
        return super().apply(fn)

    def train(self, mode: bool = True) -> Self:
        """As of the model, whose own ``train`` says which of its parts follow, and are frozen."""
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
        """Parameter, buffer or input -> its layout on the mesh of ``coordinates``."""
        return self.plan.layouts

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Where this rank is on the mesh."""
        raise NotImplementedError

    @property
    def device_number(self) -> int:
        """The number of this rank's device, on the mesh of every stage that it works on."""
        raise NotImplementedError

    @property
    def original(self) -> torch.nn.Module:
        """The module that was split, on meta."""
        return self._calls.model

    def stand_for(self, module: torch.nn.Module) -> None:
        """As stand-ins do; what is done to the module afterwards is noticed."""
        super().stand_for(module)
        self._template = OriginalModuleMonitor(module, self)

    def _start_from(self, seed: int | None, device: torch.device) -> None:
        """Begin. Calls count on from here: jobs with neighbouring seeds must not draw the same numbers one call
        later."""
        self._seed = splitmix64(torch.tensor(seed or 0, dtype=torch.int64, device=device))
        self._failed = False  # whether the last call did, here: other ranks may be in the middle of it
        self._draws = False  # whether a call has drawn random numbers, here or before a checkpoint was loaded
        self._signatures: dict[Any, Signature] = {}
        self._last_kind: tuple[object, ...] | None = None
        self._circumstances: ParamFlags = ()  # of this call
        self._last_circumstances: ParamFlags = ()
        self._seeds: dict[int, torch.Tensor] = {}  # of the last calls, by the number that tells a recomputation

    def _is_new(self, key: object) -> bool:
        """Whether all ranks must compare what they call, though they have programs for it: the last call failed here,
        or was of another kind than this."""
        return self._failed or (key, torch.is_grad_enabled()) != self._last_kind

    def _is_changed(self) -> bool:
        """Whether those that hold the same tensors must: some were frozen or replaced since the last call."""
        return self._circumstances != self._last_circumstances

    def _compared(self, key: object) -> None:
        """The ranks have compared what they call, where they had to."""
        self._last_kind, self._last_circumstances = (key, torch.is_grad_enabled()), self._circumstances
        if self._failed:
            self._calls.trials.restart()
        self._failed = False

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Steps that are tried out: afterwards gradients, buffers and random numbers are as they were."""
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
        """A call in words, for the other ranks."""
        key = key, torch.is_grad_enabled(), self._circumstances
        if key not in self._signatures:
            named = [(leaf_name(path), x) for path, x in flatten_with_path(unflatten(flat, spec))[0]]
            words = mode_text(*mode) + ("" if torch.is_grad_enabled() else ", gradients off")
            self._signatures[key] = Signature.of(named, words, self._circumstances)
        return self._signatures[key]

    @staticmethod
    def _examples(flat: Sequence[Any], spec: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
        """The arguments of a call with tensors of some shapes, on meta."""
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
        state_dict |= cut_entries(state_dict, shards)  # torch's own copy, which submodules read
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
        """Names of tensors that ranks of other stages hold alone."""
        return frozenset()

    @property
    def _shards(self) -> dict[str, Shard]:
        """Of the parameters and buffers of which other ranks hold other elements, by all names."""
        tensors = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        layouts = {id(tensor): self.layouts[name] for name, tensor in tensors if name in self.layouts}
        layout_of = {name: layouts[id(tensor)] for name, tensor in tensors if id(tensor) in layouts}
        return {name: (layout, self.coordinates) for name, layout in layout_of.items() if layout.positions}

    def _seed_of_call(self, draws: bool) -> torch.Tensor:
        """The seed of the random numbers of this call: another one for every call in training.

        A call during backward is a recomputation (``torch.utils.checkpoint``) and must draw what the first call drew.
        It is known by a number from torch's generator, whose state the checkpoint restores; the seed is not made of
        that number, since the generators of the ranks need not agree.
        """
        self._draws |= draws
        key = int(torch.randint(2**62, ())) if draws and self.training else None
        if key in self._seeds and torch._C._current_graph_task_id() != -1:
            return self._seeds[key]
        # Backward draws the masks again, when self._seed is that of the next call.
        seed = self._seed.clone() if draws else self._seed
        if key is not None:
            self._seeds[key] = seed
            if len(self._seeds) > MAX_RECOMPUTED:
                del self._seeds[next(iter(self._seeds))]
        if self.training:
            with torch.no_grad():
                self._seed += 1
        return seed
