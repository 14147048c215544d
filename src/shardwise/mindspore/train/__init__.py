"""Training: ``Model``, callbacks, metrics and checkpoints."""

from shardwise.mindspore.loss_scale import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from shardwise.mindspore.named import absent
from shardwise.mindspore.train import callback, metrics, model, recording, serialization, transforms
from shardwise.mindspore.train.callback import *
from shardwise.mindspore.train.metrics import *
from shardwise.mindspore.train.model import *
from shardwise.mindspore.train.recording import *
from shardwise.mindspore.train.serialization import *
from shardwise.mindspore.train.transforms import *

__all__ = ["DynamicLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]
for _family in (callback, metrics, model, recording, serialization, transforms):
    __all__ += _family.__all__
__all__ = [*dict.fromkeys(__all__)]  # callback also exports names of other modules
__getattr__ = absent(__name__, lambda: __all__)
