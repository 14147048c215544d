"""The specification's cases about layouts, groups, redistributions and layouts by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw
from search.small_models import conversions_into
from shardwise.graph.capture import capture_function
from shardwise.layouts.choice import AxisChoice, Split
from shardwise.layouts.layout import Atom, Layout, common_atoms
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.layouts.text import format_layout
from shardwise.rules.rule import OpRule
from shardwise.rules.tables import rule_of
from spec.cases import of_kind
from spec.words import (
    Called,
    Chain,
    chain_of_products,
    checked,
    classical,
    moved_correctly,
    on,
    randn,
    reshaped_correctly,
    same_placement,
)


@of_kind("layout_unify")
def test_two_device_matrices_have_a_common_one(case: dict[str, Any]) -> None:
    """Ours is that of the prime sub-axes; the specification's places every element alike."""
    want = case["expected"]
    mesh = sw.Mesh(x=prod(want["dev"]))
    for end in ("from", "to"):
        layout = case[f"{end}_layout"]
        own = on(mesh, classical(layout["dev"], layout["map"], layout["shape"]))
        unified = on(mesh, classical(want["dev"], want[f"{end}_map"], want["shape"]))
        assert same_placement(own, unified)
    source, target = (
        on(mesh, classical(case[e]["dev"], case[e]["map"], (64, 32))) for e in ("from_layout", "to_layout")
    )
    moved_correctly(source, target)


@of_kind("shape_util")
def test_two_shapes_have_a_common_division(case: dict[str, Any]) -> None:
    ends = ("shape", "expand") if "expand" in case else ("a", "b")
    assert common_atoms(tuple(case[ends[0]]), tuple(case[ends[1]])) == tuple(case["expected"])


@of_kind("comm_groups")
def test_groups_along_every_dim_of_the_device_matrix(case: dict[str, Any]) -> None:
    mesh = sw.Mesh([(f"d{i}", size) for i, size in enumerate(case["dev"])])
    rank = case["devices"].index(case["rank"])
    groups = [mesh.group(mesh.expand(f"d{i}"), rank) for i in range(len(case["dev"]))]
    assert [[case["devices"][member] for member in group] for group in groups] == [list(g) for g in case["expected"]]


@of_kind("repeat_group_by_tensor_map")
def test_the_devices_that_hold_the_same_slice(case: dict[str, Any]) -> None:
    layout = classical(case["dev"], case["map"], case["dev"])
    repeated = tuple(axis for axis in layout.mesh.sub_axes if layout.state_of[axis] != "S")
    rank = case["devices"].index(case["rank"])
    assert [case["devices"][r] for r in layout.mesh.group(repeated, rank)] == list(case["expected"])


@of_kind("redistribution_property")
def test_every_pair_of_maps_on_2_2_2_is_redistributed_exactly(case: dict[str, Any]) -> None:
    """34 maps that name no device dim twice, 1,122 ordered pairs; with a reshape between, every pair of shapes."""
    mesh = sw.Mesh(a=2, b=2, c=2)
    maps = [m for m in itertools.product((-1, 0, 1, 2), repeat=3) if all(m.count(k) < 2 for k in m if k >= 0)]
    assert len(maps) == 34
    if case["id"] == "redis-prop-1":
        layouts = [on(mesh, classical((2, 2, 2), m, (2, 2, 2))) for m in maps]
        for source, target in itertools.permutations(layouts, 2):
            moved_correctly(source, target)
        return
    shapes = [(4, 2), (2, 4), (8,), (2, 2, 2)]
    for source_shape, target_shape in itertools.permutations(shapes, 2):
        ends = [[on(mesh, classical((2, 2, 2), m[: len(s)], s)) for m in maps] for s in (source_shape, target_shape)]
        for source, target in random_pairs(*ends):
            reshaped_correctly(source, target)


def random_pairs(first: list[Layout], second: list[Layout], number: int = 2) -> list[tuple[Layout, Layout]]:
    pairs = list(itertools.product(dict.fromkeys(first), dict.fromkeys(second)))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(len(pairs)))
    return [pairs[i] for i in order[:number]]


@of_kind("reshape_redistribution")
def test_a_reshape_between_two_layouts_is_exact(case: dict[str, Any]) -> None:
    source, target = (classical(case[e]["dev"], case[e]["map"], case[e]["shape"]) for e in ("from_layout", "to_layout"))
    if prod(source.shape) > 4096:  # the same layouts of a tensor of 1/64 the rows, which a virtual cluster holds
        rows, columns = (128, 64), (32, 256)
        source, target = (
            classical(case[e]["dev"], case[e]["map"], s)
            for e, s in zip(("from_layout", "to_layout"), (rows, columns), strict=True)
        )
    reshaped_correctly(source, target)


@of_kind("redistribution_ops")
def test_a_redistribution_is_what_the_documents_say_or_less(case: dict[str, Any]) -> None:
    if case["id"] == "doc-reid":
        plan, _ = checked(chain_of_products(((4, 1), (1, 1)), ((1, 1), (1, 4))), (torch.randn(16, 32),), 4)
        assert conversions_into(plan, "/matmul_1") == ["all_gather@x"]
        return
    ends = [case[e] for e in ("from_layout", "to_layout")]
    source, target = (classical(e["dev"], e["map"], e["shape"]) for e in ends)
    if case["id"] == "redis-2":  # there AllGather + StridedSlice; "one AllToAll is an acceptable better answer"
        mesh = sw.Mesh(x=16)
        source, target = (on(mesh, classical(e["dev"], e["map"], (32, 48))) for e in ends)
        assert moved_correctly(source, target) == ["all_to_all"]
    else:
        plan = reshaped_correctly(source, target)
        assert not [c for c in plan.conversions if c.forward and c.op.endswith("reshape")]


