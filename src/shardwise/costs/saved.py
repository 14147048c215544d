"""What autograd keeps of an operator for its backward: asked of autograd itself, on tensors without memory.

The operator is called once on meta tensors under hooks that see every saved tensor. A saved tensor is an operand, a
result, or something of its own (the statistics of a norm, the probabilities of a cross entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.graph.ir import Arg, Op, Ref, Value

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Saved:
    """``operands``, ``results``: positions of those kept; ``other_bytes``: what is kept besides."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    other_bytes: int = 0


def saved_by(op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Saved:
    """What is kept of a call with operands and results of these (local) shapes."""
    if not any(value.requires_grad for value in operands):
        return Saved()
    if op.target == aten.scaled_dot_product_attention.default:
        # Its kernels keep operands, result and a float32 per row of scores, not the scores (FlashAttention, 2022,
        # section 3.1); on meta tensors PyTorch takes the form that keeps them.
        rows = results[0].numel // results[0].shape[-1] if results[0].shape[-1] else 0
        return Saved(tuple(range(len(operands))), (0,), 4 * rows)
    tensors = [
        torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=_takes_grad(value))
        for value in operands
    ]
    # Operators in place may not be called on leaves.
    inputs = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
        returned = _call(op, inputs)
    outputs = [item for item in _flat(returned) if isinstance(item, torch.Tensor)]
    owner: dict[int, tuple[str, int]] = {}
    for kind, group in (("result", outputs), ("operand", inputs)):
        for position, tensor in enumerate(group):
            owner[_storage(tensor)] = (kind, position)
    found: dict[str, set[int]] = {"operand": set(), "result": set()}
    others: dict[int, int] = {}
    for tensor in kept:
        known = owner.get(_storage(tensor))
        if known is None:
            others[_storage(tensor)] = tensor.untyped_storage().nbytes()
        else:
            found[known[0]].add(known[1])
    return Saved(tuple(sorted(found["operand"])), tuple(sorted(found["result"])), sum(others.values()))


def _takes_grad(value: Value) -> bool:
    return value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _flat(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _call(op: Op, tensors: list[torch.Tensor]) -> Any:
    left = iter(tensors)

    def fill(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return next(left)
        return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

    args = [fill(arg) for arg in op.args]
    return op.target(*args, **{key: fill(arg) for key, arg in op.kwargs})
