"""Elimination and the integer program against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raising import raises
from search import integer_program
from search.cost_graphs import all_values, random_problem
from shardwise.errors import ShardwiseError
from shardwise.search import conditioning, elimination, message_passing
from shardwise.search.constants import MAX_CONDITIONED_COMBINATIONS
from shardwise.search.elimination import Elimination, Interner, Problem, TooWide, elimination_of, fix_variables, solve


@pytest.mark.parametrize("start", range(0, 500, 100))
@pytest.mark.sampled(2)
def test_elimination_finds_the_least_value_of_random_problems(start):
    for seed in range(start, start + 100):
        problem = random_problem(seed)
        found, values = solve(problem), all_values(problem)
        assert found.value == values.min(), seed
        assert problem.value(found.assignment) == found.value, seed
        assert found.lower == found.value, seed


@pytest.mark.parametrize("start", range(0, 200, 50))
@pytest.mark.sampled(2)
def test_the_marginal_of_the_last_variable_is_the_least_value_with_each_of_its_values(start):
    for seed in range(start, start + 50):
        problem = random_problem(seed)
        last = seed % len(problem.sizes)
        found = solve(problem, last=last)
        others = tuple(v for v in range(len(problem.sizes)) if v != last)
        assert found.marginal == pytest.approx(all_values(problem).min(axis=others)), seed


def test_an_elimination_is_remembered_for_problems_that_differ_in_prices_only():
    """Not those that leave one variable to the last: there is one for every variable that is explained."""
    problem = random_problem(1)
    for last in range(len(problem.sizes)):
        solve(problem, last=last)
    assert not problem.known
    solve(problem)
    doubled = Problem(
        problem.sizes, problem.factors, Interner([2 * table for table in problem.interner.tables]), problem.known
    )
    assert solve(doubled).value == all_values(doubled).min()
    assert len(problem.known) == 1


def test_terms_of_all_layers_that_are_summed_do_not_join_layers(monkeypatch):
    """As the router loss of experts: each layer's routing (5 ways) adds to two sums, which run along the layers."""
    sizes, tables, factors = [6, 5, 3, 4] * 24, Interner(), []
    draw = np.random.default_rng(0)
    table = {pair: tables.add(draw.random([sizes[v % 4] for v in pair])) for pair in [(0, 1), (1, 2), (1, 3)]}
    table |= {(v, v + 4): tables.add(draw.random((sizes[v], sizes[v]))) for v in (0, 2, 3)}
    for layer in range(24):
        for pair, number in table.items():
            scope = tuple(4 * layer + v for v in pair)
            if scope[1] < len(sizes):
                factors.append((scope, number))
    problem = Problem(sizes, factors, tables)
    equal_layers_first, value = Elimination(problem), solve(problem).value
    assert equal_layers_first.largest == 16_200
    monkeypatch.setattr(elimination, "MAX_NARROW_COMBINATIONS", 50_000)
    problem.known.clear()
    assert elimination_of(problem).largest == 6 * 5 * 6 * 3 * 4
    assert solve(problem).value == pytest.approx(value, rel=1e-12)


def test_an_order_within_the_limits_is_taken_before_one_of_less_work(monkeypatch):
    sizes, tables = [3, 3, 2, 2, 2, 3], Interner()
    pairs = [(0, 4), (0, 5), (1, 2), (1, 3), (2, 5), (3, 5)]
    shapes = {shape: tables.add(np.ones(shape)) for shape in dict.fromkeys((sizes[a], sizes[b]) for a, b in pairs)}
    problem = Problem(sizes, [((a, b), shapes[sizes[a], sizes[b]]) for a, b in pairs], tables)
    fast, small = Elimination(problem), Elimination(problem, shares=False)
    assert fast.work < small.work
    assert (fast.largest, small.largest) == (18, 12)
    assert (fast.num_bytes, small.num_bytes) == (248, 232)
    monkeypatch.setattr(elimination, "MAX_NARROW_COMBINATIONS", 0)
    assert elimination_of(problem).largest == 18
    assert elimination_of(problem, max_joint=12).largest == 12
    problem.known.clear()
    monkeypatch.setattr(elimination, "MAX_ELIMINATION_BYTES", 240)
    assert elimination_of(problem).num_bytes == 232


