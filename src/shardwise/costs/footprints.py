"""The memory of one operator, forward and backward: asked of PyTorch itself, on tensors without memory.

A *form* is a tensor as an allocator sees it. An operator is called once per kind of call on meta tensors of given
forms, while a dispatch mode counts the memory that is live after every kernel: which results are views of which
operands, what autograd keeps, which cotangents share memory, and what a call needs in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.graph.ir import Arg, Ref, Value, map_refs

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes, strides and dtype of a tensor; whether a gradient flows through it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> Form:
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return Form(tuple(shape), tuple(reversed(stride)), dtype, requires_grad)

    @staticmethod
    def of(value: Value) -> Form:
        """That of a value of a graph, whose memory is contiguous."""
        takes_grad = value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
        return Form.contiguous(value.shape, value.dtype, takes_grad)

    @property
    def is_contiguous(self) -> bool:
        return self.stride == Form.contiguous(self.shape, self.dtype, False).stride or 0 in self.shape

    @property
    def num_bytes(self) -> int:
        """Of a tensor that has its memory for itself."""
        count = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride else 1
        return count


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a call returned. ``shares``: ("operand", i), ("result", i) or ("cotangent", i) whose memory it is,
    or None: ``num_bytes`` of its own."""

    form: Form
    shares: tuple[str, int] | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ForwardFootprint:
    """``saved``: operands and results that autograd keeps, as in ``Made.shares``; ``saved_bytes``: kept besides;
    ``peak_bytes``: the most that was live at once, results included."""

    results: tuple[Made, ...]
    saved: tuple[tuple[str, int], ...]
    saved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class BackwardFootprint:
    """``cotangents``: per operand (None: no gradient). ``peak_bytes``: the most that was live at once beyond operands,
    saved tensors and given cotangents."""

    cotangents: tuple[Made | None, ...]
    peak_bytes: int


