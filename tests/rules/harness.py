"""Running a rule by hand, without mesh or process group: slice, call the local operators, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from rules.samples import Sample
from shardwise.graph.ir import Graph, Op, Ref, Value
from shardwise.graph.schema import filled, tensor_results
from shardwise.rules.arguments import same_call
from shardwise.rules.rule import Dims, LocalContext, OpRule, Piece

Pieces = Mapping[str, tuple[Piece, ...]]
NEUTRAL = {"max": -torch.inf, "min": torch.inf, "any": 0.0}


@dataclass(frozen=True)
class Case:
    """A sample as an op of a graph, with the tensors it is called on and what it returns."""

    op: Op
    graph: Graph
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @cached_property
    def seeds(self) -> list[Tensor]:
        """The cotangents of the results with which gradients are compared."""
        return cotangents(self.results)

    @cached_property
    def gradients(self) -> list[Tensor | None]:
        return gradients(self.results, self.operands, self.seeds)


def make_case(sample: Sample) -> Case:
    tensors: list[Tensor] = []

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Ref(f"x{len(tensors) - 1}")
        return tuple(map(argument, value)) if isinstance(value, (list, tuple)) else value

    args = tuple(map(argument, sample.args))
    kwargs = tuple((key, argument(value)) for key, value in sample.kwargs.items())
    results = tuple(tensor_results(sample.target(*sample.args, **sample.kwargs)))
    names = tuple(f"y{i}" for i in range(len(results)))
    op = Op("/sample", sample.target, args, kwargs, names, "sample.py:1")
    values = [
        Value(name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*((f"x{i}", t) for i, t in enumerate(tensors)), *zip(names, results, strict=True))
    ]
    return Case(op, Graph(tuple(values), (), (op,), ()), tuple(tensors), results)


def whole_piece(size: int) -> tuple[Piece, ...]:
    return (Piece(size, 0, size),)


def pieces_of(sizes: Sequence[int], split: int, parts: int) -> list[tuple[Piece, ...]]:
    """The parts of a factor with atoms of ``sizes``, of which atom ``split`` is divided as evenly as possible."""
    size = sizes[split]
    bounds = [i * size // parts for i in range(parts + 1)]
    return [
        tuple(
            Piece(size, bounds[i], bounds[i + 1] - bounds[i]) if j == split else Piece(own, 0, own)
            for j, own in enumerate(sizes)
        )
        for i in range(parts)
    ]


def grid_of(sizes: Sequence[int], parts: int) -> list[tuple[Piece, ...]]:
    """The parts of a factor all of whose atoms are divided, each over its own axis of ``parts`` devices."""
    alone = [[parted[0] for parted in pieces_of((size,), 0, parts)] for size in sizes]
    return list(product(*alone))


def splits(rule: OpRule, chosen: Mapping[str, Sequence[tuple[Piece, ...]]]) -> Iterator[dict[str, tuple[Piece, ...]]]:
    """Every combination of the parts of the chosen factors; the other factors are whole."""
    for combination in product(*chosen.values()):
        own = dict(zip(chosen, combination, strict=True))
        yield {f.name: own.get(f.name, whole_piece(f.size)) for f in rule.factors}


def _atoms(dims: Dims, pieces: Pieces) -> list[list[Piece]]:
    return [[piece for factor in dim for piece in pieces[factor]] for dim in dims]


def local_shape(dims: Dims, pieces: Pieces) -> tuple[int, ...]:
    return tuple(prod(piece.length for piece in atoms) for atoms in _atoms(dims, pieces))


def window(tensor: Tensor, dims: Dims, pieces: Pieces) -> Tensor:
    atoms = [piece for dim in _atoms(dims, pieces) for piece in dim]
    view = tensor.reshape([piece.size for piece in atoms])
    for i, piece in enumerate(atoms):
        view = view.narrow(i, piece.offset, piece.length)
    return view


def take(tensor: Tensor, dims: Dims, pieces: Pieces) -> Tensor:
    return window(tensor, dims, pieces).reshape(local_shape(dims, pieces)).clone()


def put(part: Tensor, shape: Sequence[int], dims: Dims, pieces: Pieces, fill: float) -> Tensor:
    """A tensor of ``shape`` that holds ``part`` in its place and ``fill`` elsewhere."""
    whole = torch.full(tuple(shape), fill, dtype=part.dtype)
    place = window(whole, dims, pieces)
    place.copy_(part.reshape(place.shape))
    return whole


def held_rows(rule: OpRule, dims: Dims, pieces: Pieces) -> list[list[int]]:
    """Per dim of an operand the rows that a part reads, windows and all."""
    windows = dict(rule.windows)

    def of_factor(name: str) -> tuple[int, list[int]]:
        size = prod(piece.size for piece in pieces[name])
        window = windows.get(name)
        if window is None or all(piece.length == piece.size for piece in pieces[window.factor]):
            return size, flat_rows(pieces[name])
        own = flat_rows(pieces[window.factor])
        assert own == list(range(own[0], own[-1] + 1)) if own else True, "windows belong to contiguous parts"
        ranges = window.ranges(own[0], len(own)) if own else ()
        return size, [row for start, stop in ranges for row in range(start, stop)]

    found = []
    for dim in dims:
        rows = [0]
        for name in dim:
            size, own = of_factor(name)
            rows = [row * size + minor for row in rows for minor in own]
        found.append(rows)
    return found


def flat_rows(pieces: Sequence[Piece]) -> list[int]:
    rows = [0]
    for piece in pieces:
        rows = [row * piece.size + own for row in rows for own in range(piece.offset, piece.offset + piece.length)]
    return rows


def take_operand(tensor: Tensor, rule: OpRule, dims: Dims, pieces: Pieces) -> Tensor:
    for dim, rows in enumerate(held_rows(rule, dims, pieces)):
        tensor = tensor.index_select(dim, torch.tensor(rows, dtype=torch.int64))
    return tensor.clone()


def add_operand(total: Tensor, part: Tensor, rule: OpRule, dims: Dims, pieces: Pieces) -> Tensor:
    """The gradient of what a part reads, added where it was read."""
    rows = held_rows(rule, dims, pieces)
    for dim in reversed(range(total.dim())):
        shape = [total.shape[i] if i >= dim else len(rows[i]) for i in range(total.dim())]
        part = torch.zeros(shape, dtype=part.dtype).index_add(dim, torch.tensor(rows[dim], dtype=torch.int64), part)
    return total + part


def numbers(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_complex() else tensor.detach().to(torch.float64)


def cotangents(results: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]


def gradients(results: Sequence[Tensor], operands: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor | None]:
    active = [(r, s) for r, s in zip(results, seeds, strict=True) if r.requires_grad]
    wanted = [t for t in operands if t.requires_grad]
    if not active or not wanted:
        return [torch.zeros_like(t) if t.requires_grad else None for t in operands]
    found = torch.autograd.grad(
        [r for r, _ in active], wanted, [s for _, s in active], retain_graph=True, allow_unused=True
    )
    by_id = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)}
    return [by_id.get(id(t)) for t in operands]


def run_part(case: Case, rule: OpRule, pieces: Pieces, operands: Sequence[Tensor]) -> list[Tensor]:
    context = LocalContext(
        tuple(tuple(map(len, held_rows(rule, dims, pieces))) for dims in rule.operands),
        tuple(local_shape(dims, pieces) for dims in rule.results),
        dict(pieces),
    )
    local = rule.localize(case.op, context) if rule.localize is not None else same_call(case.op)
    known = dict(zip(case.op.operands, operands, strict=True))
    args = [filled(arg, known.__getitem__) for arg in local.args]
    results = tensor_results(local.target(*args, **{key: filled(arg, known.__getitem__) for key, arg in local.kwargs}))
    for result, shape, whole in zip(results, context.result_shapes, case.results, strict=True):
        assert tuple(result.shape) == shape, f"{local.target} returns {list(result.shape)}, the rule says {list(shape)}"
        assert result.dtype == whole.dtype, f"{local.target} returns {result.dtype}, {case.op.target} {whole.dtype}"
        assert result.requires_grad == whole.requires_grad, f"{local.target} loses the gradient of {case.op.target}"
    return results


def mismatch(case: Case, rule: OpRule, chosen: Mapping[str, Sequence[tuple[Piece, ...]]]) -> str:
    """What differs between the op and its parts put together, forward or backward; empty if nothing does."""
    kinds = {rule.factor(name).kind for name in chosen} & NEUTRAL.keys()
    kind = next(iter(kinds), "sum")
    fill = NEUTRAL.get(kind, 0.0)
    seeds, expected_gradients = case.seeds, case.gradients
    totals: list[Tensor | None] = [None] * len(case.results)
    gradient_totals: list[Tensor | None] = [None if g is None else torch.zeros_like(g) for g in expected_gradients]
    for pieces in splits(rule, chosen):
        local = [
            take_operand(t.detach(), rule, dims, pieces).requires_grad_(t.requires_grad)
            for t, dims in zip(case.operands, rule.operands, strict=True)
        ]
        results = run_part(case, rule, pieces, local)
        local_seeds = [take(s, dims, pieces) for s, dims in zip(seeds, rule.results, strict=True)]
        for i, (result, whole) in enumerate(zip(results, case.results, strict=True)):
            placed = put(numbers(result), whole.shape, rule.results[i], pieces, fill)
            before = totals[i]
            totals[i] = placed if before is None else combine(before, placed, kind)
        for i, gradient in enumerate(gradients(results, local, local_seeds)):
            total = gradient_totals[i]
            if gradient is not None and total is not None:
                gradient_totals[i] = add_operand(total, gradient, rule, rule.operands[i], pieces)
    found = [(f"result {i}", numbers(r), totals[i]) for i, r in enumerate(case.results)]
    found += [(f"gradient {i}", g, gradient_totals[i]) for i, g in enumerate(expected_gradients) if g is not None]
    return "; ".join(f"{name}: {a} is not {b}" for name, a, b in found if b is None or not close(a, b))


def combine(a: Tensor, b: Tensor, kind: str) -> Tensor:
    if kind == "max" or kind == "any":
        return torch.maximum(a, b)
    return torch.minimum(a, b) if kind == "min" else a + b


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
