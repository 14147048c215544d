"""Routes between all layouts of a tensor: exact values, honest prices, and never worse than any single way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layouts.test_redistribution import assert_carries
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.layouts.conversions import collective_of
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.routes import Axes, Routes, RouteTensor

CASES = (
    (Mesh(a=4, b=2), ((8,), (8,))),
    (Mesh(a=3, b=2), ((6,), (9,))),
    (Mesh(a=2, b=2, c=2), ((8,), (4,))),
    (Mesh(a=2, b=2), ((3, 4), (6,))),
)


def prices_of(mesh: Mesh) -> Prices:
    return Prices(Links(Cluster.load(f"h100-{mesh.num_devices // 2}x2"), mesh))


def routes_of(mesh: Mesh, atoms: tuple[tuple[int, ...], ...], *, differentiable: bool = True) -> Routes:
    return Routes(Axes.of(mesh), RouteTensor(atoms, 4, differentiable, 2), prices_of(mesh).collective)


def price_of_moves(routes: Routes, moves: tuple, prices: Prices) -> float:
    """Seconds of moves, from the collectives that they say they perform."""
    total = 0.0
    for move in moves:
        sides = [(False, 4), (True, 2)] if routes.tensor.differentiable else [(False, 4)]
        for backward, itemsize in sides:
            collective = collective_of(move, itemsize, backward=backward)
            if collective is not None:
                # Routes price an exchange as one with all ranks; where each has one partner, it is no dearer.
                kind = "all_to_all" if collective.kind == "collective_permute" else collective.kind
                total += prices.collective(kind, collective.axes, np.array([float(collective.num_bytes)]))[0]
    return float(total)


@pytest.mark.parametrize(("mesh", "atoms"), CASES, ids=str)
@pytest.mark.parametrize("differentiable", [True, False])
def test_the_price_of_a_route_is_that_of_its_collectives(mesh, atoms, differentiable):
    routes, prices = routes_of(mesh, atoms, differentiable=differentiable), prices_of(mesh)
    every = np.arange(len(routes.codes))
    table = routes.prices(every)
    assert np.isfinite(table).all()
    assert (np.diag(table) == 0).all()
    rng = np.random.default_rng(0)
    for source, target in rng.integers(len(every), size=(300, 2)).tolist():
        moves = routes.moves(source, target)
        assert price_of_moves(routes, moves, prices) == pytest.approx(table[source, target], rel=1e-9, abs=1e-12)
        layouts = [move.source for move in moves] + [moves[-1].target] if moves else []
        assert not moves or (layouts[0], layouts[-1]) == (routes.layout(source), routes.layout(target))
        assert [move.target for move in moves[:-1]] == layouts[1:-1]


@pytest.mark.parametrize(("mesh", "atoms"), CASES, ids=str)
def test_no_route_is_beaten_by_a_detour(mesh, atoms):
    table = routes_of(mesh, atoms).prices(np.arange(len(routes_of(mesh, atoms).codes)))
    for middle in range(len(table)):
        through = table[:, middle : middle + 1] + table[middle : middle + 1, :]
        assert (table <= through + 1e-12).all(), f"a detour over layout {middle} is cheaper"


@pytest.mark.parametrize(("mesh", "atoms"), CASES, ids=str)
def test_routes_are_near_the_unrestricted_search(mesh, atoms):
    """``redistribute`` under the same prices may also reorder axes and move parts of an axis: a lower bound."""
    routes, prices = routes_of(mesh, atoms), prices_of(mesh)
    links = prices.links.price(4)
    same = Routes(Axes.of(mesh), RouteTensor(atoms, 4, True, 4), prices.collective)
    rng, ratios = np.random.default_rng(1), []
    for source, target in rng.integers(len(routes.codes), size=(60, 2)).tolist():
        ends = same.layout(source), same.layout(target)
        free = redistribute(*ends, price=links)
        best = sum(
            prices.collective(c.kind, c.axes, np.array([float(c.num_bytes)]))[0]
            for move in free
            for c in (collective_of(move, 4), collective_of(move, 4, backward=True))
            if c is not None
        )
        ours = float(same.prices(np.array([target]))[source, 0])
        if best:
            ratios.append(ours / best)
        else:
            assert ours < 1e-12
    assert np.median(ratios) < 1 + 1e-9, "most pairs need nothing but moves of whole axes"
    assert max(ratios) < 3, "no pair is far from the unrestricted minimum"


@pytest.mark.parametrize(("mesh", "atoms"), CASES, ids=str)
def test_routes_carry_values_and_cotangents(mesh, atoms):
    routes, generator = routes_of(mesh, atoms), torch.Generator().manual_seed(0)
    rng = np.random.default_rng(2)
    for source, target in rng.integers(len(routes.codes), size=(60, 2)).tolist():
        assert_carries(routes.layout(source), routes.layout(target), routes.moves(source, target), generator)


@pytest.mark.parametrize(("mesh", "atoms"), CASES, ids=str)
def test_nodes_and_layouts_are_the_same_thing(mesh, atoms):
    routes = routes_of(mesh, atoms)
    for node in range(len(routes.codes)):
        layout = routes.layout(node)
        assert routes.node_of(layout) == node
        assert routes.numel[node] == layout.max_local_numel
    assert routes.layout(routes.whole) == Layout.whole(mesh, tuple(map(int, map(np.prod, atoms)))).refine(atoms)


def test_parts_of_an_axis_are_no_node_unless_they_are_separate():
    mesh = Mesh(a=4)
    half = Layout.whole(mesh, (8,)).moved({"a.0": (0, 0)})
    assert Routes(Axes.of(mesh), RouteTensor(((8,),), 4, True, 4), prices_of(mesh).collective).node_of(half) is None
    apart = Axes.of(mesh, frozenset({"a"}))
    assert Routes(apart, RouteTensor(((8,),), 4, True, 4), prices_of(mesh).collective).node_of(half) is not None
