"""``mint``: torch's functions, layers and optimizers under torch's own arguments, as newer programs use them."""

from typing import Any

from shardwise.mindspore.mint import distributed, linalg, nn, optim, special
from shardwise.mindspore.mint.table import TOP
from shardwise.mindspore.named import absent

__all__ = ["distributed", "linalg", "nn", "optim", "special"]
__all__ += list(TOP)
_missing = absent(__name__, lambda: __all__, {"concatenate": "concat"})


def __getattr__(name: str) -> Any:
    """Return a function. As module globals their names would hide Python's own in this file."""
    return TOP[name] if name in TOP else _missing(name)
