"""The ranks of a mesh: those that it has, and no others."""

from __future__ import annotations

import shardwise as sw
from raising import raises
from shardwise.errors import LayoutError


def test_every_rank_has_coordinates_and_others_are_refused() -> None:
    mesh = sw.Mesh(dp=2, tp=4)
    assert [mesh.rank_of(mesh.coordinates(rank)) for rank in range(8)] == list(range(8))
    assert mesh.group(("tp.0", "tp.1"), 7) == (4, 5, 6, 7)
    assert sw.Mesh().coordinates(0) == {}
    for rank in (-1, 8, 9):
        for ask in (mesh.coordinates, lambda own: mesh.group(("dp",), own), lambda own: mesh.index_along(("dp",), own)):
            with raises(LayoutError, rank, "Mesh(dp=2, tp=4)", 0, 7):
                ask(rank)
    with raises(LayoutError, "coordinate 2", "of dp", "size 2"):
        mesh.rank_of({"dp": 2, "tp.0": 0, "tp.1": 0})
    for rank in (True, 1.0, "1", 10**5000):
        with raises(LayoutError, "Mesh(dp=2, tp=4)", 0):
            mesh.coordinates(rank)
    assert mesh.group(("tp",), 7) == (4, 5, 6, 7)
    with raises(LayoutError, "'cp'"):
        mesh.group(("cp",), 0)
    for axes, group in ((("tp", "tp"), "tp.0, tp.1, tp.0, tp.1"), (("tp.0", "tp"), "tp.0, tp.0, tp.1")):
        with raises(LayoutError, "appears twice", f"({group})"):
            mesh.group(axes, 0)
