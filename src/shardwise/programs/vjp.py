"""Vector-Jacobian products: traces the kernels of an operator call in forward and in backward.

A *kind* of call is its target, its constants and the forms of its operands. Each kind is traced once: PyTorch runs the
call and its gradient on fake tensors (sizes without memory), and a dispatch mode below autograd records every kernel.
The kernels called before the gradient are the forward pass, the others the backward pass. So backward reads exactly the
values that autograd would have saved, and both use the kernels that PyTorch would have chosen.

Names inside a kind: operands ``0``, ``1``, ...; results of forward kernels ``f0``, ``f1``, ...; results of backward
kernels ``b0``, ...; cotangents of the results ``c0``, ``c1``, ... by position.

Calls that cannot be traced run with autograd, inside of two instructions whose targets are no operators: ``Record``
runs the call and returns its detached results and a tape; ``Differentiate`` runs the tape's backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardwise.dispatch_mode import OpRecorder
from shardwise.graph.ir import Arg, Ref, map_refs
from shardwise.graph.schema import AnyCall, filled, is_random
from shardwise.graph.switches import CallCache
from shardwise.graph.trees import argument_key, storage_of
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Origin, memories, with_operands

aten = torch.ops.aten

Call = tuple[Any, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # target, args, kwargs; operands are Ref("0"), ...


def with_workspace(*args: Any) -> tuple[torch.Tensor, ...]:
    """Run a layer of a recurrent network with oneDNN. It returns the workspace that its backward needs only while
    gradients are recorded."""
    with torch.enable_grad():
        return tuple(result.detach() for result in aten.mkldnn_rnn_layer.default(*args))


# Calls that return their operand.
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
# Replacements of traced targets. Views were traced with known strides; with others a copy must be possible. Zeros
# without memory cannot be written to, which an exchange may do.
_INSTEAD_OF = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten._efficientzerotensor.default: aten.zeros.default,
    aten.mkldnn_rnn_layer.default: with_workspace,
}


_NOT_YET = Origin("", "", "forward")  # of traced kernels, which belong to no operator of a program


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """A call in forward. ``results``: names of the tensors it returns; ``forms``, ``shares``: of these; ``places``: as
    in ``Compute``; ``kernels``: all that it calls; ``workspace``: bytes of temporary memory beyond its results."""

    results: tuple[str, ...]
    forms: tuple[Form, ...]
    shares: tuple[str | None, ...]
    places: tuple[tuple[int, ...], ...]
    kernels: tuple[Compute, ...]
    workspace: int


@dataclass(frozen=True, slots=True)
class BackwardTrace:
    """A call in backward. ``kernels``: in order, beginning with those of forward that are repeated, such as views;
    ``cotangents``: per operand the name of its cotangent, or None. ``needs``: names of forward that it reads, including
    operands and results. ``whole``: whether forward can stay a single call, because backward needs only its operands
    and results. ``opaque``: autograd computes it (``programs.vjp``)."""

    kernels: tuple[Compute, ...]
    cotangents: tuple[str | None, ...]
    forms: tuple[Form | None, ...]
    needs: tuple[str, ...]
    whole: bool
    opaque: bool = False

    def kernels_beside(self, weights: set[int]) -> tuple[Compute, ...]:
        """Return the kernels that the cotangents of operands other than ``weights`` (by position) need; all kernels if
        one of them overwrites memory."""
        if any(kernel.writes for kernel in self.kernels):
            return self.kernels
        cotangents = {name for i, name in enumerate(self.cotangents) if name is not None and i not in weights}
        return tuple(needed_kernels(self.kernels, cotangents))


class Untraceable(Exception):
    """Raised when a call cannot be traced. ``str`` gives the reason."""


_FORWARD: CallCache[ForwardTrace] = CallCache()
_BACKWARD: CallCache[BackwardTrace] = CallCache()


@dataclass
class VjpCache:
    """Cache of traced kinds of calls; kinds of PyTorch's own operators are traced once per process. ``device``: device
    type whose kernels are traced."""

    device: str = "cpu"
    _forward: dict[object, ForwardTrace] = field(default_factory=dict)
    _backward: dict[object, BackwardTrace] = field(default_factory=dict)
    _traced: dict[object, _TracedKernels] = field(default_factory=dict)  # their backward was not traced yet
    untraceable: dict[str, str] = field(default_factory=dict)  # target -> why autograd keeps its backward

    def forward(self, call: Call, operands: tuple[Form, ...]) -> ForwardTrace:
        key = typed_key(call), operands, self.device
        if (kind := self._forward.get(key)) is not None:
            return kind
        kind = _FORWARD.get(call[0], key)
        if kind is None:
            traced = self._traced[key] = _TracedKernels(call, operands, self.device)
            kind = traced.forward()
            _FORWARD.keep(call[0], key, kind)
        self._forward[key] = kind
        return kind

    def backward(self, call: Call, operands: tuple[Form, ...], cotangents: tuple[Form | None, ...]) -> BackwardTrace:
        """Return the backward of a call. ``cotangents``: forms of the results' cotangents, None if there is none."""
        of_forward = typed_key(call), operands, self.device
        key = of_forward, cotangents
        if (kind := self._backward.get(key)) is not None:
            return kind
        kind = _BACKWARD.get(call[0], key)
        if kind is None:
            try:
                traced = self._traced.pop(of_forward, None) or _TracedKernels(call, operands, self.device)
                kind = traced.backward(cotangents)
                _BACKWARD.keep(call[0], key, kind)
            except Exception as error:  # autograd runs calls that cannot be traced: see ``programs.vjp``
                self.untraceable[str(call[0])] = str(error).split("\n", 1)[0]
                kind = _opaque_backward(operands, self.forward(call, operands), cotangents)
        self._backward[key] = kind
        return kind


