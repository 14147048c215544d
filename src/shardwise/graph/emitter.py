"""Building of graphs operator by operator, with inferred result types; used by every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.graph.infer import TypeInference
from shardwise.graph.ir import Arg, Graph, Op, Ref, Source, Value, map_operands, map_refs, only_ref
from shardwise.graph.rejected import reject_mixed_dtypes
from shardwise.graph.schema import operator_name

aten = torch.ops.aten

# ``torch.linspace`` and ``logspace`` read the numbers of tensors ahead of the operator, outside autograd.
_READ_NUMBERS = frozenset(
    overload
    for spaced in (torch.ops.aten.linspace, torch.ops.aten.logspace)
    for overload in (spaced.Tensor_Tensor, spaced.Tensor_Scalar, spaced.Scalar_Tensor)
)
Rewrite = Callable[[Op, "Emitter"], tuple[Arg, ...] | None]


class Emitter:
    """A graph under construction.

    Operators are emitted on behalf of ``origin``, whose module path, source line and scope they get. An operator whose
    target is in ``rewrites`` is replaced by what that function emits; it returns the new results, or None to keep the
    operator.
    """

    def __init__(
        self, values: Iterable[Value], sources: Iterable[Source], rewrites: Mapping[OpOverload, Rewrite] | None = None
    ) -> None:
        self.values: dict[str, Value] = {value.name: value for value in values}
        self.sources: list[Source] = list(sources)
        self.ops: list[Op] = []
        self.producer: dict[str, Op] = {}  # value -> the op that computes it
        self.constraints: list[tuple[str, str]] = []
        self.num_random_calls = 0
        self.known: dict[str, Arg] = {}  # value of the graph that is rewritten -> what it is here
        self.origin = Op("/", torch.ops.aten.alias.default, (), (), ())
        self._rewrites = dict(rewrites or {})
        self._types = TypeInference()
        self._num_emitted = 0

    @classmethod
    def over(cls, graph: Graph, rewrites: Mapping[OpOverload, Rewrite] | None = None) -> Self:
        """Return an emitter with the sources of a graph that is rewritten."""
        emitter = cls([graph.by_name[source.value] for source in graph.sources], graph.sources, rewrites)
        emitter.known = {source.value: Ref(source.value) for source in graph.sources}
        return emitter

    def now(self, name: str) -> Ref:
        """Return what a value of the rewritten graph is here."""
        return only_ref(self.known[name])

    def value(self, arg: Arg) -> Value:
        """Return the value that a Ref uses."""
        return self.values[only_ref(arg).name]

    def fake(self, arg: Arg) -> torch.Tensor:
        """Return a fake tensor of the type of a value, in ``fake_mode``."""
        return self._types.operand(self.value(arg))

    @property
    def fake_mode(self) -> FakeTensorMode:
        return self._types.mode

    def emit(self, target: OpOverload, *args: Arg, **kwargs: Arg) -> Ref:
        """Append a call and return its only result."""
        (result,) = self.emit_several(target, *args, **kwargs)
        return result

    def emit_several(self, target: OpOverload, *args: Arg, **kwargs: Arg) -> tuple[Ref, ...]:
        """Append a call and return its results."""
        return self.apply(replace(self.origin, target=target, args=args, kwargs=tuple(kwargs.items())))

    def emit_as_is(self, target: OpOverload, *args: Arg, **kwargs: Arg) -> tuple[Ref, ...]:
        """Append a call without rewrites and return its results."""
        return self.append(replace(self.origin, target=target, args=args, kwargs=tuple(kwargs.items())))

    def apply(self, op: Op, results: tuple[str, ...] = ()) -> tuple[Arg, ...]:
        """Append ``op``, or what replaces it, and return its results.

        ``results``: their names if the op is kept and no value has these names yet.
        """
        rewrite = self._rewrites.get(op.target)
        if rewrite is not None:
            replaced = rewrite(op, self)
            if replaced is not None:
                return replaced
        return self.append(op, results)

    def append(self, op: Op, results: tuple[str, ...] = ()) -> tuple[Arg, ...]:
        """Append ``op`` without rewrites. Raises CaptureError for operands of several dtypes if its kernels accept only
        one."""
        reject_mixed_dtypes(op, self.values, self.origin)
        inferred = self._types.results(op, self.values.__getitem__)
        are_free = len(results) == len(inferred) and not any(name in self.values for name in results)
        names = results if are_free else self._fresh(operator_name(op.target), len(inferred))
        for name, value in zip(names, inferred, strict=True):
            self.values[name] = replace(value, name=name)
        self._num_emitted += 1
        name = f"{self.origin.module}/{operator_name(op.target)}.{self._num_emitted}"
        op = replace(op, name=name, results=names)
        self.ops.append(op)
        self.producer.update(dict.fromkeys(names, op))
        return tuple(Ref(name) for name in names)

    def without_gradient(self, op: Op) -> set[str]:
        """Return the operands whose gradients autograd leaves None although the operator's results have gradients."""
        places = op.operands
        if not any(self.values[name].requires_grad for name in places):
            return set()
        if op.target in _READ_NUMBERS:
            return set(places)
        left = self._types.without_gradient(op, self.values.__getitem__)
        reached = {name for name, without in zip(places, left, strict=True) if not without}
        return set(places) - reached

    def is_reached(self, before: Ref, after: Ref) -> bool:
        """Return whether a gradient of ``after`` flows into ``before``, which was made earlier."""
        reached = {after.name} if self.values[after.name].requires_grad else set()
        for op in reversed(self.ops):
            if before.name in reached or before.name in op.results:
                break
            if reached.intersection(op.results):
                reached.update(name for name in op.operands if self.values[name].requires_grad)
        return before.name in reached

    def with_zero_gradient(self, operands: Iterable[str], result: Ref) -> Ref:
        """Return ``result`` with zero gradients for ``operands``, as autograd gives overwritten tensors. Optimizers
        treat a zero gradient and None differently: they decay the parameter in one case and skip it in the other."""
        value = self.value(result)
        for name in operands:
            # -0.0 is the number that changes no other when it is added.
            zero = self.emit(aten.fill.Scalar, Ref(name), -0.0)
            if self.value(zero).dtype != value.dtype:
                zero = self.emit(aten.to.dtype, zero, value.dtype)
            result = self.emit(aten.add.Tensor, self.emit(aten.expand.default, zero, value.shape), result)
        return result

    def add_source(self, source: Source, value: Value) -> Ref:
        """Add a source unless it exists already."""
        if value.name not in self.values:
            self.values[value.name] = value
            self.sources.append(source)
        return Ref(value.name)

    def graph(self, outputs: tuple[Arg, ...], loss: str | None, mutations: tuple[tuple[str, str], ...]) -> Graph:
        """Return the finished graph. Op names are unique but provisional: ``naming.assign_names`` replaces them."""
        values = tuple(self.values.values())
        return Graph(values, tuple(self.sources), tuple(self.ops), outputs, loss, mutations, tuple(self.constraints))

    def reshaped(self, ref: Ref, shape: Sequence[int]) -> Ref:
        """Return a value in another shape."""
        same = self.value(ref).shape == tuple(shape)
        return ref if same else self.emit(aten.reshape.default, ref, tuple(shape))

    def permuted(self, ref: Ref, dims: Sequence[int]) -> Ref:
        """Return a value with its dims in another order."""
        same = list(dims) == list(range(len(dims)))
        return ref if same else self.emit(aten.permute.default, ref, tuple(dims))

    def rewritten(self, old: Graph) -> Graph:
        """Return the graph that was made of ``old``."""
        self.constraints[:0] = [(self.now(name).name, text) for name, text in old.constraints]
        return self.graph(
            tuple(map_refs(output, self.known.__getitem__) for output in old.outputs),
            None if old.loss is None else self.now(old.loss).name,
            tuple((buffer, self.now(name).name) for buffer, name in old.mutations),
        )

    def _fresh(self, stem: str, count: int) -> tuple[str, ...]:
        names: list[str] = []
        while len(names) < count:
            self._num_emitted += 1
            name = f"{stem}.{self._num_emitted}"
            if name not in self.values:
                names.append(name)
        return tuple(names)


def rewrite_graph(graph: Graph, rewrites: Mapping[OpOverload, Rewrite]) -> Graph:
    """Replace every operator in ``rewrites`` by what its function emits. All types are inferred again."""
    emitter = Emitter.over(graph, rewrites)
    for op in graph.ops:
        emitter.origin = op
        call = map_operands(op, emitter.known.__getitem__)
        results = emitter.apply(call, op.results)
        assert len(results) == len(op.results), f"{op.name}: {len(results)} results replace {len(op.results)}"
        for name, result in zip(op.results, results, strict=True):
            if graph.by_name[name].requires_grad and not emitter.value(result).requires_grad:
                differentiable = (o for o in call.operands if emitter.values[o].requires_grad)
                result = emitter.with_zero_gradient(differentiable, result)
            emitter.known[name] = result
    return emitter.rewritten(graph)
