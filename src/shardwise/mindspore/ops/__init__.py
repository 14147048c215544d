"""Operators: primitives (objects), functions, and communication."""

from typing import TYPE_CHECKING, Any

from shardwise.mindspore.named import absent
from shardwise.mindspore.ops import functions, operations
from shardwise.mindspore.ops.clip import clip_by_global_norm, clip_by_value
from shardwise.mindspore.ops.composite import GradOperation, HyperMap, Map, MultitypeFuncGraph
from shardwise.mindspore.ops.functional import depend, grad, partial, shard, stop_gradient, value_and_grad, vmap
from shardwise.mindspore.ops.functions import *
from shardwise.mindspore.ops.operations import *

if not TYPE_CHECKING:  # as in ``operations``
    __all__ = [
        "GradOperation", "HyperMap", "Map", "MultitypeFuncGraph", "clip_by_global_norm", "clip_by_value", "depend",
        "grad", "partial", "shard", "stop_gradient", "value_and_grad", "vmap",
    ]  # fmt: skip
    __all__ += functions.__all__
    __all__ += operations.__all__
    __getattr__ = absent(__name__, lambda: __all__)
else:

    def __getattr__(name: str) -> Any:
        """Names that are made from tables (``simple``, ``functions``)."""
