"""Data types of torch (``from shardwise.mindspore.common import dtype as mstype``)."""

from typing import Any

import numpy as np
import torch

from shardwise.mindspore.tensor_methods import dtype_of

bool_, int_, float_, half, double = torch.bool, torch.int64, torch.float32, torch.float16, torch.float64
int8, int16, int32, int64 = torch.int8, torch.int16, torch.int32, torch.int64
uint8, uint16, uint32, uint64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
float16, float32, float64, bfloat16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
complex64, complex128 = torch.complex64, torch.complex128
tensor_type = tensor = torch.Tensor
number = torch.dtype


def dtype_to_nptype(type_: torch.dtype) -> Any:
    """Return numpy's type of a torch dtype."""
    return torch.empty(0, dtype=type_).numpy().dtype.type


def dtype_to_pytype(type_: torch.dtype) -> type:
    """Return Python's type of a torch dtype."""
    if type_ is bool_:
        return bool
    return complex if type_.is_complex else float if type_.is_floating_point else int


def pytype_to_dtype(obj: Any) -> torch.dtype:
    """Return the torch dtype of a numpy or Python type."""
    return float32 if obj is float else dtype_of(np.dtype(obj).name)


__all__ = [
    "bfloat16", "bool_", "complex64", "complex128", "double", "dtype_to_nptype", "dtype_to_pytype", "float16",
    "float32", "float64", "float_", "half", "int8", "int16", "int32", "int64", "int_", "pytype_to_dtype", "uint8",
    "uint16", "uint32", "uint64",
]  # fmt: skip
