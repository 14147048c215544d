"""Training: ``Model``, callbacks, metrics and checkpoints."""

from shardwise.mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager
from shardwise.mindspore.train.callback import (
    Callback,
    CheckpointConfig,
    LambdaCallback,
    LossMonitor,
    ModelCheckpoint,
    RunContext,
    TimeMonitor,
)
from shardwise.mindspore.train.metrics import MAE, MSE, Accuracy, Loss, Metric
from shardwise.mindspore.train.model import Model
from shardwise.mindspore.train.serialization import (
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    save_checkpoint,
)

__all__ = [
    "MAE",
    "MSE",
    "Accuracy",
    "Callback",
    "CheckpointConfig",
    "DynamicLossScaleManager",
    "FixedLossScaleManager",
    "LambdaCallback",
    "Loss",
    "LossMonitor",
    "Metric",
    "Model",
    "ModelCheckpoint",
    "RunContext",
    "TimeMonitor",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "load_param_into_net",
    "save_checkpoint",
]