Call = tuple[Any, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # target, args, kwargs; operands are Ref("0"), ...


@dataclass
class Footprints:
    """Footprints of calls, each kind asked for once."""

    _forward: dict[object, ForwardFootprint] = field(default_factory=dict)
    _backward: dict[object, BackwardFootprint] = field(default_factory=dict)

    def forward(self, call: Call, operands: tuple[Form, ...]) -> ForwardFootprint:
        key = (call, operands)
        found = self._forward.get(key)
        if found is None:
            found = self._forward[key] = _forward(call, operands)
        return found

    def backward(
        self, call: Call, operands: tuple[Form, ...], cotangents: tuple[Form | None, ...]
    ) -> BackwardFootprint:
        key = (call, operands, cotangents)
        found = self._backward.get(key)
        if found is None:
            found = self._backward[key] = _backward(call, operands, cotangents)
        return found


def numbered(target: Any, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> tuple[Call, tuple[str, ...]]:
    """A call with its operands numbered, and their names, each once."""
    place: dict[str, int] = {}

    def number(name: str) -> Arg:
        return Ref(str(place.setdefault(name, len(place))))

    own = tuple(map_refs(arg, number) for arg in args)
    named = tuple((key, map_refs(arg, number)) for key, arg in kwargs)
    return (target, own, named), tuple(place)


def _forward(call: Call, operands: tuple[Form, ...]) -> ForwardFootprint:
    with torch.enable_grad(), LiveBytes() as live:
        inputs = live.ignoring(lambda: _inputs(operands))
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(_keeping(kept), _unpacked):
            outputs = _run(call, inputs)
        owner: dict[int, tuple[str, int]] = {}
        for kind, group in (("result", outputs), ("operand", inputs)):
            for position in reversed(range(len(group))):
                owner[_storage(group[position])] = (kind, position)
        results = tuple(_made(tensor, ("result", i), owner) for i, tensor in enumerate(outputs))
        saved = [owner.get(_storage(tensor)) for tensor in kept]
        others = {_storage(t): t.untyped_storage().nbytes() for t, own in zip(kept, saved, strict=True) if own is None}
        return ForwardFootprint(
            results,
            tuple(sorted({own for own in saved if own is not None})),
            sum(others.values()),
            live.peak,
        )


def _backward(call: Call, operands: tuple[Form, ...], cotangents: tuple[Form | None, ...]) -> BackwardFootprint:
    with torch.enable_grad():
        inputs = _inputs(operands)
        outputs = _run(call, inputs)
        given = [(out, _empty(form)) for out, form in zip(outputs, cotangents, strict=True) if form is not None]
        given = [(out, cotangent) for out, cotangent in given if out.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if not given or not wanted:
            return BackwardFootprint((None,) * len(operands), 0)
        with LiveBytes() as live:
            found = torch.autograd.grad(
                [out for out, _ in given], wanted, [cotangent for _, cotangent in given], allow_unused=True
            )
            owner: dict[int, tuple[str, int]] = {}
            positions = [i for i, form in enumerate(cotangents) if form is not None]
            by_wanted = iter(found)
            of_operand = [next(by_wanted) if tensor.requires_grad else None for tensor in inputs]
            for position in reversed(range(len(of_operand))):
                own = of_operand[position]
                if own is not None:
                    owner[_storage(own)] = ("operand", position)
            for position, (_, cotangent) in zip(positions, given, strict=False):
                owner[_storage(cotangent)] = ("cotangent", position)
            made = tuple(
                None if tensor is None else _made(tensor, ("operand", i), owner) for i, tensor in enumerate(of_operand)
            )
            return BackwardFootprint(made, live.peak)


def _made(tensor: torch.Tensor, own: tuple[str, int], owner: Mapping[int, tuple[str, int]]) -> Made:
    form = Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)
    shares = owner[_storage(tensor)]
    return Made(form, None if shares == own else shares, tensor.untyped_storage().nbytes())


def _inputs(forms: Sequence[Form]) -> list[torch.Tensor]:
    # Operators in place may not be called on leaves, hence the views.
    tensors = [_empty(form) for form in forms]
    return [
        tensor.requires_grad_().as_strided(tensor.shape, tensor.stride()) if form.requires_grad else tensor
        for tensor, form in zip(tensors, forms, strict=True)
    ]


def _empty(form: Form) -> torch.Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")


def _run(call: Call, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    def fill(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return inputs[int(arg.name)]
        return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

    target, args, kwargs = call
    own, named = [fill(arg) for arg in args], {key: fill(arg) for key, arg in kwargs}
    if target == aten.scaled_dot_product_attention.default:
        returned = _attention(target, own, named)
    elif inputs:
        returned = target(*own, **named)
    else:
        with torch.device("meta"):
            returned = target(*own, **named)
    return [item for item in tree_leaves(returned) if isinstance(item, torch.Tensor)]


def _attention(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Attention as its kernels keep it (operands, result and one number per row), which on meta tensors PyTorch does
    not choose by itself. Dropout and masks that are learned are left to the form that keeps the scores, as on CPU."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    mask = given.get("attn_mask")
    if given.get("dropout_p") or given["query"].dim() != 4 or (mask is not None and mask.requires_grad):
        return target(*args, **kwargs)
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        given["query"],
        given["key"],
        given["value"],
        0.0,
        bool(given.get("is_causal")),
        attn_mask=mask.to(given["query"].dtype) if mask is not None and mask.dtype == torch.bool else mask,
        scale=given.get("scale"),
    )[0]


def _keeping(kept: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    return keep


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that appeared while the mode was on and are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counting = True

    def ignoring(self, function: Callable[[], Any]) -> Any:
        """What the function makes is not counted."""
        self._counting = False
        made = function()
        self._counting = True
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if self._counting:
            before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for tensor in tree_leaves(returned):
                if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in before:
                    self._note(tensor.untyped_storage())
        return returned

    def _note(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, num_bytes).atexit = False

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes
