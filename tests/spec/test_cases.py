"""The specification's cases about operators, layouts, groups, completion, enumeration and errors, one test each.

What the reference only compiles is compared with one device here: outputs and every gradient, in float64. What it
refuses though mathematics allows it, we accept (docs/differences.md).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from layouts.placing import scatter, worst_difference
from search.small_models import TwoProducts, conversions_into, counts
from shardwise.graph.capture import capture_function
from shardwise.graph.ir import Graph, Op
from shardwise.layouts.layout import Atom, Layout, common_atoms
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.layouts.text import format_layout
from shardwise.rules.rule import OpRule
from shardwise.rules.tables import rule_of
from shardwise.runtime.shards import shard
from shardwise.runtime.virtual import VirtualCluster
from shardwise.search.wishes import choices_for
from spec.cited import CITED

FILE = Path(__file__).parents[3] / "shared/spec/cases.json"
FOUND: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"] if FILE.exists() else []
CASES = {case["id"]: case for case in (*CITED, *FOUND)}

# What waits for a later issue: kind, or id, -> which, and what it is about.
LATER = {
    "op_cost": "issue 5: prices",
    "cost_model_defaults": "issue 5: prices",
    "redistribution_cost": "issue 5: prices",
    "search_result": "issue 5: the exact search",
    "comm_group_name": "issue 6: names of groups in the printed IR",
    "execute_ir": "issue 6: the printed IR",
    "loss_curve": "issue 6: the quick start through Model.train",
    "defaults": "issue 6: set_auto_parallel_context",
    "allreduce_fusion": "issue 6: fusion options",
    "optimizer_parallel": "after issue 6: optimizer parallelism",
    "pipeline": "after issue 6: pipelines",
    "ctx-err-2": "issue 6: set_auto_parallel_context",
    "ctx-err-3": "issue 6: set_auto_parallel_context",
    "ctx-err-6": "issue 6: set_algo_parameters",
    "ds-strategy-1": "issue 6: dataset_strategy",
    "ds-strategy-3": "issue 6: dataset_strategy",
    "prop-none": "issue 6: search_mode without a configured operator (here it is data parallelism)",
    "gather-manual-1": "issue 6: add_prim_attr('manual_split')",
    "gather-manual-2": "issue 6: add_prim_attr('manual_split')",
    "gather-manual-3": "issue 6: add_prim_attr('manual_split')",
    "gather-manual-4": "issue 6: add_prim_attr('manual_split')",
    "gather-manual-5": "issue 6: add_prim_attr('manual_split')",
    "gather-manual-6": "issue 6: add_prim_attr('manual_split')",
    "gather-manual-7": "issue 6: add_prim_attr('manual_split')",
    "gather-manual-10": "issue 6: add_prim_attr('manual_split')",
}


def is_later(case: dict[str, Any]) -> bool:
    return case["id"] in LATER or case["kind"] in LATER


def of_kind(*kinds: str) -> Any:
    """Parametrises over the cases of some kinds that are not for later."""
    chosen = [case for case in CASES.values() if case["kind"] in kinds and not is_later(case)]
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


TESTED = frozenset(
    {
        *("redistribution_ops", "redistribution_property", "layout_unify", "reshape_redistribution", "shape_util"),
        *("comm_groups", "repeat_group_by_tensor_map", "op_layout", "forward_comm", "mirror", "virtual_div"),
        *("strategy_enumeration", "strategy_completion", "propagation", "propagation_conflict", "accept", "error"),
        "named_layout",
    }
)


def test_every_case_is_tested_or_listed_for_later() -> None:
    assert not [case["id"] for case in CASES.values() if case["kind"] not in TESTED and not is_later(case)]
    assert LATER.keys() <= {case["kind"] for case in CASES.values()} | CASES.keys() or not FOUND


@pytest.mark.skipif(not FOUND, reason="the specification's file is not here")
def test_the_cited_figures_are_those_of_the_file() -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(own) for key, own in value.items()}
        return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value

    found = {case["id"]: plain(case) for case in FOUND}
    for case in CITED:
        own = found[case["id"]]
        for key, value in case.items():
            if isinstance(value, dict):
                assert value.items() <= own[key].items(), case["id"]
            else:
                assert value == own[key], case["id"]


# ---------------------------------------------------------------------------------- device matrices and tensor maps


def classical(dev: Sequence[int], tensor_map: Sequence[int | Sequence[int]], shape: Sequence[int]) -> Layout:
    """A layout by device matrix and tensor map: device dims counted from the right, -1 for none, several major
    first."""
    mesh = sw.Mesh([(f"d{i}", size) for i, size in enumerate(dev)])

    def axes(entry: int | Sequence[int]) -> tuple[str, ...]:
        chosen = [entry] if isinstance(entry, int) else entry
        return tuple(part for k in chosen if k >= 0 for part in mesh.expand(f"d{len(dev) - 1 - k}"))

    return Layout(mesh, tuple((Atom(size, axes(k)),) for size, k in zip(shape, tensor_map, strict=True)))


def on(mesh: sw.Mesh, layout: Layout) -> Layout:
    """The layout with its sub-axes renamed to those of another mesh of the same devices (equal primes in order)."""
    assert [layout.mesh.sizes[a] for a in layout.mesh.sub_axes] == [mesh.sizes[a] for a in mesh.sub_axes]
    renamed = dict(zip(layout.mesh.sub_axes, mesh.sub_axes, strict=True))
    dims = tuple(tuple(Atom(a.size, tuple(renamed[x] for x in a.axes)) for a in dim) for dim in layout.dims)
    return Layout(mesh, dims, tuple((renamed[axis], state) for axis, state in layout.states))


def held(layout: Layout) -> list[Tensor]:
    """What every rank holds of the numbers 0, 1, 2, ... in the layout's shape, flattened."""
    numbers = torch.arange(prod(layout.shape)).reshape(layout.shape)
    return [shard(numbers, layout, layout.mesh.coordinates(r)).flatten() for r in range(layout.mesh.num_devices)]


