"""The graph: values and operators as frozen data.

A ``Graph`` is a straight list of operators over named values, in execution order, without control flow,
mutation or Python. It is produced by ``graph.capture`` and changed only by passes that return a new graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value called ``name`` inside the arguments of an operator."""

    name: str


# An argument is a Ref, a Python constant (int, float, complex, bool, None, str, dtype, device, layout,
# memory format) or a tuple of arguments.
Arg = Any
Call = TypeVar("Call")  # an Op, a kernel, an instruction


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph. ``requires_grad``: a gradient of the loss flows through it.

    ``dtype``: the compute dtype. ``stored``: the dtype in which a source is stored or passed, if another; ``reduced``:
    the dtype in which a parameter's gradient is reduced, if another (``graph.step_precision``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    stored: torch.dtype | None = None
    reduced: torch.dtype | None = None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def kept_dtype(self) -> torch.dtype:
        """Return the dtype in which a source is stored or passed, and a parameter's gradient accumulated."""
        return self.stored or self.dtype

    @property
    def grad_itemsize(self) -> int:
        """Return the bytes per element of its cotangent when it is sent."""
        return (self.reduced or self.dtype).itemsize


SourceKind = Literal["input", "parameter", "buffer", "constant", "activation"]


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a value that no operator computes.

    ``names``: for parameters and buffers every qualified name under which the module holds this tensor (more than one
    when weights are tied; the first is the canonical one, in ``named_parameters()`` order). For inputs the path of the
    leaf in the call, such as ``"args[0]"`` or ``"kwargs['input_ids']"``; for activations, which another part of a cut
    graph sends, the value's own name. ``trainable``: the parameter requires grad. ``digest``: of a constant's data, if
    the graph has ``terms``.
    """

    value: str
    kind: SourceKind
    names: tuple[str, ...]
    trainable: bool = False
    digest: str = ""


@dataclass(frozen=True)
class Op:
    """One operator call. ``results`` names the tensors it returns, in order.

    ``name`` is ``"<module path>/<operator>"`` (``"layers.0.mlp.up/linear"``; operators of the root module are
    ``"/add"``), with ``_1``, ``_2``, ... appended to repetitions: it does not depend on shapes, so plans are keyed by
    it. ``source`` is ``"model.py:41"``, the innermost line of the user's model (not of torch). ``scope`` names the
    user's annotation (``sw.shard``) that covers the operator, or is empty.
    """

    name: str
    target: OpOverload
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[str, ...]
    source: str = ""
    scope: str = ""

    @property
    def module(self) -> str:
        return self.name.rpartition("/")[0]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Return the names of the tensor operands: Refs in args, then kwargs, flattened in order, repetitions kept."""
        return tuple(refs((self.args, self.kwargs)))


