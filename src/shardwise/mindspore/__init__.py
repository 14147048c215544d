"""The MindSpore dialect: programs written in the style of the specification, on the library's plans.

``import shardwise.mindspore as ms`` stands for ``import mindspore as ms``. The dialect holds no sharding logic: a
strategy becomes ``sw.shard``, a mode becomes settings of ``sw.plan``, and ``sw.parallelize`` gives a rank its part of a
cell. What maps to what is on the page "Coming from MindSpore" of the documentation.
"""

import logging

from shardwise.mindspore import (
    amp,
    common,
    communication,
    context,
    dataset,
    mint,
    nn,
    numpy,
    ops,
    parallel,
    runtime,
    train,
)
from shardwise.mindspore import tensor as _tensor
from shardwise.mindspore.amp import build_train_network
from shardwise.mindspore.common import dtype
from shardwise.mindspore.common.dtype import *
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common.seed import get_seed, manual_seed, set_seed
from shardwise.mindspore.context import *
from shardwise.mindspore.dataset import records as mindrecord
from shardwise.mindspore.layout import Layout
from shardwise.mindspore.loss_scale import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from shardwise.mindspore.named import absent, install_paths
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.ops.functional import grad, jacfwd, jacrev, jvp, shard, value_and_grad, vjp, vmap
from shardwise.mindspore.ops.functions import is_tensor, recompute
from shardwise.mindspore.runtime import Profiler
from shardwise.mindspore.tensor import *
from shardwise.mindspore.train import callback as _callback
from shardwise.mindspore.train import model as _model
from shardwise.mindspore.train import serialization as _serialization
from shardwise.mindspore.train.callback import *
from shardwise.mindspore.train.model import *
from shardwise.mindspore.train.serialization import *

__version__ = "2.10.0"  # of the reference, whose signatures, defaults and results are followed
log = logging.getLogger("mindspore")
install_paths(__name__)

__all__ = [
    "Cell", "DynamicLossScaleManager", "FixedLossScaleManager", "Layout", "LossScaleManager", "Profiler", "amp",
    "build_train_network", "common", "communication", "context", "dataset", "dtype",
    "get_seed", "grad", "initializer", "is_tensor", "jacfwd", "jacrev", "jvp", "log", "manual_seed", "mindrecord",
    "mint", "nn", "numpy", "ops", "parallel", "recompute", "runtime", "set_seed", "shard", "train",
    "value_and_grad", "vjp", "vmap",
]  # fmt: skip
for _family in (dtype, context, _tensor, _callback, _model, _serialization):
    __all__ += _family.__all__
__all__ = [*dict.fromkeys([*__all__, "boost"])]  # an alias of nn.wrap
__getattr__ = absent(__name__, lambda: __all__)
