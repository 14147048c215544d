"""Cells, layers, losses and optimizers."""

from shardwise.mindspore.nn import activations, layers, learning_rates, loss
from shardwise.mindspore.nn.activations import *
from shardwise.mindspore.nn.adaptive import Adam, AdamWeightDecay, Lamb
from shardwise.mindspore.nn.cell import Cell, CellList, SequentialCell
from shardwise.mindspore.nn.grad_reducer import DistributedGradReducer
from shardwise.mindspore.nn.layers import *
from shardwise.mindspore.nn.learning_rates import *
from shardwise.mindspore.nn.loss import *
from shardwise.mindspore.nn.optimizer import SGD, Momentum, Optimizer
from shardwise.mindspore.nn.wrap import (
    ForwardValueAndGrad,
    PipelineCell,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithEvalCell,
    WithLossCell,
)

__all__ = [
    "SGD", "Adam", "AdamWeightDecay", "Cell", "CellList", "DistributedGradReducer", "ForwardValueAndGrad", "Lamb",
    "Momentum", "Optimizer", "PipelineCell", "SequentialCell", "TrainOneStepCell", "TrainOneStepWithLossScaleCell",
    "WithEvalCell", "WithLossCell",
]  # fmt: skip
__all__ += activations.__all__
__all__ += layers.__all__
__all__ += learning_rates.__all__
__all__ += loss.__all__
