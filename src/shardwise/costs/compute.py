"""Seconds of operators: those of the kernels that they call, forward and backward.

Which kernels an operator calls is asked of PyTorch, as programs ask it (``programs.vjp``), once per operator on whole
values; ``costs.kernels`` says how long one takes. On the part of a device the same kernels do less: arithmetic shrinks
as that of forward does, traffic as the bytes of operands and results do.

No kernel takes less than the host takes to start one (``Device.launch``): a bound for each by itself, so that splitting
what the host cannot start faster gains nothing. (The simulated step lets the host run ahead.)

An operator that cannot be traced moves in backward as many bytes as in forward; a product takes one more for every
operand that needs a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from shardwise.costs.cluster import Device
from shardwise.costs.flops import flops_of, unmasked_share
from shardwise.costs.kernels import READ_ROWS, KernelCall, KernelWork, kernel_seconds, work_of
from shardwise.costs.saved_for_backward import numbered_call
from shardwise.graph.ir import Op, Value
from shardwise.graph.schema import operator_name
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute
from shardwise.programs.vjp import Call, VjpCache, needed_kernels

aten = torch.ops.aten

Shape = tuple[int, ...]

# Operators that are one kernel on GPUs, and several on the CPU on which plans are traced.
ONE_KERNEL = {aten.rms_norm.default: "rms_norm"}


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernels of an operator on whole values, and the sizes that they were traced for: FLOPs of the call, bytes of
    its operands and results."""

    forward: tuple[KernelWork, ...]
    backward: tuple[KernelWork, ...]
    flops: float
    num_bytes: float


def operator_seconds(
    device: Device,
    op: Op,
    operands: Sequence[Value],
    results: Sequence[Value],
    shapes: tuple[Sequence[Shape], Sequence[Shape]],
    *,
    backward: bool = False,
) -> float:
    """Return the seconds of one forward call, or of its backward, which computes the cotangents of the operands that
    need one. ``operands`` and ``results``: the whole values; ``shapes``: of the parts of them that a device has."""
    if adds_bias(op, operands) and not backward:
        return 0.0
    if backward and not any(value.requires_grad for value in results):
        return 0.0
    if is_one_kernel(device, op):
        num_bytes = _num_bytes(operands, results, shapes)
        num_bytes += _num_bytes((), results, ((), shapes[1])) if backward else 0.0
        work = KernelWork(ONE_KERNEL[op.target] + "_backward" * backward, num_bytes=num_bytes)
        return max(kernel_seconds(device, work), device.launch)
    forms = tuple(map(Form.of_value, operands)), tuple(map(Form.of_value, results))
    profile = traced_profile(numbered_call(op), *forms, tuple(value.requires_grad for value in results))
    rows = operator_name(op.target) in READ_ROWS
    size = _num_bytes(operands, results, shapes, rows) / max(profile.num_bytes, 1.0)
    flops = flops_of(op, tuple(shapes[0]), tuple(shapes[1])) / profile.flops if profile.flops else 1.0
    if op.target == aten.scaled_dot_product_attention.default and profile.flops:
        whole = [value.shape for value in operands]
        flops *= unmasked_share(op, *shapes[0][:2]) / unmasked_share(op, *whole[:2])
    zeroed = prod(shapes[0][0]) / max(operands[0].numel, 1) if rows else size
    kernels = profile.backward if backward else profile.forward
    return sum(max(kernel_seconds(device, work.scaled(size, flops, zeroed)), device.launch) for work in kernels)


def adds_bias(op: Op, operands: Sequence[Value]) -> bool:
    """Return whether the operator adds a vector along the last dim, as linear layers add their biases: inside of the
    product (``programs.fused_products``), where it takes no time."""
    if op.target is not aten.add.Tensor or op.kwargs or len(operands) != 2:
        return False
    vector, other = sorted(operands, key=lambda value: len(value.shape))
    return (
        len(vector.shape) == 1 < len(other.shape) and vector.shape == other.shape[-1:] and vector.dtype == other.dtype
    )


def is_one_kernel(device: Device, op: Op) -> bool:
    """Return whether the operator is one kernel each way on this device, though it is traced as several."""
    return ONE_KERNEL.get(op.target) in device.kernels


def _num_bytes(
    operands: Sequence[Value],
    results: Sequence[Value],
    shapes: tuple[Sequence[Shape], Sequence[Shape]],
    rows: bool = False,
) -> float:
    """Return the bytes of operands and results; unread rows of a table do not count."""
    taken = [*zip(operands, shapes[0], strict=True), *zip(results, shapes[1], strict=True)][1 if rows else 0 :]
    return float(sum(prod(shape) * value.dtype.itemsize for value, shape in taken))


@lru_cache(maxsize=1)
def _vjp_cache() -> VjpCache:
    return VjpCache()


@lru_cache(maxsize=16384)
def traced_profile(
    call: Call, operands: tuple[Form, ...], results: tuple[Form, ...], needed: tuple[bool, ...]
) -> Profile:
    whole = work_of(KernelCall(*call), operands, results)
    table = operator_name(call[0]) in READ_ROWS
    num_bytes = float(sum(form.num_bytes for form in (*operands, *results)[1 if table else 0 :]))
    flops = float(flops_of(KernelCall(*call), tuple(f.shape for f in operands), tuple(f.shape for f in results)))
    try:
        forward = _vjp_cache().forward(call, operands)
        cotangents = tuple(
            Form.contiguous(form.shape, form.dtype) if form.requires_grad and need else None
            for form, need in zip(forward.forms, needed, strict=True)
        )
        backward = _vjp_cache().backward(call, operands, cotangents)
    except Exception:  # what PyTorch cannot trace on tensors without memory
        return Profile((whole,), assumed_backward(whole, operands), flops, num_bytes)
    names = {str(i): form for i, form in enumerate(operands)}
    names |= {f"c{i}": form for i, form in enumerate(cotangents) if form is not None}
    for kernel in forward.kernels:
        names |= dict(zip(kernel.results, kernel.forms, strict=True))
    first = _works(needed_kernels(forward.kernels, {*forward.results, *backward.needs}), names)
    if first and sum(work.flops for work in first) < flops:  # one call of several products, counted as one
        first = (whole,)
    second = assumed_backward(whole, operands) if backward.opaque else _works(backward.kernels, names)
    return Profile(first, second, flops, num_bytes)


def _works(kernels: Sequence[Compute], forms: dict[str, Form]) -> tuple[KernelWork, ...]:
    """Return the work of the kernels in order. ``forms``: of the values read; those of the results are added."""
    works = []
    for kernel in kernels:
        forms |= dict(zip(kernel.results, kernel.forms, strict=True))
        if not kernel.is_view:
            operands = [forms[name] for name in kernel.operands]
            written = [forms[name] for name in kernel.writes]
            works.append(
                work_of(KernelCall(kernel.target, kernel.args, kernel.kwargs), operands, [*kernel.forms, *written])
            )
    return tuple(works)


def assumed_backward(whole: KernelWork, operands: Sequence[Form]) -> tuple[KernelWork, ...]:
    """Backward of what cannot be traced, where this is forward."""
    if not whole.flops:
        return (whole,)
    contracted = sum(form.requires_grad and len(form.shape) > 1 for form in operands)
    return (replace(whole, kind=f"{whole.kind}_backward" if whole.kind else ""),) * max(contracted, 1)
