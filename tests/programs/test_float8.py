"""Products in float8 (``Precision(products=)``): their arithmetic, on one device and split, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from rules.harness import make_case
from rules.samples.calls import call
from runtime.interpreted import interpret_section
from shardwise.costs.cluster_file import format_cluster, parse
from shardwise.graph.float8 import FLOAT8_LINEAR, LARGEST, linear, scales
from shardwise.layouts.strategy import Strategy, check_strategy
from shardwise.plans.printing import format_entry
from shardwise.programs import differentiate
from shardwise.programs.float8_gathers import Float8Gathers
from shardwise.proof.rule_check import check_rule
from shardwise.rules import rule_of
from shardwise.runtime import compiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = ("float8", "float8 rows")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 3, 16) * torch.tensor([1e-3, 1, 3, 0]).view(4, 1, 1), torch.randint(10, (4, 3))


def precision(products: str = "float8") -> sw.Precision:
    return sw.Precision(compute=torch.bfloat16, products=products)


def rounded(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Round by hand: to multiples of a scale, as numbers of float64."""
    scale = largest.double() / torch.finfo(dtype).max
    return (x.double() / scale).to(dtype).double() * scale


@pytest.mark.parametrize(("rows", "inner", "outer"), [(32, 16, 48), (5, 20, 7)], ids=["multiples of 16", "filled up"])
@pytest.mark.parametrize("by_rows", [False, True])
def test_products_are_those_of_rounded_numbers(by_rows: bool, rows: int, inner: int, outer: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((rows, inner), (outer, inner)))
    dy = torch.randn(rows, outer).bfloat16()
    y = linear(x, weight, by_rows)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    with torch.no_grad():
        over = {"dim": 1, "keepdim": True} if by_rows else {}
        x8, w8 = (rounded(a, a.abs().amax(**over), E4M3) for a in (x, weight))
        dy8 = rounded(dy, dy.abs().amax(**over), E4M3 if by_rows else E5M2)
        by_columns = rounded(weight, weight.abs().amax(0, keepdim=True), E4M3) if by_rows else w8
        expected = {"y": x8 @ w8.T, "dx": dy8 @ by_columns}
        expected["dw"] = dy.double().T @ x.double() if by_rows else dy8.T @ x8
    for name, found in (("y", y.detach()), ("dx", x.grad), ("dw", weight.grad)):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected[name], rtol=2**-7, atol=1e-2, msg=name)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("turned", ["", "x", "dy", "weight"])
def test_products_read_rows_as_cuda_asks(by_rows: bool, turned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tensors whose rows are columns in memory; CPUs take any."""
    multiply, read = torch._scaled_mm, list[torch.Size]()

    def noted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        read.append(a.shape)
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    shapes = {"x": (32, 16), "weight": (48, 16), "dy": (32, 48)}
    made = {name: torch.randn(*shape).bfloat16() for name, shape in shapes.items()}
    made = {name: tensor.t().contiguous().t() if name == turned else tensor for name, tensor in made.items()}
    linear(made["x"].requires_grad_(), made["weight"].requires_grad_(), by_rows).backward(made["dy"])
    assert len(read) == (2 if by_rows else 3)


class Turned(nn.Module):
    """Mixes over features, then over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.tokens = nn.Linear(32, 32, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(self.features(x).tanh().t()).float().square().mean()


class Read(TorchDispatchMode):
    """Notes whether operands of products in float8 are in rows, also where kernels were traced."""

    def __init__(self) -> None:
        super().__init__()
        self.in_rows: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_mm.default:
            self.in_rows.append(args[0].is_contiguous() and args[1].t().is_contiguous())
        return func(*args, **(kwargs or {}))


def compiled_gradients() -> list[list[Tensor | None]]:
    x, found = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)), []
    for compile in (False, True):
        module = Turned()
        plan = sw.plan(module, x, 1, mode="data_parallel", precision=precision("float8 rows"))
        with mock.patch.object(compiled, "compile_with_inductor", interpret_section), Read() as read:
            par = sw.parallelize(module, plan, compile=compile)
            par.step(x)
        found.append([parameter.grad for parameter in par.parameters()])
        assert read.in_rows
        assert all(read.in_rows)
    return found


@pytest.mark.long
def test_compiled_products_read_rows(run_ranks: RunRanks) -> None:
    ((plain, made),) = run_ranks(compiled_gradients, 1)
    assert None not in plain
    torch.testing.assert_close(made, plain, rtol=1e-2, atol=1e-4)  # roundings to bfloat16 in another order


