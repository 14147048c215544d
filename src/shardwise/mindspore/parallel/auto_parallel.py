"""``AutoParallel``: the options of ``set_auto_parallel_context`` as methods of a cell around the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.errors import problem
from shardwise.mindspore import context
from shardwise.mindspore.checks import closest
from shardwise.mindspore.nn.wrap import PipelineCell

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
        nn.Module.__init__(self)
        super(PipelineCell, self).__init__()
        if parallel_mode not in MODES:
            what = f"AutoParallel(parallel_mode={parallel_mode!r})"
            raise ValueError(problem(what, fix=closest(parallel_mode, MODES)))
        self._called = [network]  # in a list, so that it is not registered as a submodule
        if isinstance(network, PipelineCell):
            network, self.micro_size = network.network, network.micro_size
        if isinstance(network, nn.Module):
            self.network = network
        context.reset_auto_parallel_context()
        context.set_auto_parallel_context(**MODES[parallel_mode])

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._called[0](*inputs, **kwargs)

    def train(self, mode: bool = True) -> AutoParallel:
        """Set the mode of this cell and of the network that is called."""
        if isinstance(self._called[0], nn.Module):
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


__all__ = ["AutoParallel"]
