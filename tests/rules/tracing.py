"""Lowerings as graphs, and where a split goes in them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from rules.harness import Case
from shardwise.graph.emitter import Emitter
from shardwise.graph.ir import Graph, Op, Ref
from shardwise.graph.schema import filled
from shardwise.rules import rule_of
from shardwise.rules.atoms import factor_graph
from shardwise.rules.rule import Dims, OpRule, takes_runs

Place = tuple[int, int, int]  # dim, stride and size of the atom that is split


def trace_lowering(case: Case, rule: OpRule, told: dict[str, Any]) -> Graph:
    """The operators of the lowering, on the operands x0, x1, ... ``told``: what it is given besides."""

    def program(*tensors: torch.Tensor) -> Any:
        known = dict(zip(case.op.operands, tensors, strict=True))
        args = [filled(arg, known.__getitem__) for arg in case.op.args]
        assert rule.lowering is not None
        return rule.lowering(*args, **{key: filled(arg, known.__getitem__) for key, arg in case.op.kwargs}, **told)

    traced = make_fx(program, pre_dispatch=True, tracing_mode="fake")(*case.operands)
    emitter = Emitter([case.graph.by_name[name] for name in case.op.operands], ())
    known: dict[str, Any] = {}
    operands = iter(case.op.operands)
    outputs: tuple[Any, ...] = ()

    def argument(value: Any) -> Any:
        if isinstance(value, Node):
            return known[value.name]
        return tuple(map(argument, value)) if isinstance(value, (list, tuple)) else value

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            known[node.name] = Ref(next(operands))
        elif node.op == "output":
            outputs = tuple(argument(a) for a in (node.args[0] if isinstance(node.args[0], tuple) else node.args))
        elif isinstance(node.target, torch._ops.OpOverload):
            op = Op("", node.target, argument(node.args), tuple((k, argument(v)) for k, v in node.kwargs.items()), ())
            results = emitter.apply(op)
            known[node.name] = results[0] if len(results) == 1 else results
        else:
            assert node.target.__name__ == "getitem", f"{node.target} in a lowering"
            known[node.name] = known[node.args[0].name][node.args[1]]
    return emitter.graph(outputs, None, ())


def gathers(case: Case, rule: OpRule, factor: str) -> list[str]:
    """The operators of the lowering that can not work on parts of ``factor``; empty: it is never gathered. A lowering
    by runs may gather what the runs gave, which is less than they are."""
    assert rule.lowering is not None
    sizes = {f.name: f.size for f in rule.factors}
    size, told = sizes[factor], dict[str, Any]()
    if takes_runs(rule.lowering):
        parts = next((n for n in (2, 3) if size % n == 0 and size > n), 1)
        if parts == 1:  # what does not divide has no runs of one length, and runs of 1 are no help
            return []
        told["runs"] = tuple(size // parts if dim == (factor,) else sizes[dim[0]] for dim in rule.operands[0])
    graph = trace_lowering(case, rule, told)
    rules = {}
    for op in graph.ops:
        found = rule_of(op, graph)
        assert found is not None, f"{op.target} in a lowering has no rule"
        rules[op.name] = found
    refined = factor_graph(graph, rules).rules
    places: dict[str, Place] = {}
    for name, dims in zip(case.op.operands, rule.operands, strict=True):
        found_place = _place(dims, sizes, factor)
        if found_place is not None:
            places[name] = found_place if not told else (found_place[0], size // parts, parts)
    num_given = sum(graph.by_name[name].numel for name in places)
    refused = []
    for op in graph.ops:
        own = refined[op.name]
        factors = {f.name: f.size for f in own.factors}
        wanted = set()
        for name, dims in zip(op.operands, own.operands, strict=True):
            if name in places:
                wanted.add(next((f for f in factors if _place(dims, factors, f) == places[name]), ""))
        if not wanted:
            continue
        chosen = wanted.pop()
        if told and sum(graph.by_name[name].numel for name in op.operands) < num_given:
            continue
        if wanted or not chosen or own.factor(chosen).kind not in ("parallel", "sum", "max", "min", "any"):
            refused.append(f"{op.target}: {own}")
            continue
        if own.factor(chosen).kind in ("max", "min", "any"):
            flows = [name for name in op.results if graph.by_name[name].requires_grad]
            assert not flows, f"{op.target} combines parts of {chosen} by {own.factor(chosen).kind}, with a gradient"
        for name, dims in zip(op.results, own.results, strict=True):
            result_place = _place(dims, factors, chosen)
            if result_place is not None:
                places[name] = result_place
    assert places, f"no operand holds {factor}"
    return refused


def _place(dims: Dims, sizes: dict[str, int], factor: str) -> Place | None:
    for i, dim in enumerate(dims):
        if factor in dim:
            return i, prod(sizes[f] for f in dim[dim.index(factor) + 1 :]), sizes[factor]
    return None
