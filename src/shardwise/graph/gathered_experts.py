"""Rewrite of products with gathered matrices: ``weight[experts]`` multiplied row by row is a product by expert.

Mixtures of experts also look up the matrix of every row, and multiply by a batched product:

    torch.bmm(rows[:, None], weight[experts])                       transformers' "batched_mm"
    torch.einsum("ti,taio->tao", tokens, weight[chosen])            gpt-fast

That takes a matrix per row, and has no dim of experts. ``shardwise::grouped_mm`` computes the same from the weight.
Experts are looked up among 0, 1, 2, ..., so that numbers below 0 and out of range are what they are for ``aten.index``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch._ops import OpOverload

from shardwise.graph.einsum import DOTS, terms_of
from shardwise.graph.emitter import Emitter
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Arg, Op, Ref, map_operands, only_ref
from shardwise.graph.schema import arguments, is_random

aten = torch.ops.aten
_WITH_DIMS = (aten.unsqueeze.default, aten.squeeze.dim, aten.reshape.default)
_HOLD_EXPERTS = (torch.int32, torch.int64)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A transposed lookup ``weight[experts]``. ``term``: a letter per dim of ``experts``, then of a matrix."""

    weight: Ref
    experts: Ref
    term: tuple[str, ...]


def by_expert(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite a product of two operands if one of them is a lookup of matrices; None if it is not."""
    terms = _terms(op, emitter)
    if terms is None:
        return None
    operands, (left, right, output) = terms
    for x, term, matrices, of_matrices in (
        (*operands[:1], left, *operands[1:], right),
        (*operands[1:], right, *operands[:1], left),
    ):
        gathered = _gathered(emitter, matrices, of_matrices)
        result = None if gathered is None else _product(emitter, x, term, gathered, output)
        if result is not None:
            return (result,)
    return None


def of_expert(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite a lookup of what else belongs to the experts of rows, such as a bias: products by expert share the keys.

    None for another lookup; one of matrices makes the keys.
    """
    args = arguments(op)
    x, index = args["self"], args["indices"][0]
    is_lookup = len(args["indices"]) == 1 and index is not None and emitter.value(index).dtype in _HOLD_EXPERTS
    if not is_lookup or not emitter.value(index).shape or not _is_of_parameters(emitter, x):
        return None
    count, *rest = emitter.value(x).shape
    shape, has_matrices = emitter.value(index).shape, len(rest) > 1
    keys = _keys(emitter, index, tuple(range(len(shape))), count, emits=has_matrices)
    if keys is None or has_matrices:
        return None
    return (reshaped(emitter, emitter.emit(op.target, x, (keys,)), (*shape, *rest)),)


def _terms(op: Op, emitter: Emitter) -> tuple[tuple[Ref, Ref], tuple[str, str, str]] | None:
    """Return the operands of a product, and letters for the dims of these and of the result."""
    if op.target is aten.einsum.default:
        tensors = arguments(op)["tensors"]
        terms, output = terms_of(str(op.args[0]))
        if len(tensors) != 2 or any(DOTS in term for term in (*terms, output)):
            return None
        return tensors, (terms[0], terms[1], output)
    left, right = (Ref(name) for name in (op.operands * 2)[:2])
    shapes = emitter.value(left).shape, emitter.value(right).shape
    batch = len(shapes[0]) - 2
    if batch < 1 or batch > 20 or shapes[0][:-2] != shapes[1][:-2]:
        return None
    shared = _LETTERS[:batch]
    return (left, right), (f"{shared}xy", f"{shared}yz", f"{shared}xz")


def _gathered(emitter: Emitter, ref: Ref, term: str) -> _Gathered | None:
    """Return the lookup that a value is, if it is one of parameters. Casts are of the whole weight."""
    letters, dtypes = list(term), list[torch.dtype]()
    while (producer := emitter.producer.get(ref.name)) is not None:
        args = arguments(producer)
        dims = list(range(len(letters)))
        if producer.target is aten.transpose.int:
            first, second = args["dim0"], args["dim1"]
            dims[first], dims[second] = dims[second], dims[first]
        elif producer.target is aten.mT.default:
            dims[-2:] = reversed(dims[-2:])
        elif producer.target is aten.permute.default:
            dims = [dim % len(letters) for dim in args["dims"]]
        elif producer.target is aten.to.dtype:
            dtypes.append(args["dtype"])
        else:
            break
        letters = [letters[dims.index(dim)] for dim in range(len(letters))]
        ref = args["self"]
    if producer is None:
        return None
    if producer.target is aten.index.Tensor and len(args["indices"]) == 1:
        weight, (experts,) = args["self"], args["indices"]
    elif producer.target is aten.index_select.default and args["dim"] == 0:
        weight, experts = args["self"], args["index"]
    else:
        return None
    if not _is_of_parameters(emitter, weight) or emitter.value(experts).dtype not in _HOLD_EXPERTS:
        return None
    if not emitter.value(experts).shape:
        return None
    for dtype in reversed(dtypes):
        weight = emitter.emit(aten.to.dtype, weight, dtype)
    return _Gathered(weight, experts, tuple(letters))


def _is_of_parameters(emitter: Emitter, ref: Ref) -> bool:
    """Return whether a value is a parameter, or computed from parameters by operators of one operand."""
    while (producer := emitter.producer.get(ref.name)) is not None:
        if len(producer.operands) != 1:
            return producer.target is aten.stack.default and all(
                _is_of_parameters(emitter, Ref(name)) for name in producer.operands
            )
        ref = Ref(producer.operands[0])
    return any(source.value == ref.name and source.kind == "parameter" for source in emitter.sources)


def _product(emitter: Emitter, x: Ref, term: str, gathered: _Gathered, output: str) -> Ref | None:
    """Emit the product by expert of ``x`` and the gathered matrices; None if it is another contraction."""
    emit, weight = emitter.emit, emitter.value(gathered.weight)
    rank = len(emitter.value(gathered.experts).shape)
    rows, dims = gathered.term[:rank], gathered.term[rank:]
    sizes = dict(zip(term, emitter.value(x).shape, strict=True))
    sizes |= dict(zip(gathered.term, (*emitter.value(gathered.experts).shape, *weight.shape[1:]), strict=True))
    if any(sizes[letter] != size for letter, size in zip(term, emitter.value(x).shape, strict=True)):
        return None  # a dim of size 1 is broadcast
    summed = [letter for letter in dims if letter in term and letter not in output]
    columns = [letter for letter in dims if letter in output and letter not in term]
    ones = [letter for letter in term if letter not in rows and letter not in summed]
    if len(summed) + len(columns) != len(dims) or not summed or not columns or not set(rows) <= set(output):
        return None
    if any(sizes[letter] != 1 for letter in ones) or len({*rows, *dims, *ones}) != len(rows) + len(dims) + len(ones):
        return None
    tokens = [letter for letter in rows if letter in term]
    ordered = [*tokens, *(letter for letter in rows if letter not in term)]
    count, width, wide = (prod(sizes[letter] for letter in letters) for letters in (ordered, summed, columns))
    keys = _keys(emitter, gathered.experts, tuple(rows.index(letter) for letter in ordered), weight.shape[0])
    assert keys is not None, "they are emitted"
    flat = _flat(emitter, _in_order(emitter, x, term, [*tokens, *ones, *summed]), (count, width), {})
    matrices = _in_order(emitter, gathered.weight, ("", *dims), ["", *summed, *columns])
    matrices = reshaped(emitter, matrices, (weight.shape[0], width, wide))
    experts = (weight.shape[0],)
    product = emit(grouped_mm._opoverload, flat, matrices, keys, experts, (0,), experts)
    of_rows = [*ordered, *columns]
    result = reshaped(emitter, product, tuple(sizes[letter] for letter in of_rows))
    result = _in_order(emitter, result, of_rows, [letter for letter in output if letter not in ones])
    return reshaped(emitter, result, tuple(sizes[letter] for letter in output))


def _keys(emitter: Emitter, experts: Ref, order: tuple[int, ...], count: int, *, emits: bool = True) -> Ref | None:
    """Emit the number of every row's expert. All that reads it shares it, so that rows are exchanged once."""

    def shared(target: OpOverload, *args: Arg) -> Ref | None:
        for op in reversed(emitter.ops):
            if (op.target, op.args) == (target, args):
                return Ref(op.results[0])
            if experts.name in op.results:
                break
        return emitter.emit(target, *args) if emits else None

    shape = emitter.value(experts).shape
    numbers = experts if order == tuple(range(len(order))) else shared(aten.permute.default, experts, order)
    flat = numbers if len(shape) == 1 else shared(aten.reshape.default, numbers, (prod(shape),))
    return shared(aten.index.Tensor, shared(aten.arange.default, count), (flat,))


def _flat(emitter: Emitter, x: Ref, shape: tuple[int, int], flat: dict[str, Ref]) -> Ref:
    """Return ``x`` as rows, or as the tokens of which its rows are neighbouring copies. What is computed between two
    products is emitted again on rows, for which tokens need not return from their experts in between. ``flat``: the
    values that were made flat already."""
    if x.name not in flat:
        flat[x.name] = _flattened(emitter, x, shape, flat)
    return flat[x.name]


def _flattened(emitter: Emitter, x: Ref, shape: tuple[int, int], flat: dict[str, Ref]) -> Ref:
    rows, width = shape
    before = emitter.value(x).shape
    producer = emitter.producer.get(x.name)
    if emitter.value(x).numel < rows * width or producer is None or len(before) == 2:
        return unrepeated(emitter, reshaped(emitter, x, (emitter.value(x).numel // width, width)))
    if producer.target is aten.reshape.default and emitter.values[producer.operands[0]].shape == shape:
        return Ref(producer.operands[0])
    is_pointwise = torch.Tag.pointwise in producer.target.tags or producer.target is aten.to.dtype
    is_pointwise = is_pointwise and not is_random(producer.target)
    if is_pointwise and all(emitter.values[name].shape == before for name in producer.operands):
        operands = {name: _flat(emitter, Ref(name), shape, flat) for name in producer.operands}
        if all(emitter.value(operand).shape == shape for operand in operands.values()):
            (result,) = emitter.apply(map_operands(producer, operands.__getitem__))
            return only_ref(result)
        return reshaped(emitter, x, shape)
    return unrepeated(emitter, reshaped(emitter, x, shape))


def unrepeated(emitter: Emitter, rows: Ref) -> Ref:
    """Return the tokens of which ``rows`` are neighbouring copies; a product by expert reads each of them once."""
    shape, ref = emitter.value(rows).shape, rows
    while (producer := emitter.producer.get(ref.name)) is not None and producer.operands:
        x, below = producer.operands[0], emitter.producer.get(producer.operands[0])
        before = emitter.values[x].shape
        if producer.target is aten.repeat_interleave.self_int and arguments(producer)["dim"] in (0, -len(before)):
            return Ref(x) if len(before) == 2 else rows
        if producer.target is aten.reshape.default and below is not None and below.target is aten.expand.default:
            tokens, *middle = emitter.values[below.operands[0]].shape
            is_copied = middle == [1, shape[1]] and before[:1] == (tokens,) and before[2:] == shape[1:]
            return reshaped(emitter, Ref(below.operands[0]), (tokens, shape[1])) if is_copied else rows
        if producer.target not in _WITH_DIMS or [n for n in before if n != 1] != [n for n in shape if n != 1]:
            return rows
        ref = Ref(x)
    return rows


def _in_order(emitter: Emitter, ref: Ref, found: Sequence[str], wanted: Sequence[str]) -> Ref:
    """Permute dims from the order ``found`` to ``wanted``, in letters."""
    return emitter.permuted(ref, [list(found).index(letter) for letter in wanted])


def reshaped(emitter: Emitter, ref: Ref, shape: tuple[int, ...]) -> Ref:
    """Return a value in another shape. A dim of size 1 comes and goes by operators that rows at their experts allow."""
    before, producer = emitter.value(ref).shape, emitter.producer.get(ref.name)
    if before == shape:
        return ref
    if producer is not None and producer.target is aten.unsqueeze.default:
        (x,) = producer.operands
        if emitter.values[x].shape == shape:
            return Ref(x)
    for dim in range(1, max(len(shape), len(before))):
        if before[dim : dim + 1] == (1,) and before[:dim] + before[dim + 1 :] == shape:
            return emitter.emit(aten.squeeze.dim, ref, dim)
        if shape[dim : dim + 1] == (1,) and shape[:dim] + shape[dim + 1 :] == before:
            return emitter.emit(aten.unsqueeze.default, ref, dim)
    return emitter.emit(aten.reshape.default, ref, shape)
