"""Cells around a network: with its loss, with its loss and update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.ops.functional import differentiate


class WithLossCell(Cell):
    """``loss_fn(backbone(data), label)``."""

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
    gradient starts from. A loss that is a vector is summed for its gradient, as in the reference.

    In data_parallel and hybrid_parallel mode the gradients are reduced over the ranks.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, sens: float = 1.0) -> None:
        super().__init__()
        self.network, self.sens = network, sens
        self.optimizer = optimizer
        self.weights = optimizer.parameters

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.construct(*inputs, **kwargs)  # its parts are the outermost calls

    def construct(self, *inputs: Any, **kwargs: Any) -> Any:
        result, gradients = differentiate(self.network, inputs, kwargs, self.weights, self.sens, reduce=True)
        self.optimizer([own / self.sens for own in gradients] if self.sens != 1.0 else gradients)
        return result


class ForwardValueAndGrad(Cell):
    """The loss of a network and the gradients of its weights."""

    def __init__(self, network: nn.Module, weights: Any = None, sens: float = 1.0) -> None:
        super().__init__()
        self.network, self.sens = network, sens
        self.weights = tuple(network.parameters() if weights is None else weights)

    def __call__(self, *inputs: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        return differentiate(self.network, inputs, kwargs, self.weights, self.sens, reduce=False)
