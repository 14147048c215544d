"""What training steps that are written by hand ask about the ranks (document 004 imports these names)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.launch import rank_groups
from shardwise.mindspore import context
from shardwise.mindspore.communication.management import find_group
from shardwise.mindspore.options import ParallelMode


def _get_parallel_mode() -> str:
    """The option parallel_mode."""
    return context.options().parallel_mode


def _get_device_num() -> int:
    """On how many devices the program runs: 1 in stand-alone mode."""
    alone = _get_parallel_mode() == ParallelMode.STAND_ALONE and "device_num" not in context.options().names_set
    return 1 if alone else context.options().devices


def _get_global_rank() -> int:
    """This process's number among all ranks, or the option global_rank of a single process."""
    return 0 if _get_parallel_mode() == ParallelMode.STAND_ALONE else context.options().rank


def _get_gradients_mean() -> bool:
    """The option gradients_mean."""
    return context.options().gradients_mean


def _get_full_batch() -> bool:
    """The option full_batch."""
    return context.options().full_batch


def _get_pipeline_stages() -> int:
    """The option pipeline_stages."""
    return context.options().pipeline_stages


def _get_parameter_broadcast() -> bool:
    """The option parameter_broadcast."""
    return context.options().parameter_broadcast


def _is_in_auto_parallel_mode() -> bool:
    """Whether operators are split: semi-auto or auto mode."""
    return context.options().distributed


def _is_sharding_propagation() -> bool:
    """Whether auto mode lets strategies that are set spread to other operators."""
    is_auto = _get_parallel_mode() == ParallelMode.AUTO_PARALLEL
    return is_auto and context.options().search_mode == "sharding_propagation"


def _is_in_data_parallel_mode() -> bool:
    """Whether every rank has the whole network and a part of the batch."""
    return _get_parallel_mode() == ParallelMode.DATA_PARALLEL


def _broadcast_parameters(parameters: Iterable[torch.Tensor], root: int = 0) -> None:
    """Give every rank the values of one, as the option parameter_broadcast asks before training."""
    group = find_group()
    with torch.no_grad():
        for parameter in parameters:
            if not getattr(parameter, "layerwise_parallel", False):
                parameter.copy_(rank_groups.broadcast(parameter.detach(), root, group))
