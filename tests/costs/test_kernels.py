"""Prices of kernels: what PyTorch calls for an operator, and what a device takes for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise.costs.cluster import Cluster, slowest_device
from shardwise.costs.cluster_file import format_cluster, parse
from shardwise.costs.collectives import Links
from shardwise.costs.kernels import KernelCall, kernel_seconds, work_of
from shardwise.costs.memory import busiest_program
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import priced_call
from shardwise.costs.timeline import simulate_program
from shardwise.graph.capture import capture
from shardwise.graph.ir import Ref
from shardwise.plans.bind import program_of
from shardwise.plans.quantities import format_seconds
from shardwise.programs.forms import Form
from shardwise.programs.spmd_steps import OpStep
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.compiled import compiled_program

aten = torch.ops.aten
H100 = Cluster.load("h100").with_devices(1)
BF16 = torch.bfloat16


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)

    def forward(self, *others: Tensor) -> Tensor:
        return self.function(*self.own, *others)


def microseconds(function: Callable[..., Tensor], *shapes: tuple[int, ...], others: Any = ()) -> tuple[float, float]:
    """Forward and backward on one H100, as the search prices them."""
    graph = capture(Function(function, *shapes), tuple(others), {}).graph
    prices = Prices(Links(H100, sw.Mesh(dp=1)))
    found = [0.0, 0.0]
    for op in graph.ops:
        operands, results = [graph.by_name[n] for n in op.operands], [graph.by_name[n] for n in op.results]
        shapes_of = [v.shape for v in operands], [v.shape for v in results]
        found[0] += prices.forward(op, operands, results, shapes_of)
        found[1] += prices.backward(op, operands, results, shapes_of)
    return found[0] * 1e6, found[1] * 1e6


N, M = 8192, 4096


@pytest.mark.parametrize(
    ("function", "shapes", "measured"),
    [
        (torch.add, ((N, M), (N, M)), (69.6, 0.0)),  # the cotangent is handed on
        (torch.mul, ((N, M), (N, M)), (69.4, 142.3)),  # twice as much as forward
        (F.silu, ((N, M),), (48.7, 73.3)),
        (lambda x, w, b: F.layer_norm(x, (M,), w, b), ((N, M), (M,), (M,)), (65.5, 168.4)),
        (lambda x, w: F.rms_norm(x, (M,), w), ((N, M), (M,)), (68.0, 164.2)),
        (F.linear, ((N, M), (14336, M)), (1205.9, 2553.9)),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ((1, 32, N, 128),) * 3, (876, 2609)),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((1, 32, N, 128),) * 3, (1580.3, 4659.8)),
    ],
)
def test_kernels_take_what_was_measured_on_an_h100(function: Any, shapes: Any, measured: tuple[float, float]) -> None:
    """Measured: one H100, torch 2.11, bf16. Within 20 %, which tells a factor of two in backward from one."""
    found = microseconds(function, *shapes)
    assert found == (pytest.approx(measured[0], rel=0.2), pytest.approx(measured[1], rel=0.2))


def test_a_mask_that_is_a_tensor_makes_attention_several_times_dearer() -> None:
    mask = torch.empty(1, 1, N, N, dtype=torch.bool, device="meta")
    masked = microseconds(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), *((1, 32, N, 128),) * 3, others=[mask]
    )
    causal = microseconds(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *((1, 32, N, 128),) * 3
    )
    assert masked[0] == pytest.approx(3419, rel=0.1)
    assert 3.3 < masked[0] / causal[0] < 4.2
    assert 3.0 < masked[1] / causal[1] < 4.0


def test_an_element_by_element_kernel_is_slower_than_its_bytes() -> None:
    def seconds(call: KernelCall, *forms: Form) -> float:
        return kernel_seconds(H100.device, work_of(call, forms[:-1], forms[-1:]))

    wide = Form.contiguous((N, M), BF16)
    add = KernelCall(aten.add.Tensor, (Ref("0"), Ref("1")), ())
    equal = seconds(add, wide, wide, wide)
    bias = seconds(add, wide, Form.contiguous((M,), BF16), wide)
    assert bias > equal, "fewer bytes, and slower"
    copy = KernelCall(aten.clone.default, (Ref("0"),), ())
    transposed = Form((M, N), (1, M), BF16, False)
    assert seconds(copy, transposed, Form.contiguous((M, N), BF16)) > 1.8 * seconds(copy, wide, wide)
    assert seconds(copy, transposed, transposed) == seconds(copy, wide, wide), "in the order of its memory"
    assert transposed.is_dense
    assert not Form((N, M // 2), (M, 1), BF16, False).is_dense


def test_on_a_part_a_kernel_does_a_part() -> None:
    graph = capture(Function(F.linear, (N, M), (14336, M)), (), {}).graph
    (op,) = graph.ops
    prices = Prices(Links(H100, sw.Mesh(dp=1)))
    values = [graph.by_name[n] for n in op.operands], [graph.by_name[n] for n in op.results]
    whole = prices.operator(op, *values, ([(N, M), (14336, M)], [(N, 14336)]))
    half = prices.operator(op, *values, ([(N // 2, M), (14336, M)], [(N // 2, 14336)]))
    start = 3 * (H100.device.kernel_latency + H100.device.matmul_ramp)
    assert half - start == pytest.approx((whole - start) / 2, rel=1e-6)


def test_kernels_wait_for_the_host_that_starts_them() -> None:
    with torch.device("meta"):
        model, inputs = nn.Sequential(*(nn.ReLU() for _ in range(20)), nn.Linear(8, 1)), (torch.empty(4, 8),)
    plan = sw.plan(model, inputs, H100)
    program = busiest_program(program_of(plan, capture(model, inputs, {}).graph, training=True), VjpCache())
    slow = Cluster(H100.name, replace(H100.device, launch=1e-3), H100.levels)
    steps = [simulate_program(program, Prices(Links(cluster, plan.mesh))) for cluster in (H100, slow)]
    count = round(steps[1].seconds / 1e-3)
    assert 21 <= count <= 60
    assert steps[1].exposed < 1e-9, "nobody waits for a message"
    assert steps[0].seconds >= count * H100.device.launch * 0.9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.gelu(self.up(self.norm(x)) * 2 + 1))).square().mean()


@pytest.fixture
def compiled_prices(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("compiled_prices")


def test_a_compiled_step_goes_over_memory_less_often(compiled_prices: ModuleType) -> None:
    with torch.device("meta"):
        model, inputs = Block(), (torch.empty(4096, 256),)
    plan = sw.plan(model, inputs, H100)
    program = busiest_program(program_of(plan, capture(model, inputs, {}).graph, training=True), VjpCache())
    nobody: Any = None
    compiled = compiled_program(program, nobody, torch.device("cpu"), generate=compiled_prices.price_section)
    prices = Prices(Links(H100, plan.mesh))
    eager, fused = simulate_program(program, prices), simulate_program(compiled, prices)
    assert fused.compute < 0.92 * eager.compute
    assert fused.peak_bytes < eager.peak_bytes
    own = simulate_program(program, prices, compiled=True)
    assert own.compute == pytest.approx(fused.compute, rel=0.05), "without tracing and partitioning it again"
    assert own.peak_bytes == eager.peak_bytes
    section = next(one for one in compiled.forward if hasattr(one, "target"))
    with raises(AssertionError, "was only priced"):
        section.target.function([])


def test_a_chain_is_one_pass_and_a_product_ends_it(compiled_prices: ModuleType) -> None:
    def chain(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.relu((torch.sin(x * y) + x) @ w) * 3

    size, matrix = (1024, 512), (512, 512)
    shapes = [torch.empty(one, device="meta") for one in (size, size, matrix)]
    module = torch.fx.experimental.proxy_tensor.make_fx(chain)(*shapes)
    product, *chains = sorted(compiled_prices.fused_works(module), key=lambda work: -work.flops)
    assert product.flops == 2 * 1024 * 512 * 512
    numbers = sorted(work.num_bytes / (4 * 1024 * 512) for work in chains)
    assert numbers == [2, 3], "x and y read, one value written; then one read and one written"


def test_figures_of_kernels_are_read_written_and_taken_from_another_device() -> None:
    again = parse(format_cluster(H100))
    assert again.device == H100.device
    a100 = Cluster.load("a100-80").device
    assert a100.kernels == H100.device.kernels
    assert a100.scalar_rate < H100.device.scalar_rate
    text = format_cluster(H100)
    with raises(sw.ShardwiseError, "device.kernels.sofmax", "softmax"):
        parse(text.replace("softmax = ", "sofmax = ", 1))
    with raises(sw.ShardwiseError, "device.kernels.softmax", "1.52", 1):
        parse(text.replace("softmax = 0.52", "softmax = 1.52"))
    both = slowest_device([H100.device, replace(a100, kernels=type(a100.kernels)({"softmax": 0.1}))])
    assert both.kernels["softmax"] == 0.1
    assert both.scalar_rate == a100.scalar_rate


def test_steps_of_a_program_are_priced_as_its_list_is() -> None:
    """What the search adds up and what is simulated differ only by the cotangents that are added, and by the host."""
    with torch.device("meta"):
        model, inputs = (
            nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)),
            (torch.empty(8192, 4096),),
        )
    plan = sw.plan(model, inputs, H100)
    spmd = program_of(plan, capture(model, inputs, {}).graph, training=True)
    prices = Prices(Links(H100, plan.mesh), "sgd fused")
    added = sum(prices.operator(*priced_call(step, spmd.graph)) for step in spmd.steps if isinstance(step, OpStep))
    assert simulate_program(busiest_program(spmd, VjpCache()), prices).seconds == pytest.approx(added, rel=0.05)


@pytest.mark.parametrize(("wide", "faster"), [(False, 1.1), (True, 1.0)])
def test_a_plan_on_gpus_says_what_its_compiled_step_takes(wide: bool, faster: float) -> None:
    """Chains of element-wise kernels are one each: memory-bound work gains, products do not."""
    width, rows = (8192, 8192) if wide else (512, 65_536)
    layers = [nn.Linear(width, width, bias=False), *([] if wide else [nn.Sigmoid(), nn.Tanh(), nn.Sigmoid()])]
    with torch.device("meta"):
        model, inputs = nn.Sequential(*layers), (torch.empty(rows, width), torch.empty(rows, width))
    plan = sw.plan(model, inputs, "h100-1x1", loss=nn.functional.mse_loss)
    gain = plan.prediction.simulated_seconds / plan.prediction.compiled_seconds
    assert faster <= gain <= (1.1 if wide else 3)
    headline, compiled = str(plan).splitlines()[1:3]
    assert headline.startswith(f"  step {format_seconds(plan.prediction.compiled_seconds)} (")
    assert f"eager it takes {format_seconds(plan.prediction.simulated_seconds)} (" in compiled
    assert plan.prediction.host_wait < plan.prediction.compiled_seconds
    ascend = sw.plan(model, inputs, "ascend-910b-1x1", loss=nn.functional.mse_loss)
    assert "compiled" not in str(ascend)
    assert str(ascend).splitlines()[1].startswith(f"  step {format_seconds(ascend.prediction.simulated_seconds)} (")
    assert sw.plan(model, inputs, 1, loss=nn.functional.mse_loss).prediction.compiled_seconds == 0, "on CPUs"


def test_operators_on_rows_that_follow_keys_are_not_counted_as_compiled() -> None:
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Sigmoid(), nn.Tanh()), (torch.empty(8192, 8192),)
    plan = sw.plan(model, inputs, H100)
    spmd = program_of(plan, capture(model, inputs, {}).graph, training=True)
    prices = Prices(Links(H100, plan.mesh), "sgd fused")
    program = busiest_program(spmd, VjpCache())
    plain = simulate_program(program, prices).seconds
    assert simulate_program(program, prices, compiled=True).seconds < 0.9 * plain
    vars(program.spmd)["keyed_operators"] = frozenset(op.name for op in spmd.graph.ops)
    assert simulate_program(program, prices, compiled=True).seconds == pytest.approx(plain)


@pytest.mark.parametrize(("cluster", "schedule", "is_compiled"), [
    ("h100-1x2", "1F1B", True), ("h100-1x2", "ZBVZeroBubble", False), ("ascend-910b-1x2", "1F1B", False),
])  # fmt: skip
def test_a_pipeline_on_gpus_says_what_its_compiled_step_takes(
    cluster: str, schedule: str, is_compiled: bool, tmp_path: Path
) -> None:
    """Memory-bound chains of four stages; schedules that split the backward run eager."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Sigmoid(), nn.Tanh(), nn.Sigmoid()) for _ in range(4)]
    with torch.device("meta"):
        model, inputs = nn.Sequential(*layers), (torch.empty(65_536, 512), torch.empty(65_536, 512))
    stages = 2 if schedule == "1F1B" else 4
    plan = sw.plan(
        model, inputs, cluster, loss=nn.functional.mse_loss, stages=stages, schedule=schedule, micro_batch=8192
    )
    assert plan.pipeline is not None
    eager, compiled = plan.pipeline.step_seconds, plan.pipeline.compiled_seconds
    assert (1.1 * compiled < eager < 3 * compiled) if is_compiled else compiled == 0
    headline, second = str(plan).splitlines()[1:3]
    assert headline.startswith(f"  step {format_seconds(compiled or eager)} (")
    assert (f"eager it takes {format_seconds(eager)} (" in second) == is_compiled
    asked = sw.fits(
        model, inputs, cluster, loss=nn.functional.mse_loss, stages=stages, schedule=schedule, micro_batch=8192,
        seconds=0,
    )  # fmt: skip
    assert asked.step_seconds == pytest.approx(compiled or eager)
    assert asked.step is not None
    assert asked.step.seconds.low < asked.step_seconds < asked.step.seconds.high
    plan.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json").pipeline == plan.pipeline


def test_a_step_that_waits_for_the_host_is_predicted_with_cuda_graphs_too() -> None:
    """The host starts what lies between two messages at once. Offload frees nothing then, and is not combined."""
    model, inputs = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), (torch.empty(8, 64), torch.empty(8, 64))
    plan = sw.plan(model, inputs, "h100-1x1", loss=nn.functional.mse_loss)
    found = plan.prediction
    assert found.host_wait > 0.5 * found.compiled_seconds
    assert 0 < found.graph_seconds < 0.7 * found.compiled_seconds
    advised = f'use a larger batch, or compile="graphs" ({format_seconds(found.graph_seconds)})'
    assert advised in str(plan)
    assert sw.Plan.from_json(plan.to_json()).prediction == found
