"""Floating-point operations of the operators that do the arithmetic of a model: contractions, convolutions, attention.

Counted are the multiplications and additions of one forward call, from the shapes of its operands and results, so that
the same formula serves the whole operator and the part of one device. A causal mask is not credited, except in
``kernel_flops``, which counts what a kernel does, those of backward included. Element-wise operators, reductions and
copies are not counted: they are bound by memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from shardwise.graph.attention_sinks import ATTENTION_WITH_SINKS, num_seen
from shardwise.graph.attention_within import ATTENTION_WITHIN, num_pairs
from shardwise.graph.einsum import terms_of
from shardwise.graph.float8 import FLOAT8_LINEAR
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.head_loss import HEAD_LOSS, HEAD_TERMS
from shardwise.graph.ir import Graph
from shardwise.graph.schema import AnyCall, arguments, operator_name
from shardwise.rules.arguments import operand_positions
from shardwise.rules.attention_kernels import RING_GRADIENTS, RING_STEP, busiest_block
from shardwise.rules.convolution import CONVOLUTIONS

aten = torch.ops.aten

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Flops = Callable[[AnyCall, Shapes, Shapes], int]

# FLOPs of attention's backward over those of its forward: five products for two, since the scores are computed again
# (Dao, "FlashAttention-2", 2023, section 3.1).
ATTENTION_BACKWARD = 2.5


def flops_of(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Return the operations of ``op`` on operands and results of these shapes; 0 for operators that are not counted."""
    count = FLOPS.get(op.target)
    return 0 if count is None else count(op, operands, results)


def training_flops(graph: Graph) -> tuple[float, set[torch.dtype]]:
    """Return the operations of forward and backward, without recomputation, and the dtypes of the products."""
    total, dtypes = 0.0, set[torch.dtype]()
    for op in graph.ops:
        operands, results = (tuple(tuple(graph.by_name[n].shape) for n in names) for names in (op.operands, op.results))
        if flops := flops_of(op, operands, results):
            values = [graph.by_name[name] for name in op.operands]
            needed = sum(value.requires_grad and len(value.shape) > 1 for value in values)
            total += flops * (1 + min(needed, 2))  # attention has three operands, and four products for its two
            dtypes.add(values[0].dtype)
    return total, dtypes


def unmasked_share(call: AnyCall, query: tuple[int, ...], key: tuple[int, ...]) -> float:
    """Return the share of its scores that attention computes: under a causal mask half of them, but more where the
    queries are the last part of a sequence whose keys are whole (that device is waited for)."""
    return 1 - query[-2] / (2 * key[-2]) if arguments(call).get("is_causal") and 0 < query[-2] <= key[-2] else 1.0


def kernel_flops(call: AnyCall, operands: Shapes, results: Shapes) -> float:
    """The operations of a kernel of forward or backward, of which causal attention leaves out what it does not see."""
    name = operator_name(call.target)
    if "_attention" in name:
        backward = name.endswith("backward")
        query, key = operands[1:3] if backward else operands[:2]
        value = operands[3 if backward else 2]
        products = 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        return products * unmasked_share(call, query, key) * (ATTENTION_BACKWARD if backward else 1.0)
    if call.target == aten.convolution_backward.default:
        named = arguments(call)
        result, places, weight = operands[:3]
        windows = prod(places if named["transposed"] else result) * prod(weight[1:])
        return 2.0 * windows * sum(map(bool, named["output_mask"][:2]))
    return float(flops_of(call, operands, results))


def _contraction(left: int) -> Flops:
    """Every element of the result sums over the last dim of operand ``left``."""

    def count(op: AnyCall, operands: Shapes, results: Shapes) -> int:
        return 2 * prod(results[0]) * operands[left][-1]

    return count


