"""Cells, layers, losses and optimizers."""

from shardwise.mindspore.nn.cell import Cell, CellList, SequentialCell
from shardwise.mindspore.nn.grad_reducer import DistributedGradReducer
from shardwise.mindspore.nn.loss import LossBase, MSELoss, SoftmaxCrossEntropyWithLogits
from shardwise.mindspore.nn.optimizer import Momentum, Optimizer
from shardwise.mindspore.nn.wrap import ForwardValueAndGrad, TrainOneStepCell, WithEvalCell, WithLossCell
