"""Data types (``from shardwise.mindspore.common import dtype as mstype``): torch's."""

from typing import Any

import numpy as np
import torch
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
    uint16,
    uint32,
    uint64,
)
from torch import (
    bool as bool_,
)
from torch import (
    float16 as half,
)
from torch import (
    float32 as float_,
)
from torch import (
    float64 as double,
)
from torch import (
    int64 as int_,
)

from shardwise.mindspore.tensor_methods import dtype_of

tensor_type = tensor = torch.Tensor
number = torch.dtype


def dtype_to_nptype(type_: torch.dtype) -> Any:
    """Torch's dtype as numpy's."""
    return torch.empty(0, dtype=type_).numpy().dtype.type


def dtype_to_pytype(type_: torch.dtype) -> type:
    """Torch's dtype as Python's."""
    if type_ is bool_:
        return bool
    return complex if type_.is_complex else float if type_.is_floating_point else int


def pytype_to_dtype(obj: Any) -> torch.dtype:
    """Numpy's or Python's dtype as torch's."""
    return float32 if obj is float else dtype_of(np.dtype(obj).name)


__all__ = [
    "bfloat16", "bool_", "complex64", "complex128", "double", "dtype_to_nptype", "dtype_to_pytype", "float16",
    "float32", "float64", "float_", "half", "int8", "int16", "int32", "int64", "int_", "pytype_to_dtype", "uint8",
    "uint16", "uint32", "uint64",
]  # fmt: skip