def counting_rows(kernels: Sequence[Compute], others: Sequence[Compute], rows: tuple[int, int]) -> tuple[Compute, ...]:
    """Return the kernels of a trace with its number of rows replaced where they read it: ``n1`` is that number, ``n2``
    its double. ``others``: the kernels of a trace with another number; ``rows``: both numbers. Raises Untraceable if
    they differ in more."""

    def counted(arg: Arg, other: Arg) -> Arg:
        if isinstance(arg, tuple) and isinstance(other, tuple) and len(arg) == len(other):
            return tuple(map(counted, arg, other))
        if arg == other:
            return arg
        if not isinstance(arg, int) or arg % rows[0] or other != arg // rows[0] * rows[1]:
            raise Untraceable(f"{arg} becomes {other} for {rows[1]} instead of {rows[0]} rows")
        return Ref(f"n{arg // rows[0]}")

    if [kernel.target for kernel in kernels] != [kernel.target for kernel in others]:
        raise Untraceable(f"other kernels run for {rows[1]} than for {rows[0]} rows")
    return tuple(
        replace(kernel, args=counted(kernel.args, other.args), kwargs=counted(kernel.kwargs, other.kwargs))
        for kernel, other in zip(kernels, others, strict=True)
    )


def numbered(call: AnyCall) -> tuple[Call, tuple[str, ...]]:
    """Return the call with its operands numbered, and their names, each once."""
    place: dict[str, int] = {}

    def number(name: str) -> Arg:
        return Ref(str(place.setdefault(name, len(place))))

    return (call.target, map_refs(call.args, number), map_refs(call.kwargs, number)), tuple(place)


def typed_key(call: Call) -> object:
    """Return a key that distinguishes 1, 1.0 and True."""
    target, args, kwargs = call
    return target, argument_key((args, kwargs), str)


# ------------------------------------------------------------------------------------------------------------- tracing


