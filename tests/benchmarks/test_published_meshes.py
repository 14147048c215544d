"""The free search of a known answer has the published mesh in its space."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import gcd
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.costs.cluster import Cluster
from shardwise.layouts.mesh import Mesh
from shardwise.search.mesh_shapes import candidate_meshes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("known_answers")


def makes(tried: Mesh, mesh: Mesh, place: Cluster) -> bool:
    """Whether axes of a mesh that is tried, taken together, are those of another, whose innermost axis fills the
    innermost level first."""
    left = {level.name: level.size for level in place.levels}
    wanted: dict[str, list[int]] = {name: [] for name in left}
    for _, size in reversed(mesh.axes):
        for name, room in left.items():
            taken = gcd(size, room)
            size, left[name] = size // taken, room // taken
            wanted[name].append(taken)
    return all(
        divides([size for axis, size in tried.axes if axis.rstrip("0123456789") == name], sizes)
        for name, sizes in wanted.items()
    )


def divides(sizes: Sequence[int], products: Sequence[int]) -> bool:
    """Whether sizes can be divided among groups of these products."""
    if not sizes:
        return all(product == 1 for product in products)
    first, *others = sizes
    return any(
        product % first == 0 and divides(others, [*products[:i], product // first, *products[i + 1 :]])
        for i, product in enumerate(products)
    )


def test_the_published_mesh_is_tried(known: ModuleType) -> None:
    for name, case in known.CASES.items():
        meshes = candidate_meshes(case.place, case.free["max_mesh_axes"])
        assert any(makes(mesh, case.setting["mesh"], case.place) for mesh in meshes), name


def test_two_axes_would_leave_some_of_them_out(known: ModuleType) -> None:
    without = {
        name
        for name, case in known.CASES.items()
        if not any(makes(mesh, case.setting["mesh"], case.place) for mesh in candidate_meshes(case.place, 2))
    }
    assert without == {"llama3-405b-131k", "bloom-176b-384", "deepseek-v3-2048", "qwen3-235b-256"}


def test_a_setting_of_megatron_is_priced_as_a_row(known: ModuleType) -> None:
    """Its degrees multiply to the GPUs, and nothing of the row is missing."""
    prices = importlib.import_module("published_prices")
    rows = {name: case.row for name, case in known.CASES.items() if case.framework}
    assert {name: prices.unplanned(row) for name, row in rows.items()} == dict.fromkeys(rows, "")
    bloom, gpt = rows["bloom-176b-384"], rows["gpt3-175b-64"]
    assert (bloom["micro_batch"], bloom["pp"], bloom["vpp"]) == (2, 12, 1)
    assert (gpt["micro_batch"], gpt["pp"], gpt["vpp"], gpt["dp"]) == (1, 8, 3, 1)
    stages = [stage.layers for stage in prices.stages_of(bloom)]
    assert stages == [5, *[6] * 10, 5], "embedding and head count as layers"
    assert sum(stage.layers for stage in prices.stages_of(gpt)) == 96
