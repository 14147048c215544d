"""What autograd keeps of an operator of a graph for its backward: asked of PyTorch itself, on tensors without memory.

The search asks this of every operator before there is a program. Of a program its list says what is saved
(``programs.differentiate``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.graph.attention_within import ATTENTION_WITHIN
from shardwise.graph.ir import Arg, Op, Ref, Value, map_refs
from shardwise.programs.forms import Form
from shardwise.programs.vjp import Call

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Saved:
    """``operands``, ``results``: positions of those kept; ``other_bytes``: what is kept besides (the statistics of a
    norm, the probabilities of a cross entropy)."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    other_bytes: int = 0


def numbered_call(op: Op) -> Call:
    """Return the call of an operator with numbers for operands; every occurrence of one may be in another layout."""
    position = count()

    def numbered(arg: Arg) -> Arg:
        return map_refs(arg, lambda _: Ref(str(next(position))))

    return op.target, tuple(map(numbered, op.args)), tuple((key, numbered(arg)) for key, arg in op.kwargs)


def saved_for_backward(op: Op, operands: Sequence[Value]) -> Saved:
    """Return the tensors saved for backward by a call with operands of these shapes."""
    if not any(value.requires_grad for value in operands):
        return Saved()
    saved = _saved_tensors(numbered_call(op), tuple(map(Form.of_value, operands)))
    if saved is None:  # autograd itself does its backward (``programs.vjp``), and the tape holds everything
        return Saved(tuple(range(len(operands))), tuple(range(len(op.results))))
    return saved


@lru_cache(maxsize=4096)
def _saved_tensors(call: Call, operands: tuple[Form, ...]) -> Saved | None:
    """None where there is no kernel for tensors without memory."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inputs = [_empty(form) for form in operands]
        try:
            outputs = _run(call, inputs)
        except NotImplementedError:
            return None
    owner: dict[int, tuple[str, int]] = {}
    for kind, group in (("result", outputs), ("operand", inputs)):
        for position in reversed(range(len(group))):
            owner[_storage(group[position])] = (kind, position)
    places = [owner.get(_storage(tensor)) for tensor in kept]
    others = {_storage(t): t.untyped_storage().nbytes() for t, place in zip(kept, places, strict=True) if place is None}
    of_kind = {kind: sorted({p[1] for p in places if p is not None and p[0] == kind}) for kind in ("operand", "result")}
    return Saved(tuple(of_kind["operand"]), tuple(of_kind["result"]), sum(others.values()))


def _empty(form: Form) -> torch.Tensor:
    """Return a tensor without memory. One that needs a gradient is a view of a leaf, which operators in place may be
    called on."""
    tensor = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
    return tensor.requires_grad_().as_strided(tensor.shape, tensor.stride()) if form.requires_grad else tensor


def _run(call: Call, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    def fill(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return inputs[int(arg.name)]
        if isinstance(arg, torch.device):
            return torch.device("meta")
        return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

    target, args, kwargs = call
    filled, named = [fill(arg) for arg in args], {key: fill(arg) for key, arg in kwargs}
    if target == aten.scaled_dot_product_attention.default:
        returned = _attention(target, filled, named)
    elif target == ATTENTION_WITHIN:  # of blocks, which are put together
        returned = _attention(target, filled[:3], {"scale": filled[7]}).clone()
    else:
        with torch.device("meta"):
            returned = target(*filled, **named)
    return [item for item in tree_leaves(returned) if isinstance(item, torch.Tensor)]


def _attention(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Attention as its kernels keep it (operands, result and one number per row), which on meta tensors PyTorch does
    not choose by itself. Dropout and masks that are learned are left to the form that keeps the scores, as on CPU."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    mask = arguments.get("attn_mask")
    if arguments.get("dropout_p") or arguments["query"].dim() != 4 or (mask is not None and mask.requires_grad):
        return target(*args, **kwargs)
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        arguments["query"],
        arguments["key"],
        arguments["value"],
        0.0,
        bool(arguments.get("is_causal")),
        attn_mask=mask.to(arguments["query"].dtype) if mask is not None and mask.dtype == torch.bool else mask,
        scale=arguments.get("scale"),
    )[0]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
