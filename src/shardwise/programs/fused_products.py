"""Fuses a product with the bias that is added to it, and with the messages that feed or read it.

A linear layer is a product and an addition in a graph, and one call on a rank if nothing else reads the product.

An all-gather and the products that read its result are one instruction, and so are a product and the reduce-scatter of
its result. On GPUs with symmetric memory torch has operators for both (``symm_mem.fused_all_gather_matmul``,
``symm_mem.fused_matmul_reduce_scatter``), which multiply the parts that have arrived. Elsewhere the message and the
products run one after the other, with the same numbers. The message stays where it was, so that ranks keep their order.

Conditions are those of the operators: a message of one value along one dim other than the last one, in even parts that
lie in the order of the ranks, and products without a bias whose weights exist ahead of the message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch

from shardwise.graph.ir import Arg, Ref, refs
from shardwise.layouts.conversions import Move
from shardwise.programs.buckets import Bucket
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Convert, Instruction, sent_by
from shardwise.programs.program import LocalOp, LocalProgram
from shardwise.programs.rank_program import RankProgram
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


_TRANSPOSES = {aten.linear.default: True, aten.mm.default: False}  # product -> whether it transposes its weight


@dataclass(frozen=True, slots=True)
class FusedProduct(Convert):
    """A message and its products. ``dim``: along which parts are gathered or scattered; ``transposed``: per product,
    whether its weight is transposed.

    ``gathers``: operands are (the part, the weights), and results (the whole, the products). Otherwise operands are
    (the left side, the weight), and the result is this rank's part of the product's sum.
    """

    dim: int = 0
    transposed: tuple[bool, ...] = ()
    gathers: bool = True

    @property
    def is_turned(self) -> bool:
        """Return whether the values lie in another order than with ``dim`` first, in which operators work."""
        return prod(self.forms[0].shape[: self.dim]) > 1

    def weights(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the right sides of the products."""
        return [weight.t() if is_t else weight for weight, is_t in zip(operands[1:], self.transposed, strict=True)]

    def scattered(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the product of which every rank gets its part of the sum."""
        return operands[0] @ self.weights(operands)[0]

    def products(self, left: torch.Tensor, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the products of the gathered value, in their forms."""
        made = (left @ weight for weight in self.weights(operands))
        return [product.reshape(form.shape) for product, form in zip(made, self.forms[1:], strict=True)]


def with_fused_products(program: RankProgram) -> RankProgram:
    """Return the program whose messages are joined with their products, as far as conditions allow."""
    forward = _Joined(program.forms, program.forward, {*program.ends, *program.saved}).join()
    backward = _Joined(program.forms, program.backward, {*program.gradients.values()}).join()
    return replace(program, forward=forward, backward=backward)


class _Joined:
    def __init__(self, forms: Mapping[str, Form], instructions: Sequence[Instruction], ends: Collection[str]) -> None:
        self.forms, self.instructions = forms, instructions
        self.made = {name: i for i, instruction in enumerate(instructions) for name in instruction.results}
        self.reads = Counter(name for instruction in instructions for name in instruction.operands)
        self.reads.update(ends)
        self.gone: set[int] = set()  # positions of instructions that are parts of others now

    def join(self) -> tuple[Instruction, ...]:
        joined = list(self.instructions)
        for i, instruction in enumerate(self.instructions):
            if type(instruction) is Convert and (dim := self._dim(instruction)) is not None:
                kind = sent_by(instruction)[0].kind
                joined[i] = (self._gathered if kind == "all_gather" else self._scattered)(i, instruction, dim)
        return tuple(instruction for i, instruction in enumerate(joined) if i not in self.gone)

    def _dim(self, convert: Convert) -> int | None:
        """Return the dim along which a message gathers or scatters, if an operator can do that."""
        sent, conversion = sent_by(convert), convert.conversions[0]
        if len(convert.conversions) != 1 or len(conversion.moves) != 1 or conversion.ways or conversion.scale:
            return None
        is_known = [one.kind for one in sent] in (["all_gather"], ["reduce_scatter"])
        if not is_known or convert.of_parameters:
            return None
        return _dim_of(conversion.moves[0], backward=convert.backward)

    def _gathered(self, at: int, convert: Convert, dim: int) -> Convert:
        whole = self.forms[convert.results[0]]
        sides = {convert.results[0]}
        taken: list[tuple[int, Compute, str, bool]] = []
        for i, instruction in enumerate(self.instructions[at + 1 :], at + 1):
            if not isinstance(instruction, Compute) or i in self.gone or sides.isdisjoint(instruction.operands):
                continue
            if instruction.is_view and self._is_rows(instruction.results[0], whole.shape):
                sides.add(instruction.results[0])
            elif (product := _product(instruction)) and product[0] in sides and self.made.get(product[1], -1) < at:
                taken.append((i, instruction, product[1], product[2]))
        if not taken:
            return convert
        self.gone.update(i for i, *_ in taken)
        products = [product for _, product, *_ in taken]
        changed: dict[str, Any] = {
            "origin": products[0].origin,
            "operands": (*convert.operands, *(weight for _, _, weight, _ in taken)),
            "results": (*convert.results, *(product.results[0] for product in products)),
            "forms": (*convert.forms, *(product.forms[0] for product in products)),
            "shares": (*convert.shares, *(None for _ in products)),
        }
        return _joined(convert, changed, dim, tuple(is_t for *_, is_t in taken), gathers=True)

    def _scattered(self, at: int, convert: Convert, dim: int) -> Convert:
        name, views = convert.operands[0], set[int]()
        while (i := self.made.get(name)) is not None and self.reads[name] == 1:
            instruction = self.instructions[i]
            if not isinstance(instruction, Compute) or i in self.gone or any(j not in views for j in range(i + 1, at)):
                break
            if instruction.is_view and len(instruction.operands) == 1:
                views.add(i)
                name = instruction.operands[0]
                continue
            product, shape = _product(instruction), self.forms[convert.operands[0]].shape
            if product is None or self.forms[product[0]].shape[:-1] != shape[:-1]:
                break  # rows of a view: the left side would have to be viewed as well
            self.gone.update({i, *views})
            changed = {"operands": product[:2], "origin": instruction.origin}
            return _joined(convert, changed, dim, (product[2],), gathers=False)
        return convert

    def _is_rows(self, name: str, whole: tuple[int, ...]) -> bool:
        return self.forms[name].shape == (prod(whole[:-1]), whole[-1])


def _joined(
    convert: Convert, changed: dict[str, Any], dim: int, transposed: tuple[bool, ...], *, gathers: bool
) -> FusedProduct:
    copied = {field.name: getattr(convert, field.name) for field in fields(Convert)}
    return FusedProduct(**copied | changed, dim=dim, transposed=transposed, gathers=gathers)


def _product(instruction: Compute) -> tuple[str, str, bool] | None:
    """Return (left side, weight, whether it is transposed) of a product without a bias."""
    sides = [arg.name for arg in instruction.args if isinstance(arg, Ref)]
    if instruction.target not in _TRANSPOSES or len(instruction.args) != 2 or len(sides) != 2:
        return None
    return (sides[0], sides[1], _TRANSPOSES[instruction.target]) if sides[0] != sides[1] else None


def _dim_of(move: Move, *, backward: bool) -> int | None:
    """Return the dim that a move splits or joins, if the parts lie in it in the order of the ranks: evenly, along its
    innermost axes."""
    before, after = move.ends(backward)
    if move.cut is not None or move.reverse is not None or not (before.is_even and after.is_even):
        return None
    dims = [d for d in range(len(before.dims)) if before.dims[d] != after.dims[d]]
    if len(dims) != 1 or dims[0] == len(before.dims) - 1 or len(before.dims[dims[0]]) != 1:
        return None
    (one,), (other,) = before.dims[dims[0]], after.dims[dims[0]]
    few, many = sorted((one.axes, other.axes), key=len)
    in_order = tuple(sorted(move.axes, key=before.mesh.order.__getitem__))
    return dims[0] if many == (*few, *in_order) else None
