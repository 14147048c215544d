"""Special functions."""

from shardwise.mindspore.mint.table import SPECIAL
from shardwise.mindspore.named import absent

globals().update(SPECIAL)
__all__ = list(SPECIAL)
__getattr__ = absent(__name__, lambda: __all__)
