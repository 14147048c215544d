"""Kernels: what one does on a device, and how long it takes.

A kernel takes the longer of its arithmetic and its memory traffic (Williams, Waterman and Patterson, "Roofline", CACM
52(4), 2009), after what it takes to start. *Products* (matmuls, convolutions, attention) have arithmetic, everything
else moves memory. A device's file says what part of its peaks a kind of kernel reaches, where that is less than a large
matmul or a large element-wise operator (``Device.kernels``); the kinds are ``cluster.PRODUCTS`` and ``MOVES``.

Element by element, and so at a rate of its own, goes what reads an operand of another size (a bias), what writes wider
numbers than it reads (a cast to float32), and what reads along another dim than it writes (a transposed copy): kernels
that do not load several numbers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch._ops import OpOverload

from shardwise.costs.cluster import MOVES, PRODUCTS, Cluster, Device
from shardwise.costs.flops import kernel_flops
from shardwise.graph.ir import Arg, Ref
from shardwise.graph.schema import arguments, operator_name
from shardwise.programs.forms import Form

aten = torch.ops.aten

DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.float8_e4m3fn: "f8", torch.float8_e5m2: "f8", torch.complex64: "f32", torch.complex128: "f64",
}  # fmt: skip

# Query rows of attention's backward take so many times those of forward (fitted with ``Device.attention_row``).
ROWS_BACKWARD = 4.0

# Fewer input channels of a convolution than these take as long as these, on devices with a figure for convolutions
# (fitted: 3 channels take the time of some 32).
_LEAST_CHANNELS = 32

# Operators that read some rows of their first operand, and those that add rows to a result of zeros.
READ_ROWS = frozenset(("embedding", "index_select", "gather", "index"))
_ADD_ROWS = frozenset(
    ("embedding_dense_backward", "index_put", "index_add", "scatter_add", "_unsafe_index_put", "embedding_backward")
)
# Copies that take several numbers at once.
_COPIES_OF_PARTS = frozenset(("cat", "stack", "zeros", "fill", "full"))
_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "max", "min", "prod", "var_mean", "var", "std", "logsumexp"))
_KIND_OF = {
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax"), "softmax"),
    "_softmax_backward_data": "softmax_backward",
    "_log_softmax_backward_data": "log_softmax_backward",
    **dict.fromkeys(("native_layer_norm", "layer_norm", "native_group_norm"), "layer_norm"),
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), "layer_norm_backward"),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), "rms_norm"),
    "_fused_rms_norm_backward": "rms_norm_backward",
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), "batch_norm"),
    "native_batch_norm_backward": "batch_norm_backward",
    **dict.fromkeys(("native_dropout", "bernoulli", "dropout"), "random"),
    "max_pool2d_with_indices": "pool",
    "max_pool2d_with_indices_backward": "pool_backward",
}


def peak_flops(cluster: Cluster, dtypes: Iterable[torch.dtype]) -> float:
    """Return the FLOP/s of all devices in the fastest of these dtypes; 0 for none."""
    rates = (cluster.device.peak_flops(DTYPE_NAMES.get(dtype, "f32")) for dtype in dtypes)
    return cluster.num_devices * max(rates, default=0.0)


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What a kernel does. ``flops``: of a product; ``num_bytes``: read and written; ``scalars``: elements that go one
    by one; ``rows``: query rows of all heads of attention; ``dtype``: of the first operand, in which a product is
    computed (a name of ``Device.flops``); ``written``: bytes that are set to zero first; ``channels``: of the input of
    a convolution; ``made``: bytes of the largest result."""

    kind: str = ""
    flops: float = 0.0
    num_bytes: float = 0.0
    scalars: float = 0.0
    rows: float = 0.0
    dtype: str = "f32"
    written: float = 0.0
    channels: int = _LEAST_CHANNELS
    made: float = 0.0

    def scaled(self, size: float, flops: float, written: float) -> KernelWork:
        """Return the same kernel on other sizes: by which factors bytes, FLOPs and what is zeroed change."""
        return replace(
            self,
            flops=self.flops * flops,
            num_bytes=self.num_bytes * size,
            scalars=self.scalars * size,
            rows=self.rows * size,
            written=self.written * written,
            made=self.made * size,
        )


@runtime_checkable
class PricedKernel(Protocol):
    """A target of an instruction that knows its kernels: a compiled section."""

    @property
    def works(self) -> tuple[KernelWork, ...]: ...


