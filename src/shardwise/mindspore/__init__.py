"""The MindSpore dialect: programs written in the style of the specification, on the library's plans.

``import shardwise.mindspore as ms`` stands for ``import mindspore as ms``. The dialect holds no sharding logic: a
strategy becomes ``sw.shard``, a mode becomes settings of ``sw.plan``, and ``sw.parallelize`` gives a rank its part of a
cell. What maps to what is in docs/from-mindspore.md.
"""

from shardwise.mindspore import amp, common, communication, context, dataset, nn, ops, parallel, train
from shardwise.mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager
from shardwise.mindspore.common import dtype
from shardwise.mindspore.common.dtype import (
    bfloat16,
    bool_,
    complex64,
    complex128,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
)
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common.seed import get_seed, set_seed
from shardwise.mindspore.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelMode,
    get_algo_parameters,
    get_auto_parallel_context,
    get_context,
    reset_algo_parameters,
    reset_auto_parallel_context,
    reset_context,
    set_algo_parameters,
    set_auto_parallel_context,
    set_context,
)
from shardwise.mindspore.ops.functional import grad, shard, value_and_grad
from shardwise.mindspore.tensor import Parameter, ParameterTuple, Tensor
from shardwise.mindspore.train import (
    Callback,
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    TimeMonitor,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    save_checkpoint,
)

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "Callback",
    "CheckpointConfig",
    "DynamicLossScaleManager",
    "FixedLossScaleManager",
    "LossMonitor",
    "Model",
    "ModelCheckpoint",
    "ParallelMode",
    "Parameter",
    "ParameterTuple",
    "Tensor",
    "TimeMonitor",
    "amp",
    "bfloat16",
    "bool_",
    "common",
    "communication",
    "complex64",
    "complex128",
    "context",
    "dataset",
    "dtype",
    "float16",
    "float32",
    "float64",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_context",
    "get_seed",
    "grad",
    "initializer",
    "int8",
    "int16",
    "int32",
    "int64",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "load_param_into_net",
    "nn",
    "ops",
    "parallel",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "reset_context",
    "save_checkpoint",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_context",
    "set_seed",
    "shard",
    "train",
    "uint8",
    "value_and_grad",
]