def same_placement(one: Layout, other: Layout) -> bool:
    return all(torch.equal(a, b) for a, b in zip(held(one), held(other), strict=True))


def moved_correctly(source: Layout, target: Layout) -> list[str]:
    """The collectives of a redistribution that is exact, forward and backward, on the virtual cluster."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(source.shape, dtype=torch.float64, generator=generator)
    seed = torch.randn(source.shape, dtype=torch.float64, generator=generator)
    cluster = VirtualCluster(source.mesh)
    before = [tensor.requires_grad_() for tensor in scatter(full, source, generator)]
    after = cluster.convert(before, redistribute(source, target))
    assert worst_difference(after, target, full) < 1e-12
    kinds = [collective.kind for collective in cluster.record]
    seeds = [shard(seed, target, own) for own in cluster.coordinates]
    torch.autograd.backward(after, [own.clone() for own in seeds])
    assert worst_difference([t.grad for t in before if t.grad is not None], source.dual, seed) < 1e-12
    return kinds


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


def random_pairs(first: list[Layout], second: list[Layout], number: int = 4) -> list[tuple[Layout, Layout]]:
    pairs = list(itertools.product(dict.fromkeys(first), dict.fromkeys(second)))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(len(pairs)))
    return [pairs[i] for i in order[:number]]


class Reshaped(nn.Module):
    """A parameter in one layout, viewed as another shape, in another layout."""

    def __init__(self, source: Layout, target: Layout) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(source.shape, generator=torch.Generator().manual_seed(2)))
        self.texts, self.shape = (format_layout(source), format_layout(target)), target.shape

    def forward(self) -> tuple[Tensor, Tensor]:
        x = sw.constrain(self.weight, self.texts[0])
        y = sw.constrain(x.sin().reshape(self.shape), self.texts[1])
        return y.exp().sum(), y


def reshaped_correctly(source: Layout, target: Layout) -> sw.Plan:
    """The plan of a reshape between two layouts, verified: loss, output and gradient."""
    module = Reshaped(source, target)
    plan = sw.plan(module, (), source.mesh.num_devices, mesh=source.mesh)
    report = sw.verify(module, (), plan, steps=1)
    assert report.ok, f"{source} -> {target}\n{report}"
    return plan


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


# ------------------------------------------------------------------------------------------------ operators: layouts


def chain_of_products(first: Any, second: Any) -> nn.Module:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w, self.v = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            y = sw.shard(torch.matmul, first)(x, self.w)
            return sw.shard(torch.matmul, second)(y, self.v).square().mean()

    return Chain()


def checked(module: nn.Module, inputs: tuple[Any, ...], devices: int, **options: Any) -> tuple[sw.Plan, sw.Report]:
    """A plan on one axis ``x`` whose forward and gradients equal those of one device."""
    plan = sw.plan(module, inputs, devices, mesh=options.pop("mesh", sw.Mesh(x=devices)), **options)
    report = sw.verify(module, inputs, plan, steps=1)
    assert report.ok, f"{report}\n{plan}"
    return plan, report


class Called(nn.Module):
    """A function of tensors, split by counts; floating tensors are parameters, so that each has a gradient."""

    def __init__(self, function: Callable[..., Tensor], tensors: Sequence[Tensor], strategy: Any, out: Any = None):
        super().__init__()
        self.function, self.strategy, self.out = function, strategy, out
        for i, tensor in enumerate(tensors):
            if tensor.is_floating_point():
                self.register_parameter(f"p{i}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"p{i}", tensor)
        self.count = len(tensors)

    def forward(self) -> tuple[Tensor, Tensor]:
        own = [getattr(self, f"p{i}") for i in range(self.count)]
        call = self.function if self.strategy is None else sw.shard(self.function, self.strategy, self.out)
        y = call(*own)
        return (y.sin() * y).sum(), y


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def onehot(depth: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: F.one_hot(ids, depth)


def call_of(case: dict[str, Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """The operator of a case in torch's words, and operands of its shapes."""
    shapes = [shape for shape in case["inputs"] if shape]
    if case["op"] == "MatMul":
        if case.get("transpose_b"):
            return (lambda a, b: torch.einsum("mk,xynk->xymn", a, b)), [randn(*s) for s in shapes]
        return torch.matmul, [randn(*s) for s in shapes]
    if case["op"] == "Add":
        return torch.add, [randn(*s) for s in shapes]
    if case["op"] == "ReduceSum":
        return (lambda x: x.sum(case["axis"])), [randn(*shapes[0])]
    if case["op"] == "OneHot":
        return onehot(case["depth"]), [torch.arange(prod(shapes[0])).reshape(shapes[0]) % case["depth"]]
    if case["op"] == "Softmax":
        return (lambda x: torch.softmax(x, case["axis"])), [randn(*shapes[0])]
    if case["op"] == "SoftmaxCrossEntropyWithLogits":  # where logits and labels meet
        return torch.mul, [randn(*s) for s in shapes]
    if case["op"] == "Gather":
        ids = torch.randint(shapes[0][0], tuple(shapes[1]), generator=torch.Generator().manual_seed(1))
        return (lambda weight, index: F.embedding(index, weight)), [randn(*shapes[0]), ids]
    assert case["op"] == "Conv2D"
    (_, _, height, width), (_, _, k, _) = shapes
    stride, mode, groups = case["stride"], case["pad_mode"], case.get("group", 1)
    total = [max((-(-n // stride) - 1) * stride + k - n, 0) for n in (height, width)] if mode == "same" else [0, 0]
    left = [t // 2 for t in total]

    def conv(x: Tensor, w: Tensor) -> Tensor:
        if total == [2 * p for p in left]:
            return F.conv2d(x, w, stride=stride, padding=left, groups=groups)
        return F.conv2d(x, w, stride=stride, padding="same", groups=groups)

    return conv, [randn(*shapes[0]) / 4, randn(*shapes[1])]


def bound(case: dict[str, Any], strategy: Any = None) -> tuple[Op, Graph, OpRule, Strategy, sw.Mesh]:
    """The one operator of a case with its rule, and the strategy that its split counts mean on its devices."""
    function, tensors = call_of(case)
    graph = capture_function(function, tuple(t.requires_grad_(t.is_floating_point()) for t in tensors))
    op = next(op for op in graph.ops if len(op.operands) == len(tensors))
    rule = rule_of(op, graph)
    assert rule is not None
    mesh = sw.Mesh(x=case["device_num"])
    given = case["strategy"] if strategy is None else strategy
    split = tuple(tuple(own) for own, shape in zip(given, case["inputs"], strict=True) if shape)
    burden = {factor.name: 0 for factor in rule.factors}
    return op, graph, rule, Strategy.of(choices_for(op, rule, rule, split, mesh, graph, burden)), mesh


@of_kind("op_layout")
def test_split_counts_give_the_slices_of_the_specification(case: dict[str, Any]) -> None:
    want = case["expected"]
    if case["op"] == "OneHot":  # its counts are those of the result
        _, _, rule, _, mesh = bound(case | {"strategy": [(1,), (), ()]})
        (n,), (c,) = rule.results[0]
        take = {n: case["strategy"][0][0], c: case["strategy"][0][1]}
        free, choices = list(mesh.sub_axes), {}
        for name, count in take.items():
            while count > 1:
                count //= mesh.sizes[free[0]]
                choices[free.pop(0)] = name
        strategy = Strategy.of(choices)
    else:
        _, _, rule, strategy, mesh = bound(case)
    applied = apply_strategy(rule, strategy, mesh)
    layouts = (*applied.operands, *applied.results)
    if case["id"] == "mm-6":  # the specification orders devices by batch dims first: the same slices, other ranks
        assert sorted(mesh.size_of(axes) for _, axes in strategy.factors) == sorted(want["dev"])
        return
    coordinates = mesh.coordinates(0)
    if "slices" in want and case["op"] != "SoftmaxCrossEntropyWithLogits":
        assert [list(layout.local_shape(coordinates)) for layout in layouts] == [list(s) for s in want["slices"]]
    maps = [*want.get("in_maps", ()), *([want["out_map"]] if "out_map" in want else ())]
    for layout, tensor_map in zip(layouts, maps, strict=False):
        placed = layout.moved(dict.fromkeys(dict(layout.states), "I"))
        assert same_placement(placed, on(mesh, classical(want["dev"], tensor_map, layout.shape)))
    forward = want.get("forward_ops", [])
    assert bool(applied.results[0].partial_axes) == bool(forward)
    if forward:  # AllReduce(sum) groups [0-3],[4-7]
        groups = {mesh.group(applied.results[0].partial_axes, rank) for rank in range(mesh.num_devices)}
        assert groups == {(0, 1, 2, 3), (4, 5, 6, 7)}
    if case["device_num"] <= 64 and case["op"] not in ("OneHot", "SoftmaxCrossEntropyWithLogits"):
        function, tensors = call_of(case)
        split = tuple(tuple(own) for own, shape in zip(case["strategy"], case["inputs"], strict=True) if shape)
        checked(Called(function, tensors, split), (), case["device_num"])


def test_the_loss_of_case_ce_1_needs_no_communication_but_its_sum() -> None:
    case = CASES["ce-1"]
    split = tuple(case["strategy"][0])

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(randn(*case["inputs"][0]))

        def forward(self, labels: Tensor) -> Tensor:
            return -(sw.shard(F.log_softmax, (split,))(self.logits, -1) * labels).sum(-1).sum()

    plan, _ = checked(Loss(), (randn(*case["inputs"][1]).softmax(-1),), case["device_num"])
    assert counts(plan, "/log_softmax") == (split,)
    assert [c.kind for c in plan.collectives()] == ["all_reduce"]  # of the scalar loss
    assert not list(plan.collectives(backward=True))  # "mirror_ops": 0


@of_kind("forward_comm")
def test_a_product_whose_contraction_is_whole_sends_nothing(case: dict[str, Any]) -> None:
    _, _, rule, strategy, mesh = bound(case)
    assert case["expected"]["forward_ops"] in ([], ())
    assert not any(layout.partial_axes for layout in apply_strategy(rule, strategy, mesh).results)


@of_kind("mirror", "virtual_div")
def test_gradients_of_repeated_work_are_those_of_one_device(case: dict[str, Any]) -> None:
    """The specification sums gradients over repeated devices and divides the loss by their number; here repeated work
    is invariant and needs neither. An operand that others split further is summed: ``mirror_on_input1``."""
    function, tensors = call_of(case)
    split = tuple(tuple(own) for own in case["strategy"])
    devices = case["device_num"]
    plan, _ = checked(Called(function, tensors, split), (), devices, mode="semi_auto")
    backward = [(c.value, e) for c in plan.conversions for e in c.backward if c.op == "/add"]
    if case["id"] == "add-2":
        sizes = {value: plan.mesh.size_of(plan.mesh.parse_axes(e.axes)) for value, e in backward}
        assert sizes == {"p0": 4, "p1": 8}  # each summed over the axes that split the other
        assert all(e.kind == "all_reduce" for _, e in backward)
    else:
        assert not backward


# ------------------------------------------------------------------------------------- enumeration and completion


ENUMERATED: dict[str, Callable[..., Tensor]] = {
    "enum-3": lambda a, b: torch.mv(a, b),
    "enum-4": torch.add,
    "enum-6": torch.relu,
    "enum-8": torch.add,
}


@of_kind("strategy_enumeration")
def test_the_even_splits_that_use_all_devices_are_counted(case: dict[str, Any]) -> None:
    """Splits by powers of two whose product is the number of devices, or 1; operands that share a dim share its
    count."""
    tensors = [randn(*shape) for shape in case["inputs"]]
    graph = capture_function(ENUMERATED[case["id"]], tuple(tensors))
    rule = rule_of(graph.ops[0], graph)
    assert rule is not None
    found = set()
    for split in itertools.product((1, 2, 4, 8), repeat=len(rule.factors)):
        by = dict(zip((f.name for f in rule.factors), split, strict=True))
        if prod(split) not in (case["device_num"], 1) or any(f.size % by[f.name] for f in rule.factors):
            continue
        own = tuple(tuple(prod(by[f] for f in dim) for dim in dims) for dims in rule.operands)
        found.add(own)
    if case["id"] == "enum-8":
        assert found
        assert all(s1[0] == 1 and s0[2] == s1[1] for s0, s1 in found)
    elif case["id"] == "enum-3":
        assert all(s0[1] == s1[0] for s0, s1 in found)
        assert len(found) == case["expected"]["count"]
    else:
        assert len(found) == case["expected"]["count"]


def scattered(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.index_put(x, (index,), values)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def completed(case: dict[str, Any], function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Any:
    """The counts of all operands that a partial strategy means."""
    partial = tuple(map(tuple, case["partial_strategy"]))
    own = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors)
    graph = capture_function(function, own)
    op = next(op for op in graph.ops if len(op.operands) == len(tensors))
    rule = rule_of(op, graph)
    assert rule is not None
    needed = prod(max((split[d] for split in partial if d < len(split)), default=1) for d in range(5))
    mesh = sw.Mesh(x=max(needed, 2))
    choices = choices_for(op, rule, rule, partial, mesh, graph, {factor.name: 0 for factor in rule.factors})
    split = {f.name: mesh.size_of([a for a, c in choices.items() if c == f.name]) for f in rule.factors}
    return tuple(tuple(prod(split[f] for f in dim) for dim in dims) for dims in rule.operands)


@of_kind("strategy_completion")
def test_a_partial_strategy_is_completed(case: dict[str, Any]) -> None:
    shapes = case["inputs"]
    op = case["op"]
    if op.startswith("LayerNorm"):  # gamma and beta span more dims than are normalised: they multiply what is
        shapes = shapes[:2]
        case = case | {"partial_strategy": case["partial_strategy"][:2]}
        function, tensors = torch.mul, [randn(*shape) for shape in shapes]
    elif op == "Add":
        function, tensors = torch.add, [randn(*shape) for shape in shapes]
    elif op == "Conv2D":
        function, tensors = (lambda x, w: F.conv2d(x, w)), [meta(*shape) for shape in shapes]
    elif op == "ScatterUpdate":
        function, tensors = scattered, [meta(*shapes[0]), meta(*shapes[1], dtype=torch.int64), meta(*shapes[2])]
    elif op == "GatherNd":  # torch has one tensor per indexed dim, without the last dim of the index
        function = lambda x, i, j, k: x[i, j, k]  # noqa: E731
        tensors = [meta(*shapes[0]), *(meta(*shapes[1][:2], dtype=torch.int64) for _ in shapes[0])]
        split = case["partial_strategy"][1][:2]
        case = case | {"partial_strategy": [(), split, split, split], "expected": [(1, 1, 1), split, split, split]}
    else:
        assert op == "BatchNorm"
        function = lambda x, w, b, m, v: F.batch_norm(x, m.detach(), v.detach(), w, b)  # noqa: E731
        tensors = [meta(*shape) for shape in shapes]
    found = completed(case, function, tensors)
    if "expected" in case and case["expected"] != "error":
        assert found == tuple(map(tuple, case["expected"]))[: len(found)]
    else:  # the reference wants the counts of the first input; here what is given is enough
        for own, given in zip(found, case["partial_strategy"], strict=True):
            assert not given or own == tuple(given)


# -------------------------------------------------------------------------------------------------------- propagation


class Chain(nn.Module):
    """A chain of functions on a parameter; some of them are split by counts."""

    def __init__(self, shape: Sequence[int], steps: Sequence[tuple[Callable[..., Tensor], Any]]) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.rand(tuple(shape)) + 0.5), steps

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        for function, strategy in self.steps:
            y = function(y) if strategy is None else sw.shard(function, strategy)(y)
        return y.square().mean()


def split_of(plan: sw.Plan, name: str, operand: int = 0) -> tuple[int, ...]:
    return counts(plan, name)[operand]


@of_kind("propagation", "propagation_conflict")
def test_a_configured_operator_reaches_its_neighbours(case: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if case["id"] == "doc-003-prop":
        first = sw.shard(torch.matmul, tuple(map(tuple, case["configured"]["matmul"])))
        plan, _ = checked(TwoProducts(first), (torch.randn(case["expected"]["global_x"]),), 8)
        assert counts(plan, "/relu") == tuple(map(tuple, case["expected"]["relu"]))
        assert counts(plan, "/matmul_1") == tuple(map(tuple, case["expected"]["matmul2"]))
    elif case["id"] == "prop-5":
        steps = [
            lambda y: y.cumprod(2), lambda y: y.cummax(2)[0], lambda y: y.cummin(2)[0], lambda y: y.flip(2),
            torch.lgamma, torch.trunc, lambda y: y.log_softmax(2), lambda y: y.softmax(2), F.elu,
        ]  # fmt: skip
        split = tuple(case["configured"]["first"][0])
        model = Chain((4, 8, 4, 8), [(steps[0], (split,)), *((step, None) for step in steps[1:])])
        plan = sw.plan(model, torch.rand(4, 8, 4, 8), 8, mesh=sw.Mesh(x=8))
        names = ("cumprod", "cummax", "cummin", "flip", "lgamma", "trunc", "log_softmax", "softmax", "elu")
        assert [split_of(plan, f"/{name}") for name in names] == [split] * 9
        assert sw.verify(model, torch.rand(4, 8, 4, 8), plan, steps=1).ok
    elif case["id"] == "prop-4":

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 16, 1, 1))

            def forward(self, x: Tensor) -> Tensor:
                conv = sw.shard(lambda x, w: F.conv2d(x, w, stride=2), tuple(map(tuple, case["configured"]["Conv2D"])))
                return torch.relu(conv(x, self.weight)).square().mean()

        plan, _ = checked(Net(), (torch.randn(32, 16, 8, 8),), 16)
        assert split_of(plan, "/relu") == tuple(case["expected"]["ReLU"][0])
    elif case["id"] == "prop-2":
        split = tuple(case["configured"]["Sigmoid"][0])
        model = Chain((64, 32), [(torch.relu, None), (torch.sigmoid, (split,))])
        plan, _ = checked(model, (torch.randn(64, 32),), 16)
        assert counts(plan, "/mul") == (split, split)
    else:  # two configured operators disagree: a redistribution between them
        configured = case["configured"]
        model = Chain((64, 32), [(torch.relu, tuple(map(tuple, configured["ReLU"])))])
        plan, _ = checked(model, (torch.randn(64, 32),), 16)
        assert split_of(plan, "/relu") == tuple(configured["ReLU"][0])


# --------------------------------------------------------------------------------------------------- accept and refuse


@of_kind("accept")
def test_what_the_reference_compiles_equals_one_device(case: dict[str, Any]) -> None:
    if case["id"] == "mm-outstrategy":
        a, b, c = 2, 2, 2
        for out, kind in ((((a, c),), "all_reduce"), (((a * b, c),), "reduce_scatter")):
            module = Called(torch.matmul, [randn(8, 12), randn(12, 6)], ((a, b), (b, c)), out)
            plan, _ = checked(module, (), a * b * c)
            assert next(f"{e.kind}@{e.axes}" for c in plan.conversions for e in c.forward) == f"{kind}@x.1"
        return
    function, tensors = call_of(case)
    split = tuple(map(tuple, case["strategy"]))
    out = case.get("out_strategy")
    module = Called(function, tensors, split, tuple(map(tuple, out)) if out else None)
    checked(module, (), case["device_num"])


# id -> words of our message
REFUSED = {
    "add-err-1": "factor d1", "add-err-2": "64 devices: there are only 32", "ce-err-1": "16 ways",
    "mm-err-1": "factor b1", "mm-err-2": "split counts", "mm-err-3": "factor k", "mm-err-5": "from 1|count 0",
    "mm-err-6": "from 1|count -1", "mm-err-7": "2 elements", "reduce-err-1": "split counts",
    "softmax-err-1": "2 strategies for 1", "softmax-err-5": "16 elements", "conv-err-2": "factor",
    "softmax-err-4": "Dimension out of range",
}  # fmt: skip

# Refused there, right here (docs/differences.md): id -> devices, split counts that show what was refused.
ACCEPTED = {
    "softmax-err-3": (8, ((1, 1, 2, 4),)),
    "conv-err-3": (8, None),
    "conv-err-7": (8, None),
}


@of_kind("error")
def test_what_is_wrong_is_refused_and_what_is_right_is_exact(case: dict[str, Any]) -> None:
    name = case["id"]
    if name in ("layout-err-1", "layout-err-2"):
        mesh = sw.Mesh(zip(case["layout"]["axes"], case["layout"]["mesh"], strict=True))
        text = "[" + ", ".join(f"8@{axis}" for axis in case["call"]) + "]"
        words = "more than once" if name == "layout-err-1" else "unknown mesh axis"
        module = Chain((8,) * len(case["call"]), [(lambda y: sw.constrain(y, text), None)])
        with pytest.raises(sw.ShardwiseError, match=words):
            sw.plan(module, torch.rand((8,) * len(case["call"])), 8, mesh=mesh)
    elif name == "layout-split-err":  # at the sharded dim: gathered first; out of range: as torch says
        mesh = sw.Mesh(x=2)
        for dim in (0, 1):
            rows = (lambda y: sw.constrain(y, "[4@x, 6]"), None)
            parts = (lambda y, d=dim: torch.cat([part.exp() for part in y.split(1, d)], d), None)
            module = Chain((4, 6), [rows, parts])
            checked(module, (torch.rand(4, 6),), 2, mesh=mesh)
        with pytest.raises(sw.CaptureError, match="out of range"):
            sw.plan(Chain((4, 6), [(lambda y: y.split(1, 2)[0], None)]), torch.rand(4, 6), 2, mesh=mesh)
    elif name == "layout-reshape-err-2":
        mesh = sw.Mesh(zip(case["axes"], case["mesh"], strict=True))
        names = [f"{n}@{axis}" if axis else str(n) for n, axis in zip(case["src"], case["x"], strict=True)]
        module = Chain(case["src"], [(lambda y: sw.constrain(y, f"[{', '.join(names)}]"), None),
                                     (lambda y: y.reshape(case["dst"]).exp(), None)])  # fmt: skip
        checked(module, (torch.rand(case["src"]),), 8, mesh=mesh)
    elif name in ACCEPTED:
        devices, split = ACCEPTED[name]
        function, tensors = call_of(case)
        if name.startswith("softmax"):
            tensors = [randn(2, 4, 8, 16)]
        checked(Called(function, tensors, split or tuple(map(tuple, case["strategy"]))), (), devices)
    else:
        function, tensors = call_of(case)
        split, devices = tuple(map(tuple, case["strategy"])), case["device_num"]
        with pytest.raises(sw.ShardwiseError, match=REFUSED[name]):
            checked(Called(lambda *own: sw.shard(function, split)(*own), tensors, None), (), devices)


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
    choices: dict[str, str] = {}
    for layout, dims in zip(operands, rule.operands, strict=True):
        for dim, factors in zip(layout.dims, dims, strict=True):
            for atom in dim:
                choices |= dict.fromkeys(atom.axes, factors[0])
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
