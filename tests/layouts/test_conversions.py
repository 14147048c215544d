"""The table of sixteen conversions against the identity it follows from, and every redistribution against slicing."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from layouts.placing import MESHES, convert, random_layout, scatter, worst_difference
from shardwise.layouts.conversions import CELLS, Move
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.redistribute import redistribute
from shardwise.proof.virtual import VirtualCluster

DUAL = {"S": "S", "I": "I", "R": "P", "P": "I"}
STATES = ("S", "I", "R", "P")

# Dims as atoms, in groups that describe the same shape: some divide, some do not, some do not nest with each other.
FORMS = (
    [((4,), (6,))],
    [((5,), (8,))],
    [((2, 6), (3,)), ((12,), (3,)), ((3, 4), (3,)), ((4, 3), (3,))],
    [((12,), (4, 2)), ((2, 6), (8,))],
    [((7,),)],
    [((24,),), ((2, 3, 4),), ((4, 6),), ((6, 4),), ((8, 3),)],
    [((8,), (1,), (6,))],
)


def test_the_table_has_all_sixteen_cells() -> None:
    assert set(CELLS) == {(a, b) for a in STATES for b in STATES}


@pytest.mark.parametrize("cell", CELLS)
def test_a_backward_is_the_forward_between_the_dual_layouts(cell: tuple[str, str]) -> None:
    source, target = cell
    if cell == ("S", "S"):
        assert CELLS[cell].backward == "all_to_all"
        return
    assert CELLS[cell].backward == CELLS[DUAL[target], DUAL[source]].forward


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "y")])
def test_one_move_carries_value_and_cotangent_exactly(cell: tuple[str, str], axes: tuple[str, ...]) -> None:
    mesh = Mesh(x=2, y=3)
    generator = torch.Generator().manual_seed(1)
    bare = Layout(mesh, ((Atom(2), Atom(5)), (Atom(12),), (Atom(7),)))
    places = {"S": (0, 1), "I": "I", "R": "R", "P": "P"}
    source = bare.moved(dict.fromkeys(axes, places[cell[0]]))
    target = bare.moved(dict.fromkeys(axes, (2, 0) if cell == ("S", "S") else places[cell[1]]))
    full, cotangent = (torch.randn(bare.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    held = [tensor.requires_grad_() for tensor in scatter(full, source, generator)]
    moved = convert(VirtualCluster(mesh), held, [Move(source, target, axes)])
    assert worst_difference(moved, target, full) < 1e-14
    torch.autograd.backward(moved, scatter(cotangent, target.dual, generator))
    assert worst_difference([gradient_of(tensor) for tensor in held], source.dual, cotangent) < 1e-14


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(6)
def test_redistribution_equals_slicing_the_global_tensor(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(15):
        mesh, forms = rng.choice(MESHES), rng.choice(FORMS)
        source, target = (random_layout(rng, mesh, rng.choice(forms)) for _ in range(2))
        moves = redistribute(source, target)
        full, cotangent = (torch.randn(source.shape, generator=generator, dtype=torch.float64) for _ in range(2))
        held = [tensor.requires_grad_() for tensor in scatter(full, source, generator)]
        moved = convert(VirtualCluster(mesh), held, moves)
        told = f"seed {seed}: {source} -> {target}: {[(move.cell, move.axes) for move in moves]}"
        assert worst_difference(moved, target, full) < 1e-13, told
        torch.autograd.backward(moved, scatter(cotangent, target.dual, generator))
        assert worst_difference([gradient_of(tensor) for tensor in held], source.dual, cotangent) < 1e-13, told


@pytest.mark.parametrize("kind", ["max", "min", "any"])
def test_gradient_free_reductions_reduce(kind: str) -> None:
    mesh = Mesh(x=2, y=2)
    source = Layout(mesh, ((Atom(3),),), (("x", f"P{kind}"), ("y", f"P{kind}")))
    values = [torch.tensor([rank, -rank, 0]) for rank in range(4)]
    if kind == "any":
        values = [value > 2 for value in values]
    moved = convert(VirtualCluster(mesh), values, redistribute(source, Layout.whole(mesh, (3,)), differentiable=False))
    want = {"max": [3, 0, 0], "min": [0, -3, 0], "any": [True, False, False]}[kind]
    assert all(tensor.tolist() == want for tensor in moved)


def test_uneven_shards_are_the_same_whether_axes_are_merged_or_not() -> None:
    nested, merged = Mesh(x=2, y=3), Mesh(z=6)
    for size in range(1, 20):
        by_two = Layout(nested, ((Atom(size, ("x", "y")),),))
        by_one = Layout(merged, ((Atom(size, ("z.0", "z.1")),),))
        for rank in range(6):
            assert by_two.atom_pieces(0, 0, nested.coordinates(rank)) == by_one.atom_pieces(
                0, 0, merged.coordinates(rank)
            )
        outer = Layout(nested, ((Atom(size, ("x",)),),))
        for rank in range(6):
            start, length = outer.atom_pieces(0, 0, nested.coordinates(rank))
            parts = [by_two.atom_pieces(0, 0, nested.coordinates(r)) for r in nested.group(("y",), rank)]
            assert (start, length) == (parts[0][0], sum(part[1] for part in parts))


def test_redistribution_of_nothing_to_do_is_empty() -> None:
    mesh = Mesh(dp=2, tp=2)
    layout = Layout(mesh, ((Atom(4, ("dp",)), Atom(3)),))
    assert redistribute(layout, layout.canonical()) == ()
    assert prod(layout.canonical().shape) == 12
