"""The specification's cases about operators, completion, enumeration, propagation and errors, one test each.

What the reference only compiles is compared with one device here: outputs and every gradient, in float64. What it
refuses though mathematics allows it, we accept (docs/differences.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from search.small_models import TwoProducts, counts
from shardwise.graph.capture import capture_function
from shardwise.layouts.choice import Split
from shardwise.layouts.strategy import Strategy, apply_strategy
from shardwise.rules.tables import rule_of
from shardwise.search.user_strategies import choices_for
from spec.cases import CASES, ELSEWHERE, OTHERWISE, TESTED, is_not_here, of_kind
from spec.words import (
    Called,
    Chain,
    bound,
    call_of,
    checked,
    classical,
    meta,
    on,
    randn,
    same_placement,
    split_of,
)


def test_every_case_is_tested() -> None:
    assert not [case["id"] for case in CASES.values() if case["kind"] not in TESTED and not is_not_here(case)]
    assert {*ELSEWHERE, *OTHERWISE} <= {case["kind"] for case in CASES.values()} | CASES.keys()


def test_what_is_tested_elsewhere_is_named_there() -> None:
    for name, file in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / file).read_text()
        told = [case["id"] in text or f'"{case["kind"]}"' in text for case in CASES.values()
                if name in (case["id"], case["kind"])]  # fmt: skip
        assert all(told), name


# ------------------------------------------------------------------------------------------------ operators: layouts


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
                choices[free.pop(0)] = Split(name)
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
    split = {f.name: mesh.size_of([a for a, c in choices.items() if c == Split(f.name)]) for f in rule.factors}
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
        plan = sw.plan(model, torch.rand(4, 8, 4, 8), 8, mesh=sw.Mesh(x=8), search="sharding_propagation")
        names = ("cumprod", "cummax", "cummin", "flip", "lgamma", "trunc", "log_softmax", "softmax", "elu")
        assert [split_of(plan, f"/{name}") for name in names] == [split] * 9
        report = sw.verify(model, torch.rand(4, 8, 4, 8), plan, steps=1)
        assert all(difference.error <= report.tolerance for difference in report.differences)
        assert report.not_proven == "these inputs do not prove backward: every gradient is zero", "trunc has none"
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


def by_hand(case: dict[str, Any]) -> tuple[nn.Module, sw.Mesh]:
    """A lookup in a table whose rows are split by hand over r, its columns and the last dim of the indices evenly."""
    (rows, columns), split = case["strategy"][0], ",".join(map(str, case["manual_split"]))
    mesh = sw.Mesh(r=rows, c=columns, rest=case["device_num"] // (rows * columns))
    function, tensors = call_of(case)
    if case.get("axis"):
        ids = torch.arange(8) * 5 % 8
        return Called(lambda x, i: x.index_select(1, i), [tensors[0], ids], f"v@r{{{split}}}"), mesh
    fields = "8@r" if case["strategy"][1][1] == rows else "8"
    return Called(function, tensors, f"v@r{{{split}}} e@c", f"[8, {fields}, 8@c]"), mesh


@of_kind("accept")
def test_what_the_reference_compiles_equals_one_device(case: dict[str, Any]) -> None:
    if case["id"] == "mm-outstrategy":
        a, b, c = 2, 2, 2
        for out, kind in ((((a, c),), "all_reduce"), (((a * b, c),), "reduce_scatter")):
            module = Called(torch.matmul, [randn(8, 12), randn(12, 6)], ((a, b), (b, c)), out)
            plan, _ = checked(module, (), a * b * c)
            assert next(f"{e.kind}@{e.axes}" for c in plan.conversions for e in c.forward) == f"{kind}@x.1"
        return
    if "manual_split" in case:
        module, mesh = by_hand(case)
        plan, _ = checked(module, (), case["device_num"], mesh=mesh)
        layout = plan.layouts["p0"]
        held = [layout.local_shape(mesh.coordinates(rank))[0] for rank in range(mesh.num_devices)]
        assert tuple(held[:: mesh.num_devices // case["strategy"][0][0]]) == tuple(case["manual_split"])
        assert held[case.get("rank", 0)] == {"gather-manual-3": 30}.get(case["id"], held[0])  # rank 17: the third part
        assert not any(c.value == "p0" for c in plan.conversions)  # the table stays as it is stored
        return
    function, tensors = call_of(case)
    split = tuple(map(tuple, case["strategy"]))
    out = case.get("out_strategy")
    module = Called(function, tensors, split, tuple(map(tuple, out)) if out else None)
    checked(module, (), case["device_num"])


# id -> words of our message
REFUSED = {
    "add-err-1": "factor d1", "add-err-2": ("64 devices", "only 32"), "ce-err-1": "16 ways",
    "mm-err-1": "factor b1", "mm-err-2": ("split counts", "(4, 16, 1)"), "mm-err-3": "factor k",
    "mm-err-5": ("in_strategy", "count 0"), "mm-err-6": "count -1", "mm-err-7": "2 elements",
    "reduce-err-1": ("split counts", "(2, 2, 8, 16)"),
    "softmax-err-1": "2 strategies for 1", "softmax-err-5": "16 elements", "conv-err-2": "factor",
    "softmax-err-4": ("IndexError", "out of range"),
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
        with raises(sw.errors.LayoutError, words, op="/alias", source="test_cases.py"):
            sw.plan(module, torch.rand((8,) * len(case["call"])), 8, mesh=mesh, search="sharding_propagation")
    elif name == "layout-split-err":  # at the sharded dim: gathered first; out of range: as torch says
        mesh = sw.Mesh(x=2)
        for dim in (0, 1):
            rows = (lambda y: sw.constrain(y, "[4@x, 6]"), None)
            parts = (lambda y, d=dim: torch.cat([part.exp() for part in y.split(1, d)], d), None)
            module = Chain((4, 6), [rows, parts])
            checked(module, (torch.rand(4, 6),), 2, mesh=mesh)
        with raises(sw.errors.CaptureError, "IndexError", "of range", source="test_cases.py"):
            sw.plan(
                Chain((4, 6), [(lambda y: y.split(1, 2)[0], None)]),
                torch.rand(4, 6),
                2,
                mesh=mesh,
                search="sharding_propagation",
            )
    elif name == "layout-reshape-err-2":
        mesh = sw.Mesh(zip(case["axes"], case["mesh"], strict=True))
        names = [f"{n}@{axis}" if axis else str(n) for n, axis in zip(case["src"], case["x"], strict=True)]
        module = Chain(case["src"], [(lambda y: sw.constrain(y, f"[{', '.join(names)}]"), None),
                                     (lambda y: y.reshape(case["dst"]).exp(), None)])  # fmt: skip
        checked(module, (torch.rand(case["src"]),), 8, mesh=mesh)
    elif name in ("gather-manual-4", "gather-manual-7"):  # other dims, and repeated work
        module, mesh = by_hand(case)
        checked(module, (), case["device_num"], mesh=mesh)
    elif name == "gather-manual-10":  # an uneven split without the axes that split
        module = Called(*call_of(case), "v{4,4}")
        with raises(sw.errors.NotationError, "m@dp", "n@tp", op="/embedding", section="strategy-names"):
            sw.plan(module, (), case["device_num"], search="sharding_propagation")
    elif "manual_split" in case:  # two lengths for four devices
        module, mesh = by_hand(case)
        with raises(
            sw.errors.LayoutError, "2 lengths {4,4}", "factor v", "4 devices", op="/embedding", source="words.py"
        ):
            sw.plan(module, (), case["device_num"], mesh=mesh, search="sharding_propagation")
    elif name in ACCEPTED:
        devices, split = ACCEPTED[name]
        function, tensors = call_of(case)
        if name.startswith("softmax"):
            tensors = [randn(2, 4, 8, 16)]
        checked(Called(function, tensors, split or tuple(map(tuple, case["strategy"]))), (), devices)
    else:
        function, tensors = call_of(case)
        split, devices = tuple(map(tuple, case["strategy"])), case["device_num"]
        with raises(sw.ShardwiseError, REFUSED[name]):
            checked(Called(lambda *own: sw.shard(function, split)(*own), tensors, None), (), devices)
