"""``mint``: torch's functions, layers and optimizers under torch's own arguments, as newer programs use them."""

from shardwise.mindspore.mint import distributed, linalg, nn, optim, special
from shardwise.mindspore.mint.table import TOP
from shardwise.mindspore.named import absent

__all__ = ["distributed", "linalg", "nn", "optim", "special"]
__all__ += list(TOP)
__getattr__ = absent(__name__, lambda: __all__, TOP)