@pytest.mark.parametrize("by_rows", [False, True])
def test_every_split_has_the_scales_of_whole_tensors(by_rows: bool) -> None:
    """Forward and backward: of tokens, outputs and the contraction, over 2, 3 and 2 x 2 devices."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 6).requires_grad_(), torch.randn(7, 6).requires_grad_()
    of = [tensor.detach() for tensor in scales(x, weight, 3, by_rows, LARGEST)]
    report = check_rule(FLOAT8_LINEAR, (x, weight, *of), find_missing=False)
    assert report.ok, str(report)
    assert report.num_splits > 10


@pytest.mark.filterwarnings("ignore:products=")
@pytest.mark.parametrize("products", BOTH)
def test_a_plan_equals_one_device_that_rounds_alike(products: str) -> None:
    strategies = {"up": "n@tp", "gate": "n@tp", "down": "k@tp"}
    settings: dict[str, Any] = {"mesh": sw.Mesh(dp=2, tp=2), "mode": "semi_auto", "strategies": strategies}
    with pytest.warns(sw.errors.CaptureWarning, match=r"head \(10 of \[10, 16\] no multiple of 16\)"):
        plan = sw.plan(Gated(), batch(), 4, precision=precision(products), **settings)
    report = sw.verify(Gated(), batch(), plan, steps=1)
    assert report.ok, str(report)
    assert report.in_dtypes is not None
    assert report.in_dtypes.judged
    reduced = [c for c in report.backward if c.kind == "all_reduce" and c.num_bytes == 8]
    assert (len(reduced) > 0) == (products == "float8"), "one scale per cotangent, of all ranks"


@pytest.mark.filterwarnings("ignore:products=")
@pytest.mark.parametrize("settings", [{"micro_batch": 2}, {"micro_batch": 2, "stages": 2}], ids=str)
@pytest.mark.long
def test_micro_batches_have_scales_of_their_own(settings: dict[str, Any]) -> None:
    devices = 2 * settings.get("stages", 1)
    plan = sw.plan(
        Gated(), batch(), devices, mesh=sw.Mesh(dp=2), mode="data_parallel", precision=precision(), **settings
    )
    assert (report := sw.verify(Gated(), batch(), plan, steps=2)).ok, str(report)


class Tied(nn.Module):
    """Its table is the weight of its head; ``up`` and ``down`` are read once, ``shared`` twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(48, 16), nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.shared, self.head = nn.Linear(16, 16), nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.shared(self.table(ids))
        x = self.shared(x + self.down(F.silu(self.up(x))))
        return self.head(x).flatten(0, 1).float().square().mean() + F.mse_loss(x.float(), target)


GATHERED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ZeRO 3": ({"mesh": sw.Mesh(dp=2)}, {"up", "down", "shared"}),
    "micro-batches": ({"mesh": sw.Mesh(dp=2), "micro_batch": 2}, {"up", "down", "shared"}),
    "stages": ({"mesh": sw.Mesh(dp=2), "micro_batch": 2, "stages": 2}, {"up", "down", "shared"}),
    "tensors split": (
        {"mesh": sw.Mesh(dp=2, tp=2), "mode": "semi_auto", "strategies": {"up": "n@tp", "down": "k@tp"}},
        {"up", "down", "shared"},
    ),
    "by price": ({"mesh": sw.Mesh(dp=2), "mode": "auto", "search": "dynamic_programming"}, set()),
    "by rows": ({"mesh": sw.Mesh(dp=2), "precision": precision("float8 rows")}, set()),
}


