"""The MindSpore dialect: programs written in the style of the specification, on the library's plans.

``import shardwise.mindspore as ms`` stands for ``import mindspore as ms``. The dialect holds no sharding logic: a
strategy becomes ``sw.shard``, a mode becomes settings of ``sw.plan``, and ``sw.parallelize`` gives a rank its part of a
cell. What maps to what is on the page "Coming from MindSpore" of the documentation.
"""

import logging

from shardwise.mindspore import (
    aliases,
    amp,
    common,
    communication,
    context,
    dataset,
    mindrecord,
    mint,
    nn,
    numpy,
    ops,
    parallel,
    train,
)
from shardwise.mindspore.amp import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
    build_train_network,
)
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
from shardwise.mindspore.compiling import (
    JitConfig,
    constexpr,
    jit,
    jit_class,
    lazy_inline,
    ms_class,
    ms_function,
    mutable,
    no_inline,
)
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
    run_check,
    set_algo_parameters,
    set_auto_parallel_context,
    set_context,
    set_deterministic,
    set_device,
)
from shardwise.mindspore.layout import Layout
from shardwise.mindspore.named import absent
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops.functional import get_grad, grad, jacfwd, jacrev, jvp, shard, value_and_grad, vjp, vmap
from shardwise.mindspore.ops.functions import is_tensor, recompute
from shardwise.mindspore.profiling import Profiler
from shardwise.mindspore.tensor import Parameter, ParameterTuple, Tensor, from_numpy, tensor
from shardwise.mindspore.train import (
    BackupAndRestore,
    Callback,
    CheckpointConfig,
    DatasetHelper,
    EarlyStopping,
    History,
    LambdaCallback,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    OnRequestExit,
    ReduceLROnPlateau,
    RunContext,
    SummaryCollector,
    SummaryRecord,
    TimeMonitor,
    async_ckpt_thread_status,
    build_searched_strategy,
    data_sink,
    export,
    load,
    load_checkpoint,
    load_distributed_checkpoint,
    load_param_into_net,
    merge_pipeline_strategys,
    merge_sliced_parameter,
    rank_list_for_transform,
    restore_group_info_list,
    save_checkpoint,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)

log = logging.getLogger("mindspore")
aliases.install()

__all__ = [
    "GRAPH_MODE", "PYNATIVE_MODE", "BackupAndRestore", "Callback", "Cell", "CheckpointConfig", "DatasetHelper",
    "DynamicLossScaleManager", "EarlyStopping", "FixedLossScaleManager", "History", "JitConfig", "LambdaCallback",
    "Layout", "LearningRateScheduler", "LossMonitor", "LossScaleManager", "Model", "ModelCheckpoint",
    "OnRequestExit", "ParallelMode", "Parameter", "ParameterTuple", "Profiler", "ReduceLROnPlateau", "RunContext",
    "SummaryCollector", "SummaryRecord", "Tensor", "TimeMonitor", "amp", "async_ckpt_thread_status", "bfloat16",
    "bool_", "build_searched_strategy", "build_train_network", "common", "communication", "complex64", "complex128",
    "constexpr", "context", "data_sink", "dataset", "double", "dtype", "dtype_to_nptype", "dtype_to_pytype",
    "export", "float16", "float32", "float64", "float_", "from_numpy", "get_algo_parameters",
    "get_auto_parallel_context", "get_context", "get_grad", "get_seed", "grad", "half", "initializer", "int8",
    "int16", "int32", "int64", "int_", "is_tensor", "jacfwd", "jacrev", "jit", "jit_class", "jvp", "lazy_inline",
    "load", "load_checkpoint", "load_distributed_checkpoint", "load_param_into_net", "log",
    "merge_pipeline_strategys", "merge_sliced_parameter", "mindrecord", "mint", "ms_class", "ms_function",
    "mutable", "nn", "no_inline", "numpy", "ops", "parallel", "pytype_to_dtype", "rank_list_for_transform",
    "recompute", "reset_algo_parameters", "reset_auto_parallel_context", "reset_context", "restore_group_info_list",
    "run_check", "save_checkpoint", "set_algo_parameters", "set_auto_parallel_context", "set_context",
    "set_deterministic", "set_device", "set_seed", "shard", "tensor", "train", "transform_checkpoint_by_rank",
    "transform_checkpoints", "uint8", "uint16", "uint32", "uint64", "value_and_grad", "vjp", "vmap",
]  # fmt: skip
_DENSE = "dense tensors: ops.matmul of a dense matrix, or ops.gather and ops.unsorted_segment_sum over edges"
__getattr__ = absent(
    __name__,
    lambda: __all__,
    {
        **dict.fromkeys(("COOTensor", "CSRTensor", "RowTensor", "SparseTensor"), _DENSE),
        "load_mindir": "load",
    },
)
