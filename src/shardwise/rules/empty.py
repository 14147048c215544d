"""Ranks that hold nothing: a factor split over more devices than it has indices leaves some without a share.

Most operators accept empty tensors. PyTorch's convolutions, poolings, transforms and norms refuse them, and two end
the process with a floating-point exception (a norm in torch 2.13, attention without heads in 2.11). Their local call is
then a kernel that returns zeros: the result is empty itself, or a sum without addends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

from shardwise.graph.ir import Graph, Op, Ref
from shardwise.rules.arguments import same_call
from shardwise.rules.binding import RuleFunction
from shardwise.rules.local_kernels import NOTHING
from shardwise.rules.rule import LocalContext, LocalOpCall, OpRule


def zeros_if_empty(function: RuleFunction) -> RuleFunction:
    """Return the rule function, with a local call that copes with empty operands."""

    @wraps(function)
    def guarded(op: Op, graph: Graph) -> OpRule | None:
        rule = function(op, graph)
        if rule is None:
            return None
        inner = rule.localize
        seen = {name for name, _ in rule.windows}
        results = [graph.by_name[name] for name in op.results]
        dtypes = tuple(str(result.dtype).removeprefix("torch.") for result in results)
        differentiable = tuple(result.requires_grad for result in results)

        def is_empty(context: LocalContext) -> bool:
            """An operand is empty. An empty window of one is the business of the rule, unless the result is empty."""
            if any(0 in shape for shape in context.result_shapes):
                return any(0 in shape for shape in context.operand_shapes)
            return any(
                size == 0 and not any(name in seen for name in factors)
                for shape, dims in zip(context.operand_shapes, rule.operands, strict=True)
                for size, factors in zip(shape, dims, strict=True)
            )

        def localize(op: Op, context: LocalContext) -> LocalOpCall:
            if not is_empty(context):
                return inner(op, context) if inner is not None else same_call(op)
            sizes = tuple(size for shape in context.result_shapes for size in shape)
            ranks = tuple(map(len, context.result_shapes))
            return LocalOpCall(NOTHING, (tuple(map(Ref, op.operands)), sizes, ranks, dtypes, differentiable))

        return replace(rule, localize=localize)

    return guarded
