"""Queries of hand-written training steps about the ranks (document 004 imports these names), the options of
``set_auto_parallel_context`` as an object, and the parameters of the reference's cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from shardwise.mindspore import context, rank_groups
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.context import get_cost_model_context as get_cost_model_context
from shardwise.mindspore.context import reset_cost_model_context as reset_cost_model_context
from shardwise.mindspore.context import set_cost_model_context
from shardwise.mindspore.named import absent, functions_of
from shardwise.mindspore.options import ALIASES, CHECKS, ParallelMode


def _is_mode(*modes: str) -> bool:
    return context.options().parallel_mode in modes


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
_ALONE, _AUTO = ParallelMode.STAND_ALONE, ParallelMode.AUTO_PARALLEL
globals().update(functions_of({
    # 1 in stand-alone mode, unless the program has set it
    "_get_device_num": lambda: (
        1 if _is_mode(_ALONE) and "device_num" not in context.options().names_set else context.options().devices),
    "_get_global_rank": lambda: 0 if _is_mode(_ALONE) else context.options().rank,
    "_is_in_auto_parallel_mode": lambda: context.options().distributed,
    "_is_in_data_parallel_mode": lambda: _is_mode(ParallelMode.DATA_PARALLEL),
    "_is_sharding_propagation": lambda: _is_mode(_AUTO) and context.options().search_mode == "sharding_propagation",
    **{f"_get_{name}": partial(lambda name: getattr(context.options(), name), name) for name in (
        "parallel_mode", "gradients_mean", "full_batch", "pipeline_stages", "parameter_broadcast")},
    "_set_multi_subgraphs": lambda multi_subgraph=True: set_cost_model_context(multi_subgraphs=multi_subgraph),
    "auto_parallel_context": lambda: _options,
}, __name__))  # fmt: skip
__getattr__ = absent(__name__, lambda: globals())
