"""The cost graph: choices as variables, prices as tables over one or two of them.

Variables are the strategy of every operator and the layout in which every parameter is stored. A value with several
consumers has one more: the layout that they share, to which it is converted once, and from there for each consumer.
Every table has four components, because they do not simply add up: seconds of *exposed* collectives, seconds of
*compute*, seconds of *traffic* that overlaps with compute (gathers of parameters, reductions of gradients), and *bytes*
held. Transient bytes, operands and messages of one choice, do not add up at all: ``transients``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from shardwise.layouts.layout import Layout
from shardwise.layouts.routes import Floats, Ints, Routes
from shardwise.layouts.strategy import Strategy
from shardwise.search.domains import Domain, Domains
from shardwise.search.elimination import Interner, Places, Problem, Scope, Solution, places_of


@dataclass(frozen=True, slots=True, eq=False)
class OperatorVariable:
    """The strategy of an operator: its values are those of a domain."""

    name: str
    domain: Domain
    kind: ClassVar[str] = "operator"

    @property
    def size(self) -> int:
        return len(self.domain)

    def choice(self, value: int) -> Strategy:
        return self.domain.strategy(value)


@dataclass(frozen=True, slots=True, eq=False)
class _LayoutVariable:
    """A layout of a value: per value of the variable its node among the routes."""

    name: str
    routes: Routes
    nodes: Ints

    @property
    def size(self) -> int:
        return len(self.nodes)

    def choice(self, value: int) -> Layout:
        return self.routes.layout(int(self.nodes[value]))


class StorageVariable(_LayoutVariable):
    """The layout in which a parameter is stored."""

    __slots__ = ()
    kind: ClassVar[str] = "storage"


class SharedVariable(_LayoutVariable):
    """The layout from which all consumers convert a value."""

    __slots__ = ()
    kind: ClassVar[str] = "shared"


class ReceivedVariable(_LayoutVariable):
    """The layout in which a value of another stage arrives."""

    __slots__ = ()
    kind: ClassVar[str] = "received"


Variable = OperatorVariable | StorageVariable | SharedVariable | ReceivedVariable


COMPONENTS = ("exposed", "compute", "traffic", "bytes")
EXPOSED, COMPUTE, TRAFFIC, BYTES = range(4)

# The tables of the four components; None: zero everywhere.
Components = tuple[Floats | None, ...]


@dataclass(frozen=True)
class CostWeights:
    """The cost of a second of each component, and of a byte, in one solve."""

    exposed: float = 1.0
    compute: float = 1.0
    traffic: float = 1.0
    bytes: float = 0.0

    @property
    def vector(self) -> tuple[float, float, float, float]:
        return self.exposed, self.compute, self.traffic, self.bytes


@dataclass(frozen=True, slots=True)
class FoldedView:
    """A view without a variable: it runs in the layout of its operand. ``home``: the variable that decides that layout;
    ``nodes``: per value of it the node of the operand."""

    op: str
    home: int
    nodes: Ints


@dataclass
class CostGraph:
    """A cost graph. ``variables`` in execution order; ``factors``: scope and number of a table in ``kinds``, each of
    which holds its components (None: zero everywhere). ``transients``: number of a table -> function for one of the
    same shape, of the transient bytes of a choice; tables that are missing hold none."""

    domains: Domains
    variables: list[Variable] = field(default_factory=list)
    factors: list[tuple[Scope, int]] = field(default_factory=list)
    kinds: list[Components] = field(default_factory=list)
    transients: dict[int, Callable[[], Floats]] = field(default_factory=dict)
    number: dict[tuple[str, str], int] = field(default_factory=dict)
    folded: list[FoldedView] = field(default_factory=list)
    # Value -> the variable that decides the layout it is made in (its consumers convert from), per value the node.
    maker: dict[str, tuple[int, Ints]] = field(default_factory=dict)
    home: dict[str, tuple[int, Ints]] = field(default_factory=dict)
    # Value that is sent to another stage -> the variable that decides its layout, per value the node it is sent in.
    sent: dict[str, tuple[int, Ints]] = field(default_factory=dict)

    def weighted(self, weights: CostWeights) -> Problem:
        """Return the problem of minimising the weighted sum of the components."""
        weighted: list[Floats] = []
        for components in self._tables:
            total: Floats | None = None
            for weight, table in zip(weights.vector, components, strict=True):
                if table is not None and weight:
                    total = table * weight if total is None else total + table * weight
            shape = next(table.shape for table in components if table is not None)
            weighted.append(np.zeros(shape) if total is None else total)
        sizes = [variable.size for variable in self.variables]
        problem = Problem(sizes, self._scopes, Interner(weighted), self.domains.eliminations)
        problem.places = self._places
        return problem

    @cached_property
    def _places(self) -> Places:
        return places_of(self._scopes)

    @cached_property
    def _distinct(self) -> dict[int, int]:
        """Return the number of each kind among those of different content, which are different objects."""
        numbers: dict[int, int] = {}
        return {kind: numbers.setdefault(id(components), len(numbers)) for kind, components in enumerate(self.kinds)}

    @cached_property
    def _tables(self) -> list[Components]:
        return list({number: self.kinds[kind] for kind, number in self._distinct.items()}.values())

    @cached_property
    def _scopes(self) -> list[tuple[Scope, int]]:
        return [(scope, self._distinct[kind]) for scope, kind in self.factors]

    @cached_property
    def solutions(self) -> dict[CostWeights, Solution]:
        return {}

    @cached_property
    def by_kind(self) -> list[tuple[Components, Ints]]:
        """Return the tables of different content, and the scopes of each."""
        scopes: list[list[Scope]] = [[] for _ in self._tables]
        for scope, number in self._scopes:
            scopes[number].append(scope)
        return [(table, np.array(group, dtype=np.int64)) for table, group in zip(self._tables, scopes, strict=True)]

    @cached_property
    def scopes_of_transients(self) -> dict[int, Ints]:
        """Return the scopes of the tables of ``transients``, by number."""
        scopes: dict[int, list[Scope]] = {}
        for scope, kind in self.factors:
            if kind in self.transients:
                scopes.setdefault(kind, []).append(scope)
        return {kind: np.array(group, dtype=np.int64) for kind, group in scopes.items()}

    def components(self, assignment: list[int]) -> Floats:
        """Return the four components of a complete assignment."""
        total, values = np.zeros(4), np.array(assignment, dtype=np.int64)
        for tables, scopes in self.by_kind:
            at = tuple(values[scopes].T)
            for i, table in enumerate(tables):
                if table is not None:
                    total[i] += table[at].sum()
        return total


def bytes_of_variables(cost: CostGraph, assignment: list[int]) -> dict[tuple[str, str], float]:
    """Return the bytes that each variable (kind, name) and the conversions to it hold."""
    num_bytes: dict[tuple[str, str], float] = {}
    for scope, kind in cost.factors:
        table = cost.kinds[kind][BYTES]
        if table is not None:
            variable = cost.variables[scope[-1]]
            key = variable.kind, variable.name
            num_bytes[key] = num_bytes.get(key, 0.0) + float(table[tuple(assignment[v] for v in scope)])
    return num_bytes
