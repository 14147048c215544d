"""What hides messages of parameters, and what memory and updates take on CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import format_cluster, parse
from shardwise.costs.collectives import Links
from shardwise.costs.kernels import KernelWork, kernel_seconds
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import overlap_windows, price_program
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph, Value
from shardwise.plans.bind import program_of

NODE = Cluster.load("h100-1x8")
LOCAL = Cluster.local(2)


class Wide(nn.Module):
    """A narrow body under a wide head, whose weight the body uses, too, if it is tied."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(256, 256, bias=False), nn.Linear(256, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.body(x))), labels)


def wide(classes: int, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor], Graph]:
    with torch.device("meta"):
        model, inputs = Wide(classes), (torch.empty(batch, 256), torch.empty(batch, dtype=torch.int64))
    return model, inputs, capture(model, inputs, {}).graph


def test_nothing_hides_the_first_parameter_and_what_comes_before_a_use_hides_the_others() -> None:
    _, _, graph = wide(4096, 64)
    prices = Prices(Links(NODE, sw.Mesh(dp=8)))
    found = overlap_windows(graph, prices)
    before = 0.0
    for op in graph.ops[:2]:
        operands, results = [graph.by_name[name] for name in op.operands], [graph.by_name[name] for name in op.results]
        before += prices.operator(op, operands, results, ([v.shape for v in operands], [v.shape for v in results]))
    assert found == {"body.weight": 0.0, "head.weight": pytest.approx(before)}


def test_what_does_not_fit_into_its_window_is_exposed_by_search_and_program_alike() -> None:
    model, inputs, graph = wide(400_000, 64)
    mesh = sw.Mesh(dp=8)
    plan = sw.plan(model, inputs, NODE, mesh=mesh, mode="data_parallel")
    spmd, prices = program_of(plan, graph, training=True), Prices(Links(NODE, mesh))
    windows = overlap_windows(graph, prices)
    free, true = price_program(spmd, prices), price_program(spmd, prices, windows=windows)
    assert true.exposed + true.traffic == pytest.approx(free.exposed + free.traffic)
    assert true.traffic == pytest.approx(windows["head.weight"])  # the body's gradient is sent last, behind nothing
    chosen = sw.plan(model, inputs, NODE, mesh=mesh, search="dynamic_programming")
    assert chosen.strategies["head/linear"] == "n@dp", "its gradient is not sent"
    assert chosen.prediction.bound <= chosen.prediction.additive_price < true.exposed + true.compute


def test_large_results_on_cpus_wait_for_their_pages() -> None:
    small, large = (
        kernel_seconds(LOCAL.device, KernelWork(num_bytes=3.0 * size, made=size)) for size in (2.0**25, 2.0**25 + 8)
    )
    assert large - small == pytest.approx(2**25 / 2.5e9, rel=1e-3)
    assert NODE.device.fresh_seconds(2.0**30) == 0
    assert parse(format_cluster(LOCAL)).device.fresh_bandwidth == LOCAL.device.fresh_bandwidth


@pytest.mark.parametrize(
    ("optimizer", "numel", "measured"),
    [
        ("sgd", 1_000, 1.65), ("momentum", 1_000, 5.06), ("adamw", 1_000, 17.7), ("adamw fused", 1_000, 3.4),
        ("adamw fused", 10_000_000, 5288), ("adamw", 1_000_000, 1432), ("adamw", 30_000_000, 148_651),
        ("momentum", 10_000_000, 5118), ("sgd", 10_000_000, 2097),
    ],
)  # fmt: skip
def test_updates_on_a_cpu_take_what_was_measured(optimizer: str, numel: int, measured: float) -> None:
    """Microseconds per tensor: 2-core AMD EPYC 9005, torch 2.13, one thread, fastest of many. Within a factor of two:
    small tensors stay in caches; AdamW's implementations differ by ten, small and large tensors by thirty thousand."""
    value = Value("w", (numel,), torch.float32)
    prices = Prices(Links(LOCAL, sw.Mesh(dp=2)), optimizer)
    assert 0.5 < prices.update(value, numel) * 1e6 / measured < 2
    twice = replace(prices, passes=2)
    added = 3 * 4 * numel / LOCAL.device.bytes_per_second() / 2  # of two passes, the second adds to the first's sum
    assert twice.update(value, numel) == pytest.approx(prices.update(value, numel) / 2 + added)
