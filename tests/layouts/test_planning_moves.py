"""What it takes to plan a redistribution: how far the search looks, over few units and over many, and by which prices.

No test measures time; ``make bench-planning`` does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from layouts.independent_search import SENT, Dims, Search
from layouts.optimality import Outcome, plain, price_of, price_of_redistribution
from layouts.test_redistribution import assert_carries, layouts_of
from raising import raises
from shardwise.errors import LayoutError
from shardwise.layouts import redistribute as planning
from shardwise.layouts.conversions import COLLECTIVES, Primitive
from shardwise.layouts.directed import Directed
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.redistribution_steps import RedistributionSteps, Space, State
from shardwise.layouts.shortest_path import SETTLED_UP_TO, Path, _AStar

BINARY, SIX = Mesh(a=2, b=2, c=2), Mesh(a=2, b=3)
LARGE = (Mesh(dp=8, tp=8), Mesh(dp=64, cp=32, tp=8), Mesh(a=16, b=16, c=8, d=8))


def random_layout(mesh: Mesh, shape: tuple[tuple[int, ...], ...], rng: random.Random) -> Layout:
    """Every sub-axis shards some atom, in any order, or is in some other state."""
    axes = list(mesh.sub_axes)
    rng.shuffle(axes)
    positions = [(d, i) for d, atoms in enumerate(shape) for i in range(len(atoms))]
    bare = Layout(mesh, tuple(tuple(Atom(size) for size in atoms) for atoms in shape))
    return bare.moved({axis: rng.choice([*positions, *positions, "I", "R", "P"]) for axis in axes})


def answer(source: Layout, target: Layout, price: planning.Price | None = None) -> tuple[planning._Task, Path]:
    task, path, _ = planning._search(source, target, True, price)
    assert task is not None
    assert path is not None
    return task, path


# ------------------------------------------------------------------------------------------------------- many units


@pytest.mark.parametrize("mesh", LARGE)
def test_few_states_with_few_steps_are_looked_at_however_many_sub_axes_there_are(mesh: Mesh) -> None:
    rng = random.Random(0)
    for _ in range(30):
        source, target = (random_layout(mesh, ((4096,), (3, 4096), (65536,)), rng) for _ in range(2))
        task, path = answer(source, target)
        assert path.num_settled <= (SETTLED_UP_TO if len(task.units) > 3 else 1000)
        if len(task.units) > 3:
            space = Space(tuple(mesh.size_of(unit) for unit in task.units), task.dims, (), (), True)
            directed = Directed(RedistributionSteps(space), path.states[-1])
            assert max(len(directed.steps(state)) for state in path.states) <= 80, f"{source} -> {target}"


@pytest.mark.parametrize("mesh", LARGE)
def test_no_list_is_dearer_than_the_direct_route(mesh: Mesh) -> None:
    rng = random.Random(1)
    for _ in range(30):
        source, target = (random_layout(mesh, ((4096,), (4096,), (65536,)), rng) for _ in range(2))
        task, path = answer(source, target)
        space = Space(tuple(mesh.size_of(unit) for unit in task.units), task.dims, (), (), True)
        route = Directed(RedistributionSteps(space), path.states[-1]).route(path.states[0])
        direct = sum(step.sent_forward + step.sent_backward for step in route)
        assert route[-1].after == path.states[-1]
        assert len(route) <= 11
        assert path.cost[0] <= direct, f"{source} -> {target}"


@pytest.mark.long
def test_over_four_sub_axes_lists_are_near_the_minimum() -> None:
    """``make sweep-redistribution`` compares more of these: 1.005 times the minimum over all pairs, a pair up to 1.5
    (2026-11-21)."""
    mesh, outcome = Mesh(a=2, b=2, c=2, d=2), Outcome()
    search = Search(mesh, plain(16, 16))
    layouts, rng = layouts_of(search), random.Random(2)
    for _ in range(500):
        i, j = rng.randrange(len(layouts)), rng.randrange(len(layouts))
        outcome.add(layouts[i], layouts[j], int(search.cheapest[i, j]), 0)
    print(outcome)
    assert not outcome.cheaper
    assert outcome.sent < 1.01 * outcome.least
    assert max(more for more, *_ in outcome.worse) <= 1.5


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (Mesh(a=2, b=2, c=2, d=2), ((16,), (16,))),
        (Mesh(a=2, b=2, c=2, d=2), ((3, 5), (7,))),
        (Mesh(a=4, b=2, c=3), ((12, 2), (5,))),
        (Mesh(dp=4, tp=8), ((8,), (4, 8))),
    ],
)
def test_values_and_cotangents_are_exact_over_many_units(mesh: Mesh, shape: tuple[tuple[int, ...], ...]) -> None:
    rng, generator = random.Random(3), torch.Generator().manual_seed(0)
    for _ in range(12):
        source, target = (random_layout(mesh, shape, rng) for _ in range(2))
        assert_carries(source, target, redistribute(source, target), generator)


@pytest.mark.parametrize("ways", [(((4, 9), (6, 6)), ((8,),)), (((4, 9), (6, 6)), ((4, 6), (3, 8)))])
def test_atoms_that_do_not_nest_are_exact_over_many_units(ways: Dims) -> None:
    """Also where units that begin to shard find the other way of their dim in use."""
    mesh, rng, generator = Mesh(a=2, b=2, c=2, d=2), random.Random(4), torch.Generator().manual_seed(0)
    for _ in range(20):
        source = random_layout(mesh, tuple(both[0] for both in ways), rng)
        target = random_layout(mesh, tuple(both[-1] for both in ways), rng)
        assert_carries(source, target, redistribute(source, target), generator)


def test_maxima_over_many_units_are_taken_and_cannot_arise() -> None:
    mesh = Mesh(a=2, b=2, c=2, d=2)
    source = Layout(mesh, ((Atom(16, ("b", "c")),), (Atom(16, ("d",)),)), (("a", "Pmax"),))
    target = Layout(mesh, ((Atom(16, ("c",)),), (Atom(16, ("b", "a")),)))
    assert redistribute(source, target, differentiable=False)[-1].target == target
    with raises(LayoutError, "[16@c, 16@(b,a)]", "[16@(b,c), 16@d]"):
        redistribute(target, source, differentiable=False)


# -------------------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("mesh", [BINARY, SIX])
@pytest.mark.parametrize("dims", [plain(6, 6), plain(5, 7), (((2, 6), (3, 4)),)])
@pytest.mark.parametrize("differentiable", [True, False])
def test_no_step_costs_less_than_the_bound_falls(mesh: Mesh, dims: Dims, differentiable: bool) -> None:
    """What makes A* exact; also over sizes that do not divide and atoms that do not nest."""
    search = Search(mesh, dims)
    states = [(placement.orders, placement.letters) for placement in search.placements]
    everywhere = (tuple(range(len(search.sizes))),) * len(search.positions)
    steps = RedistributionSteps(Space(search.sizes, dims, ("I", "R", "P"), everywhere, differentiable))
    for target in states[:: max(1, len(states) // 6)]:
        bounded = _AStar(steps, target, None)
        assert bounded._bound(target) == (0, 0, 0, 0)
        for state in states:
            for step in steps.everywhere(state, False):
                paid = tuple(a + b for a, b in zip(bounded._cost(state, step), bounded._bound(step.after), strict=True))
                assert bounded._bound(state) <= paid, f"{state} -> {step} -> {target}"


def test_single_conversions_cost_what_the_bound_says() -> None:
    steps = RedistributionSteps(Space((3,), ((((12,),)[0],),), ("I", "R", "P"), ((0,),), True))
    states: list[State] = [(((0,),), ("S",)), *(((((),)), (letter,)) for letter in "IRP")]
    for target in states:
        search = _AStar(steps, target, None)
        for state in states:
            cheapest = search.path_from(state)
            assert cheapest is not None
            assert cheapest.cost[0] == search._least_sent(state)


# ----------------------------------------------------------------------------------------------------------- prices


@dataclass(frozen=True)
class Sent:
    """The default prices, as a function; elements times devices are whole numbers."""

    num_devices: int

    def __call__(self, primitive: Primitive, axes: tuple[str, ...], elements: float) -> tuple[float, ...]:
        return (round(elements * self.num_devices), 1) if primitive in COLLECTIVES else (0, 0)


@dataclass(frozen=True)
class Seconds:
    """Slow between nodes (axis ``a``), and a start-up time per message; per local step a little, too."""

    latency: float = 5e-6

    def __call__(self, primitive: Primitive, axes: tuple[str, ...], elements: float) -> tuple[float, ...]:
        if primitive not in COLLECTIVES:
            return (0.0,) if primitive == "none" else (1e-6,)
        return (self.latency + elements / (1e8 if any(axis.startswith("a") for axis in axes) else 1e10),)


@pytest.mark.parametrize(("mesh", "shape"), [(SIX, (6, 6, 6)), (SIX, (5, 7)), (BINARY, (8, 8))])
def test_a_price_function_that_counts_bytes_finds_the_independent_minimum(mesh: Mesh, shape: tuple[int, ...]) -> None:
    search = Search(mesh, plain(*shape))
    layouts = layouts_of(search)
    for i in range(0, len(layouts), 3 if mesh is SIX else 31):
        for j, target in enumerate(layouts):
            if i != j:
                sent, messages = price_of_redistribution(layouts[i], target, price=Sent(mesh.num_devices))
                told = f"{layouts[i]} -> {target}"
                assert sent * SENT + messages == search.cheapest[i, j], told
                assert (
                    price_of(redistribute(layouts[i], target, price=Sent(mesh.num_devices)), mesh)
                    == search.cheapest[i, j]
                ), told


@pytest.mark.parametrize("mesh", [Mesh(a=4, b=2, c=3), Mesh(a=4, b=8)])
def test_prices_are_those_of_the_moves_and_not_dearer_than_the_moves_that_send_least(mesh: Mesh) -> None:
    """The tensor has more dims than the search sees, and sub-axes that stay where they are."""
    rng = random.Random(5)

    def seconds(source: Layout, target: Layout, price: Seconds | None) -> float:
        moves = redistribute(source, target, price=price)
        both = [(move, way) for move in moves for way in (False, True)]
        return sum(
            Seconds()(move.entry.backward if way else move.entry.forward, move.axes, move.num_sent(way))[0]
            for move, way in both
        )

    for _ in range(60):
        source, target = (random_layout(mesh, ((96,), (96, 96), (192,), (96,)), rng) for _ in range(2))
        (claimed,) = price_of_redistribution(source, target, price=Seconds())
        assert seconds(source, target, Seconds()) <= claimed * (1 + 1e-9)  # local steps of one kind are joined
        if len(answer(source, target)[0].units) <= 3:
            assert claimed <= seconds(source, target, None) * (1 + 1e-9)


def test_asked_again_no_price_is_computed() -> None:
    calls: list[Primitive] = []

    @dataclass(frozen=True)
    class Recorded:
        latency: float

        def __call__(self, primitive: Primitive, axes: tuple[str, ...], elements: float) -> tuple[float, ...]:
            calls.append(primitive)
            return (self.latency + elements,)

    mesh = Mesh(a=2, b=4)
    source, target = Layout.whole(mesh, (64, 64), "P"), Layout.whole(mesh, (64, 64)).moved({"a": (0, 0), "b.0": "R"})
    first, num_calls = price_of_redistribution(source, target, price=Recorded(1.0)), len(calls)
    assert num_calls > 0
    again = Layout.whole(mesh, (64, 64), "P"), Layout.whole(mesh, (64, 64)).moved({"a": (0, 0), "b.0": "R"})
    assert price_of_redistribution(*again, price=Recorded(1.0)) == first
    assert redistribute(*again, price=Recorded(1.0))
    assert len(calls) == num_calls
    assert price_of_redistribution(*again, price=Recorded(2.0)) > first
    assert len(calls) > num_calls
    assert price_of_redistribution(source, source, price=Recorded(1.0)) == ()
