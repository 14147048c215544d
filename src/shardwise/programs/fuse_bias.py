"""Bias fusion: a linear layer is a product and an addition in a graph, and one call on a rank if nothing else reads the
product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shardwise.graph.ir import Arg, Ref, refs
from shardwise.programs.buckets import Bucket
from shardwise.programs.program import LocalOp, LocalProgram
from shardwise.programs.spmd_steps import Conversion

aten = torch.ops.aten

# A product -> the fields of its call that change when a bias is added.
_WITH_BIAS: dict[Any, Callable[[tuple[Arg, ...], Arg], dict[str, Any]]] = {
    aten.linear.default: lambda args, bias: {"args": (*args, bias)},
    aten.mm.default: lambda args, bias: {"target": aten.addmm.default, "args": (bias, *args)},
}


def with_biases(program: LocalProgram) -> list[LocalOp | Conversion | Bucket]:
    """Return the local instructions with biases fused into products. A fused call stands where the addition stood."""
    spmd = program.spmd
    layouts, values = spmd.layouts, spmd.graph.by_name
    uses = Counter(name for instruction in program.instructions for name in instruction.operands)
    # Being a result of the program is a use.
    uses.update([*refs(spmd.outputs), *([spmd.loss] if spmd.loss else []), *(value for _, value in spmd.mutations)])
    joined: list[LocalOp | Conversion | Bucket | None] = list(program.instructions)
    products: dict[str, int] = {}  # result of a product that only one instruction uses -> its position
    for position, instruction in enumerate(program.instructions):
        if not isinstance(instruction, LocalOp):
            continue
        call = instruction.call
        if call.target in _WITH_BIAS and len(call.args) == 2:
            products[instruction.results[0]] = position
        elif call.target is aten.add.Tensor and not call.kwargs:
            names = [arg.name if isinstance(arg, Ref) else None for arg in call.args]
            for product, bias in (names, names[::-1]):
                if product is None or bias is None or product not in products or uses[product] > 1:
                    continue
                # By global shapes: fusion affects the order of messages, so it must not depend on the rank.
                first_dtype, second_dtype = (values[name.split(":")[0]].dtype for name in (product, bias))
                if layouts[bias].shape == layouts[product].shape[-1:] and first_dtype == second_dtype:
                    at = products.pop(product)
                    first = joined[at]
                    assert isinstance(first, LocalOp), "a product is joined once"
                    whole = replace(first.call, **_WITH_BIAS[first.call.target](first.call.args, Ref(bias)))
                    joined[position] = replace(first, call=whole, results=instruction.results)
                    joined[at] = None
                    break
    return [instruction for instruction in joined if instruction is not None]
