"""More of what the tests of the search check: ``make sweep-search``, or ``python -m search.sweep --graphs 2000`` in
tests/."""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np

from search.checking import MESHES, TINY, Tally, check_emitted, check_plan, check_search, gap_of, tiny_cost
from search.cost_graphs import climbed, random_assignments, seconds_of
from search.integer_program import solve_ilp
from shardwise.search.auto import PRICED_SEARCHES, run_search
from shardwise.search.cost_graph import CostWeights
from shardwise.search.elimination import solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=400, help="small random graphs, against all assignments")
    parser.add_argument("--most", type=int, default=200_000, help="assignments of a small graph")
    parser.add_argument("--random", type=int, default=3000, help="random assignments of every model")
    parser.add_argument("--climbs", type=int, default=20, help="of them, those from which a hill is climbed")
    parser.add_argument("--models", nargs="*", default=list(TINY))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    faults: list[str] = []

    def check(what: str, call: object, *arguments: object) -> object:
        try:
            return call(*arguments)  # type: ignore[operator]
        except AssertionError as error:
            faults.append(f"{what}: {error}")
            print(f"FAILED {faults[-1]}", flush=True)
            return None

    tally, start = Tally(), time.perf_counter()
    for seed in range(options.graphs):
        check(f"graph {seed}", check_search, seed, options.most, tally)
    print(f"{tally} ({time.perf_counter() - start:.0f} s)", flush=True)
    for name in options.models:
        for mesh in MESHES:
            _model(name, mesh, options, check)
        for search in PRICED_SEARCHES:
            check(f"plan of {name}, {search}", check_plan, name, search, MESHES[1])
        print(f"{name}: plans of {', '.join(PRICED_SEARCHES)} are one device's", flush=True)
    print(f"{len(faults)} failed")
    if faults:
        raise SystemExit(1)


def _model(name: str, mesh: object, options: argparse.Namespace, check: object) -> None:
    assert callable(check)
    cost = tiny_cost(name, mesh)  # type: ignore[arg-type]
    best = run_search(cost, "dynamic_programming", None)
    equal = check(f"price of {name} on {mesh}", check_emitted, best, best.outcome.assignment, name)
    least = np.inf
    for seed, assignment in enumerate(random_assignments(cost, options.random, 0)):
        least = min(least, float(seconds_of(cost.components(assignment))))
        if seed < options.climbs:
            least = min(least, climbed(cost, assignment))
    assert least >= best.outcome.bound * (1 - 1e-9), f"{name} on {mesh}: {least} is below the bound"
    seconds = []
    for weights in (CostWeights(), CostWeights(1.0, 0.5, 0.5, 1e-9)):
        problem = cost.weighted(weights)
        start = time.perf_counter()
        exact = solve(problem)
        middle = time.perf_counter()
        program = solve_ilp(problem)
        seconds.append((middle - start, time.perf_counter() - middle))
        assert abs(program.value / exact.value - 1) <= 1e-9, f"{name} on {mesh}: {program.value}, {exact.value}"
    print(
        f"{name} on {mesh}: step {best.outcome.seconds:.4g} s, gap {gap_of(best.outcome):.2%}, "
        f"best of {options.random} "
        f"random and {options.climbs} climbed {least / best.outcome.seconds:.4g} times that; claimed "
        f"{'equals' if equal else 'is above'} emitted; elimination {seconds[0][0]:.2f} s, HiGHS {seconds[0][1]:.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
