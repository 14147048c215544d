"""Checks of graph invariants between passes. A violation is an internal error, so it raises AssertionError."""

from __future__ import annotations

from shardwise.graph.ir import Graph, Source, Value, refs
from shardwise.graph.schema import written_arguments


def verify_graph(graph: Graph) -> None:
    """Raise AssertionError for a broken invariant.

    * names of values are unique, and so are names of ops; every value is produced once, by a source or an op
    * an op uses only values that exist before it, and changes nothing in place
    * the loss is a floating scalar; mutations go from buffers to values of the same shape and dtype
    * an activation has its value's name; only parameters are trainable; only inexact sources need gradients
    * cotangents are those of outputs that need gradients, each once and not the loss's
    """
    names = [value.name for value in graph.values]
    assert len(names) == len(set(names)), f"duplicate values: {_repeated(names)}"
    ops = [op.name for op in graph.ops]
    assert len(ops) == len(set(ops)), f"duplicate ops: {_repeated(ops)}"
    types_of = graph.by_name
    defined: set[str] = set()

    def define(name: str, where: str) -> None:
        assert name in types_of, f"{where}: {name} is not registered among the values"
        assert name not in defined, f"{where}: {name} is produced twice"
        defined.add(name)

    for source in graph.sources:
        define(source.value, f"source {source.names}")
        _verify_source(source, types_of[source.value])
    for op in graph.ops:
        for name in op.operands:
            assert name in defined, f"{op.name} uses {name} before it is defined"
        for name in op.results:
            define(name, op.name)
        written = written_arguments(op.target)
        assert not written, f"{op.name} ({op.target}) writes into {', '.join(written)}"
    left = set(names) - defined
    assert not left, f"values that nothing produces: {sorted(left)}"
    for name in refs(graph.outputs):
        assert name in defined, f"the output {name} is not defined"
    _verify_ends(graph, defined)


def _verify_source(source: Source, value: Value) -> None:
    assert source.names, f"source {source.value} has no name"
    if source.kind == "activation":
        assert source.names == (source.value,), f"the activation {source.value} is called {', '.join(source.names)}"
    assert not source.trainable or source.kind == "parameter", f"the {source.kind} {source.value} is trainable"
    inexact = value.dtype.is_floating_point or value.dtype.is_complex
    assert inexact or not value.requires_grad, f"the {source.kind} {source.value}, {value.dtype}, requires a gradient"


def _verify_ends(graph: Graph, defined: set[str]) -> None:
    if graph.loss is not None:
        assert graph.loss in defined, f"the loss {graph.loss} is not defined"
        loss = graph.by_name[graph.loss]
        scalar = loss.shape == () and loss.dtype.is_floating_point
        assert scalar, f"the loss {loss.name} is {loss.dtype} of shape {loss.shape}"
        kind = graph.source_of[graph.loss].kind if graph.loss in graph.source_of else ""
        assert kind != "activation", f"the loss {graph.loss} is an activation of another part"
    cotangents = graph.cotangents or ()
    assert len(cotangents) == len(set(cotangents)), f"cotangents given twice: {_repeated(list(cotangents))}"
    for name in cotangents:
        assert name in set(refs(graph.outputs)), f"the cotangent of {name}, which is not an output"
        assert graph.by_name[name].requires_grad, f"the cotangent of {name}, which needs no gradient"
        assert name != graph.loss, f"the loss {name} has a cotangent from outside"
    changed = [buffer for buffer, _ in graph.mutations]
    assert len(changed) == len(set(changed)), f"buffers mutated twice: {_repeated(changed)}"
    for buffer, name in graph.mutations:
        kinds = [source.kind for source in graph.sources if source.value == buffer]
        assert kinds == ["buffer"], f"the mutation target {buffer} is not a buffer"
        assert name in defined, f"the mutation of {buffer} writes {name}, which is not defined"
        before, after = graph.by_name[buffer], graph.by_name[name]
        same = (before.shape, before.dtype) == (after.shape, after.dtype)
        assert same, f"the mutation of {buffer} writes {after.dtype} {after.shape} to {before.dtype} {before.shape}"
    for name, _ in graph.constraints:
        assert name in defined, f"the constraint on {name}, which is not defined"


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
