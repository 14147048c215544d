"""Windows: rows arrive from wherever they are, and the cotangents of a row that is in several windows are added."""

from __future__ import annotations

import random

import pytest
import torch

from layouts.placing import convert, scatter, worst_difference
from raising import raises
from shardwise.errors import NotationError
from shardwise.layouts.conversions import collective_of
from shardwise.layouts.holdings import segments
from shardwise.layouts.layout import Atom, Layout, Ranges, Windows
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.text import format_layout, parse_layout
from shardwise.proof.virtual import VirtualCluster

MESHES = (Mesh(x=2), Mesh(x=3), Mesh(x=4), Mesh(a=2, x=2), Mesh(x=2, y=3), Mesh(x=3, y=2))


def rows_of(layout: Layout, dim: int, rank: int) -> list[int]:
    """The rows of a dim that a rank holds, worked out on its own."""
    coordinates = layout.mesh.coordinates(rank)
    windows = {(own.dim, own.atom): own.ranges for own in layout.windows}
    rows = [0]
    for i, atom in enumerate(layout.dims[dim]):
        index = layout.mesh.index_along(atom.axes, rank)
        count = layout.mesh.size_of(atom.axes)
        own = [row for row in range(atom.size) if index * atom.size // count <= row < (index + 1) * atom.size // count]
        if (dim, i) in windows:
            own = [
                row
                for start, stop in windows[dim, i][layout.index_along(dim, i, coordinates)]
                for row in range(start, stop)
            ]
        rows = [row * atom.size + minor for row in rows for minor in own]
    return rows


def take(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    for dim in range(full.dim()):
        full = full.index_select(dim, torch.tensor(rows_of(layout, dim, rank), dtype=torch.int64))
    return full


def put(part: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    for dim in range(part.dim()):
        index = torch.tensor(rows_of(layout, dim, rank), dtype=torch.int64)
        shape = [layout.shape[i] if i == dim else size for i, size in enumerate(part.shape)]
        part = torch.zeros(shape, dtype=part.dtype).index_add(dim, index, part)
    return part


def assert_carries(source: Layout, target: Layout) -> None:
    """Values are the rows of the windows; cotangents are added up; the record is what the moves announce."""
    generator = torch.Generator().manual_seed(1)
    moves = redistribute(source, target)
    told = f"{source} -> {target}"
    full = torch.randn(source.shape, generator=generator, dtype=torch.float64)
    held = [tensor.requires_grad_() for tensor in scatter(full, source, generator)]
    cluster = VirtualCluster(source.mesh)
    moved = convert(cluster, held, moves)
    ranks = range(source.mesh.num_devices)
    for rank, tensor in enumerate(moved):
        assert torch.allclose(tensor, take(full, target, rank), atol=1e-12), f"{told}, rank {rank}"
    # Of the ranks that hold the same windows (the axis is not sharded), all have the same cotangent.
    sharding = tuple(target.positions)
    drawn: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in ranks:
        key = target.mesh.group(tuple(a for a in target.mesh.sub_axes if a not in sharding), rank)
        drawn.setdefault(key, torch.randn(moved[rank].shape, generator=generator, dtype=torch.float64))
    keys = [target.mesh.group(tuple(a for a in target.mesh.sub_axes if a not in sharding), rank) for rank in ranks]
    torch.autograd.backward(moved, [drawn[key].clone() for key in keys])
    want = sum((put(drawn[key], target, key[0]) for key in drawn), torch.zeros_like(full))
    gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in held]
    assert worst_difference(gradients, source.dual, want) < 1e-12, told
    forward, backward = ([collective_of(move, 8, backward=way) for move in moves] for way in (False, True))
    assert cluster.record == [own for own in (*forward, *reversed(backward)) if own is not None], told


def random_ranges(rng: random.Random, size: int) -> Ranges:
    """Up to three ranges that do not overlap, in any order; sometimes none."""
    cuts = sorted(rng.sample(range(size + 1), rng.choice((0, 2, 2, 4)) if size > 3 else 2))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
    rng.shuffle(ranges)
    return tuple(ranges)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_windows_carry_values_and_add_cotangents(mesh: Mesh) -> None:
    rng = random.Random(5)
    for trial in range(40):
        size = rng.choice((4, 5, 7, 12))
        axes = list(mesh.sub_axes)
        rng.shuffle(axes)
        own = tuple(axes[: rng.randint(1, len(axes))])
        ranges = tuple(random_ranges(rng, size) for _ in range(mesh.size_of(own)))
        dims = ((Atom(size, own), Atom(2)), (Atom(3),)) if trial % 3 == 0 else ((Atom(3),), (Atom(size, own),))
        place = (0, 0) if trial % 3 == 0 else (1, 0)
        target = Layout(mesh, dims, (), (Windows(*place, ranges),))
        others = Layout(mesh, tuple((Atom(size),) for size in target.shape))
        sources = [target.without_windows, others]
        for _ in range(2):
            layout = others
            for axis in mesh.sub_axes:
                layout = layout.moved({axis: rng.choice(((0, 0), (1, 0), "I", "R", "P"))})
            sources.append(layout)
        for source in sources:
            assert_carries(source, target)


def test_windows_along_two_dims_include_the_corners() -> None:
    mesh = Mesh(x=2, y=2)
    dims = ((Atom(6, ("x",)),), (Atom(5, ("y",)),))
    target = Layout(mesh, dims, (), (Windows(0, 0, (((0, 4),), ((2, 6),))), Windows(1, 0, (((0, 3),), ((1, 5),)))))
    assert_carries(target.without_windows, target)
    assert [move.entry.forward for move in redistribute(target.without_windows, target)] == ["halo_exchange"] * 2


def test_only_rows_that_a_rank_lacks_are_sent() -> None:
    mesh = Mesh(x=4)
    target = parse_layout("[2, 16@x{0:5|3:9|7:13|11:16}, 3]", mesh)
    (move,) = redistribute(target.without_windows, target)
    # In the middle a rank gives one row to either side, gets one from either side; 2 * 3 elements a row.
    assert (move.num_sent(), move.num_sent(backward=True)) == (12, 12)
    local = parse_layout("[2, 16@x{0:3|4:7|8:11|12:15}, 3]", mesh)
    (move,) = redistribute(local.without_windows, local)
    assert (move.entry.forward, move.entry.backward) == ("take_window", "add_window")
    assert (move.num_sent(), collective_of(move, 4)) == (0, None)


def test_what_is_whole_and_may_have_summands_is_cut_on_the_spot() -> None:
    mesh = Mesh(x=4)
    target = parse_layout("[16@x{0:5|3:9|7:13|11:16}]", mesh)
    replicated, invariant = parse_layout("[16] replicated(x)", mesh), parse_layout("[16]", mesh)
    assert [move.entry.forward for move in redistribute(replicated, target)] == ["take_window"]
    assert [move.entry.forward for move in redistribute(invariant, target, differentiable=False)] == ["take_window"]
    assert [move.entry.forward for move in redistribute(invariant, target)] == ["slice", "halo_exchange"]


def test_a_window_wider_than_the_neighbours_comes_from_several_ranks() -> None:
    assert segments(((1, 8),), 10, 5) == ((0, 1, 2), (1, 2, 4), (2, 4, 6), (3, 6, 8))
    assert segments(((8, 10), (0, 1)), 10, 5) == ((4, 8, 10), (0, 0, 1))
    assert segments(((0, 2),), 2, 4) == ((1, 0, 1), (3, 1, 2))  # two of four devices hold a row


def test_layouts_with_windows_print_and_parse_back() -> None:
    mesh = Mesh(dp=2, tp=4)
    for text in (
        "[2@dp, 16@tp{0:5|3:9|7:13|11:16}]",
        "[16@tp{14:16+0:2|||1:3}, 16@dp{0:9|7:16}] ",
        "[(6@dp{0:4|2:6} 4@tp), 3]",
    ):
        layout = parse_layout(text, mesh)
        assert parse_layout(format_layout(layout), mesh) == layout
        assert layout.windows
        assert layout != layout.without_windows
        assert hash(layout) == hash(parse_layout(text, mesh))
    assert str(parse_layout("[2@dp, 16@tp{0:5|3:9|7:13|11:16}]", mesh)) == "[2@dp, 16@tp{0:5|3:9|7:13|11:16}]"
    with raises(NotationError, "{0:5|3:8}"):
        parse_layout("[16@dp{0-5|3:9}]", mesh)