class _KernelRecorder(OpRecorder):
    """Records the kernels that are called. ``prefix``: of the names of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.alive: list[torch.Tensor] = []  # keeps the ids in ``names`` unique
        self.kernels: list[Compute] = []
        self.storages: dict[int, str] = {}  # storage -> the first name that had it
        self.prefix, self.count = "f", 0

    def know(self, tensor: torch.Tensor, name: str) -> None:
        self.names[id(tensor)] = name
        self.alive.append(tensor)
        self.storages.setdefault(storage_of(tensor), name)

    def name_of(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self.names:
            raise Untraceable("a tensor comes from outside of the call")
        return self.names[id(tensor)]

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        tensors = list(_tensors(returned))
        if func in _SAME and isinstance(same := self._arg(args[0]), Ref):
            self.know(tensors[0][1], same.name)
            return
        if func in _SAME:  # of a number
            func, args, kwargs = aten.scalar_tensor.default, (same,), {"dtype": tensors[0][1].dtype, "device": None}
        shared = {storage_of(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        call_args = tuple(map(self._arg, args))
        call_kwargs = tuple((key, self._arg(value)) for key, value in kwargs.items())
        names, forms, places, shares, writes = [], [], [], [], []
        for place, tensor in tensors:
            if id(tensor) in self.names:  # in place, or returned twice
                writes += [written] if (written := self.names[id(tensor)]) not in names else []
                continue
            name = f"{self.prefix}{self.count}"
            self.count += 1
            before = shared.get(storage_of(tensor))
            shares.append(None if before is None else self.names.get(id(before)))
            self.know(tensor, name)
            names.append(name)
            forms.append(Form.of(tensor))
            places.append(place)
        target, results = _INSTEAD_OF.get(func, func), (tuple(names), tuple(places), tuple(forms), tuple(shares))
        self.kernels.append(Compute(target, call_args, call_kwargs, *results, _NOT_YET, tuple(writes)))

    def _arg(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.names and value.dim() == 0 and not isinstance(value, FakeTensor):
                with _disable_current_modes():
                    return value.item()  # a number that PyTorch wrapped
            return Ref(self.name_of(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._arg, value))
        return value


def _tensors(returned: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the tensors in the value that a call returned, each with its index path."""
    if isinstance(returned, torch.Tensor):
        yield place, returned
    elif isinstance(returned, (list, tuple)):
        for i, item in enumerate(returned):
            yield from _tensors(item, (*place, i))


