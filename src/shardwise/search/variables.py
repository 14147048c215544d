"""The variables of a cost graph: their values, and what each value stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardwise.layouts.layout import Layout
from shardwise.layouts.routes import Ints, Routes
from shardwise.layouts.strategy import Strategy
from shardwise.search.domains import Domain


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
