"""Torch's functions of layers and losses."""

from shardwise.mindspore.mint.table import FUNCTIONAL
from shardwise.mindspore.named import absent

globals().update(FUNCTIONAL)
__all__ = list(FUNCTIONAL)
__getattr__ = absent(__name__, lambda: __all__)