@lru_cache(maxsize=4096)
def is_view(target: Any) -> bool:
    """Return whether the operator's result is another view of its operand's memory: it takes no time on the device."""
    if not isinstance(target, OpOverload):
        return False
    if target in (aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.alias.default):
        return True
    return any(result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call as ``costs.flops`` reads it."""

    target: Any
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]


def work_of(call: KernelCall, operands: Sequence[Form], results: Sequence[Form]) -> KernelWork:
    """Return the work of a kernel on operands and results of these forms. Of a target that is no operator of PyTorch
    only what it moves is known."""
    read, written = ([form.num_bytes for form in forms] for forms in (operands, results))
    num_bytes, work = float(sum(read) + sum(written)), partial(KernelWork, made=float(max(written, default=0)))
    if not isinstance(call.target, OpOverload):
        return work(num_bytes=num_bytes)
    name = operator_name(call.target)
    dtype = next((DTYPE_NAMES[form.dtype] for form in operands if form.dtype in DTYPE_NAMES), "f32")
    shapes = tuple(form.shape for form in operands), tuple(form.shape for form in results)
    if flops := kernel_flops(call, *shapes):
        return _product(name, call, shapes[0], partial(work, flops=flops, num_bytes=num_bytes, dtype=dtype))
    if name.startswith("nll_loss"):  # picks a number of each row, and fills what it makes in backward
        labels = sum(float(form.num_bytes) for form in operands if not form.dtype.is_floating_point)
        return work(num_bytes=2 * labels, written=float(written[0]) if name.endswith("backward") else 0.0)
    if name in _ADD_ROWS:
        return work("scatter", num_bytes=2 * float(max(read, default=0)), written=float(sum(written[:1])))
    if name in READ_ROWS and operands and results:
        return work(num_bytes=num_bytes + float(written[0]) - float(read[0]))
    if name in _REDUCTIONS and operands and results and results[0].shape != operands[0].shape:
        kept = bool(results[0].shape) and results[0].shape[-1:] == operands[0].shape[-1:]
        return work("column_reduction" if kept else "reduction", num_bytes=num_bytes)
    kind = _KIND_OF.get(name, "")
    return work(kind, num_bytes=num_bytes, scalars=0.0 if kind else _scalars(name, operands, results), dtype=dtype)


def _product(
    name: str, call: KernelCall, operands: tuple[tuple[int, ...], ...], work: Callable[..., KernelWork]
) -> KernelWork:
    """Return the work of a product. ``work``: makes it, given the kind and the sizes that only some kinds have."""
    backward = "_backward" if name.endswith("backward") else ""
    if "attention" in name:
        named = arguments(call)
        masked = "masked_" if isinstance(named.get("attn_mask", named.get("attn_bias")), Ref) else ""
        query = operands[1 if backward else 0]
        return work(f"{masked}attention{backward}", rows=float(prod(query[:-1])))
    if "conv" not in name:
        return work()
    weight = operands[2 if backward else 1]
    return work(f"convolution{backward}", channels=min(weight[1], _LEAST_CHANNELS))


def _scalars(name: str, operands: Sequence[Form], results: Sequence[Form]) -> float:
    """Elements of an element-wise kernel that cannot load several at once: its operands differ in size or in the order
    of their memory, or have gaps, or it writes wider numbers than it reads."""
    if not results or name in _COPIES_OF_PARTS:
        return 0.0
    result = results[0]
    large = [form for form in operands if prod(form.shape) > 1]
    same_form = all(form.shape == result.shape and form.stride == result.stride for form in large) and result.is_dense
    widens = any(form.dtype.itemsize < result.dtype.itemsize for form in large)
    return float(prod(result.shape)) if large and (widens or not same_form) else 0.0


def product_rate(device: Device, kind: str, dtype: str) -> float:
    """Return the FLOP/s that a large product of a kind reaches."""
    if share := device.kernels.get(kind, 0.0):
        return device.peak_flops(dtype) * share
    is_own = bool(device.products) and kind in PRODUCTS  # attention and convolutions have their own dtype
    return (replace(device, products="") if is_own else device).matmul_flops(dtype)


def fastest_rate(device: Device, op: str, dtype: str) -> float:
    """Return the FLOP/s that no kernel of a product exceeds, forward or backward, however it is split. ``op``: its
    name."""
    family = next((name for name in ("attention", "conv") if name in op), None)
    kinds = ("", *(kind for kind in PRODUCTS if family is not None and family in kind))
    return max(product_rate(device, kind, dtype) for kind in kinds)


def kernel_seconds(device: Device, work: KernelWork) -> float:
    """Seconds that a kernel keeps a device busy."""
    share = device.kernels.get(work.kind, 0.0)
    bandwidth = device.bytes_per_second()
    moving = work.num_bytes / (device.memory_bandwidth * share if share and work.kind in MOVES else bandwidth)
    if work.scalars and device.scalar_rate:
        moving = max(moving, work.scalars / device.scalar_rate)
    seconds = device.kernel_latency + work.written / bandwidth + device.fresh_seconds(work.made)
    if not work.flops:
        return seconds + moving
    arithmetic = (
        work.flops / product_rate(device, work.kind, work.dtype) * (_LEAST_CHANNELS / work.channels if share else 1.0)
    )
    if work.rows and device.attention_row:
        arithmetic += work.rows * device.attention_row * (ROWS_BACKWARD if work.kind.endswith("backward") else 1.0)
    return seconds + max(device.matmul_ramp + arithmetic, moving)
