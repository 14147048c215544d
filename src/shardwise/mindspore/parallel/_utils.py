"""Queries of hand-written training steps about the ranks (document 004 imports these names), the options of
``set_auto_parallel_context`` as an object, and the parameters of the reference's cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.mindspore import context, rank_groups
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.context import get_cost_model_context as get_cost_model_context
from shardwise.mindspore.context import reset_cost_model_context as reset_cost_model_context
from shardwise.mindspore.context import set_cost_model_context
from shardwise.mindspore.options import ALIASES, CHECKS, ParallelMode


def _get_parallel_mode() -> str:
    return context.options().parallel_mode


def _get_device_num() -> int:
    """Return the number of devices on which the program runs: 1 in stand-alone mode."""
    alone = _get_parallel_mode() == ParallelMode.STAND_ALONE and "device_num" not in context.options().names_set
    return 1 if alone else context.options().devices


def _get_global_rank() -> int:
    return 0 if _get_parallel_mode() == ParallelMode.STAND_ALONE else context.options().rank


def _option(name: str) -> Callable[[], Any]:
    return lambda: getattr(context.options(), name)


_get_gradients_mean, _get_full_batch, _get_pipeline_stages, _get_parameter_broadcast = map(
    _option, ("gradients_mean", "full_batch", "pipeline_stages", "parameter_broadcast")
)


def _is_in_auto_parallel_mode() -> bool:
    return context.options().distributed


def _is_sharding_propagation() -> bool:
    """Return whether auto mode propagates strategies to other operators."""
    is_auto = _get_parallel_mode() == ParallelMode.AUTO_PARALLEL
    return is_auto and context.options().search_mode == "sharding_propagation"


def _is_in_data_parallel_mode() -> bool:
    return _get_parallel_mode() == ParallelMode.DATA_PARALLEL


def _broadcast_parameters(parameters: Iterable[torch.Tensor], root: int = 0) -> None:
    """Broadcast one rank's parameters, as the option parameter_broadcast does before training."""
    group = find_group()
    with torch.no_grad():
        for parameter in parameters:
            if not getattr(parameter, "layerwise_parallel", False):
                parameter.copy_(rank_groups.broadcast(parameter.detach(), root, group))


class _AutoParallelContext:
    """Access to every option by ``get_NAME()``, ``set_NAME(value)`` and ``get_NAME_is_set()``."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        verb, _, name = method.partition("_")
        option = name.removesuffix("_is_set")
        if verb not in ("get", "set") or (ALIASES.get(option, option) not in CHECKS):
            raise AttributeError(method)
        if verb == "set":
            return lambda value: context.set_auto_parallel_context(**{name: value})
        if option != name:
            return lambda: ALIASES.get(option, option) in context.options().names_set
        return lambda: context.get_auto_parallel_context(name)


_options = _AutoParallelContext()


def auto_parallel_context() -> _AutoParallelContext:
    """Return the only instance."""
    return _options


def _set_multi_subgraphs(multi_subgraph: bool = True) -> None:
    """Set ``multi_subgraphs`` of the cost model."""
    set_cost_model_context(multi_subgraphs=multi_subgraph)
