"""The layout in which a value crosses between stages."""

from __future__ import annotations

from dataclasses import replace

from shardwise.layouts.layout import Layout, Windows
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import parse_layout
from shardwise.layouts.transfer import boundary_layout


def test_what_is_replicated_partial_or_in_windows_crosses_whole_or_in_slices() -> None:
    mesh = Mesh(a=2, b=2)
    assert boundary_layout(parse_layout("[4@a, 6] partial(sum@b)", mesh)) == parse_layout("[4@a, 6]", mesh)
    assert boundary_layout(parse_layout("[4, 6] replicated(b)", mesh)) == Layout.whole(mesh, (4, 6))
    halo = replace(parse_layout("[4@a]", mesh), windows=(Windows(0, 0, (((0, 3),), ((1, 4),))),))
    assert boundary_layout(halo) == parse_layout("[4@a]", mesh)
    by_hand = replace(halo, windows=(Windows.of_lengths(0, 0, [3, 1]),))
    assert boundary_layout(by_hand) == by_hand
