"""Names of ``mindspore.parallel``: functions that newer programs import from here."""

from typing import Any

from shardwise.mindspore.context import get_algo_parameters, reset_algo_parameters, set_algo_parameters
from shardwise.mindspore.layout import Layout
from shardwise.mindspore.named import absent
from shardwise.mindspore.nn.grad_reducer import DistributedGradReducer
from shardwise.mindspore.nn.wrap import PipelineGradReducer
from shardwise.mindspore.ops.functional import shard
from shardwise.mindspore.train import (
    build_searched_strategy,
    load_distributed_checkpoint,
    merge_pipeline_strategys,
    rank_list_for_transform,
    restore_group_info_list,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)


def sync_pipeline_shared_parameters(net: Any) -> None:
    """Do nothing; kept for programs that call it. Stages that share a parameter have the same values."""


__all__ = [
    "DistributedGradReducer", "Layout", "PipelineGradReducer", "build_searched_strategy",
    "get_algo_parameters", "load_distributed_checkpoint", "merge_pipeline_strategys", "rank_list_for_transform",
    "reset_algo_parameters", "restore_group_info_list", "set_algo_parameters", "shard",
    "sync_pipeline_shared_parameters", "transform_checkpoint_by_rank", "transform_checkpoints",
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
