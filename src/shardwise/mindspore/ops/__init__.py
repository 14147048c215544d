"""Operators: primitives (objects), functions, and communication."""

from typing import TYPE_CHECKING, Any

from shardwise.mindspore.compiling import constexpr
from shardwise.mindspore.named import absent
from shardwise.mindspore.ops import composite, functional, functions, operations, primitive
from shardwise.mindspore.ops.clip import clip_by_global_norm, clip_by_value
from shardwise.mindspore.ops.composite import GradOperation, HyperMap, Map, MultitypeFuncGraph, Partial, add_flags, core
from shardwise.mindspore.ops.functional import (
    depend,
    grad,
    jacfwd,
    jacrev,
    jvp,
    partial,
    shard,
    stop_gradient,
    value_and_grad,
    vjp,
    vmap,
)
from shardwise.mindspore.ops.functions import *
from shardwise.mindspore.ops.operations import *

if not TYPE_CHECKING:  # as in ``operations``
    __all__ = [
        "GradOperation", "HyperMap", "Map", "MultitypeFuncGraph", "Partial", "add_flags", "clip_by_global_norm",
        "clip_by_value", "constexpr", "core", "depend", "grad", "jacfwd", "jacrev", "jvp", "partial", "shard",
        "stop_gradient", "value_and_grad", "vjp", "vmap",
    ]  # fmt: skip
    __all__ += functions.__all__
    __all__ += operations.__all__
    _OWN = "a function of torch operators, which can be split; a custom kernel is torch.library.custom_op"
    __getattr__ = absent(__name__, lambda: __all__, {"Custom": _OWN, "CustomRegOp": _OWN})

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
