"""Data types, seeds and initial values."""

from shardwise.mindspore.common import dtype
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.common.seed import get_seed, set_seed
from shardwise.mindspore.tensor import Parameter, ParameterTuple, Tensor

__all__ = ["Parameter", "ParameterTuple", "Tensor", "dtype", "get_seed", "initializer", "set_seed"]
