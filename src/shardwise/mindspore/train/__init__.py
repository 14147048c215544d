"""Training: ``Model``, callbacks, metrics and checkpoints."""

from shardwise.mindspore.loss_scale import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from shardwise.mindspore.named import absent
from shardwise.mindspore.train import callback, metrics, model, serialization
from shardwise.mindspore.train.callback import *
from shardwise.mindspore.train.metrics import *
from shardwise.mindspore.train.model import *
from shardwise.mindspore.train.serialization import *

__all__ = ["DynamicLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]
for _family in (callback, metrics, model, serialization):
    __all__ += _family.__all__
__getattr__ = absent(__name__, lambda: __all__)
