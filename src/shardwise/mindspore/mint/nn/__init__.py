"""Torch's layers and losses as cells."""

from shardwise.mindspore.mint.nn import functional
from shardwise.mindspore.mint.table import CELLS
from shardwise.mindspore.named import absent

globals().update(CELLS)
__all__ = ["functional"]
__all__ += list(CELLS)
__getattr__ = absent(__name__, lambda: __all__)
