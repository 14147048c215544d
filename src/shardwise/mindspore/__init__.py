"""The MindSpore dialect: programs written in the style of the specification, on the library's plans.

``import shardwise.mindspore as ms`` stands for ``import mindspore as ms``. The dialect holds no sharding logic: a
strategy becomes ``sw.shard``, a mode becomes settings of ``sw.plan``, and ``sw.parallelize`` gives a rank its part of a
cell. What maps to what is in docs/from-mindspore.md.
"""

import logging

from shardwise.mindspore import aliases, amp, common, communication, context, dataset, nn, numpy, ops, parallel, train
from shardwise.mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager
from shardwise.mindspore.common import dtype
from shardwise.mindspore.common.dtype import (
    bfloat16,
    bool_,
    complex64,
    complex128,
    double,
    dtype_to_nptype,
    dtype_to_pytype,
    float16,
    float32,
    float64,
    float_,
    half,
    int8,
    int16,
    int32,
    int64,
    int_,
    pytype_to_dtype,
    uint8,
    uint16,
    uint32,
    uint64,
)
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common.seed import get_seed, set_seed
from shardwise.mindspore.compiling import JitConfig, jit, jit_class, lazy_inline, ms_function, mutable
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
from shardwise.mindspore.layout import Layout
from shardwise.mindspore.named import absent
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops.functional import grad, shard, value_and_grad
from shardwise.mindspore.tensor import Parameter, ParameterTuple, Tensor, from_numpy, tensor
from shardwise.mindspore.train import (
    Callback,
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    TimeMonitor,
    export,
    load,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    save_checkpoint,
)

log = logging.getLogger("mindspore")
aliases.install()

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "Callback",
    "Cell",
    "CheckpointConfig",
    "DynamicLossScaleManager",
    "FixedLossScaleManager",
    "JitConfig",
    "Layout",
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
    "double",
    "dtype",
    "dtype_to_nptype",
    "dtype_to_pytype",
    "export",
    "float16",
    "float32",
    "float64",
    "float_",
    "from_numpy",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_context",
    "get_seed",
    "grad",
    "half",
    "initializer",
    "int8",
    "int16",
    "int32",
    "int64",
    "int_",
    "jit",
    "jit_class",
    "lazy_inline",
    "load",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "load_param_into_net",
    "log",
    "ms_function",
    "mutable",
    "nn",
    "numpy",
    "ops",
    "parallel",
    "pytype_to_dtype",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "reset_context",
    "save_checkpoint",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_context",
    "set_seed",
    "shard",
    "tensor",
    "train",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "value_and_grad",
]  # fmt: skip
_DISTRIBUTED = "load_distributed_checkpoint, which joins the files of any number of ranks"
__getattr__ = absent(
    __name__,
    lambda: __all__,
    dict.fromkeys(("transform_checkpoints", "rank_list_for_transform", "merge_pipeline_strategys"), _DISTRIBUTED),
)
