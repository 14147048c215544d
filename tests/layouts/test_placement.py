"""Placements of stages, and what is refused."""

from __future__ import annotations

import pytest

from raising import raises
from shardwise.errors import LayoutError
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement, check_placements

FOUR = Mesh(dp=2, tp=2)


def test_devices_of_the_mesh_are_global_ranks() -> None:
    place = Placement(FOUR, (1, 4, 6, 7))
    assert place.device_of(6) == 2
    assert place.coordinates(6) == {"dp": 1, "tp": 0}
    assert place.group(("tp",), 6) == (6, 7)
    assert place.group(("dp",), 7) == (4, 7)
    assert place.group(("dp", "tp"), 1) == (1, 4, 6, 7)
    assert Placement.whole(FOUR) == Placement(FOUR, (0, 1, 2, 3))
    assert str(place) == "Mesh(dp=2, tp=2) on ranks 1, 4, 6, 7"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 1, 2), ("4 devices", "3 ranks: 0, 1, 2", "one global rank for every")),
        ((0, 1, 1, 2), ("rank 1 is listed twice", "0, 1, 1, 2 of Mesh(dp=2, tp=2)", "fix:    list every")),
        ((-2, 0, 1, 2), ("rank -2 is negative", "-2, 0, 1, 2", "counted from 0")),
        ((0, 2, 1, 3), ("rank 1 comes after rank 2", "ascending")),
    ],
)
def test_a_placement_that_is_none_is_refused(ranks: tuple[int, ...], message: object) -> None:
    with raises(LayoutError, message):
        Placement(FOUR, ranks)


def test_a_rank_that_is_elsewhere_has_no_coordinates() -> None:
    with raises(LayoutError, "rank 5", "Mesh(dp=2, tp=2)", "0, 1, 2, 3", "fix:"):
        Placement.whole(FOUR).coordinates(5)


def placed(*ranks: int) -> Placement:
    return Placement(Mesh(x=len(ranks)), ranks)


def test_stages_have_ranks_of_their_own_or_the_same() -> None:
    check_placements([placed(0, 1), placed(2, 3, 4, 5)], 6)
    check_placements([placed(0, 1), placed(2, 3), placed(0, 1), placed(2, 3)], 4)  # a looped schedule
    check_placements([placed(0, 1, 2, 3), Placement(FOUR, (0, 1, 2, 3))], 4)  # the same ranks, seen as another mesh


@pytest.mark.parametrize(
    ("placements", "num_ranks", "message"),
    [
        ([], 2, ("the plan has no stages", "fix:")),
        (
            [placed(0, 1), placed(2, 5, 6)],
            5,
            ("stage 1 names 2 of its 3 ranks beyond the 5 of the job: 5, 6", "start 7 ranks"),
        ),
        (
            [placed(0, 1), placed(2, 3), placed(1, 2, 3)],
            4,
            ("stages 0 and 2 share 1 rank (1), but not all: stage 0 has 0, 1, stage 2 has 1, 2, 3", "fix:    give"),
        ),
        (
            [placed(0, 1), placed(11)],
            12,
            ("9 of 12 ranks are in no stage: 2, 3, 4, 5, 6, 7, 8, 9, ... (9)", "add them to the placement"),
        ),
    ],
)
def test_placements_that_overlap_or_leave_ranks_out_are_refused(
    placements: list[Placement], num_ranks: int, message: object
) -> None:
    with raises(LayoutError, message):
        check_placements(placements, num_ranks)
