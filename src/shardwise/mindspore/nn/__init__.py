"""Cells, layers, losses and optimizers."""

from typing import Any

from shardwise.mindspore.named import absent
from shardwise.mindspore.nn import adaptive, layers, optimizer, simple, wrap, wrapped
from shardwise.mindspore.nn.adaptive import *
from shardwise.mindspore.nn.cell import Cell, CellDict, CellList, GraphCell, SequentialCell
from shardwise.mindspore.nn.layers import *
from shardwise.mindspore.nn.optimizer import *
from shardwise.mindspore.nn.simple import *
from shardwise.mindspore.nn.wrap import *
from shardwise.mindspore.nn.wrapped import *

Sequential = SequentialCell
__all__ = ["Cell", "CellDict", "CellList", "GraphCell", "Sequential", "SequentialCell"]
for _family in (adaptive, layers, optimizer, simple, wrap, wrapped):
    __all__ += _family.__all__
_missing = absent(__name__, lambda: __all__)


def __getattr__(name: str) -> Any:
    """Return a metric, as older programs import metrics from ``nn``."""
    if not name.startswith("_"):
        from shardwise.mindspore.train import metrics

        if name in metrics.__all__:
            return getattr(metrics, name)
    return _missing(name)