class _TracedKernels:
    """A call that has run on fake operands. ``backward`` can be called once: autograd then frees its saved tensors."""

    def __init__(self, call: Call, operands: tuple[Form, ...], device: str) -> None:
        self.recorder, self.device = _KernelRecorder(), device
        with _fake_mode(), torch.enable_grad():
            self.inputs = [form.empty(device) for form in operands]
            for i, tensor in enumerate(self.inputs):
                self.recorder.know(tensor, str(i))
            target, args, kwargs = call
            with self.recorder, torch.device(device):
                named = {key: filled(arg, self._input) for key, arg in kwargs}
                returned = target(*filled(args, self._input), **named)
        self.outputs = list(_tensors(returned))  # each with its place
        self.kernels, self.recorder.kernels = self.recorder.kernels, []

    def _input(self, name: str) -> torch.Tensor:
        return self.inputs[int(name)]

    def forward(self) -> ForwardTrace:
        names = tuple(self.recorder.name_of(tensor) for _, tensor in self.outputs)
        first: dict[int, str] = {}
        shares: list[str | None] = []
        for (_, tensor), name in zip(self.outputs, names, strict=True):
            root = self.recorder.storages[storage_of(tensor)]
            shares.append(root if root.isdigit() else first.get(storage_of(tensor)))
            first.setdefault(storage_of(tensor), name)
        forms = tuple(Form.of(tensor) for _, tensor in self.outputs)
        places = tuple(place for place, _ in self.outputs)
        kernels = tuple(self.kernels)
        return ForwardTrace(names, forms, tuple(shares), places, kernels, _workspace(kernels, names))

    def backward(self, cotangents: tuple[Form | None, ...]) -> BackwardTrace:
        recorder = self.recorder
        recorder.prefix, recorder.count = "b", 0
        with _fake_mode(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            of_results = []
            for i, ((_, tensor), form) in enumerate(zip(self.outputs, cotangents, strict=True)):
                if form is not None and tensor.requires_grad:
                    cotangent = form.with_gradient(False).empty(self.device)
                    recorder.know(cotangent, f"c{i}")
                    of_results.append((tensor, cotangent))
            differentiable = [tensor for tensor in self.inputs if tensor.requires_grad]
            none = (None,) * len(self.inputs)
            if not of_results or not differentiable:
                return BackwardTrace((), none, none, (), True)
            results, given = zip(*of_results, strict=True)
            with recorder, torch.autograd.set_detect_anomaly(False):  # which fake tensors would end
                derivatives = iter(torch.autograd.grad(results, differentiable, given, allow_unused=True))
            gradients = [next(derivatives) if tensor.requires_grad else None for tensor in self.inputs]
            names = tuple(None if gradient is None else recorder.name_of(gradient) for gradient in gradients)
            forms = tuple(None if gradient is None else Form.of(gradient) for gradient in gradients)
            returned = frozenset(recorder.name_of(tensor) for _, tensor in self.outputs)
        numbers = {
            str(i): Form.of(tensor).num_bytes
            for i, tensor in enumerate(self.inputs)
            if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        }
        return _backward_kind(self.kernels, recorder.kernels, returned, (names, forms), numbers)


def _backward_kind(
    forward: Sequence[Compute],
    backward: Sequence[Compute],
    results: frozenset[str],
    gradients: tuple[tuple[str | None, ...], tuple[Form | None, ...]],
    numbers: Mapping[str, int],
) -> BackwardTrace:
    """Build the backward of a kind. ``gradients``: names and forms of the operands' cotangents; ``numbers``: operands
    that are integers or booleans, with their bytes."""
    cotangents, forms = gradients
    kernels = needed_kernels(backward, {name for name in cotangents if name is not None})
    by_result = {name: kernel for kernel in forward for name in kernel.results}
    made_again = _recomputable(forward, numbers)
    replayed: dict[str, Compute] = {}
    whole = True

    def need(name: str) -> None:
        """Provide a name of forward that backward reads: keep it, repeat its view, or recompute it if it depends only
        on positions or on no operand (a mask)."""
        nonlocal whole
        kernel = by_result.get(name)
        if kernel is None or name in results:
            needs[name] = None
        elif kernel.is_view or name in made_again:
            if name not in replayed:
                for operand in kernel.operands:
                    need(operand)
                replayed[name] = kernel
        else:
            whole = False
            needs[name] = None

    needs: dict[str, None] = {}
    for name in (*(name for kernel in kernels for name in kernel.operands), *cotangents):
        if name is not None and (name[0] == "f" or name.isdigit()):
            need(name)
    every = _without_twins([*dict.fromkeys(replayed.values()), *kernels], cotangents)
    return BackwardTrace(every[0], every[1], forms, tuple(needs), whole)


def _recomputable(kernels: Sequence[Compute], numbers: Mapping[str, int]) -> frozenset[str]:
    """Return the names to recompute: results of deterministic kernels that depend on no operand of the call, or only on
    integers and booleans that are smaller than the result. ``numbers``: these operands, with their bytes."""
    root = memories(kernels)
    overwritten = {root.get(name, name) for kernel in kernels for name in kernel.writes}
    origins: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in numbers}
    recomputed: set[str] = set()
    for kernel in kernels:
        written = any(root[name] in overwritten for name in kernel.results)
        drawn = isinstance(kernel.target, OpOverload) and is_random(kernel.target)
        if not written and not drawn and origins.keys() >= set(kernel.operands):
            read = frozenset[str]().union(*(origins[name] for name in kernel.operands))
            origins.update(dict.fromkeys(kernel.results, read))
            size = sum(numbers[name] for name in read)
            results = zip(kernel.results, kernel.forms, strict=True)
            recomputed.update(name for name, form in results if not read or form.num_bytes > size)
    return frozenset(recomputed)


def needed_kernels(kernels: Sequence[Compute], needed: set[str]) -> list[Compute]:
    """Return the kernels that compute ``needed`` or write to its memory. ``needed`` is extended by their operands."""
    root = memories(kernels)
    memory = {root.get(name, name) for name in needed}
    kept = []
    for kernel in reversed(kernels):
        touched = {root.get(name, name) for name in (*kernel.results, *kernel.writes)}
        views_only = kernel.is_view and not needed.intersection(kernel.results)
        if memory.intersection(touched) and not views_only:
            needed.update(kernel.operands)
            memory.update(root.get(name, name) for name in kernel.operands)
            kept.append(kernel)
    return kept[::-1]


