"""``mindspore.parallel``: functions that newer programs import from here; ``AutoParallel``, the options of
``set_auto_parallel_context`` as methods of a cell around the network; and queries of hand-written training steps about
the ranks (document 004 imports these names)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import Module  # parallel.nn is another module

from shardwise.errors import problem
from shardwise.mindspore import context, rank_groups
from shardwise.mindspore.checks import closest
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.context import get_algo_parameters, reset_algo_parameters, set_algo_parameters
from shardwise.mindspore.context import get_cost_model_context as get_cost_model_context
from shardwise.mindspore.context import reset_cost_model_context as reset_cost_model_context
from shardwise.mindspore.context import set_cost_model_context as set_cost_model_context
from shardwise.mindspore.layout import Layout
from shardwise.mindspore.named import TABLES, absent, functions_of
from shardwise.mindspore.nn.wrap import DistributedGradReducer, PipelineCell, PipelineGradReducer
from shardwise.mindspore.ops.functional import shard
from shardwise.mindspore.options import ALIASES, CHECKS, ParallelMode
from shardwise.mindspore.train import serialization

MODES: dict[str, dict[str, str]] = {
    "semi_auto": {"parallel_mode": "semi_auto_parallel"},
    "sharding_propagation": {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"},
    "recursive_programming": {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming"},
}


def _switch(**values: Any) -> Callable[..., None]:
    """Return a method that sets options to fixed values."""
    return lambda self: context.set_auto_parallel_context(**values)


def _setter(option: str) -> Callable[..., None]:
    """Return a method that sets an option to its argument, whatever its name."""
    return lambda self, *value, **named: context.set_auto_parallel_context(**{option: (*value, *named.values())[0]})


class AutoParallel(PipelineCell):
    """A wrapper of a network (or a function) that sets the options of the process: ``AutoParallel(network,
    parallel_mode="semi_auto")``. It resets all options first, so the latest instance decides for all cells."""

    def __init__(self, network: Any, parallel_mode: str = "semi_auto") -> None:
        Module.__init__(self)
        super(PipelineCell, self).__init__()
        if parallel_mode not in MODES:
            what = f"AutoParallel(parallel_mode={parallel_mode!r})"
            raise ValueError(problem(what, fix=closest(parallel_mode, MODES)))
        self._called = [network]  # in a list, so that it is not registered as a submodule
        if isinstance(network, PipelineCell):
            network, self.micro_size = network.network, network.micro_size
        if isinstance(network, Module):
            self.network = network
        context.reset_auto_parallel_context()
        context.set_auto_parallel_context(**MODES[parallel_mode])

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._called[0](*inputs, **kwargs)

    def train(self, mode: bool = True) -> AutoParallel:
        """Set the mode of this cell and of the network that is called."""
        if isinstance(self._called[0], Module):
            self._called[0].train(mode)
        super().train(mode)
        return self

    def construct(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().construct(*inputs) if hasattr(self, "micro_size") else self.network(*inputs, **kwargs)

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """Enable the parallel optimizer.

        Args:
            shard_size: number of ranks over which it shards; -1: all.
            threshold: least size of a sharded parameter in KB.
            optimizer_level: what it shards.
        """
        config = {"optimizer_weight_shard_size": shard_size, "parallel_optimizer_threshold": threshold,
                  "optimizer_level": optimizer_level}  # fmt: skip
        context.set_auto_parallel_context(enable_parallel_optimizer=True, parallel_optimizer_config=config)

    def pipeline(
        self, stages: int = 1, output_broadcast: bool = False, interleave: bool = False, scheduler: str = "1f1b"
    ) -> None:
        """Set the number of stages and their schedule."""
        config = {"pipeline_interleave": interleave, "pipeline_scheduler": scheduler}
        context.set_auto_parallel_context(
            pipeline_stages=stages, pipeline_result_broadcast=output_broadcast, pipeline_config=config
        )

    load_param_strategy_file = load_operator_strategy_file = _setter("strategy_ckpt_load_file")
    save_param_strategy_file = save_operator_strategy_file = _setter("strategy_ckpt_save_file")
    comm_fusion, set_group_ckpt_save_file = _setter("comm_fusion"), _setter("group_ckpt_save_file")
    dataset_strategy = _setter("dataset_strategy")  # "data_parallel", "full_batch", or a tuple per input
    enable_gradients_mean = _switch(gradients_mean=True)
    enable_fp32_communication = _switch(force_fp32_communication=True)
    disable_gradient_fp32_sync = _switch(gradient_fp32_sync=False)
    disable_loss_repeated_mean = _switch(loss_repeated_mean=False)
    disable_strategy_file_only_for_trainable_params = _switch(strategy_ckpt_config={"only_trainable_params": False})

    def no_init_parameters_in_compile(self) -> None:
        """Do nothing; kept for programs that call it. Parameters have their values before anything is split."""


def sync_pipeline_shared_parameters(net: Any) -> None:
    """Do nothing; kept for programs that call it. Stages that share a parameter have the same values."""


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
CHECKPOINTS = {name: getattr(serialization, name) for name in TABLES["parallel"]["checkpoints"].split()}
globals().update(CHECKPOINTS)

__all__ = [
    "AutoParallel", "DistributedGradReducer", "Layout", "PipelineGradReducer", "get_algo_parameters",
    "reset_algo_parameters", "set_algo_parameters", "shard", "sync_pipeline_shared_parameters", *CHECKPOINTS,
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
