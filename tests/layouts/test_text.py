"""Layouts, meshes and strategies print and parse back; what does not parse points at the column."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layouts.placing import MESHES, random_layout
from raising import raises
from shardwise.errors import LayoutError, NotationError
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh, prime_factors
from shardwise.layouts.strategy import Strategy
from shardwise.layouts.text import format_layout, parse_layout


@given(st.integers(0, 10**6))
def test_a_layout_parses_back_to_the_same_placement(seed: int) -> None:
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    atoms = tuple(
        tuple(rng.choice((1, 2, 3, 4, 5, 8)) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(0, 3))
    )
    layout = random_layout(rng, mesh, atoms)
    assert parse_layout(format_layout(layout, torch.bfloat16), mesh) == layout.canonical()


@given(st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 12), max_size=4))
def test_a_mesh_parses_back(axes: dict[str, int]) -> None:
    assert Mesh.parse(str(Mesh(axes))) == Mesh(axes)


@given(st.integers(1, 5000))
def test_prime_factors_multiply_to_the_number(number: int) -> None:
    product = 1
    for prime in prime_factors(number):
        assert all(prime % small for small in range(2, prime))
        product *= prime
    assert product == number


def test_fused_projections_print_with_their_atoms() -> None:
    mesh = Mesh(dp=2, tp=4)
    layout = Layout(mesh, ((Atom(64, ("dp",)),), (Atom(3), Atom(12, ("tp.0", "tp.1")), Atom(64))))
    assert format_layout(layout, torch.float64) == "f64[64@dp, (3 768@tp)]"
    assert layout.local_shape(mesh.coordinates(5)) == (32, 576)


def test_states_print_as_words() -> None:
    mesh = Mesh(dp=2, tp=4)
    layout = Layout.whole(mesh, (4,)).moved({"dp": "R", "tp.0": "P", "tp.1": "P"})
    assert format_layout(layout) == "[4] replicated(dp) partial(sum@tp)"


def test_strategies_parse_back() -> None:
    mesh = Mesh(dp=2, tp=4)
    text = "m@(dp,tp.0) k@tp.1"
    assert Strategy.parse(text, mesh).format(mesh) == text


@pytest.mark.parametrize(
    ("text", "column"),
    [("64@dp", 0), ("[64@dp", 6), ("[64, x]", 5), ("[64] whole(dp)", 5), ("[64] partial(dp)", 5)],
)
def test_a_layout_that_does_not_parse_gets_a_caret(text: str, column: int) -> None:
    with pytest.raises(NotationError) as error:
        parse_layout(text, Mesh(dp=2))
    assert str(error.value).splitlines()[-1] == "  " + " " * column + "^"


@pytest.mark.parametrize("text", ["[64@dp, 32@dp]", "[64@dp] partial(sum@dp)"])
def test_axes_must_be_used_once(text: str) -> None:
    with raises(LayoutError, "axis dp", "than once", repr(text)):
        parse_layout(text, Mesh(dp=2))


def test_axes_must_exist() -> None:
    with raises(LayoutError, "unknown", "axis 'tp'", "(dp=2)"):
        parse_layout("[64@tp]", Mesh(dp=2))


@pytest.mark.parametrize("sizes", [{"dp": 0}, {"dp": -2}, {"dp": 2.5}, {"dp": True}])
def test_a_mesh_axis_needs_a_positive_whole_number(sizes: dict[str, int]) -> None:
    with raises(LayoutError, "axis dp", "positive", f"not {sizes['dp']}"):
        Mesh(sizes)


def test_ranks_are_row_major_with_the_last_axis_fastest() -> None:
    """The device matrix cases of the reference: rank 5 of (2, 2, 3) and of (2, 1, 4, 2)."""
    mesh = Mesh(a=2, b=2, c=3)
    assert [mesh.group(mesh.expand(axis), 5) for axis in "abc"] == [(5, 11), (2, 5), (3, 4, 5)]
    mesh = Mesh(a=2, b=1, c=4, d=2)
    groups = [sorted(mesh.group(mesh.expand(axis), 5)) for axis in "abcd"]
    assert groups == [[5, 13], [5], [1, 3, 5, 7], [4, 5]]