def test_all_values_are_those_of_the_assignments_one_by_one():
    for seed in range(20):
        problem = random_problem(seed)
        values = all_values(problem)
        assert values.shape == tuple(problem.sizes)
        for assignment in np.ndindex(values.shape):
            assert problem.value(assignment) == values[assignment]


def test_a_variable_that_is_held_keeps_its_value():
    for seed in range(100):
        problem = random_problem(seed)
        variable = seed % len(problem.sizes)
        value = seed % problem.sizes[variable]
        found = solve(fix_variables(problem, {variable: value}))
        least = all_values(problem).take(value, axis=variable).min()
        assert found.value == least
        assert np.isinf(least) or found.assignment[variable] == value


@pytest.mark.parametrize("start", range(0, 200, 50))
@pytest.mark.sampled(2)
def test_the_integer_program_finds_the_least_value_of_random_problems(start):
    for seed in range(start, start + 50):
        problem = random_problem(seed)
        found = integer_program.solve_ilp(problem)
        assert found.value == pytest.approx(all_values(problem).min(), rel=1e-9), seed


def long_chain(length: int, size: int = 12, *, repeats: bool = True) -> Problem:
    """Equal links, and every third variable linked to the next but one."""
    rng, interner = np.random.default_rng(0), Interner()

    def table(*shape: int) -> int:
        return interner.add(rng.random(shape))

    own, link, skip = table(size), table(size, size), table(size, size)
    factors = [((i,), own if repeats else table(size)) for i in range(length)]
    factors += [((i, i + 1), link) for i in range(length - 1)]
    factors += [((i, i + 2), skip) for i in range(0, length - 2, 3)]
    return Problem([size] * length, factors, interner)


def test_equal_layers_are_eliminated_once():
    counts = [solve(long_chain(length)).num_tables for length in (60, 600, 6000)]
    assert counts[1] < counts[0] + 20
    assert counts[2] < counts[0] + 40  # it grows with the logarithm
    assert solve(long_chain(600, repeats=False)).num_tables > 500


