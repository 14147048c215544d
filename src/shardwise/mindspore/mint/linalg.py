"""Linear algebra."""

from shardwise.mindspore.mint.table import LINALG
from shardwise.mindspore.named import absent

globals().update(LINALG)
__all__ = list(LINALG)
__getattr__ = absent(__name__, lambda: __all__)
