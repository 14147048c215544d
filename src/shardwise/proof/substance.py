"""Checks whether the numbers of one device can prove anything: a loss of nan equals any other loss of nan.

A run whose loss, gradients or parameters are not finite proves nothing; the report names the operator that causes it.
Gradients that are zero everywhere do not prove backward. Single elements of outputs and buffers may be infinite or nan
on purpose (masks): their positions and signs are compared, and they are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph, Op
from shardwise.graph.to_float64 import to_float64
from shardwise.proof.errors_by_tensor import Key, Values, is_finite, magnitude, natural_gradient
from shardwise.proof.runs import OneDevice, RunStart

ROUNDING = 16 * torch.finfo(torch.float64).eps  # of the loss, after a sum of a few terms that cancel


class Substance:
    """Collects from the values of one device, step by step, what a comparison cannot prove."""

    def __init__(self, start: RunStart) -> None:
        self.start = start
        self.fault = ""  # why nothing is proven
        self.not_finite: dict[Key, tuple[int, int]] = {}  # of the first step: (infinite elements, nan elements)
        self.has_gradient = self.has_nonzero_gradient = False

    def note(self, step: int, values: Values) -> None:
        """Record the values of one device after a step."""
        sizes = {key: magnitude(tensor) for key, tensor in values.items()}
        for (kind, name), tensor in values.items():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if kind == "gradient":
                self.has_gradient = True
                self.has_nonzero_gradient |= sizes[kind, name] > ROUNDING * natural_gradient(sizes, name)
            if is_finite(tensor):
                continue
            num_nan, num_infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            if step == 0 and kind in ("output", "buffer", "parameter"):
                self.not_finite[kind, name] = num_infinite, num_nan
            is_whole = num_nan == tensor.numel()
            if kind in ("loss", "gradient") or num_nan * (kind == "parameter") or is_whole:
                self.fault = self.fault or self._fault(step, (kind, name), "nan" if num_nan else "infinite")

    @property
    def not_proven(self) -> str:
        """Return why a comparison of these values proves nothing, or nothing about backward; else an empty text."""
        if self.fault:
            return f"these inputs prove nothing: {self.fault}"
        graph, parameters = self.start.captured.graph, self.start.module.parameters()
        if graph.loss is None or self.has_nonzero_gradient or not any(p.requires_grad for p in parameters):
            return ""
        why = "every gradient is zero" if self.has_gradient else "the loss depends on no parameter"
        return f"these inputs do not prove backward: {why}"

    def notes(self, wrong: Sequence[Key]) -> list[str]:
        """Return notes that count the elements which are not finite on both sides. ``wrong``: tensors that differ."""
        notes = []
        texts = ("infinite on both sides, with equal signs", "nan on both sides, in the same places")
        for position, text in enumerate(texts):
            counts = {key: both[position] for key, both in self.not_finite.items() if both[position]}
            counts = {key: count for key, count in counts.items() if key not in wrong and not self.fault}
            if counts:
                names = [f"{kind} {name}" for kind, name in counts]
                named = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
                notes.append(f"elements that are {text}: {sum(counts.values())} ({named})")
        return notes

    def _fault(self, step: int, key: Key, what: str) -> str:
        kind, name = key
        shown = "the loss" if kind == "loss" else f"the {kind} of {name}" if kind == "gradient" else f"{kind} {name}"
        at = f" in step {step + 1}" if step else ""
        origin = _origin(self.start, step, key)
        return f"{shown} is {what}{at}{f', from {origin}' if origin else ''}"


def _origin(start: RunStart, step: int, key: Key) -> str:
    """Return the operator or source from which a value that is not finite comes; empty if unknown."""
    graph = to_float64(start.captured.graph)
    device = OneDevice(start)
    for earlier in range(step):
        device.step(earlier)
    sources = {
        name: tensor.detach().clone().requires_grad_(graph.by_name[name].requires_grad)
        for name, tensor in start.bindings(graph, device.tensors, step, {}).items()
    }
    values = interpret(graph, sources)
    bad = {name for name, value in values.items() if not is_finite(value)}
    kind, name = key
    if kind != "gradient":
        outputs = [getattr(out, "name", "") for out in graph.outputs]
        at = graph.loss if kind == "loss" else outputs[int(name[1:-1])] if kind == "output" else None
        at = at if at in bad else next((op.results[0] for op in graph.ops if bad.intersection(op.results)), None)
        return "" if at is None else _first_of(graph, at, values, bad)
    return _first_of_backward(graph, values)


def _first_of(graph: Graph, at: str, values: Mapping[str, Tensor], bad: set[str]) -> str:
    """Follow values that are nan, or infinite, from ``at`` back to their origin and describe it."""
    makers = {result: op for op in graph.ops for result in op.results}
    if values[at].isnan().any():
        bad = {name for name in bad if values[name].isnan().any()}
    while at in makers:
        operand = next((name for name in makers[at].operands if name in bad), None)
        if operand is None:
            return _named(makers[at])
        at = operand
    source = graph.source_of[at]
    return f"{source.kind} {', '.join(source.names)}"


def _first_of_backward(graph: Graph, values: Mapping[str, Tensor]) -> str:
    """Return the operator whose backward computes non-finite cotangents from finite ones; empty if there is none."""
    if graph.loss is None or not values[graph.loss].requires_grad:
        return ""
    names = [name for name, value in values.items() if value.requires_grad and value.is_floating_point()]
    gradients = torch.autograd.grad(values[graph.loss], [values[name] for name in names], allow_unused=True)
    cotangents = {name: cotangent for name, cotangent in zip(names, gradients, strict=True) if cotangent is not None}
    bad = {name for name, cotangent in cotangents.items() if not is_finite(cotangent)}
    for op in reversed(graph.ops):
        if bad.intersection(op.operands) and not bad.intersection(op.results):
            return f"backward of {_named(op)}"
    return ""


def _named(op: Op) -> str:
    return f"operator {op.name} ({op.source})" if op.source else f"operator {op.name}"
