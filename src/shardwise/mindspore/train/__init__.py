"""Training: ``Model``, callbacks, metrics and checkpoints."""

from shardwise.mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from shardwise.mindspore.named import absent
from shardwise.mindspore.train.callback import (
    Callback,
    CheckpointConfig,
    LambdaCallback,
    LossMonitor,
    ModelCheckpoint,
    RunContext,
    TimeMonitor,
)
from shardwise.mindspore.train.metrics import (
    F1,
    MAE,
    MSE,
    ROC,
    Accuracy,
    ConfusionMatrix,
    CosineSimilarity,
    Dice,
    Fbeta,
    Loss,
    Metric,
    Perplexity,
    Precision,
    Recall,
    Top1CategoricalAccuracy,
    Top5CategoricalAccuracy,
    TopKCategoricalAccuracy,
    auc,
    get_metric_fn,
    names,
    rearrange_inputs,
)
from shardwise.mindspore.train.model import Model, data_sink
from shardwise.mindspore.train.recording import (
    BackupAndRestore,
    DatasetHelper,
    OnRequestExit,
    SummaryCollector,
    SummaryRecord,
)
from shardwise.mindspore.train.serialization import (
    async_ckpt_thread_status,
    export,
    load,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    save_checkpoint,
)
from shardwise.mindspore.train.transforms import (
    build_searched_strategy,
    merge_pipeline_strategys,
    merge_sliced_parameter,
    rank_list_for_transform,
    restore_group_info_list,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from shardwise.mindspore.train.watching import EarlyStopping, History, LearningRateScheduler, ReduceLROnPlateau

__all__ = [
    "F1", "MAE", "MSE", "ROC", "Accuracy", "BackupAndRestore", "Callback", "CheckpointConfig", "ConfusionMatrix",
    "CosineSimilarity",
    "DatasetHelper", "Dice", "DynamicLossScaleManager", "EarlyStopping", "Fbeta", "FixedLossScaleManager", "History",
    "LambdaCallback", "LearningRateScheduler", "Loss", "LossMonitor", "LossScaleManager", "Metric", "Model",
    "ModelCheckpoint", "OnRequestExit",
    "Perplexity", "Precision", "Recall", "ReduceLROnPlateau",
    "RunContext", "SummaryCollector", "SummaryRecord", "TimeMonitor",
    "Top1CategoricalAccuracy", "Top5CategoricalAccuracy", "TopKCategoricalAccuracy", "async_ckpt_thread_status", "auc",
    "build_searched_strategy", "data_sink", "export", "get_metric_fn", "load", "load_checkpoint",
    "load_distributed_checkpoint", "load_param_into_net", "merge_pipeline_strategys", "merge_sliced_parameter",
    "names", "rank_list_for_transform", "rearrange_inputs", "restore_group_info_list",
    "save_checkpoint", "transform_checkpoint_by_rank",
    "transform_checkpoints",
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
