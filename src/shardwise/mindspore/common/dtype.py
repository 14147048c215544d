"""Data types (``from shardwise.mindspore.common import dtype as mstype``): torch's."""

from torch import (
    bfloat16,
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
from torch import (
    bool as bool_,
)

__all__ = [
    "bfloat16", "bool_", "complex64", "complex128", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8",
]  # fmt: skip
