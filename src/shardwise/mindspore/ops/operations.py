"""The operators as primitives, of all families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.mindspore.named import absent
from shardwise.mindspore.ops import arithmetic, communication, dims, images, indexing, simple
from shardwise.mindspore.ops.arithmetic import *
from shardwise.mindspore.ops.communication import *
from shardwise.mindspore.ops.dims import *
from shardwise.mindspore.ops.images import *
from shardwise.mindspore.ops.indexing import *
from shardwise.mindspore.ops.primitive import Primitive
from shardwise.mindspore.ops.simple import *

if not TYPE_CHECKING:  # type checkers cannot evaluate __all__; to them all imports are public
    __all__ = ["Primitive"]
    for _family in (arithmetic, communication, dims, images, indexing, simple):
        __all__ += _family.__all__
    __getattr__ = absent(__name__, lambda: __all__)
else:

    def __getattr__(name: str) -> Any:
        """Return names that are made from tables (``simple``, ``functions``)."""
