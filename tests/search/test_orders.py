"""Orders that are searched for the stages at hand: how much of the time places wait, against torch's orders, the room
that they keep to, and the bound."""

from __future__ import annotations

from itertools import permutations

import pytest

from raising import raises
from shardwise.costs.pipeline_simulation import Action, Order, StageSeconds, simulate_pipeline
from shardwise.plans.schedule import SCHEDULES, SOLVED, check_order, format_order, order_of, schedule_of
from shardwise.search.orders import OrderProblem, least_seconds, solve_order

V = SCHEDULES[SOLVED]


def equal(count: int) -> list[StageSeconds]:
    return [StageSeconds(1.0, 1.0, 1.0, 0.0, 0.0)] * count


def built_in(num_places: int, num_micro_batches: int) -> dict[str, Order]:
    return {
        name: order_of(own, num_places, num_micro_batches)
        for name, own in SCHEDULES.items()
        if own.stages_per_place == 2 and not own.is_solved and not own.fault(num_places, num_micro_batches)
    }


def work(stages: list[StageSeconds], num_places: int, num_micro_batches: int, room: float) -> OrderProblem:
    """Two stages on a place, a V, which keep a byte per micro-batch."""
    place_of = tuple(V.place_of(stage, num_places) for stage in range(2 * num_places))
    return OrderProblem(tuple(stages), place_of, num_micro_batches, (1.0,) * len(stages), (room,) * num_places)


def most_kept(order: Order, stages: list[StageSeconds]) -> float:
    places = len(order)
    return max(OrderProblem(tuple(stages), (), 1, (1.0,) * len(stages), (0.0,) * places).peaks(order))


def folded(orders: dict[str, Order]) -> list[Order]:
    return [order for name, order in orders.items() if SCHEDULES[name].folded]


def check_runs(found: Order, given: OrderProblem, seconds: float) -> float:
    """That the order does everything once, within the room, in these seconds; its bubble."""
    solved = schedule_of(SOLVED, format_order(found))
    assert solved.actions == found
    check_order(solved, given.num_places, given.num_micro_batches)
    step = simulate_pipeline(found, given.stages)
    assert step.seconds == pytest.approx(seconds)
    assert all(peak <= room for peak, room in zip(given.peaks(found), given.room, strict=True))
    assert seconds >= least_seconds(given) * (1 - 1e-9)
    return step.bubbles


@pytest.mark.parametrize(("places", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_on_equal_stages_no_built_in_order_is_better(places: int, micro_batches: int) -> None:
    stages = equal(2 * places)
    orders = built_in(places, micro_batches)
    assert {"ZBVZeroBubble", "DualPipeV", "Interleaved1F1B", "InterleavedZeroBubble"} <= set(orders)
    best = min(simulate_pipeline(order, stages).bubbles for order in orders.values())
    room = most_kept(orders["ZBVZeroBubble"], stages)
    given = work(stages, places, micro_batches, room)
    found = solve_order(given, folded(orders))
    assert check_runs(found.order, given, found.seconds) <= best + 1e-9
    assert found.seconds == pytest.approx(found.bound), "nothing is left to find"


UNEVEN = {
    "stages take 1, 1.2, .8": lambda n: [StageSeconds(*[(1.0, 1.2, 0.8)[s % 3]] * 3, 0.0, 0.0) for s in range(n)],
    "forward 1, input 1.2, weight .8": lambda n: [StageSeconds(1.0, 1.2, 0.8, 0.0, 0.0)] * n,
    "a large head, messages": lambda n: (
        [StageSeconds(1.0, 1.0, 1.0, 0.1, 0.2)] * (n - 1) + [StageSeconds(1.5, 1.5, 1.5, 0.0, 0.2)]
    ),
}


@pytest.mark.parametrize("case", UNEVEN)
@pytest.mark.parametrize(("places", "micro_batches"), [(2, 4), (4, 8)])
def test_on_uneven_stages_a_quarter_of_the_bubble_goes(case: str, places: int, micro_batches: int) -> None:
    stages = UNEVEN[case](2 * places)
    orders = built_in(places, micro_batches)
    interleaved = orders["Interleaved1F1B"]
    given = work(stages, places, micro_batches, most_kept(interleaved, stages))
    found = solve_order(given, folded(orders))
    bubble = check_runs(found.order, given, found.seconds)
    assert bubble <= 0.75 * simulate_pipeline(interleaved, stages).bubbles
    assert found.seconds <= 1.04 * found.bound


def test_no_order_takes_less_than_the_bound() -> None:
    """All orders of a small pipeline, in which the best one is known by trying them."""
    stages = [StageSeconds(1.0, 2.0, 0.5, 0.3, 0.1), StageSeconds(2.0, 1.0, 1.5, 0.0, 0.4)]
    given = OrderProblem(tuple(stages), (0, 1), 2, (1.0, 1.0), (2.0, 2.0))
    kinds = ("forward", "input", "weight")

    def ways(stage: int) -> list[tuple[Action, ...]]:
        own = [Action(stage, kind, number) for kind in kinds for number in range(2)]
        rank = {kind: position for position, kind in enumerate(kinds)}
        return [
            way
            for way in permutations(own)
            if all(
                rank[a.kind] < rank[b.kind] or a.micro_batch != b.micro_batch
                for i, a in enumerate(way)
                for b in way[i + 1 :]
            )
        ]

    best = 1e9
    for first in ways(0):
        for second in ways(1):
            try:
                best = min(best, simulate_pipeline((first, second), stages).seconds)
            except ValueError:
                continue
    found = solve_order(given)
    assert found.bound <= best + 1e-9
    assert found.seconds == pytest.approx(best)
    assert found.bound > sum(2 * stages[1].of(kind) for kind in kinds), "it counts what comes before and after"


def test_little_room_is_kept_to_and_none_is_said() -> None:
    stages = equal(4)
    tight = work(stages, 2, 4, 2.0)  # a micro-batch at a time
    found = solve_order(tight)
    roomy = solve_order(work(stages, 2, 4, 8.0))
    assert check_runs(found.order, tight, found.seconds) > roomy.seconds / found.seconds - 1
    assert found.seconds > roomy.seconds
    with raises(ValueError, "no order"):
        solve_order(work(stages, 2, 4, 1.0))


def test_the_same_stages_get_the_same_order() -> None:
    stages = UNEVEN["forward 1, input 1.2, weight .8"](4)
    given = work(stages, 2, 6, 5.0)
    assert solve_order(given).order == solve_order(given).order


@pytest.mark.long
@pytest.mark.parametrize("case", UNEVEN)
def test_large_pipelines_too(case: str) -> None:
    """Eight places, 32 micro-batches."""
    stages = UNEVEN[case](16)
    orders = built_in(8, 32)
    interleaved = orders["Interleaved1F1B"]
    given = work(stages, 8, 32, most_kept(interleaved, stages))
    found = solve_order(given, folded(orders))
    assert check_runs(found.order, given, found.seconds) <= 0.75 * simulate_pipeline(interleaved, stages).bubbles
    assert found.seconds <= 1.03 * found.bound
