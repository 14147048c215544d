"""The proof must be able to fail: every cell's backward and every rule's reduction, broken, is caught by the random
programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from programs.building import Program, program_of_sample, random_program
from programs.running import run
from rules.samples import SAMPLES
from shardwise.layouts import choice, conversions, redistribute, shortest_path
from shardwise.layouts.conversions import CELLS, Cell, Move, Primitive
from shardwise.layouts.mesh import Mesh
from shardwise.programs import lower
from shardwise.proof.virtual import VirtualCluster
from shardwise.rules.rule import OpRule
from shardwise.rules.tables import rule_of

# A primitive of the same shapes that is wrong in its place.
WRONG: dict[Primitive, Primitive] = {
    "none": "all_reduce",
    "all_reduce": "none",
    "keep_one": "none",
    "reduce_scatter": "slice",
    "all_gather": "zero_pad",
    "zero_pad": "all_gather",
}
BROKEN = [(cell, column) for cell in CELLS for column in ("forward", "backward") if cell[0] != cell[1]]
SWAPPED = [(cell, column) for cell, column in BROKEN if getattr(CELLS[cell], column) in WRONG]
MESH = Mesh(a=2, b=2)
CACHED = (
    redistribute._redistribute,
    redistribute._through_windows,
    redistribute._search,
    shortest_path.solve,
    shortest_path._steps,
    lower._capture_lowering,
)


@cache
def programs() -> tuple[Program, ...]:
    return tuple(random_program(seed) for seed in range(60))


@contextmanager
def fresh_caches() -> Iterator[None]:
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


def is_caught(made: tuple[Program, ...]) -> bool:
    """Whether some program differs, or can no longer be executed at all."""
    for seed, program in enumerate(made):
        try:
            if run(program, seed, MESH).error > 1e-10:
                return True
        except (AssertionError, RuntimeError):
            return True
    return False


def test_nothing_is_caught_when_nothing_is_broken() -> None:
    assert not is_caught(programs()[:10])  # test_random_programs runs the others


def ids(cells: list[tuple[tuple[str, str], str]]) -> list[str]:
    return [f"{a}-{b}-{column}" for (a, b), column in cells]


@pytest.mark.parametrize(("cell", "column"), SWAPPED, ids=ids(SWAPPED))
def test_a_cell_with_another_primitive_is_caught(
    cell: tuple[str, str], column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Primitive = getattr(CELLS[cell], column)
    broken = dict(CELLS)
    broken[cell] = replace(CELLS[cell], **{column: WRONG[right]})
    monkeypatch.setattr(conversions, "CELLS", broken)
    with fresh_caches():
        assert is_caught(programs())


@pytest.mark.parametrize(("cell", "column"), BROKEN, ids=ids(BROKEN))
def test_a_cell_that_doubles_is_caught(cell: tuple[str, str], column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classical mistake: an all-reduce whose backward is an all-reduce too makes gradients n times too large."""
    perform = VirtualCluster.perform

    def doubling(self: VirtualCluster, move: Move, tensors: Any, backward: bool) -> list[Tensor]:
        results = perform(self, move, tensors, backward)
        hit = move.cell == cell and backward == (column == "backward")
        return [result * 2 if hit and result.is_floating_point() else result for result in results]

    monkeypatch.setattr(VirtualCluster, "perform", doubling)
    assert is_caught(programs())


def test_a_broken_all_to_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "CELLS", CELLS | {("S", "S"): Cell("all_to_all", "none")})
    with fresh_caches():
        assert is_caught(programs())


@pytest.mark.parametrize("kind", sorted(choice.REDUCTION_STATES))
def test_a_reduction_of_another_kind_is_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choice.REDUCTION_STATES, kind, "I")
    with fresh_caches():
        assert is_caught(tuple(program_of_sample(SAMPLES[i]) for i in reducing(kind)))


@cache
def reducing(kind: str) -> tuple[int, ...]:
    """Samples whose rule has a factor of a kind that an axis of two can split."""
    found = []
    for index, sample in enumerate(SAMPLES):
        if sample.unspecified:
            continue
        graph = program_of_sample(sample).graph
        rule = rule_of(graph.ops[0], graph)
        if rule is not None and any(f.kind == kind and f.size > 1 for f in rule.factors):
            found.append(index)
    return tuple(found)


SUMS = reducing("sum")


@pytest.mark.parametrize("index", SUMS, ids=[f"{i}-{SAMPLES[i].target}" for i in SUMS])
def test_a_rule_that_forgets_its_reduction_is_caught(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are called whole where they are summands."""
    target = SAMPLES[index].target

    def forgetful(rule: OpRule) -> OpRule:
        return rule.with_kinds({f.name: "parallel" for f in rule.factors if f.kind == "sum"})

    from programs import running

    monkeypatch.setattr(
        running,
        "rule_of",
        lambda op, graph: (
            forgetful(found) if (found := rule_of(op, graph)) and op.target == target else rule_of(op, graph)
        ),
    )
    program = program_of_sample(SAMPLES[index])
    with fresh_caches():
        assert is_caught((program,) * 24)
