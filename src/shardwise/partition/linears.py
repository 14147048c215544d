"""Linear layers as one step of a rank's program.

In a graph a linear layer is a product, an addition and perhaps a conversion of its input, each an operator with a
strategy of its own. On a rank they are one step again where nothing else needs what is between them: the bias is added
inside the product, and where backward reduces the gradient of the input, the gradient of the weight is computed while
that message travels (``runtime.linear``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from shardwise.graph.ir import Ref, refs
from shardwise.partition.buckets import Bucket
from shardwise.partition.program import LocalOp, Program
from shardwise.partition.spmd import conversions_of
from shardwise.partition.steps import Conversion

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A product ``x @ weight.T`` with what belongs to it. ``conversion``: that of ``x``, free in forward and an
    all-reduce in backward, or None; ``bias``: the value added to it, or None; ``result``: of the whole."""

    product: LocalOp
    x: str
    weight: str
    bias: str | None
    conversion: Conversion | None
    result: str


def join_linears(program: Program) -> list[LocalOp | Conversion | Bucket | LinearStep]:
    """The instructions of a program with linear layers put together. Every step stands where its last part stood."""
    uses = _uses(program)
    layouts = program.spmd.layouts
    conversion_of = {i.result: i for i in program.instructions if isinstance(i, Conversion)}
    instructions: list[LocalOp | Conversion | Bucket | LinearStep | None] = list(program.instructions)
    products: dict[str, int] = {}  # result of a product that only one instruction uses -> its position
    for position, instruction in enumerate(instructions):
        if not isinstance(instruction, LocalOp):
            continue
        if instruction.call.target is aten.linear.default and len(instruction.call.args) == 2:
            products[instruction.results[0]] = position
        elif instruction.call.target is aten.add.Tensor and not instruction.call.kwargs:
            names = [arg.name if isinstance(arg, Ref) else None for arg in instruction.call.args]
            for own, bias in (names, names[::-1]):
                if own is None or bias is None or own not in products or uses[own] > 1:
                    continue
                # By the global shapes: what is joined decides the order of messages, and must not depend on the rank.
                if layouts[bias].shape == layouts[own].shape[-1:] and _same_dtype(program, own, bias):
                    at = products.pop(own)
                    product = instructions[at]
                    assert isinstance(product, LocalOp), "a product is joined once"
                    step = _step(product, bias, instruction.results[0], conversion_of, uses)
                    instructions[position] = step
                    instructions[at] = None
                    break
    for at in products.values():
        product = instructions[at]
        assert isinstance(product, LocalOp), "a product is joined once"
        step = _step(product, None, product.results[0], conversion_of, uses)
        if step.conversion is not None:
            instructions[at] = step
    taken = {step.conversion.result for step in instructions if isinstance(step, LinearStep) and step.conversion}
    return [
        instruction
        for instruction in instructions
        if instruction is not None and not (isinstance(instruction, Conversion) and instruction.result in taken)
    ]


def _step(
    product: LocalOp, bias: str | None, result: str, conversion_of: dict[str, Conversion], uses: Counter[str]
) -> LinearStep:
    x, weight = product.call.args
    assert isinstance(x, Ref), "the operands of a product are values"
    assert isinstance(weight, Ref), "the operands of a product are values"
    conversion = conversion_of.get(x.name)
    if conversion is None or uses[x.name] > 1 or not _only_reduces_in_backward(conversion):
        return LinearStep(product, x.name, weight.name, bias, None, result)
    return LinearStep(product, conversion.value, weight.name, bias, conversion, result)


def _only_reduces_in_backward(conversion: Conversion) -> bool:
    moves = conversion.moves
    return (
        len(moves) == 1
        and conversion.differentiable
        and (moves[0].entry.forward, moves[0].entry.backward) == ("none", "all_reduce")
    )


def _same_dtype(program: Program, first: str, second: str) -> bool:
    by_name = program.spmd.graph.by_name
    return by_name[first.split(":")[0]].dtype == by_name[second.split(":")[0]].dtype


def _uses(program: Program) -> Counter[str]:
    """How often every value is used, results of the program included."""
    uses: Counter[str] = Counter()
    for instruction in program.instructions:
        if isinstance(instruction, LocalOp):
            uses.update(refs((instruction.call.args, tuple(value for _, value in instruction.call.kwargs))))
        else:
            uses.update(conversion.value for conversion in conversions_of(instruction))
    spmd = program.spmd
    uses.update([*refs(spmd.outputs), *([spmd.loss] if spmd.loss else []), *(value for _, value in spmd.mutations)])
    return uses
