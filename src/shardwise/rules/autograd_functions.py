"""The rule of a captured ``torch.autograd.Function``: every dim may be split where it is element-wise.

That is tried: forward and backward run on fake tensors, and every kernel that they call must be element-wise over
tensors of one shape, and take the same constants whatever the size of a dim is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from shardwise.dispatch_mode import OpRecorder
from shardwise.graph.function_operator import FUNCTION
from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments
from shardwise.graph.trees import constant_key, is_constant
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.elementwise import ELEMENTWISE
from shardwise.rules.rule import OpRule

aten = torch.ops.aten

_Operand = tuple[tuple[int, ...], torch.dtype, bool]


def _function(op: Op, graph: Graph) -> OpRule | None:
    args = arguments(op)
    operands = [graph.by_name[name] for name in op.operands]
    shape = max((value.shape for value in operands), key=len, default=())
    fits = all(graph.by_name[name].shape in (shape, ()) for name in op.operands)
    if not fits or not all(graph.by_name[name].shape == shape for name in op.results):
        return None
    types = tuple((value.shape, value.dtype, value.requires_grad) for value in operands)
    if not _is_elementwise(args["function"], args["arguments"], args["lowest"], types):
        return None
    dims = single(dim_names(len(shape)))
    return build(op, graph, [dims if value.shape else () for value in operands], [dims] * len(op.results))


@lru_cache(maxsize=1000)
def _is_elementwise(function: str, text: str, lowest: torch.dtype, operands: tuple[_Operand, ...]) -> bool:
    shape = max((operand_shape for operand_shape, _, _ in operands), key=len, default=())
    sizes = [shape] + [
        (*shape[:dim], size, *shape[dim + 1 :]) for dim in range(len(shape)) for size in (1, 2 * shape[dim] + 1)
    ]
    calls_of_sizes = []
    for size in sizes:
        kernels = _FunctionKernels()
        types = [(size if is_whole else (), dtype, grad) for is_whole, dtype, grad in operands]
        try:
            _run(kernels, function, text, lowest, types)
        except Exception:  # whatever its Python raises for this size: then its sizes matter
            return False
        if not kernels.elementwise(size):
            return False
        calls_of_sizes.append(kernels.calls)
    return all(calls == calls_of_sizes[0] for calls in calls_of_sizes)


def _run(
    kernels: _FunctionKernels, function: str, text: str, lowest: torch.dtype, operands: Sequence[_Operand]
) -> None:
    with FakeTensorMode(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=grad) for shape, dtype, grad in operands]
        cotangents: list[Tensor] = []
        with kernels:
            results = [r for r in FUNCTION(inputs, function, text, lowest) if r.requires_grad]
        cotangents = [torch.empty_like(result) for result in results]
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        if results and differentiable:
            with kernels:
                torch.autograd.grad(results, differentiable, cotangents, allow_unused=True)


class _FunctionKernels(OpRecorder):
    """Notes the kernels that are called, without the tensors, and the shapes of these."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.known = True

    def elementwise(self, shape: tuple[int, ...]) -> bool:
        """Return whether all kernels work on each element of tensors of this shape alone."""
        return self.known and self.shapes <= {shape, ()}

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        if func.namespace == "prim":  # asks a tensor for its device and the like
            return
        if func in _RESHAPING and returned.shape == args[0].shape:  # the sizes that it names are those of the operand
            args, kwargs = args[:1], {}
        leaves = tree_leaves((args, kwargs))
        self.shapes.update(tuple(t.shape) for t in (*leaves, *tree_leaves(returned)) if isinstance(t, Tensor))
        self.known &= _functional(func) in ELEMENTWISE or func in _SAME or (len(args) == 1 and func in _RESHAPING)
        constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.calls.append((func, tuple(constant_key(c) if is_constant(c) else str(c) for c in constants)))


_RESHAPING = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default})
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.view_as.default, aten.empty_like.default})


def _functional(func: OpOverload) -> OpOverload:
    """``aten.mul.Tensor`` for ``aten.mul_.Tensor``."""
    name, overload = func._schema.name.partition("::")[2], func._overloadname
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and func.namespace == "aten" else None
    functional: OpOverload = getattr(packet, overload, func)
    return functional


AUTOGRAD_FUNCTIONS: RuleTable = {FUNCTION: _function}