# ------------------------------------------------------------------------------------------------------ named layouts


def named(case: dict[str, Any], key: str, shape: Sequence[int], mesh: sw.Mesh) -> Layout:
    """A layout by one axis name, several or None per dim."""
    entries = [[] if e is None else [e] if isinstance(e, str) else list(e) for e in case[key]]
    return Layout(mesh, tuple(
        (Atom(size, tuple(part for axis in own for part in mesh.expand(axis))),)
        for size, own in zip(shape, entries, strict=True)
    ))  # fmt: skip


def strategy_from(rule: OpRule, operands: Sequence[Layout], mesh: sw.Mesh) -> Strategy:
    """The strategy that takes operands as they are laid out."""
    choices: dict[str, AxisChoice] = {}
    for layout, dims in zip(operands, rule.operands, strict=True):
        for dim, factors in zip(layout.dims, dims, strict=True):
            for atom in dim:
                choices |= dict.fromkeys(atom.axes, Split(factors[0]))
    return Strategy.of(choices)


def expected_result(layout: Layout, tensor_map: Sequence[int | Sequence[int]], mesh: sw.Mesh) -> bool:
    """Whether the axes of every dim are those of the map: mesh axes counted from the right."""
    names = [name for name, _ in mesh.axes]
    for dim, entry in zip(layout.dims, tensor_map, strict=True):
        chosen = [] if entry == -1 else [entry] if isinstance(entry, int) else list(entry)
        want = [part for k in chosen for part in mesh.expand(names[len(names) - 1 - k])]
        if [axis for atom in dim for axis in atom.axes] != want:
            return False
    return True


@of_kind("named_layout")
def test_named_layouts_of_operands_give_those_of_the_results(case: dict[str, Any]) -> None:
    mesh = sw.Mesh(zip(case["axes"], case["mesh"], strict=True))
    op = case["op"]
    if op == "Reshape":
        source = named(case, "x", case["src"], mesh)
        target = on(mesh, classical(case["mesh"], want_map(case), case["dst"]))
        assert target.local_shape(mesh.coordinates(0)) == tuple(case["expected"]["local_dst"])
        small = [8, 6, 4, 4, 3], [4, 2, 2, 12, 12]  # the same split of a tensor that a virtual cluster holds
        rebuilt = named(case, "x", small[0], mesh), on(mesh, classical(case["mesh"], want_map(case), small[1]))
        assert source.mesh == mesh
        reshaped_correctly(*rebuilt)
        return
    if op == "MatMul":
        ta, tb = case.get("transpose_a", False), case.get("transpose_b", False)
        function = lambda x, w: torch.einsum(f"{'km' if ta else 'mk'},{'nk' if tb else 'kn'}->mn", x, w)  # noqa: E731
        tensors = [randn(*((24, 16) if ta else (16, 24))), randn(*((8, 24) if tb else (24, 8)))]
        operands = [named(case, key, tensor.shape, mesh) for key, tensor in zip("xw", tensors, strict=True)]
    elif op == "Embedding":
        function = lambda w, i: F.embedding(i, w)  # noqa: E731
        tensors = [randn(8, 6), torch.arange(48).reshape(16, 3) % 8]
        operands = [named(case, key, tensor.shape, mesh) for key, tensor in zip("wx", tensors, strict=True)]
    elif op == "TopK":
        function = lambda x: torch.topk(x, 2, -1)  # noqa: E731
        shape = (*(4, 8, 6)[: len(case["x"]) - 1], 6)
        tensors = [randn(*shape)]
        operands = [named(case, "x", shape, mesh)]
    else:
        assert op == "RmsNorm"
        function = lambda x, gamma: F.rms_norm(x, (6,), gamma)  # noqa: E731
        tensors = [randn(4, 8, 6), randn(6)]
        operands = [named(case, "x", (4, 8, 6), mesh), named(case, "gamma", (6,), mesh)]
    graph = capture_function(function, tuple(tensors))
    rule = rule_of(graph.ops[0], graph)
    assert rule is not None
    strategy = strategy_from(rule, operands, mesh)
    applied = apply_strategy(rule, strategy, mesh)
    expected = case.get("expected", "")
    maps = (
        []
        if isinstance(expected, str)
        else [expected[key] for key in ("out_map", "values_map", "indices_map") if key in expected]
    )
    for i, tensor_map in enumerate(maps):
        assert expected_result(applied.results[i], tensor_map, mesh), str(applied.results[i])
    split_contraction = any(rule.factor(name).kind == "sum" for name, _ in strategy.factors)
    assert bool(applied.results[0].partial_axes) == split_contraction
    split = strategy.format(mesh)
    if op == "TopK":
        module = Chain(tensors[0].shape, [(lambda y: sw.shard(torch.topk, split)(y, 2, -1)[0], None)])
        checked(module, (tensors[0],), mesh.num_devices, mesh=mesh)
        return
    out = None
    if "out" in case:
        out = format_layout(named(case, "out", applied.results[0].shape, mesh))
    plan, _ = checked(Called(function, tensors, split, out), (), mesh.num_devices, mesh=mesh)
    if out:
        assert "reduce_scatter" in [e.kind for conversion in plan.conversions for e in conversion.forward]


def want_map(case: dict[str, Any]) -> list[Any]:
    return [e if isinstance(e, int) else tuple(e) for e in case["expected"]["out_map"]]
