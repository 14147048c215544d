"""Random equations of every form that ``torch.einsum`` takes, under random strategies against one device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from programs.running import run
from rules.samples import x
from rules.test_odd_inputs import program_of
from shardwise.rules import rule_of

aten = torch.ops.aten
LETTERS = "abBzA"  # the names of dims of the ellipsis begin with a b, and capitals get names of their own
EQUATIONS = 40


def random_call(rng: random.Random) -> tuple[list[Any], list[Tensor], bool]:
    """Subscripts of every operand and of the output (None: implicit), the operands, and whether an index repeats."""
    sizes = {letter: rng.choice([2, 3, 4]) for letter in LETTERS}
    dots = [rng.choice([2, 3, 4]) for _ in range(rng.choice([0, 1, 1, 2]))]
    terms: list[list[str]] = []
    operands: list[Tensor] = []
    for _ in range(rng.choice([1, 2, 2, 3])):
        letters = rng.choices(LETTERS, k=rng.randint(0, 3))
        shared = {letter: 1 if rng.random() < 0.1 else sizes[letter] for letter in letters}
        term, shape = list(letters), [shared[letter] for letter in letters]
        if rng.random() < 0.6:
            place, rank = rng.randint(0, len(term)), rng.randint(0, len(dots))
            shape[place:place] = [1 if rng.random() < 0.1 else size for size in dots[len(dots) - rank :]]
            term.insert(place, "...")
        terms.append(term)
        operands.append(x(*shape))
    output = None
    if rng.random() < 0.7:
        known = sorted({letter for term in terms for letter in term if letter != "..."})
        output = rng.sample(known, rng.randint(0, len(known)))
        if rng.random() < 0.7:
            output.insert(rng.randint(0, len(output)), "...")
    repeats = any(term.count(letter) > 1 for term in terms for letter in term)
    return [*terms, output], operands, repeats


def spelled(rng: random.Random, subscripts: list[Any], operands: list[Tensor]) -> Any:
    """The call of ``torch.einsum``: as an equation, with blanks or without, or as lists of numbers."""
    *terms, output = subscripts
    if rng.random() < 0.3:
        numbers = {"...": Ellipsis} | {c: ord(c) - (65 if c.isupper() else 71) for c in LETTERS}
        lists = [[numbers[c] for c in term] for term in subscripts if term is not None]

        def by_lists(*tensors: Tensor) -> Tensor:
            pairs = [item for pair in zip(tensors, lists, strict=False) for item in pair]
            result: Tensor = torch.einsum(*pairs, *lists[len(tensors) :])
            return result

        return by_lists
    blank = rng.choice(["", " "])
    equation = f"{blank},".join(blank.join(term) for term in terms)
    equation += "" if output is None else f"{blank}->{blank}{blank.join(output)}"
    return lambda *tensors: torch.einsum(equation, *tensors)


@pytest.mark.parametrize("seed", range(EQUATIONS))
@pytest.mark.sampled(10)
def test_random_equations_equal_one_device(seed: int) -> None:
    rng = random.Random(seed)
    subscripts, operands, repeats = random_call(rng)
    program = program_of(spelled(rng, subscripts, operands), tuple(operands))
    targets = [op.target for op in program.graph.ops]
    assert (aten.diagonal.default in targets) == repeats, subscripts
    products = [op for op in program.graph.ops if op.target is aten.einsum.default]
    assert products or len(operands) == 1, subscripts  # capture leaves out what returns its operand
    for product in products:
        rule = rule_of(product, program.graph)
        assert rule is not None, product
        assert all(factor.kind in ("parallel", "sum") for factor in rule.factors), rule
    for strategies in range(2):
        outcome = run(program, strategies)
        assert outcome.ok, f"{subscripts} {[list(o.shape) for o in operands]} {strategies=}: {outcome.where}"


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("...i,bi->...", [(8, 16), (8, 16)], "b0 i, b i -> b0  i:sum b:sum"),
        ("...i,bi->...b", [(8, 16), (4, 16)], "b0 i, b i -> b0 b  i:sum"),
        ("...b,bc->...c", [(8, 16), (16, 4)], "b0 b, b c -> b0 c  b:sum"),
        ("b...B,...->bB", [(2, 3, 4, 5), (4,)], "b b0 b1 b_, b1 -> b b_  b0:sum b1:sum"),
        ("...ii->...i", [(2, 3, 3)], "b0 i -> b0 i"),
    ],
)
def test_dims_of_the_ellipsis_have_names_that_no_letter_has(
    equation: str, shapes: list[tuple[int, ...]], expected: str
) -> None:
    program = program_of(lambda *tensors: torch.einsum(equation, *tensors), tuple(x(*shape) for shape in shapes))
    (product,) = (op for op in program.graph.ops if op.target is aten.einsum.default)
    assert str(rule_of(product, program.graph)) == expected
