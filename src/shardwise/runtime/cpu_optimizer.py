"""Offload optimizer states to host memory between steps, under plans that ask for it.

The steps of torch's own element-wise optimizers are replaced: they update group by group (``programs.state_groups``).
The states of a group are copied to the device, its parameters are updated alone, and the states go back while those of
the next group arrive. States of these optimizers are per parameter, so this equals one update.

Between steps ``optimizer.state`` holds host tensors (pinned for a GPU). Where the device is the CPU the copies are
still made: the same steps, without the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.costs.optimizers import is_on_host
from shardwise.errors import ShardwiseError
from shardwise.programs.state_groups import is_offloaded, state_groups
from shardwise.runtime.cpu_embedding import HOST
from shardwise.runtime.guards.elementwise_optimizers import ELEMENTWISE, known_elementwise, replace_step
from shardwise.runtime.hooks import watch_optimizers
from shardwise.runtime.host_copies import CopyInFlight, host_memory, start_copy

_ON_DEVICE = "plan with the optimizer's name without ' on host'"

# Modules whose plan keeps states on the host -> names of their parameters that are on the host themselves.
_modules: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()


def place_states(module: torch.nn.Module, optimizer: str, on_host: frozenset[str] = frozenset()) -> None:
    """Keep optimizer states of this module's parameters on the host from now on, if the optimizer described by its plan
    does. ``on_host``: names of parameters that are on the host themselves."""
    if is_on_host(optimizer):
        _modules[module] = on_host
        watch_optimizers(_check)
        for kind in ELEMENTWISE:
            replace_step(kind, _step_by_groups)


def with_states_on_host() -> frozenset[int]:
    """Return the ids of the parameters whose states are kept on the host."""
    return frozenset(
        id(parameter)
        for module, on_host in list(_modules.items())
        for name, parameter in module.named_parameters()
        if name not in on_host and is_offloaded(parameter.nbytes)
    )


def _has_some(optimizer: Optimizer, offloaded: frozenset[int]) -> bool:
    return any(id(parameter) in offloaded for group in optimizer.param_groups for parameter in group["params"])


def _step_by_groups(step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Replace the ``step`` of an element-wise optimizer. A closure runs once, before the update."""
    offloaded = with_states_on_host()
    if not _has_some(optimizer, offloaded):
        return step(optimizer, *args, **kwargs)
    closure: Callable[[], Any] | None = args[0] if args else kwargs.get("closure")
    with torch.enable_grad():
        loss = None if closure is None else closure()
    lists = [group["params"] for group in optimizer.param_groups]
    parameters = [(i, p) for i, group_parameters in enumerate(lists) for p in group_parameters]
    groups = state_groups([(numbered, numbered[1].nbytes) for numbered in parameters])
    hosts = _CpuStates(optimizer, offloaded)
    try:
        hosts.bring(p for _, p in groups[0])
        for number, group in enumerate(groups):
            hosts.land(hosts.coming)
            hosts.land(hosts.going)  # room for the states of two groups
            if number + 1 < len(groups):
                hosts.bring(p for _, p in groups[number + 1])
            for i, group_now in enumerate(optimizer.param_groups):
                group_now["params"] = [p for at, p in group if at == i]
            step(optimizer)
            hosts.send(p for _, p in group)
        hosts.end()
    finally:
        for group_now, group_parameters in zip(optimizer.param_groups, lists, strict=True):
            group_now["params"] = group_parameters
    return loss


def _check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ShardwiseError where an update cannot be done group by group. torch calls this before every step."""
    if not _has_some(optimizer, with_states_on_host()):
        return
    kind, what = type(optimizer), ""
    if torch.compiler.is_compiling():
        what = "torch.compile wraps a step whose optimizer states are copied from and to the host"
        raise ShardwiseError(what, fix=f"compile the module alone, or {_ON_DEVICE}")
    if not known_elementwise(kind):
        what = f"{kind.__qualname__} is not known to count its steps per parameter, which updates by group need"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        what = "a differentiable update needs its states on the device"
    if what:
        what = f"{what}, but the plan keeps its states on the host"
        raise ShardwiseError(what, fix=f"use one of torch's element-wise optimizers, or {_ON_DEVICE}")


class _CpuStates:
    """The states of one optimizer during an update. ``wanted``: ids of the parameters whose states are on the host."""

    def __init__(self, optimizer: Optimizer, offloaded: frozenset[int]) -> None:
        self.optimizer, self.wanted = optimizer, offloaded
        self.home: dict[tuple[int, str], Tensor] = {}  # the host tensor of each state on the device
        self.coming: list[CopyInFlight] = []
        self.going: list[CopyInFlight] = []

    def bring(self, parameters: Iterable[Tensor]) -> None:
        """Start the copies to the device. States already there (after torch's ``load_state_dict``) are skipped."""
        for parameter in parameters:
            for key, state in self._states(parameter):
                if state.device == HOST:
                    here = torch.empty_like(state, device=parameter.device)
                    self.coming.append(start_copy(state, here))
                    self.home[id(parameter), key] = state
                    self.optimizer.state[parameter][key] = here

    def send(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            for key, state in self._states(parameter):
                home = self.home.pop((id(parameter), key), None)
                if home is None or not (home.is_pinned() or state.device == HOST):
                    home = host_memory(state)
                self.going.append(start_copy(state, home))
                self.optimizer.state[parameter][key] = home

    def land(self, started: list[CopyInFlight]) -> None:
        """Make later device work wait for the copies, and drop their sources."""
        for copy in started:
            copy.wait()
        started.clear()

    def end(self) -> None:
        """Wait until all states are on the host, since reading them there does not synchronize with the device."""
        for copy in self.going:
            copy.finish()
        self.going.clear()

    def _states(self, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """Return the offloaded states of the parameter's shape; numbers, such as a step count, stay."""
        if id(parameter) not in self.wanted:
            return []
        states: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        return [
            (key, state)
            for key, state in states.items()
            if isinstance(state, Tensor) and state.shape == parameter.shape and is_offloaded(state.nbytes)
        ]
