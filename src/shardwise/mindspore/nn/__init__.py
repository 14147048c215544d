"""Cells, layers, losses and optimizers."""

from typing import Any

from shardwise.mindspore.named import absent
from shardwise.mindspore.nn import activations, adaptive, layers, learning_rates, loss, norms, simple, wrap, wrapped
from shardwise.mindspore.nn.activations import *
from shardwise.mindspore.nn.adaptive import *
from shardwise.mindspore.nn.cell import Cell, CellDict, CellList, GraphCell, SequentialCell
from shardwise.mindspore.nn.grad_reducer import DistributedGradReducer
from shardwise.mindspore.nn.layers import *
from shardwise.mindspore.nn.learning_rates import *
from shardwise.mindspore.nn.loss import *
from shardwise.mindspore.nn.norms import *
from shardwise.mindspore.nn.optimizer import SGD, Momentum, Optimizer
from shardwise.mindspore.nn.simple import *
from shardwise.mindspore.nn.wrap import *
from shardwise.mindspore.nn.wrapped import *

Sequential = SequentialCell
__all__ = [
    "SGD", "Cell", "CellDict", "CellList", "DistributedGradReducer", "GraphCell", "Momentum", "Optimizer",
    "Sequential", "SequentialCell",
]  # fmt: skip
for _family in (activations, adaptive, layers, learning_rates, loss, norms, simple, wrap, wrapped):
    __all__ += _family.__all__
_missing = absent(__name__, lambda: __all__)


def __getattr__(name: str) -> Any:
    """Return a metric, as older programs import metrics from ``nn``."""
    if not name.startswith("_"):
        from shardwise.mindspore.train import metrics

        if name in metrics.__all__:
            return getattr(metrics, name)
    return _missing(name)
