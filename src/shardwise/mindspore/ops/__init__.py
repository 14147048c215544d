"""Operators: primitives (objects), functions, and communication."""

from typing import TYPE_CHECKING, Any

from shardwise.mindspore.context import constexpr
from shardwise.mindspore.named import absent
from shardwise.mindspore.ops import composite, functional, functions, operations, primitive
from shardwise.mindspore.ops.composite import *
from shardwise.mindspore.ops.functional import *
from shardwise.mindspore.ops.functions import *
from shardwise.mindspore.ops.operations import *
from shardwise.mindspore.ops.simple import Custom

if not TYPE_CHECKING:  # as in ``operations``
    __all__ = ["Custom", "constexpr"]
    __all__ += composite.__all__ + functional.__all__ + functions.__all__ + operations.__all__
    __getattr__ = absent(__name__, lambda: __all__)

    def _operator(name: str) -> Any:
        """Return any operator, for ``from mindspore.ops import functional as F`` and ``composite as C``."""
        if name.startswith("__"):
            raise AttributeError(name)
        return globals()[name] if name in globals() else __getattr__(name)

    vars(primitive)["constexpr"] = vars(primitive)["_primexpr"] = constexpr
    vars(composite)["__getattr__"] = vars(functional)["__getattr__"] = _operator
else:

    def __getattr__(name: str) -> Any:
        """Return names that are made from tables (``simple``, ``functions``)."""