@pytest.mark.parametrize("elements", [2, 16, 500])
def test_large_joint_tables_are_minimised_in_parts_with_the_same_result(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = solve(long_chain(30))
    monkeypatch.setattr(elimination, "CACHE_BLOCK_ELEMENTS", elements)
    assert solve(long_chain(30)) == at_once


def test_a_long_chain_is_the_same_as_an_integer_program():
    problem = long_chain(40, repeats=False)
    assert solve(problem).value == pytest.approx(integer_program.solve_ilp(problem).value, rel=1e-9)


def clique(count: int, size: int, seed: int = 0) -> Problem:
    rng, interner = np.random.default_rng(seed), Interner()
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    return Problem([size] * count, [(pair, interner.add(rng.random((size, size)))) for pair in pairs], interner)


def test_an_elimination_that_is_too_wide_is_refused_and_names_its_width():
    with raises(TooWide, 15625, 6) as caught:
        solve(clique(6, 5), max_joint=10_000)
    assert len(caught.value.scope) == 6
    assert solve(clique(6, 5), max_joint=15_625).value == pytest.approx(integer_program.solve_ilp(clique(6, 5)).value)


def test_variables_that_are_held_take_no_width():
    problem = clique(9, 6)
    fixed = {variable: variable % 6 for variable in range(7)}
    found = solve(fix_variables(problem, fixed), max_joint=6 * 6)
    ends = [[*fixed.values(), *pair] for pair in np.ndindex(6, 6)]
    assert found.assignment == min(ends, key=problem.value)
    assert found.value == pytest.approx(min(map(problem.value, ends)))


def test_variables_of_one_value_in_a_long_chain_are_all_eliminated() -> None:
    """Whatever is eliminated leaves the table it came from: a class comes to life again while it is emptied."""
    interner = Interner()
    link, own = interner.add(np.zeros((1, 1))), interner.add(np.zeros(1))
    for length in range(2, 40):
        factors = [((i, i + 1), link) for i in range(length - 1)] + [((i,), own) for i in range(length)]
        factors += [((i, i + 2), link) for i in range(0, length - 2, 3)]
        solution = solve(Problem([1] * length, factors, interner))
        assert solution.assignment == [0] * length


@pytest.mark.parametrize("max_joint", [10, 50, 300])
def test_message_passing_has_a_bound_and_an_assignment_on_both_sides_of_the_least_value(max_joint, monkeypatch):
    for module in (conditioning, message_passing):
        monkeypatch.setattr(module, "MAX_CONDITIONED_COMBINATIONS", max_joint)
    monkeypatch.setattr(elimination, "MAX_NARROW_COMBINATIONS", max_joint)
    reached = 0
    for seed in range(150):
        problem = random_problem(seed)
        least = all_values(problem).min()
        try:
            found = message_passing.solve_wide(problem)
        except ShardwiseError:  # of the allowed assignments none was found
            assert np.isfinite(least), seed
            continue
        assert problem.value(found.assignment) == pytest.approx(found.value, rel=1e-12), seed
        assert found.lower <= least * (1 + 1e-12) <= found.value * (1 + 2e-12), seed
        reached += found.value <= least * (1 + 1e-12)
    assert reached > 100


def test_an_elimination_whose_tables_together_are_too_large_is_refused(monkeypatch):
    monkeypatch.setattr("shardwise.search.elimination.MAX_ELIMINATION_BYTES", 8 * 5**4)
    with raises(TooWide, 5000, "tables"):
        solve(clique(6, 5))


def test_message_passing_leaves_what_its_tables_have_no_memory_for(monkeypatch):
    monkeypatch.setattr(elimination, "MAX_ELIMINATION_BYTES", 1000)
    rng = np.random.default_rng(0)
    interner = Interner()
    factors = [((i, i + 1), interner.add(rng.random((4, 4)))) for i in range(39)]
    problem = Problem([4] * 40, factors, interner)
    with raises(TooWide, 1000, "tables"):
        solve(problem)
    found = message_passing.solve_wide(Problem([4] * 40, factors, interner))
    monkeypatch.undo()
    assert found.value == pytest.approx(solve(Problem([4] * 40, factors, interner)).value)


def test_a_cutset_leaves_a_dense_block_narrow_and_is_found_once_for_all_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, searched = np.random.default_rng(0), list[frozenset[int]]()
    real = conditioning._cutset

    def counted(sums: Problem, avoided: frozenset[int]) -> frozenset[int]:
        cutset = real(sums, avoided)
        scopes = [tuple(v for v in scope if v not in cutset) for scope, _ in sums.factors]
        rest = Problem(sums.sizes, [(scope, i) for i, scope in enumerate(scopes)], sums.interner)
        assert elimination_of(rest, max_joint=MAX_CONDITIONED_COMBINATIONS).largest <= MAX_CONDITIONED_COMBINATIONS
        assert 0 < len(cutset) < len(sums.sizes)
        searched.append(cutset)
        return cutset

    monkeypatch.setattr(conditioning, "_cutset", counted)
    scopes = [(first, second) for second in range(20) for first in range(second)]  # every layer reads all before it
    known: dict[Any, Any] = {}
    for _ in range(3):
        tables = Interner([rng.random((8, 8)) for _ in scopes])
        problem = Problem([8] * 20, [(scope, number) for number, scope in enumerate(scopes)], tables, known)
        found = message_passing.solve_wide(problem)
        assert found.lower <= found.value == problem.value(found.assignment)
    assert len(searched) == 3, "once for each round of the first problem"
    assert searched[1] - searched[0], "a round fixes other variables"
