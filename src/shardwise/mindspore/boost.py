"""``mindspore.boost``: the accumulation of gradients. Other methods of it are not there."""

from shardwise.mindspore.named import absent
from shardwise.mindspore.nn.wrap import GradientAccumulation as GradientAccumulation

__all__ = ["GradientAccumulation"]
__getattr__ = absent(__name__, lambda: __all__)
