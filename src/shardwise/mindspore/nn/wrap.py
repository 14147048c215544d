"""Cells around a network: with its loss, with its loss and update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.mindspore.amp import FixedLossScaleManager, all_finite
from shardwise.mindspore.communication.management import GlobalComm
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.ops.functional import differentiate


class WithLossCell(Cell):
    """``loss_fn(backbone(data), label)``."""

    is_wrapper = True

    def __init__(self, backbone: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self._backbone, self._loss_fn = backbone, loss_fn

    @property
    def backbone_network(self) -> nn.Module:
        return self._backbone

    def construct(self, data: Any, label: Any) -> Any:
        return self._loss_fn(self._backbone(data), label)


class WithEvalCell(Cell):
    """Loss, output and label, for metrics."""

    def __init__(self, network: nn.Module, loss_fn: Any, add_cast_fp32: bool = False) -> None:
        super().__init__()
        self._network, self._loss_fn, self.add_cast_fp32 = network, loss_fn, add_cast_fp32

    def construct(self, data: Any, label: Any) -> Any:
        output = self._network(data)
        output = output.float() if self.add_cast_fp32 else output
        return self._loss_fn(output, label), output, label


class TrainOneStepCell(Cell):
    """Forward, backward and update; returns the loss. ``network`` returns the loss (first); ``sens``: what the
    gradient starts from, which the optimizer's ``loss_scale`` divides by again. A loss that is a vector is summed for
    its gradient, as in the reference.

    In data_parallel and hybrid_parallel mode the gradients are reduced over the ranks.
    """

    is_wrapper = True

    def __init__(self, network: nn.Module, optimizer: Optimizer, sens: float = 1.0) -> None:
        super().__init__()
        self.network, self.sens = network, sens
        self.optimizer = optimizer
        self.weights = optimizer.parameters

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.construct(*inputs, **kwargs)  # its parts are the outermost calls

    def construct(self, *inputs: Any, **kwargs: Any) -> Any:
        result, gradients = differentiate(self.network, inputs, kwargs, self.weights, self.sens, reduce=True)
        self.optimizer(gradients)
        return result


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """The same with a loss scale: gradients are divided by it, a step in which one of them is not finite (on any rank)
    changes nothing, and the scale adjusts itself. Returns the loss, whether the step was left out, and its scale.

    ``scale_sense``: a loss scale manager, or a number that stays.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, scale_sense: Any) -> None:
        super().__init__(network, optimizer)
        manager = hasattr(scale_sense, "update_loss_scale")
        self.manager = scale_sense if manager else FixedLossScaleManager(float(scale_sense))

    def construct(self, *inputs: Any, **kwargs: Any) -> tuple[Any, bool, float]:
        scale = float(self.manager.get_loss_scale())
        result, gradients = differentiate(self.network, inputs, kwargs, self.weights, scale, reduce=True)
        overflow = not all_finite(gradients, group=GlobalComm.WORLD_COMM_GROUP)
        if not overflow:
            self.optimizer([gradient / scale for gradient in gradients])
        self.manager.update_loss_scale(overflow)
        return (result[0] if isinstance(result, (tuple, list)) else result), overflow, scale


class ForwardValueAndGrad(Cell):
    """The loss of a network and the gradients of its weights."""

    def __init__(self, network: nn.Module, weights: Any = None, sens: float = 1.0) -> None:
        super().__init__()
        self.network, self.sens = network, sens
        self.weights = tuple(network.parameters() if weights is None else weights)

    def __call__(self, *inputs: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        return differentiate(self.network, inputs, kwargs, self.weights, self.sens, reduce=False)


class PipelineCell(Cell):
    """A network whose batch is cut into micro-batches for pipeline stages: not built yet."""

    def __init__(self, network: nn.Module, micro_size: int) -> None:
        raise NotImplementedError(
            f"PipelineCell(..., micro_size={micro_size}): pipeline stages follow in a later version; train the network "
            "itself, with operator-level, data-parallel or automatic plans"
        )
