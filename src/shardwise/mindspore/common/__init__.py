"""Data types, seeds and initial values."""

from shardwise.mindspore.common import dtype, initializer
from shardwise.mindspore.common.seed import get_seed, set_seed
from shardwise.mindspore.context import JitConfig, jit, jit_class, lazy_inline, ms_function, mutable
from shardwise.mindspore.tensor import Parameter, ParameterTuple, Tensor

__all__ = [
    "JitConfig", "Parameter", "ParameterTuple", "Tensor", "dtype", "get_seed", "initializer", "jit", "jit_class",
    "lazy_inline", "ms_function", "mutable", "set_seed",
]  # fmt: skip
