"""Rejection of operators that export accepts and a graph cannot hold, with a fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.errors import CaptureError, Section
from shardwise.graph.ir import Op, Ref, Value
from shardwise.graph.schema import arguments, has_symbols, operator_name, tensor_results

READ_A_NUMBER = "keep it a tensor: arithmetic, torch.where and comparisons work on 0-dim tensors"
_OF_DATA_SHAPE = "nonzero nonzero_numpy argwhere masked_select _unique _unique2 unique_dim unique_consecutive"
_DATA_SHAPE = "keep the shape fixed: torch.where(mask, x, 0), x * mask, or topk with a fixed k"

TRANSFORMS = "this use of torch.func"
FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_LOOP = "write the loop in Python: its iterations are captured one after the other"
CONSTRUCTS = {  # torch constructs in place of Python, and what to write instead
    "torch.cond": "compute both branches and choose with torch.where, or branch on Python numbers",
    **dict.fromkeys(("torch.while_loop", "torch.scan", "torch.associative_scan", "torch.map"), _LOOP),
    FLEX_ATTENTION: "call scaled_dot_product_attention with a mask computed from positions (a large one is never "
    'materialized); for models of transformers pass attn_implementation="sdpa"',
    TRANSFORMS: "grad, vjp, jvp, jacrev, jacfwd, hessian and vmap of functions of tensors are captured; "
    "or use batched operators and torch.autograd.grad(..., create_graph=True)",
}

REJECTED = {
    "item": ("reads a number out of a tensor", READ_A_NUMBER),
    "_local_scalar_dense": ("reads a number out of a tensor", READ_A_NUMBER),
    "is_nonzero": ("decides by the data of a tensor", "choose with torch.where"),
    "equal": ("decides by the data of a tensor", "choose with torch.where"),
    **dict.fromkeys(_OF_DATA_SHAPE.split(), ("has a result whose shape depends on data", _DATA_SHAPE)),
    "bincount": ("has a result whose shape depends on data", "count with one_hot(...).sum(0)"),
}


# Operators whose operands have one dtype; the fake tensors of a trace let others through, kernels do not.
_OF_ONE_DTYPE = frozenset(
    ("linear", "mm", "matmul", "addmm", "addbmm", "mv", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
     "conv_transpose2d", "conv_transpose3d", "convolution", "index_add", "index_copy", "index_put", "index_reduce",
     "binary_cross_entropy", "grid_sampler", "embedding_bag", "cdist", "linalg_cross", "complex")
)  # fmt: skip

_EXCHANGES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})


def reject_unsupported(target: Any, value: Any, origin: Op) -> None:
    """Raise CaptureError for a call that a graph cannot hold.

    ``value``: the fake result; ``origin``: gives module and line.
    """
    section: Section | None = None
    if not isinstance(target, OpOverload):
        name = getattr(target, "__name__", str(target))
        used = f"torch.{name.removesuffix('_impl')}"
        if "_functorch" in str(getattr(target, "__module__", "")):
            used = TRANSFORMS
        what, fix = f"{used} in forward cannot be captured", CONSTRUCTS.get(used, "")
        if not fix:
            what, fix = f"{name} is not an operator", "call ordinary torch operators"
    elif target.namespace in _EXCHANGES:
        what = f"{operator_name(target)} in forward: the model calls collectives itself"
        fix = "remove it: write forward for one device and the whole batch; the plan adds the communication"
    elif operator_name(target) in REJECTED:
        name = operator_name(target)
        what, fix = REJECTED[name]
        what, section = f"{name} {what}", "tensor-values"
    elif target is torch.ops.aten.tensor_split.tensor_indices_or_sections:
        what = "tensor_split takes its split indices from a tensor, so the result shapes depend on data"
        fix = "pass them as Python integers: torch.tensor_split(x, (2, 5)), or indices.tolist() outside the model"
    elif any(tensor.layout != torch.strided for tensor in tensor_results(value)):
        what = f"{operator_name(target)} makes a sparse tensor, which cannot be split"
        fix = "keep it dense: index_add, scatter_add or a mask; torch.matmul with a dense constant for torch.sparse.mm"
    elif has_symbols(value):
        name = operator_name(target)
        boolean = "boolean indexing" if name in ("index", "index_put") else name
        what, fix, section = f"{boolean} has a result whose shape depends on data", _DATA_SHAPE, "tensor-values"
    else:
        return
    raise CaptureError(what, op=origin.module, source=origin.source, fix=fix, section=section)


def reject_mixed_dtypes(op: Op, values: Mapping[str, Value], origin: Op) -> None:
    """Raise CaptureError for operands of several dtypes if the call's kernels accept only one.

    ``values``: those of the graph, by name; ``origin``: the op on whose behalf the call is emitted.
    """
    if not isinstance(op.target, OpOverload) or operator_name(op.target) not in _OF_ONE_DTYPE:
        return
    operands = [(name, values[value.name].dtype) for name, value in arguments(op).items() if isinstance(value, Ref)]
    numbers = [(name, dtype) for name, dtype in operands if name not in ("index", "indices", "offsets")]
    if len({dtype for _, dtype in numbers}) > 1:
        dtypes = ", ".join(f"{name} is {dtype}" for name, dtype in numbers)
        raise CaptureError(
            f"{operator_name(op.target)} takes operands of one dtype: {dtypes}",
            op=origin.module,
            source=origin.source,
            fix="cast one with .to(other.dtype) instead of a fixed dtype, which a Precision may change",
        )
