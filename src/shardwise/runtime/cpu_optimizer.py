"""Optimizer states that wait in the memory of the host from step to step, under plans that say so.

Torch calls hooks ahead of and behind every optimizer's step. Ahead of it the whole update is done, group by group
(``programs.state_groups``): the states of a group come to the device, the optimizer steps on these parameters alone,
and the states leave again, while those of the next group come. The step itself then finds no parameters. Optimizers are
torch's own element-wise ones: what each keeps is by parameter, so that updates one after another are one update.

Between steps ``optimizer.state`` holds tensors of the host (pinned, beside a GPU). Where the device is the host, a copy
is made all the same: the same steps, without the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.costs.optimizers import is_on_host
from shardwise.errors import ShardwiseError, problem
from shardwise.programs.state_groups import is_offloaded, state_groups
from shardwise.runtime.cpu_embedding import HOST
from shardwise.runtime.guards.elementwise_optimizers import bare_step, known_elementwise
from shardwise.runtime.host_copies import CopyInFlight, host_memory, start_copy

_ON_DEVICE = "plan with the optimizer's name without ' on host'"

# Modules whose plan keeps states on the host, with the parameters that are not on the device themselves.
_modules: WeakKeyDictionary[torch.nn.Module, frozenset[str]] = WeakKeyDictionary()
_hidden: WeakKeyDictionary[Optimizer, list[list[Tensor]]] = WeakKeyDictionary()  # parameters of groups, during a step


def keep_states_on_host(module: torch.nn.Module, on_host: frozenset[str] = frozenset()) -> None:
    """From now on, the states of optimizers of this module's parameters wait on the host. ``on_host``: the names of
    parameters that are there themselves."""
    _modules[module] = on_host
    _install()


def place_states(module: torch.nn.Module, optimizer: str, on_host: frozenset[str] = frozenset()) -> None:
    """The same, if the optimizer that a plan describes keeps its states there."""
    if is_on_host(optimizer):
        keep_states_on_host(module, on_host)


def with_states_on_host() -> frozenset[int]:
    """The identities of the parameters whose states wait on the host."""
    return frozenset(
        id(parameter)
        for module, on_host in list(_modules.items())
        for name, parameter in module.named_parameters()
        if name not in on_host and is_offloaded(parameter.nbytes)
    )


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_update)
    register_optimizer_step_post_hook(_show)


def _update(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Ahead of a step: all of the update. Raises ShardwiseError for optimizers of which nobody knows that they may
    update parameters one after another."""
    _show(optimizer, args, kwargs)  # its last step may have ended in an error behind this hook
    lists = [group["params"] for group in optimizer.param_groups]
    wanted = with_states_on_host()
    if wanted.isdisjoint(id(parameter) for parameters in lists for parameter in parameters):
        return None
    _check(optimizer)
    args, kwargs = _evaluated(args, kwargs)
    parameters = [(i, p) for i, group_parameters in enumerate(lists) for p in group_parameters]
    groups = state_groups([(numbered, numbered[1].nbytes) for numbered in parameters])
    step = bare_step(type(optimizer))
    hosts = _CpuStates(optimizer, wanted)
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
    except BaseException:
        _restore(optimizer, lists)
        raise
    for group_now in optimizer.param_groups:
        group_now["params"] = []
    _hidden[optimizer] = lists
    return args, kwargs


def _show(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Behind a step: the optimizer has its parameters again."""
    lists = _hidden.pop(optimizer, None)
    if lists is not None:
        _restore(optimizer, lists)


def _restore(optimizer: Optimizer, lists: Iterable[list[Tensor]]) -> None:
    for group, parameters in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = parameters


def _check(optimizer: Optimizer) -> None:
    """Raises ShardwiseError where an update cannot be done group by group."""
    kind, what = type(optimizer), ""
    if torch.compiler.is_compiling():
        what = "torch.compile is around a step whose states come from the host and go there"
        raise ShardwiseError(problem(what, fix=f"compile the module alone, or {_ON_DEVICE}"))
    if not known_elementwise(kind):
        what = (
            f"nothing says that {kind.__qualname__} counts its steps by parameter, so that it may update a part of them"
        )
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        what = "an update that is differentiable keeps its states on the device"
    elif optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        what = f"hooks of this {kind.__qualname__} would see an update that is done group by group"
    if what:
        raise ShardwiseError(
            problem(
                f"{what}, and the plan keeps its states on the host",
                fix=f"use one of torch's element-wise optimizers without hooks of its own, or {_ON_DEVICE}",
            )
        )


def _evaluated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step whose closure, if it has one, ran ahead of the update."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {}


class _CpuStates:
    """The states of one optimizer's update. ``wanted``: identities of the parameters whose states wait."""

    def __init__(self, optimizer: Optimizer, wanted: frozenset[int]) -> None:
        self.optimizer, self.wanted = optimizer, wanted
        self.home: dict[tuple[int, str], Tensor] = {}  # where a state that came waits again
        self.coming: list[CopyInFlight] = []
        self.going: list[CopyInFlight] = []

    def bring(self, parameters: Iterable[Tensor]) -> None:
        """Start the copies to the device. (What torch's ``load_state_dict`` has put there is there.)"""
        for parameter in parameters:
            for key, state in self._states(parameter):
                if state.device == HOST:
                    here = torch.empty_like(state, device=parameter.device)
                    self.coming.append(start_copy(state, here))
                    self.home[id(parameter), key] = state
                    self.optimizer.state[parameter][key] = here

    def send(self, parameters: Iterable[Tensor]) -> None:
        """Start the copies to the host."""
        for parameter in parameters:
            for key, state in self._states(parameter):
                home = self.home.pop((id(parameter), key), None)
                if home is None or not (home.is_pinned() or state.device == HOST):
                    home = host_memory(state)
                self.going.append(start_copy(state, home))
                self.optimizer.state[parameter][key] = home

    def land(self, started: list[CopyInFlight]) -> None:
        """What follows on the device waits for copies; what they were made of may go."""
        for copy in started:
            copy.wait()
        started.clear()

    def end(self) -> None:
        """Wait until all states are on the host: whoever reads them there does not ask the device."""
        for copy in self.going:
            copy.finish()
        self.going.clear()

    def _states(self, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """Those of the parameter's shape that wait on the host; numbers, such as a count of steps, stay."""
        if id(parameter) not in self.wanted:
            return []
        states: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        return [
            (key, state)
            for key, state in states.items()
            if isinstance(state, Tensor) and state.shape == parameter.shape and is_offloaded(state.nbytes)
        ]


__all__ = ["keep_states_on_host", "place_states", "with_states_on_host"]
