"""Transfers between placements: every rank gets what its layout says it holds, and nobody is asked twice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from layouts.blocks import cut_block, deliver
from layouts.placing import MESHES, random_layout
from layouts.transfers import TransferBlock, transfer
from raising import raises
from shardwise.errors import LayoutError
from shardwise.graph.ir import Value
from shardwise.layouts.layout import Layout, Windows
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import parse_layout
from shardwise.layouts.transfer import boundary_layout
from shardwise.runtime.local_shards import shard

SHAPES = (((12,), (6,)), ((3, 4), (5,)), ((2, 2, 3), (2, 3)), ((7,), (1,)), ((24,),), ())


def random_end(rng: random.Random, atoms: tuple[tuple[int, ...], ...]) -> tuple[Layout, Placement]:
    """A layout without R and P, by hand uneven now and then, on some of sixteen ranks."""
    mesh = rng.choice((*MESHES, Mesh(x=1), Mesh(dp=2), Mesh(tp=2)))
    layout = random_layout(rng, mesh, atoms, "I") if atoms else Layout(mesh, ())
    if rng.random() < 0.3:
        split = [(d, i) for d, dim in enumerate(layout.dims) for i, atom in enumerate(dim) if atom.axes]
        if split:
            d, i = rng.choice(split)
            atom = layout.dims[d][i]
            inner = sorted(rng.randint(0, atom.size) for _ in range(mesh.size_of(atom.axes) - 1))
            lengths = [b - a for a, b in zip([0, *inner], [*inner, atom.size], strict=True)]
            layout = replace(layout, windows=(Windows.of_lengths(d, i, lengths),))
    return layout, Placement(mesh, tuple(sorted(rng.sample(range(16), mesh.num_devices))))


@pytest.mark.parametrize("seed", range(300))
def test_a_transfer_is_slicing_the_global_tensor(seed: int) -> None:
    rng = random.Random(seed)
    atoms = rng.choice(SHAPES)
    other = tuple((torch.Size(dim).numel(),) if rng.random() < 0.5 else dim for dim in atoms)
    (source, source_place), (target, target_place) = random_end(rng, atoms), random_end(rng, other)
    value = Value("x", source.shape, torch.int64)
    full = torch.arange(value.numel).view(value.shape)
    blocks = transfer(value, source, source_place, target, target_place)
    held = {rank: shard(full, source, source_place.coordinates(rank)) for rank in source_place.ranks}
    arrived = deliver(blocks, held, target, target_place)
    assert set(arrived) == set(target_place.ranks)
    for rank, tensor in arrived.items():
        assert torch.equal(tensor, shard(full, target, target_place.coordinates(rank)))
    pairs = Counter((block.sender, block.receiver) for block in blocks)
    assert all(count == 1 for count in pairs.values())
    for block in blocks:
        assert block.sender in source_place.ranks
        assert block.receiver in target_place.ranks
    shared = set(source_place.ranks) & set(target_place.ranks)
    for rank in shared:  # what it holds itself, nobody sends it
        own = set(held[rank].flatten().tolist())
        others = [b for b in blocks if b.receiver == rank and b.sender != rank]
        assert not any(own & set(cut_block(held[b.sender], b).flatten().tolist()) for b in others)


def test_the_list_is_what_one_would_write() -> None:
    """From rows over two ranks to columns over two others: four quarters."""
    rows, columns = Placement(Mesh(dp=2), (0, 1)), Placement(Mesh(tp=2), (2, 3))
    value = Value("h", (4, 6), torch.float32)
    found = transfer(
        value, parse_layout("[4@dp, 6]", rows.mesh), rows, parse_layout("[4, 6@tp]", columns.mesh), columns
    )
    top, bottom, left, right = ((0, 2),), ((2, 4),), ((0, 3),), ((3, 6),)
    assert found == (
        TransferBlock(0, 2, (top, left), (top, left), (top, left)),
        TransferBlock(1, 2, (bottom, left), (top, left), (bottom, left)),
        TransferBlock(0, 3, (top, right), (top, right), (top, left)),
        TransferBlock(1, 3, (bottom, right), (top, right), (bottom, left)),
    )


def test_holders_of_copies_share_the_sending() -> None:
    """Whole on two ranks, whole on four: each sends to two; and a rank that has it already is sent nothing."""
    two, four = Placement(Mesh(dp=2), (0, 1)), Placement(Mesh(tp=4), (2, 3, 4, 5))
    value = Value("h", (4,), torch.float32)
    whole = Layout.whole(two.mesh, (4,)), Layout.whole(four.mesh, (4,))
    found = transfer(value, whole[0], two, whole[1], four)
    assert [(block.sender, block.receiver) for block in found] == [(0, 2), (1, 3), (0, 4), (1, 5)]
    same = Placement(Mesh(tp=2), (0, 1))
    found = transfer(value, whole[0], two, Layout.whole(same.mesh, (4,)), same)
    assert [(block.sender, block.receiver) for block in found] == [(0, 0), (1, 1)]


def test_what_is_replicated_partial_or_in_windows_crosses_whole_or_in_slices() -> None:
    mesh = Mesh(a=2, b=2)
    assert boundary_layout(parse_layout("[4@a, 6] partial(sum@b)", mesh)) == parse_layout("[4@a, 6]", mesh)
    assert boundary_layout(parse_layout("[4, 6] replicated(b)", mesh)) == Layout.whole(mesh, (4, 6))
    halo = replace(parse_layout("[4@a]", mesh), windows=(Windows(0, 0, (((0, 3),), ((1, 4),))),))
    assert boundary_layout(halo) == parse_layout("[4@a]", mesh)
    by_hand = replace(halo, windows=(Windows.of_lengths(0, 0, [3, 1]),))
    assert boundary_layout(by_hand) == by_hand


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[4, 6] partial(sum@tp)", ("Mesh(tp=2)", "2, 3", "partial")),
        ("[4@tp, 6] replicated(dp)", ("Mesh(dp=2, tp=2)", "Mesh(tp=2)")),
        ("[4, 6] replicated(tp)", ("[4, 6]", "replicated")),
        ("[6@tp, 4]", ("[6, 4]", "[4, 6]")),
    ],
)
def test_a_layout_that_is_no_boundarys_is_refused(text: str, message: object) -> None:
    rows, columns = Placement(Mesh(dp=2), (0, 1)), Placement(Mesh(tp=2), (2, 3))
    mesh = Mesh(dp=2, tp=2) if "dp" in text else columns.mesh
    source = parse_layout("[4@dp, 6]", rows.mesh)
    with raises(LayoutError, message, facts=["place"]):
        transfer(Value("h", (4, 6), torch.float32), source, rows, parse_layout(text, mesh), columns)


def test_windows_that_overlap_are_refused() -> None:
    place = Placement(Mesh(dp=2), (0, 1))
    halo = replace(parse_layout("[4@dp]", place.mesh), windows=(Windows(0, 0, (((0, 3),), ((1, 4),))),))
    with raises(LayoutError, "[4@dp]", facts=["place"]):
        transfer(Value("h", (4,), torch.float32), halo, place, parse_layout("[4@dp]", place.mesh), place)