def _einsum(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Return the product of the sizes of all indices: one multiplication and one addition each."""
    terms, _ = terms_of(str(arguments(op)["equation"]))
    sizes: dict[str | int, int] = {}
    for term, shape in zip(terms, operands, strict=True):
        before, _, after = term.partition("...")
        dots = range(len(before) - len(shape) + len(after), 0)  # dims of the ellipsis align at its end
        for index, size in zip((*before, *dots, *after), shape, strict=True):
            sizes[index] = max(sizes.get(index, 1), size)
    return 2 * prod(sizes.values())


def _convolution(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Every window meets every kernel: windows are places of the result, of the input where it is transposed.

    The weight is ``(g co) ci k...``, transposed ``(g ci) co k...``: either way every channel of a place meets the
    second dim of the weight.
    """
    transposed = "transpose" in str(op.target) or bool(arguments(op).get("transposed", False))
    places = operands[0] if transposed else results[0]
    return 2 * prod(places) * prod(operands[1][1:])


def _attention_within(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    named = arguments(op)
    blocks = named["rows"], named["firsts"], named["ends"]
    return 2 * (prod(operands[0]) + prod(results[0])) * num_pairs(*blocks) // sum(blocks[0])


def _attention_with_sinks(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    query, key, value = operands[:3]
    pairs = num_seen(arguments(op)["band"], query[-2], key[-2])
    return 2 * prod(query[:-2]) * pairs * (query[-1] + value[-1])


def _ring_step(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Every block computes what the busiest of them does."""
    shapes = {name: operands[i] for name, (i, *_) in operand_positions(op).items()}
    query, value = shapes["q"], shapes["v"]
    return 2 * prod(query[:-2]) * busiest_block(op, shapes)[1] * (query[-1] + value[-1])


def _grouped_mm(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Every row meets the matrix of one expert; experts have equally many rows, for want of better."""
    (experts, size, columns), (rows,) = operands[1:]
    return 2 * rows * size * columns * experts // prod(op.args[3])


def _grouped_mm_backward(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Every row of the gradient meets the matrix of its expert, or its row of ``x``."""
    (rows, columns), _, (experts, size, _) = operands[:3]
    return 2 * rows * size * columns * experts // prod(op.args[4])


def _head(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Every row meets every class."""
    return 2 * prod(operands[0]) * prod(operands[1][:-1])


def _outer(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    return prod(results[0])


def _recurrent(op: AnyCall, operands: Shapes, results: Shapes) -> int:
    """Every step of every sample meets every weight matrix."""
    return 2 * prod(operands[0][:2]) * sum(prod(shape) for shape in operands[1:] if len(shape) == 2)


FLOPS: dict[torch._ops.OpOverload, Flops] = {
    aten.linear.default: _contraction(0),
    aten.matmul.default: _contraction(0),
    aten.mm.default: _contraction(0),
    aten._scaled_mm.default: _contraction(0),
    FLOAT8_LINEAR: _contraction(0),
    aten.bmm.default: _contraction(0),
    aten.mv.default: _contraction(0),
    aten.dot.default: _contraction(0),
    aten.vdot.default: _contraction(0),
    aten.outer.default: _outer,
    # A subtraction, a power and an addition for every coordinate of every pair.
    aten.cdist.default: lambda op, operands, results: 3 * prod(results[0]) * operands[0][-1],
    aten.addmm.default: _contraction(1),
    aten.einsum.default: _einsum,
    # ``b h t d, b h s d, b h s e -> b h t e``: scores, and the mean of the values.
    aten.scaled_dot_product_attention.default: lambda op, operands, results: (
        2 * (prod(operands[0]) + prod(results[0])) * operands[1][-2]
    ),
    ATTENTION_WITHIN: _attention_within,
    ATTENTION_WITH_SINKS: _attention_with_sinks,
    **dict.fromkeys((RING_STEP, RING_GRADIENTS), _ring_step),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), _recurrent),
    **dict.fromkeys((HEAD_LOSS, HEAD_TERMS), _head),
    grouped_mm._opoverload: _grouped_mm,
    torch.ops.shardwise.grouped_mm_of_x.default: _grouped_mm_backward,
    torch.ops.shardwise.grouped_mm_of_weight.default: _grouped_mm_backward,
}
