"""What a division refuses is refused before anything is searched, and no plan that fits is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise.costs.optimizers import HELD
from shardwise.planning import execute as planning
from shardwise.planning.execute import execute
from shardwise.plans.nothing_fits import ResidentBytes, refuse_division
from shardwise.plans.price_scope import figures
from shardwise.plans.request import PlanRequest


class Stack(nn.Module):
    """Layers of one width, with what a bound must not count twice or at all: an unused and a frozen layer, tied
    weights, and two parameters that are added and share their gradient."""

    def __init__(self, width: int, layers: int, tricky: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.tricky = tricky
        if tricky:
            self.first, self.second = nn.Parameter(torch.ones(width, width)), nn.Parameter(torch.ones(width, width))
            self.unused, self.frozen = nn.Linear(width, width), nn.Linear(width, width).requires_grad_(False)
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tricky:
            x = self.frozen(F.linear(x, self.first + self.second))
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.square().mean()


def request_of(
    *, width: int = 64, layers: int = 3, tricky: bool = True, devices: str = "h100-1x2", **settings: Any
) -> PlanRequest:
    with torch.device("meta"):
        return PlanRequest.of(Stack(width, layers, tricky), torch.empty(16, width), devices, **settings)


def share_of(request: PlanRequest, *, staged: bool = False) -> int:
    """Return the bytes that some device holds at least: a limit below is refused by division, and none above."""
    captures: list[planning.Planning] = []
    with raises(sw.errors.NothingFits, section="nothing-fits"):
        execute(request.varied(memory_bytes=1.0), captures=captures)
    graph, optimizer, cluster = captures[0].captured.graph, request.training.optimizer, request.cluster
    share = ResidentBytes.of(graph, optimizer, cluster.device, staged=staged).on_each(cluster.num_devices)
    refuse_division(graph, optimizer, cluster, share, staged=staged)
    with raises(sw.errors.NothingFits, f"{share:,}", f"{cluster.num_devices} devices"):
        refuse_division(graph, optimizer, cluster, share - 1, staged=staged)
    return share


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "sgd"},
        {"optimizer": "adagrad fused"},
        {"optimizer": "adamw on host"},
        {"zero": 3},
        {"zero": sw.Zero(1, whole_below=4096)},
        {"micro_batch": 8},
        {"recompute": "full", "offload": "all"},
        {"precision": sw.Precision(compute=torch.bfloat16, parameter=torch.float32)},
        {"stages": 2, "micro_batch": 4},
        {"stages": 2, "micro_batch": 4, "optimizer": "momentum"},
        {"layouts": {"layers.0.weight": "[64, 64]"}},
        {"tricky": False},
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_no_plan_holds_less_than_its_share(settings: dict[str, Any]) -> None:
    request = request_of(**settings)
    free = figures(execute(request).plan)
    assert free is not None
    assert share_of(request, staged="stages" in settings) <= free[1]


@pytest.mark.long
@pytest.mark.parametrize("stages", [None, 2])
def test_the_least_memory_that_is_found_is_no_less_than_the_share(stages: int | None) -> None:
    request = request_of(tricky=stages is None, stages=stages)
    share = share_of(request, staged=stages is not None)
    with raises(sw.errors.NothingFits, "found", section="nothing-fits") as refused:
        execute(request.varied(memory_bytes=float(share)))
    needed = str(refused.value).partition(" = ")[2].partition(" bytes")[0].replace(",", "")
    assert share < int(needed) <= 2 * share


@pytest.mark.long
@pytest.mark.parametrize("optimizer", sorted(HELD))
def test_no_plan_holds_less_under_any_optimizer(optimizer: str) -> None:
    for devices in ("h100-1x4", "local"):
        request = request_of(devices=devices, optimizer=optimizer)
        free = figures(execute(request).plan)
        assert free is not None
        assert share_of(request) <= free[1]


def test_a_division_refuses_before_any_search_and_its_fixes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """13e9 parameters with AdamW on eight cards: 16 bytes each / 8 and the temporaries of an update."""
    searched: list[Any] = []
    monkeypatch.setattr(planning, "choose_stage", lambda *args: searched.append(args))
    width, limit = 57024, 24.0 * 2**30
    request = request_of(width=width, layers=4, tricky=False, devices="h100-1x8", memory_bytes=limit)
    with raises(
        sw.errors.NothingFits, "24 GiB", "8 devices", section="nothing-fits", facts=["needed", "largest", "least"]
    ) as caught:
        execute(request)
    assert not searched
    numel = 4 * width * width
    parts = f"parameters {numel // 2:,} + gradients {numel // 2:,} + optimizer states {numel:,} + "
    assert f"needed: {parts}temporaries {numel // 2:,} = {numel * 20 // 8:,} bytes" in str(caught.value)
    waits, more = caught.value.computed
    assert waits.startswith('the optimizer\'s states on the host (optimizer="adamw on host"): at least 12.1 GiB')
    assert more.startswith("2 times the devices (16): at least 15.1 GiB")
    named = str(caught.value.naming([], "not planned"))
    assert f"fix 1:  {waits}" in named
    assert "fixes:  not planned" in named


def test_a_fix_may_need_both_and_none_is_named_where_no_cluster_is_large_enough() -> None:
    with raises(sw.errors.NothingFits, section="nothing-fits") as caught:
        execute(request_of(memory_bytes=16_000.0, tricky=False))
    assert [fix.partition(": at least")[0] for fix in caught.value.computed] == [
        'the optimizer\'s states on the host (optimizer="adamw on host") and 4 times the devices (8)',
        "8 times the devices (16)",
    ]
    with raises(sw.errors.NothingFits, section="nothing-fits") as caught:
        execute(request_of(memory_bytes=10.0))
    assert not caught.value.computed
    with raises(sw.errors.NothingFits, "reserve", section="nothing-fits"):
        execute(request_of(width=2**18, layers=4))


def test_variants_of_one_call_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Any] = []
    real = planning.capture

    def counted(*args: Any, **options: Any) -> Any:
        captured.append(args)
        return real(*args, **options)

    monkeypatch.setattr(planning, "capture", counted)
    captures: list[planning.Planning] = []
    request = request_of()
    first = execute(request, captures=captures)
    assert execute(request.varied(optimizer="adamw on host"), captures=captures).plan != first.plan
    assert execute(request.varied(zero=3), captures=captures).plan.predicted is not None
    assert len(captured) == 1
    assert execute(request.varied(samples=8), captures=captures).plan != first.plan
    half = sw.Precision(compute=torch.bfloat16, parameter=torch.float32)
    assert execute(request.varied(precision=half), captures=captures).plan != first.plan
    assert len(captured) == 3
