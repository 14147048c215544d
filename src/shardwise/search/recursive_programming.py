"""Greedy search by levels: one mesh axis after the other, on every axis the heaviest operators first.

The specification's ``recursive_programming`` halves the devices again and again. At every halving, from the heaviest
operator to the lightest, each takes the cheapest cut, given the neighbours that have been cut already. Other neighbours
are assumed to split the level in the best way. Here a level is a mesh axis of any size (one prime factor, where the
mesh has an axis for each). The prices are those of the exact search: a strategy is that of the levels before with one
more axis split, repeated or deferred. A level that makes the step slower is skipped.

Nothing is proven about the result.
"""

from __future__ import annotations

import numpy as np

from shardwise.layouts.choice import INVARIANT, AxisChoice, Split
from shardwise.layouts.routes import Floats, Ints
from shardwise.search.constants import BYTE_TIE_BREAK
from shardwise.search.cost_graph import BYTES, CostGraph, CostWeights, OperatorVariable
from shardwise.search.domains import Domain
from shardwise.search.dynamic_programming import DoesNotFit, SearchOutcome
from shardwise.search.elimination import Problem, Scope, Solution, fix_variables
from shardwise.search.solving import minimise

# Seconds per byte that are tried where a plan does not fit: from a byte that takes as long as to write it on a fast
# device to one that outweighs everything.
PER_BYTE = tuple(10.0**exponent for exponent in range(-14, -3))


def recursive_search(cost: CostGraph, memory_bytes: float | None = None) -> SearchOutcome:
    """Return the greedy assignment; if it does not fit, the first that does at growing prices of a byte, and in the end
    the one of least memory. Its bound is not known. Raises DoesNotFit."""
    solves = 0
    for per_byte in (BYTE_TIE_BREAK, *PER_BYTE):
        assignment = _Levels(cost, cost.weighted(CostWeights(bytes=per_byte))).run()
        components = cost.components(assignment)
        solves += 1
        if memory_bytes is None or components[BYTES] <= memory_bytes:
            return SearchOutcome(assignment, components, 0.0, solves)
    least = minimise(cost.weighted(CostWeights(0.0, 0.0, 0.0, 1.0))).assignment
    components = cost.components(least)
    if components[BYTES] > memory_bytes:
        raise DoesNotFit(least, float(components[BYTES]))
    return SearchOutcome(least, components, 0.0, solves + 1)


class _Levels:
    """One pass over all levels. ``chosen``: per operator (its variable) the strategy of the levels so far; ``decided``:
    those that this level has dealt with; ``splits``: of the others, the strategies that split the level."""

    def __init__(self, cost: CostGraph, problem: Problem) -> None:
        self.cost, self.problem = cost, problem
        self.domain_of = {
            i: variable.domain for i, variable in enumerate(cost.variables) if isinstance(variable, OperatorVariable)
        }
        self.chosen = {variable: self._least_split(domain) for variable, domain in self.domain_of.items()}
        self.decided: set[int] = set()
        self.splits: dict[int, Ints] = {}
        self._known: dict[tuple[int, int, tuple[AxisChoice, ...]], tuple[Ints, Ints]] = {}
        self.at: list[list[tuple[Scope, Floats]]] = [[] for _ in cost.variables]
        for scope, number in problem.factors:
            for variable in scope:
                self.at[variable].append((scope, problem.interner.tables[number]))

    def run(self) -> list[int]:
        best = self._completed()
        for level in range(len(self.cost.domains.axes.groups)):
            before = dict(self.chosen)
            order = self._heaviest_first()
            options = {variable: self._options(variable, level) for variable in order}
            self.splits = {variable: values for variable, (_, values) in options.items()}
            self.decided = set()
            for variable in order:
                values, _ = options[variable]
                self.chosen[variable] = int(values[self._price_of(variable, None)[values].argmin()])
                self.decided.add(variable)
            completed = self._completed()
            if completed.value < best.value:
                best = completed
            else:  # the level does not pay: all devices on it do the same
                self.chosen = before
        return best.assignment

    def _completed(self) -> Solution:
        return minimise(fix_variables(self.problem, self.chosen))

    @staticmethod
    def _least_split(domain: Domain) -> int:
        return min(range(len(domain)), key=lambda i: sum(choice != INVARIANT for choice in domain.choices[i]))

    def _heaviest_first(self) -> list[int]:
        weight = {variable: float(domain.compute.max()) for variable, domain in self.domain_of.items()}
        return sorted(weight, key=lambda variable: (-weight[variable], variable))

    def _options(self, variable: int, level: int) -> tuple[Ints, Ints]:
        """Return, per choice on the axis of a level, the strategy that repeats the work on all later axes (or is
        closest to that, where the user decided them) with the axes before as they are; and those among them that split
        it (all, if none does)."""
        domain = self.domain_of[variable]
        before = domain.choices[self.chosen[variable]][:level]
        key = id(domain), level, before
        if key not in self._known:
            best: dict[AxisChoice, tuple[int, int]] = {}
            for i, choices in enumerate(domain.choices):
                if choices[:level] == before:
                    later = sum(choice != INVARIANT for choice in choices[level + 1 :])
                    best[choices[level]] = min(best.get(choices[level], (later, i)), (later, i))
            every = [i for _, i in best.values()]
            split = [i for choice, (_, i) in best.items() if isinstance(choice, Split)]
            self._known[key] = np.array(every, dtype=np.int64), np.array(split or every, dtype=np.int64)
        return self._known[key]

    def _price_of(self, variable: int, asking: int | None) -> Floats:
        """Return [values] the price of a variable beside all but ``asking``: its own, that of tables shared with
        decided operators, and the least over what undecided ones and layouts (stored or shared) between them can be."""
        total = np.zeros(self.cost.variables[variable].size)
        for scope, table in self.at[variable]:
            if len(scope) == 1:
                total = total + table
                continue
            other = scope[0] if scope[1] == variable else scope[1]
            seen = table if scope[0] == variable else table.T  # [own values, values of the other]
            if other == asking:
                continue
            if other in self.decided:
                total = total + seen[:, self.chosen[other]]
            elif other in self.splits:
                total = total + seen[:, self.splits[other]].min(axis=1)
            else:
                total = total + (seen + self._price_of(other, variable)[None, :]).min(axis=1)
        return total
