"""The reference's names of operators and types, and hashes in names."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.mindspore.communication.management import gnu_hash

# PyTorch operators whose name in the reference is not their CamelCase name.
OPERATORS = {  # conv_window: convolution of a part of the rows
    "matmul": "MatMul", "mm": "MatMul", "bmm": "BatchMatMul", "addmm": "MatMul", "linear": "Dense", "relu": "ReLU",
    "gelu": "GeLU", "silu": "SiLU", "convolution": "Conv2D", "conv2d": "Conv2D", "conv_window": "Conv2D",
    "sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin", "prod": "ReduceProd",
    "any": "ReduceAny", "all": "ReduceAll", "max": "ArgMaxWithValue", "min": "ArgMinWithValue", "argmax": "Argmax",
    "argmin": "Argmin", "maximum": "Maximum", "minimum": "Minimum", "embedding": "Gather", "index_select": "Gather",
    "gather": "GatherD", "layer_norm": "LayerNorm", "native_layer_norm": "LayerNorm", "batch_norm": "BatchNorm",
    "rms_norm": "RmsNorm", "t": "Transpose", "transpose": "Transpose", "permute": "Transpose", "view": "Reshape",
    "reshape": "Reshape", "flatten": "Reshape", "_unsafe_view": "Reshape", "unsqueeze": "ExpandDims",
    "expand": "BroadcastTo", "to": "Cast", "_to_copy": "Cast", "slice": "StridedSlice", "select": "StridedSlice",
    "cat": "Concat", "concat": "Concat", "where": "Select", "div": "RealDiv", "eq": "Equal", "ne": "NotEqual",
    "ge": "GreaterEqual", "gt": "Greater", "le": "LessEqual", "lt": "Less", "topk": "TopK", "one_hot": "OneHot",
    "cumsum": "CumSum", "max_pool2d": "MaxPool", "avg_pool2d": "AvgPool",
    "cross_entropy_loss": "SparseSoftmaxCrossEntropyWithLogits", "nll_loss": "NLLLoss",
}  # fmt: skip
# The reference's names of an operator's inputs.
INPUTS = {"MatMul": ("x1", "x2"), "BatchMatMul": ("x1", "x2"), "ReLU": ("x",)}
TYPES = {torch.bfloat16: "BFloat16", torch.uint8: "UInt8"}
COLLECTIVES = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_to_all": "AlltoAll",
    "collective_permute": "NeighborExchange", "halo_exchange": "NeighborExchangeV2",
}  # fmt: skip


def operator(target: OpOverload) -> str:
    """Return the reference's name of an operator; operators that it lacks get their torch name in CamelCase."""
    name = target._schema.name.partition("::")[2]
    return OPERATORS.get(name) or "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def inputs(target: OpOverload, count: int) -> tuple[str, ...]:
    """Return the names of an operator's first inputs."""
    names = tuple("x" if argument.name == "self" else argument.name for argument in target._schema.arguments)
    return INPUTS.get(operator(target), names)[:count]


def dtype(of: torch.dtype) -> str:
    return TYPES.get(of) or str(of).removeprefix("torch.").capitalize()


def tensor(of: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"<Tensor[{dtype(of)}], {shape_text(shape)}>"


def reference(of: torch.dtype, shape: tuple[int, ...], key: str) -> str:
    """Return the type of a parameter."""
    return f"<Ref[Tensor[{dtype(of)}]], {shape_text(shape)}, ref_key=:{key}>"


def constant(value: Any) -> str:
    """Return the type of an operand that is not a tensor."""
    if isinstance(value, tuple):
        kinds = {constant(item)[1:-1] for item in value}
        return f"<Tuple[{kinds.pop()}*{len(value)}]>" if len(kinds) == 1 else f"<Tuple*{len(value)}>"
    return {bool: "<Bool>", int: "<Int64>", float: "<Float64>", str: "<String>"}.get(type(value), "<None>")


def shape_text(shape: tuple[int, ...]) -> str:
    """Return ``(16)`` for one dim, as in the reference."""
    return f"({', '.join(map(str, shape))})"


def hashed(*parts: object) -> int:
    """Return the number in the name of an inserted operator. It is the same on every rank and in every run."""
    return gnu_hash(" ".join(map(str, parts)).encode())
