"""``mint``: torch's functions, layers and optimizers under torch's own arguments, as newer programs use them."""

from shardwise.mindspore.mint import distributed, optim
from shardwise.mindspore.mint.table import CELLS, FUNCTIONAL, LINALG, SPECIAL, TOP
from shardwise.mindspore.named import absent, module_of

linalg, special = module_of(f"{__name__}.linalg", LINALG), module_of(f"{__name__}.special", SPECIAL)
nn = module_of(f"{__name__}.nn", {**CELLS, "functional": module_of(f"{__name__}.nn.functional", FUNCTIONAL)})
__all__ = ["distributed", "linalg", "nn", "optim", "special"]
__all__ += list(TOP)
__getattr__ = absent(__name__, lambda: __all__, TOP)
