"""Placements of stages, and what is refused."""

from __future__ import annotations

import pytest

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
        ((0, 1, 2), r"has 4 devices, the placement names 3 ranks: 0, 1, 2\n  fix:    list one global rank for every"),
        (
            (0, 1, 1, 2),
            r"rank 1 is listed twice in the placement 0, 1, 1, 2 of Mesh\(dp=2, tp=2\)\n  fix:    list every",
        ),
        ((-2, 0, 1, 2), r"rank -2 is negative in the placement -2, 0, 1, 2 .*\n  fix:    ranks are counted from 0"),
        (
            (0, 2, 1, 3),
            r"rank 1 comes after rank 2 in the placement .*\n  fix:    list ranks in ascending order; .* axes",
        ),
    ],
)
def test_a_placement_that_is_none_is_refused(ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Placement(FOUR, ranks)


def test_a_rank_that_is_elsewhere_has_no_coordinates() -> None:
    with pytest.raises(LayoutError, match=r"rank 5 is not in Mesh\(dp=2, tp=2\) on ranks 0, 1, 2, 3\n  fix:"):
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
        ([], 2, r"the plan has no stages\n  fix:"),
        (
            [placed(0, 1), placed(2, 5, 6)],
            5,
            r"stage 1 names 2 of its 3 ranks beyond the 5 of the job: 5, 6\n  fix:    start 7 ranks, or use ranks from",
        ),
        (
            [placed(0, 1), placed(2, 3), placed(1, 2, 3)],
            4,
            r"stages 0 and 2 share 1 rank \(1\), but not all: stage 0 has 0, 1, stage 2 has 1, 2, 3\n  fix:    give",
        ),
        (
            [placed(0, 1), placed(11)],
            12,
            r"9 of 12 ranks are in no stage: 2, 3, 4, 5, 6, 7, 8, 9, ... \(9\)\n  fix:    add them to the placement",
        ),
    ],
)
def test_placements_that_overlap_or_leave_ranks_out_are_refused(
    placements: list[Placement], num_ranks: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        check_placements(placements, num_ranks)