@dataclass(frozen=True)
class Graph:
    """A captured model.

    ``sources``: parameters, buffers, constants and inputs. ``outputs``: the flattened outputs of the call: Refs or
    Python constants. ``loss``: the value that is differentiated, or None. ``mutations``: (buffer value, value written
    back to it after the step). ``constraints``: (value, layout text) from ``sw.constrain``.

    ``cotangents``: for a part of a cut graph (``graph.cut``), the outputs whose cotangents come from outside; else
    None. ``terms``: (value, the user's name for it) of the terms of the loss that every micro-batch computes as if it
    were the batch (``graph.loss_terms``).
    """

    values: tuple[Value, ...]
    sources: tuple[Source, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Arg, ...]
    loss: str | None = None
    mutations: tuple[tuple[str, str], ...] = ()
    constraints: tuple[tuple[str, str], ...] = ()
    cotangents: tuple[str, ...] | None = None
    terms: tuple[tuple[str, str], ...] = ()

    @cached_property
    def by_name(self) -> dict[str, Value]:
        return {value.name: value for value in self.values}

    @cached_property
    def op_by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> dict[str, Op]:
        """Return value name -> the op that computes it (sources are absent)."""
        return {result: op for op in self.ops for result in op.results}

    @cached_property
    def source_of(self) -> dict[str, Source]:
        return {source.value: source for source in self.sources}

    @cached_property
    def consumers(self) -> dict[str, tuple[Op, ...]]:
        """Return value name -> the ops that use it, in order, each once."""
        ops_of: dict[str, dict[str, Op]] = {value.name: {} for value in self.values}
        for op in self.ops:
            for name in op.operands:
                ops_of[name][op.name] = op
        return {name: tuple(ops.values()) for name, ops in ops_of.items()}

    def made_from(self, values: Iterable[str], admits: Callable[[Op], bool]) -> set[str]:
        """Return the values, and those that operators compute from them alone. ``admits``: the operators that count."""
        made = set(values)
        for op in self.ops:
            if made.issuperset(op.operands) and admits(op):
                made.update(op.results)
        return made

    @cached_property
    def differentiated(self) -> tuple[str, ...]:
        """Return the values from which backward starts: the loss and the outputs with cotangents from outside; without
        both, all outputs."""
        if self.loss is None and self.cotangents is None:
            return tuple(name for name in refs(self.outputs) if self.by_name[name].requires_grad)
        return (() if self.loss is None else (self.loss,)) + (self.cotangents or ())

    @cached_property
    def updated(self) -> frozenset[str]:
        """Return the trainable parameters that get a gradient (``differentiated``). Optimizers skip all others and keep
        no states for them."""
        reached = set(self.differentiated)
        for op in reversed(self.ops):
            if any(name in reached and self.by_name[name].requires_grad for name in op.results):
                reached.update(name for name in op.operands if self.by_name[name].requires_grad)
        return frozenset(s.value for s in self.sources if s.trainable and s.value in reached)


def only_ref(arg: Arg) -> Ref:
    """Return an argument that is a value."""
    assert isinstance(arg, Ref), f"expected a value, found {arg!r}"
    return arg


def refs(arg: Arg) -> list[str]:
    """Return the names of the values used in an argument, depth first."""
    names: list[str] = []
    _collect_refs(arg, names)
    return names


def _collect_refs(arg: Arg, names: list[str]) -> None:
    if isinstance(arg, Ref):
        names.append(arg.name)
    elif isinstance(arg, tuple):
        for item in arg:
            _collect_refs(item, names)


def map_refs(arg: Arg, function: Callable[[str], Arg]) -> Arg:
    """Return the argument with every Ref replaced by ``function(name)``; tuples stay tuples."""
    if isinstance(arg, Ref):
        return function(arg.name)
    if isinstance(arg, tuple):
        return tuple([map_refs(item, function) for item in arg])
    return arg


def needed_for(names: Iterable[str], calls: Sequence[Call]) -> tuple[list[Call], set[str]]:
    """Return the calls on which values depend, in order, and all values among them. ``calls``: anything with
    ``operands`` and ``results``."""
    needed, kept = set(names), list[Call]()
    for call in reversed(calls):
        made: Any = call
        if needed.intersection(made.results):
            needed.update(made.operands)
            kept.append(call)
    return kept[::-1], needed


def rename_operands(call: Call, before: Iterable[str], after: Iterable[str]) -> Call:
    """Return the call (its ``args``, ``kwargs``) with operands renamed, by position in ``before``. If a name is there
    several times, its Refs get the new names in order, and the last one from then on; names that do not occur stay."""
    names: dict[str, list[str]] = {}
    for name, other in zip(before, after, strict=True):
        names.setdefault(name, []).append(other)

    def renamed(name: str) -> Arg:
        others = names.get(name, [name])
        return Ref(others.pop(0) if len(others) > 1 else others[0])

    return map_operands(call, renamed)


def map_operands(call: Call, function: Callable[[str], Arg]) -> Call:
    """Return the call with every Ref in its arguments replaced by ``function(name)``, in the order of ``refs``."""
    before: Any = call
    mapped: Call = replace(before, args=map_refs(before.args, function), kwargs=map_refs(before.kwargs, function))
    return mapped