def _without_twins(
    kernels: Sequence[Compute], cotangents: tuple[str | None, ...]
) -> tuple[tuple[Compute, ...], tuple[str | None, ...]]:
    """Return the kernels with equal views merged and double transposes removed, and the renamed cotangents."""
    same: dict[str, str] = {}
    views: dict[object, str] = {}
    transposed: dict[str, str] = {}
    kept: list[Compute] = []

    for kernel in kernels:
        kernel = with_operands(kernel, same)
        if kernel.is_view and len(kernel.results) == 1:
            (name,) = kernel.results
            operand = kernel.args[0]
            if kernel.target is aten.t.default and isinstance(operand, Ref):
                if operand.name in transposed:
                    same[name] = transposed[operand.name]
                    continue
                transposed[name] = operand.name
            twin = views.setdefault((kernel.target, kernel.args, kernel.kwargs), name)
            if twin != name:
                same[name] = twin
                continue
        kept.append(kernel)
    merged = tuple(None if name is None else same.get(name, name) for name in cotangents)
    return tuple(needed_kernels(kept, {name for name in merged if name is not None})), merged


def _workspace(kernels: Sequence[Compute], results: Sequence[str]) -> int:
    root = memories(kernels)
    last: dict[str, int] = {}
    for i, kernel in enumerate(kernels):
        for name in (*kernel.operands, *kernel.results):
            last[root.get(name, name)] = i
    kept = {root.get(name, name) for name in results}
    live: dict[str, int] = {}
    most = 0
    for i, kernel in enumerate(kernels):
        for name, form in zip(kernel.results, kernel.forms, strict=True):
            if root[name] == name and name not in kept:
                live[name] = form.num_bytes
        most = max(most, sum(live.values()))
        live = {name: size for name, size in live.items() if last[name] > i}
    return most


def _opaque_backward(
    operands: tuple[Form, ...], forward: ForwardTrace, cotangents: tuple[Form | None, ...]
) -> BackwardTrace:
    """Return the backward of a call that autograd differentiates in one instruction (``programs.vjp``)."""
    flows = any(form.requires_grad for c, form in zip(cotangents, forward.forms, strict=True) if c is not None)
    names = tuple(f"b{i}" if flows and form.requires_grad else None for i, form in enumerate(operands))
    forms = tuple(
        None if name is None else Form.contiguous(form.shape, form.dtype)
        for form, name in zip(operands, names, strict=True)
    )
    return BackwardTrace((), names, forms, (), False, opaque=True)


@lru_cache(maxsize=1)
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


@dataclass(frozen=True, slots=True)
class OpaqueTape:
    """Results of one recorded call with their autograd history, and its operands that need a gradient."""

    results: Sequence[Tensor]
    operands: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Record:
    """Maps operands to (results of the call in order, tape). ``wanted``: per operand whether it needs a gradient."""

    call: Call
    wanted: tuple[bool, ...]

    def __call__(self, *operands: Tensor) -> tuple[Any, ...]:
        target, args, kwargs = self.call
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_(w) for tensor, w in zip(operands, self.wanted, strict=True)]

            def operand(name: str) -> Tensor:
                return leaves[int(name)]

            named = {key: filled(arg, operand) for key, arg in kwargs}
            returned = target(*filled(args, operand), **named)
        results = [item for item in tree_leaves(returned) if isinstance(item, Tensor)]
        tape = OpaqueTape(results, [leaf for leaf in leaves if leaf.requires_grad])
        return (*(result.detach() for result in results), tape)


@dataclass(frozen=True, slots=True)
class Differentiate:
    """Maps (tape, cotangents) to the cotangents of the operands that need one. ``has_cotangent``: of each result."""

    has_cotangent: tuple[bool, ...]

    def __call__(self, tape: OpaqueTape, *cotangents: Tensor) -> tuple[Tensor, ...]:
        results = [result for result, has_one in zip(tape.results, self.has_cotangent, strict=True) if has_one]
        gradients = torch.autograd.grad(
            results, list(tape.operands), list(cotangents), allow_unused=True, materialize_grads=True, retain_graph=True
        )
        return tuple(gradient.contiguous() for gradient in gradients)
