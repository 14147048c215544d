"""Inference of operators' result types by running them on fake tensors (no memory, no arithmetic)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from shardwise.graph.ir import Value, refs
from shardwise.graph.schema import AnyCall, run_call, tensor_results
from shardwise.graph.switches import CallCache
from shardwise.graph.trees import argument_key

_OF_PYTORCHS: CallCache[tuple[Value, ...]] = CallCache()
_WITHOUT_GRADIENT: CallCache[tuple[bool, ...]] = CallCache()


class TypeInference:
    """Runs operators on fake tensors.

    Operands are contiguous CPU tensors of a value's shape, dtype and requires_grad. Results are cached by the call's
    signature (target, constants, types of operands, torch's default dtype), so that repeated layers run once. Results
    of PyTorch's own operators are shared with all other inferences of the process.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._cache: dict[object, tuple[Value, ...]] = {}
        self._cache_without: dict[object, tuple[bool, ...]] = {}

    def results(self, call: AnyCall, value: Callable[[str], Value]) -> list[Value]:
        """Return the results of a call as nameless values.

        Requires_grad is what autograd reports. Raises what the operator raises.
        """
        signature = _call_signature(call, value)
        cached = self._cache.get(signature) or _OF_PYTORCHS.get(call.target, signature)
        if cached is None:
            cached = self._cache[signature] = self._run(call, value)
            _OF_PYTORCHS.keep(call.target, signature, cached)
        return list(cached)

    def _run(self, call: AnyCall, value: Callable[[str], Value]) -> tuple[Value, ...]:
        def called(operand: Callable[[Value], torch.Tensor]) -> Any:
            return run_call(call, lambda name: operand(value(name)))

        with torch.enable_grad():
            try:
                with self.mode:
                    result = called(self.operand)
            except DataDependentOutputException:  # quantile looks at its probability, on CPUs, in torch 2.11
                result = called(lambda operand: _empty(operand, "meta"))
        return tuple(Value("", tuple(t.shape), t.dtype, t.requires_grad) for t in tensor_results(result))

    def without_gradient(self, call: AnyCall, value: Callable[[str], Value]) -> tuple[bool, ...]:
        """Return per tensor argument, in order, whether autograd leaves its gradient None though all results have one:
        the target of a loss that compares it, the second operand of ``expand_as``."""
        signature = _call_signature(call, value)
        cached = self._cache_without.get(signature) or _WITHOUT_GRADIENT.get(call.target, signature)
        if cached is None:
            cached = self._cache_without[signature] = self._differentiate(call, value)
            _WITHOUT_GRADIENT.keep(call.target, signature, cached)
        return cached

    def _differentiate(self, call: AnyCall, value: Callable[[str], Value]) -> tuple[bool, ...]:
        with torch.enable_grad():
            try:  # tensors on meta take a sixth of the time of fake ones, and not every operator takes them
                return _left_out(call, lambda name: _empty(value(name), "meta"))
            except (RuntimeError, IndexError):
                pass
            with self.mode:
                try:
                    return _left_out(call, lambda name: self.operand(value(name)))
                except (RuntimeError, IndexError):  # no derivative, reads data, or wrong: its error comes later
                    return (False,) * len(refs((call.args, call.kwargs)))

    def operand(self, value: Value) -> torch.Tensor:
        """Return a fake tensor of the value's type."""
        with self.mode:
            return _empty(value, "cpu")


def _empty(value: Value, device: str) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad, device=device)


def _left_out(call: AnyCall, make: Callable[[str], torch.Tensor]) -> tuple[bool, ...]:
    """Return per tensor argument whether its gradient is None though all results have one. ``make``: of an operand."""
    operands: list[torch.Tensor] = []

    def operand(name: str) -> torch.Tensor:
        operands.append(make(name))
        return operands[-1]

    results = [result for result in tensor_results(run_call(call, operand)) if result.requires_grad]
    if not results:  # ``zeros_like``: nothing is differentiated
        return (False,) * len(operands)
    differentiable = [tensor for tensor in operands if tensor.requires_grad]
    cotangents = list(map(torch.empty_like, results))
    gradients = iter(torch.autograd.grad(results, differentiable, cotangents, allow_unused=True))
    return tuple(tensor.requires_grad and next(gradients) is None for tensor in operands)


def _call_signature(call: AnyCall, value: Callable[[str], Value]) -> object:
    """Return a key of a call by types. It distinguishes 1, 1.0 and True, and 0.0 and -0.0."""

    def of(name: str) -> object:
        operand = value(name)
        return operand.shape, operand.dtype, operand.requires_grad

    return call.target, argument_key((call.args, call.kwargs), of), torch.get_default_dtype()
