"""Emission of the gradient of values by others, operator by operator, from operators that have rules.

Reverse mode (Griewank and Walther 2008, chapter 3) over the operators emitted so far: from the last to the first, the
cotangents of an operator's results give those of its operands, and cotangents of one value add up. The backward of a
call is what PyTorch's autograd calls for it, traced below autograd on fake tensors; backward operators are written out
by ``differentiable_forms``. It reads the call's operands and results, and computes again what else the call keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.errors import CaptureError
from shardwise.graph.emitter import Emitter
from shardwise.graph.function_operator import FUNCTION
from shardwise.graph.inner_gradients import differentiable_forms, function_refusal
from shardwise.graph.ir import Arg, Op, Ref
from shardwise.graph.schema import arguments, draws_nothing, is_random, operator_name, run_call, tensor_results
from shardwise.graph.switches import CallCache
from shardwise.graph.trees import argument_key
from shardwise.graph.written_out import emitted_node

aten = torch.ops.aten
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_FILLED = {aten.ones_like.default: aten.ones.default, aten.zeros_like.default: aten.zeros.default}
# The backward of a call and, per gradient in it, the operands that PyTorch's backward of that gradient reaches.
_TRACED: CallCache[tuple[fx.GraphModule, list[list[int]]]] = CallCache()
Apply = Callable[[Op], tuple[Ref, ...]]


def emit_gradient(
    emitter: Emitter,
    apply: Apply,
    call: tuple[Sequence[Ref], Sequence[Ref], Sequence[Ref]],
    batched: bool,
    create_graph: bool,
) -> list[Ref]:
    """Emit the gradients of outputs by inputs. ``call``: outputs, inputs, cotangents of the outputs, which have a
    further, leading dim where ``batched``; ``apply``: emits an operator; ``create_graph``: they have gradients."""
    outputs, inputs, cotangents = call
    reached, path = {ref.name for ref in inputs}, list[Op]()
    for op in emitter.ops:
        if reached.intersection(op.operands) and any(emitter.values[name].requires_grad for name in op.results):
            reached.update(name for name in op.results if emitter.values[name].requires_grad)
            path.append(op)
    total: dict[str, Ref] = {}

    def add(name: str, cotangent: Ref) -> None:
        before = total.get(name)
        total[name] = cotangent if before is None else _emit(emitter, apply, aten.add.Tensor, before, cotangent)

    for output, cotangent in zip(outputs, cotangents, strict=True):
        add(output.name, cotangent)
    for op in reversed(path):
        of_results = [total.get(name) for name in op.results]
        wanted = [n for n in dict.fromkeys(op.operands) if n in reached and emitter.values[n].requires_grad]
        if wanted and any(of_results):
            for name, found, beside in _backward(emitter, apply, op, of_results, wanted, batched):
                add(name, emitter.with_zero_gradient(beside if create_graph else (), found))
    if any(ref.name not in total for ref in inputs):
        what = "torch.autograd.grad in forward: capture does not see how a tensor to differentiate by requires grad"
        fix = "set it by x.requires_grad_() in forward"
        raise CaptureError(what, op=emitter.origin.module, source=emitter.origin.source, fix=fix)
    return [total[ref.name] for ref in inputs]


def _emit(emitter: Emitter, apply: Apply, target: Any, *args: Arg, **kwargs: Arg) -> Ref:
    return apply(replace(emitter.origin, target=target, args=args, kwargs=tuple(kwargs.items())))[0]


def check_differentiable(emitter: Emitter, ops: Sequence[Op]) -> None:
    """Raise CaptureError for backward operators through which PyTorch cannot differentiate once more."""
    for op in ops:
        if "_backward" in operator_name(op.target) and any(emitter.values[name].requires_grad for name in op.results):
            operands = {name: emitter.fake(Ref(name)) for name in op.operands}
            differentiable = [x for x in operands.values() if x.requires_grad]
            try:
                with emitter.fake_mode, torch.enable_grad():
                    results = [x for x in tensor_results(run_call(op, operands.__getitem__)) if x.requires_grad]
                    cotangents = list(map(torch.empty_like, results))
                    torch.autograd.grad(results, differentiable, cotangents, allow_unused=True)
            except RuntimeError as error:  # NotImplementedError is one
                raise CaptureError(
                    f"the gradient inside forward calls {operator_name(op.target)}, which PyTorch cannot differentiate",
                    op=op.module,
                    source=op.source,
                    fix="replace the operator, or pass create_graph=False if no gradient goes through this one",
                ) from error


def _backward(
    emitter: Emitter, apply: Apply, op: Op, cotangents: list[Ref | None], wanted: list[str], batched: bool
) -> list[tuple[str, Ref, list[str]]]:
    """Emit the backward of a call. Return the names of its operands, their cotangents, and the operands of which the
    cotangent lacks a zero gradient."""
    if op.target is FUNCTION:
        raise function_refusal(arguments(op)["function"].rpartition(".")[2], op.source)
    if is_random(op.target) and not draws_nothing(op):
        raise CaptureError(
            f"a gradient inside forward goes through {operator_name(op.target)}, which draws random numbers",
            op=op.module,
            source=op.source,
            fix="multiply by the noise, x * F.dropout(torch.ones_like(x), p): the gradient then reads the same noise",
        )
    operands = list(dict.fromkeys(op.operands))
    given = [ref for ref in cotangents if ref is not None]
    place, flows = {name: i for i, name in enumerate(operands)}, [ref is not None for ref in cotangents]

    def of(name: str) -> object:
        return place[name], replace(emitter.values[name], name="")

    kind = argument_key((op.args, op.kwargs), of), tuple(flows), tuple(map(place.get, wanted)), batched
    signature = op.target, kind, emitter.value(given[0]).shape[:1] if batched else ()
    known = _TRACED.get(op.target, signature)
    if known is None:
        known = _traced(emitter, op, operands, flows, wanted, given, batched)
        _TRACED.keep(op.target, signature, known)
    traced, reached = known
    values: dict[fx.Node, Any] = {}
    nodes = iter(node for node in traced.graph.nodes if node.op == "placeholder")
    values.update(zip(nodes, (*map(Ref, operands), *given), strict=True))
    ends: Any = traced.graph.output_node().args[0]
    of_operands, of_results = ends[: len(wanted)], ends[len(wanted) :]
    values.update(zip(of_results, map(Ref, op.results), strict=True))
    needed, first = set(of_operands), len(emitter.ops)
    for node in reversed(traced.graph.nodes):
        needed.update(node.all_input_nodes if node in needed and node not in values else ())
    for node in traced.graph.nodes:
        if node in needed and node not in values:
            values[node] = _emitted(node, values, emitter, apply)
    found = []
    for name, node, places in zip(wanted, of_operands, reached, strict=True):
        if node is not None:
            beside = _without_path(emitter, first, values[node], op, [operands[place] for place in places])
            found.append((name, values[node], beside))
    return found


def _without_path(emitter: Emitter, first: int, gradient: Ref, op: Op, operands: list[str]) -> list[str]:
    """Return the operands of a call that no gradient of ``gradient``, made by the operators from ``first`` on, reaches:
    ``where`` reads the sign of the input of ``relu`` without one, and ``threshold_backward`` gives it zeros."""
    reached = {gradient.name}
    for made in reversed(emitter.ops[first:] if operands else []):
        if reached.intersection(made.results):
            reached.update(name for name in made.operands if emitter.values[name].requires_grad)
    return [] if reached.intersection(op.results) else [name for name in operands if name not in reached]


def _emitted(node: fx.Node, values: dict[fx.Node, Any], emitter: Emitter, apply: Apply) -> Any:
    if node.op != "call_function":
        raise _untraceable(emitter.origin, "a backward", f"it reads {node}")
    if node.target in _SAME:
        return values[node.args[0]]  # type: ignore[index]
    if node.target in _FILLED:  # needs no value of the operand, which may be one of the whole batch
        val = node.meta["val"]
        return _emit(emitter, apply, _FILLED[node.target], tuple(val.shape), dtype=val.dtype)
    return emitted_node(node, values, emitter.origin, apply)


def _traced(
    emitter: Emitter, op: Op, operands: list[str], flows: list[bool], wanted: list[str], given: list[Ref], batched: bool
) -> tuple[fx.GraphModule, list[list[int]]]:
    """Trace a call and its backward on fake tensors, as operators that write nothing. Return it, and which operands the
    backward of each gradient reaches where PyTorch computes it."""

    def backward(leaves: dict[str, torch.Tensor], cotangents: list[torch.Tensor]) -> Any:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            results = tensor_results(run_call(op, leaves.__getitem__))
            ends = [result for result, flow in zip(results, flows, strict=True) if flow]
            gradients = torch.autograd.grad(
                ends,
                [leaves[name] for name in wanted],
                cotangents,
                create_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
        return gradients, results

    def run(operands_data: list[torch.Tensor], cotangents: list[torch.Tensor]) -> Any:
        pairs = zip(operands, operands_data, strict=True)
        gradients, results = backward(
            {name: x.detach().requires_grad_(name in wanted) for name, x in pairs}, cotangents
        )
        return [*gradients, *results]

    call = [emitter.fake(Ref(name)) for name in operands], [emitter.fake(ref) for ref in given]
    try:
        with emitter.fake_mode:
            traced = proxy_tensor.make_fx(run, decomposition_table=differentiable_forms())(*call)
            if any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in traced.graph.nodes):
                traced = proxy_tensor.make_fx(torch.func.functionalize(traced))(*call)
            gradients, _ = backward(dict(zip(operands, call[0], strict=True)), call[1])
            reached = [_reached(gradient, call[0]) for gradient in gradients]
    except Exception as error:  # whatever an operator's derivative raises on tensors without data
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _untraceable(op, operator_name(op.target), first) from error
    return traced, reached


def _reached(gradient: torch.Tensor | None, tensors: list[torch.Tensor]) -> list[int]:
    """Return the places of the tensors to which the backward of a gradient gives one."""
    places = [i for i, x in enumerate(tensors) if x.requires_grad]
    if gradient is None or not gradient.requires_grad or not places:
        return []
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        found = torch.autograd.grad(gradient, [tensors[i] for i in places], torch.empty_like(gradient), **options)
    except RuntimeError:  # has no second derivative: ``check_differentiable`` tells
        return []
    return [i for i, x in zip(places, found, strict=True) if x is not None]


def _untraceable(op: Op, name: str, why: str) -> CaptureError:
    what = f"a gradient inside forward goes through {name}, whose derivative cannot be traced ({why})"
    fix = "replace it by operators whose derivative does not depend on values"
    return CaptureError(what, op=op.module, source=op.source, fix=fix)
