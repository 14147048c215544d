"""Seconds of local operators: the roofline of a device, with what large operators reach of its peaks.

An operator takes the longer of its arithmetic and its memory traffic (Williams, Waterman and Patterson, "Roofline",
CACM 52(4), 2009), after the latency of its kernel. Arithmetic is counted for contractions, convolutions and attention
(``costs.flops``); everything else is bound by memory. A matmul takes its FLOPs at the full rate and, so that
small ones are less efficient, the device's ``matmul_ramp``.

Backward: every operand that needs a gradient costs as many FLOPs as forward (two products for a matmul), attention 2.5
times forward altogether, because its kernels compute the scores again (Dao, "FlashAttention-2", 2023, section 3.1).
The cotangent of what rows were read from (a table of embeddings) is dense: its zeros are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch._ops import OpOverload

from shardwise.costs.cluster import Device
from shardwise.costs.flops import flops_of
from shardwise.graph.ir import Op

aten = torch.ops.aten

Shape = tuple[int, ...]

# FLOPs of attention's backward over those of its forward (see above).
ATTENTION_BACKWARD = 2.5
# Memory traffic of backward over that of forward, for operators whose FLOPs are not counted: the cotangent of the
# result and what was saved are read, cotangents of operands written, as many bytes as forward moves.
BACKWARD_TRAFFIC = 1.0

# Operators that read some rows of their first operand.
_READ_ROWS = frozenset((aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor))

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8",
    torch.float8_e5m2: "f8",
    torch.complex64: "f32",
    torch.complex128: "f64",
}


@lru_cache(maxsize=4096)
def is_view(target: OpOverload) -> bool:
    """Whether the operator's result is another view of its operand's memory: it takes no time on the device."""
    if target in (aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.alias.default):
        return True
    return any(result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns)


def forward_seconds(
    device: Device, op: Op, operands: Sequence[Shape], results: Sequence[Shape], dtypes: Sequence[torch.dtype]
) -> float:
    """Seconds of one forward call on local operands and results of these shapes; ``dtypes``: those of operands, then
    results."""
    if is_view(op.target):
        return 0.0
    return kernel_seconds(device, *_work(op, operands, results, dtypes), dtypes)


def backward_seconds(
    device: Device,
    op: Op,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    dtypes: Sequence[torch.dtype],
    needed: Sequence[bool],
) -> float:
    """Seconds of the backward of that call, which computes the cotangents of the operands that ``needed`` marks."""
    if is_view(op.target) or not any(needed):
        return 0.0
    flops, num_bytes = _work(op, operands, results, dtypes)
    if not flops:
        zeros = prod(operands[0]) * dtypes[0].itemsize if op.target in _READ_ROWS and needed[0] else 0
        return kernel_seconds(device, 0, num_bytes * BACKWARD_TRAFFIC + zeros, dtypes)
    if op.target == aten.scaled_dot_product_attention.default:
        return kernel_seconds(device, flops * ATTENTION_BACKWARD, num_bytes * 2, dtypes)
    # The cotangent of a bias is a sum that the kernels of the others hide.
    contracted = sum(need for need, shape in zip(needed, operands, strict=True) if len(shape) > 1)
    return max(contracted, 1) * kernel_seconds(device, flops, num_bytes, dtypes)


def _work(
    op: Op, operands: Sequence[Shape], results: Sequence[Shape], dtypes: Sequence[torch.dtype]
) -> tuple[float, float]:
    """FLOPs, and bytes read and written. Rows that an embedding does not read are not counted."""
    shapes = (*operands, *results)
    num_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    if op.target in _READ_ROWS:
        num_bytes -= prod(operands[0]) * dtypes[0].itemsize
        num_bytes += prod(results[0]) * dtypes[0].itemsize
    return flops_of(op, tuple(operands), tuple(results)), num_bytes


def kernel_seconds(device: Device, flops: float, num_bytes: float, dtypes: Sequence[torch.dtype]) -> float:
    """Seconds of one kernel: its arithmetic, in the first dtype that devices have a rate for, or its traffic."""
    traffic = num_bytes / device.bytes_per_second()
    if not flops:
        return device.kernel_latency + traffic
    name = next((DTYPE_NAMES[dtype] for dtype in dtypes if dtype in DTYPE_NAMES), "f32")
    arithmetic = device.matmul_ramp + flops / device.matmul_flops(name)
    return device.kernel_latency + max(arithmetic, traffic)
