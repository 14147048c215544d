"""Which moves a program makes between two layouts, when they are chosen by price: those that the search counted."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.costs.prices import Prices
from shardwise.graph.ir import Value
from shardwise.layouts.conversions import Move
from shardwise.layouts.layout import Layout, common_atoms
from shardwise.layouts.redistribute import redistribute, through_windows
from shardwise.layouts.routes import Axes, Routes, RouteTensor

Atoms = tuple[tuple[int, ...], ...]


class Router:
    """Moves between layouts: the cheapest in seconds on a described cluster.

    ``atoms``: of the values that the search knows, ``parameters``: those among them that are parameters. What has no
    node among ``Routes`` (parts of an axis that are treated differently, maxima, dims whose atoms do not nest) takes
    the path that ``redistribute`` finds, by the same seconds.
    """

    def __init__(
        self,
        axes: Axes,
        prices: Prices,
        atoms: Mapping[str, Atoms] | None = None,
        parameters: frozenset[str] = frozenset(),
    ) -> None:
        self.axes, self.prices, self.atoms, self.parameters = axes, prices, atoms or {}, parameters
        self._routes: dict[tuple[RouteTensor, bool], Routes] = {}

    def routes(self, value: Value, atoms: Atoms, *, is_parameter: bool = False, keyed: str = "") -> Routes:
        """Return the layouts of a kind of value and the routes between them. ``keyed``: the keyed state that it may
        have."""
        tensor = RouteTensor(atoms, value.dtype.itemsize, value.requires_grad, value.grad_itemsize, keyed)
        routes = self._routes.get((tensor, is_parameter))
        if routes is None:
            seconds = self.prices.parameter_collective if is_parameter else self.prices.collective
            routes = self._routes[tensor, is_parameter] = Routes(self.axes, tensor, seconds)
        return routes

    def __call__(self, value: Value, source: Layout, target: Layout) -> tuple[Move, ...]:
        """Return the moves that turn ``source`` into ``target``."""
        if source.windows or target.windows:
            return through_windows(source, target, value.requires_grad, lambda *ends: self(value, *ends))
        if source.canonical() == target.canonical():
            return ()
        atoms = self.atoms.get(value.name) or _common(source, target)
        if atoms is not None:
            routes = self.routes(value, atoms, is_parameter=value.name in self.parameters)
            ends = routes.node_of(source), routes.node_of(target)
            if ends[0] is not None and ends[1] is not None:
                return routes.moves(ends[0], ends[1])
        seconds = self.prices.links.price(value.dtype.itemsize)
        return redistribute(source, target, differentiable=value.requires_grad, price=seconds)


def _common(source: Layout, target: Layout) -> Atoms | None:
    """Atoms over which both layouts can be written, or None."""
    atoms = []
    for source_atoms, target_atoms in zip(source.canonical().atoms, target.canonical().atoms, strict=True):
        common = common_atoms(source_atoms, target_atoms)
        if common is None:
            return None
        atoms.append(common)
    return tuple(atoms)