@pytest.mark.parametrize(("settings", "rounded"), GATHERED.values(), ids=GATHERED)
def test_weights_in_parts_are_gathered_in_float8(settings: dict[str, Any], rounded: set[str]) -> None:
    """Those that only products read; every other one as it is. A file keeps its messages."""
    torch.manual_seed(0)
    batch = torch.randint(48, (4, 3)), torch.randn(4, 3, 16)
    options = {"mode": "data_parallel", "precision": precision(), "zero": 3, "cache": False} | settings
    with mock.patch.object(Float8Gathers, "_may_be_rounded", return_value=False):
        earlier = sw.plan(Tied(), batch, settings["mesh"].num_devices * settings.get("stages", 1), **options)
    plan = sw.plan(Tied(), batch, earlier.plan.num_ranks, **options)
    entries = [c for stage in plan.plan.stages for c in stage.conversions or () if c.source.startswith("f8[")]
    assert {entry.value.partition(".")[0] for entry in entries} >= rounded
    is_apart = "stages" in settings  # the stage of the head does not read the table
    assert any(entry.value == "table.weight" for entry in entries) == is_apart
    for each in (sw.Plan.from_json(plan.to_json()), sw.Plan.from_json(earlier.to_json())):
        report = sw.verify(Tied(), batch, each, steps=3)
        assert report.ok, str(report)
    assert "f8[" not in str(earlier)
    if settings.get("precision"):
        assert "rounded behind the message: backward rounds it by columns" in format_entry(plan.plan, "up.weight")


@pytest.mark.filterwarnings("ignore:products=")
def test_a_scale_of_one_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: every rank rounds its cotangents by its own largest."""
    plan = sw.plan(Gated(), batch(), 2, mesh=sw.Mesh(dp=2), mode="data_parallel", precision=precision())
    writer = differentiate._StepWriter
    monkeypatch.setattr(writer, "_of_all_ranks", lambda self, largest, found: found)
    report = sw.verify(Gated(), batch(), plan, steps=1)
    assert report.max_error > 1e-4
    assert not report.ok


def test_what_is_not_rounded_is_refused() -> None:
    with raises(sw.errors.ShardwiseError, "products='float4'", fix="'float8' or 'float8 rows'"):
        sw.Precision(products="float4")
    with raises(sw.errors.ShardwiseError, "changes nothing", "float32, not bfloat16", fix="multiples of 16"):
        sw.plan(nn.Linear(16, 16), torch.zeros(4, 16), 2, precision=sw.Precision(products="float8"))
    with torch.autocast("cpu"), raises(sw.errors.ShardwiseError, "products", fix="use only one"):
        sw.plan(nn.Linear(16, 16), torch.zeros(4, 16), 2, precision=sw.Precision(products="float8"))


def planned(cluster: str = "h800-1x8", **dtypes: Any) -> Any:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.GELU(), nn.Linear(8192, 8192, bias=False))
        batch = torch.empty(2**17, 8192)
    options = {"mesh": sw.Mesh(dp=8), "mode": "data_parallel", "search": "dynamic_programming"}
    return sw.plan(module, batch, sw.Cluster.load(cluster), precision=sw.Precision(**dtypes), **options)


def test_products_have_the_rate_of_float8(tmp_path: Path) -> None:
    half, eighth = (planned(compute=torch.bfloat16, products=products) for products in (None, "float8"))
    device = sw.Cluster.load("h800-1x8").device
    flops = (2 + 3) * 2 * 2**14 * 8192 * 8192  # nothing needs the gradient of the input
    saved = flops / device.matmul_flops("bf16") - flops / device.matmul_flops("f8")
    gained = half.prediction.compiled_seconds - eighth.prediction.compiled_seconds
    assert 0 < gained < saved, "rounding takes a part of it"
    eighth.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again == eighth.plan
    assert again.precision == precision()
    assert "products float8" in str(again)
    with raises(sw.errors.ShardwiseError, "A100", "f8", fix="leave products= out"):
        planned("a100-80-1x8", compute=torch.bfloat16, products="float8")


def test_a_cluster_file_has_the_products_of_its_devices() -> None:
    cluster = sw.Cluster.load("h800-1x8").with_products("f8")
    assert parse(format_cluster(cluster), "the text").device == cluster.device
    text = format_cluster(cluster).replace('products = "f8"', 'products = "f4"')
    with raises(sw.errors.ShardwiseError, "f4", "device.flops"):
        parse(text, "the text")


def test_a_repeated_product_for_other_consumers_is_refused() -> None:
    """Its cotangents would be partial sums on every rank, and are rounded before they are added."""
    x, weight = torch.randn(4, 16).requires_grad_(), torch.randn(8, 16).requires_grad_()
    case = make_case(call(FLOAT8_LINEAR, x, weight, torch.ones(()), torch.ones(())))
    rule, mesh = rule_of(case.op, case.graph), sw.Mesh(dp=2)
    assert rule is not None
    with raises(sw.errors.LayoutError, "float8", "R@dp"):
        check_strategy(rule, Strategy.parse("R@dp", mesh), mesh)
