"""The size of messages that carry several parameters, chosen by price."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.search import planner

MIB = 2**20


def chain(width: int, depth: int) -> nn.Module:
    blocks = (nn.Sequential(*(nn.Linear(width, width) for _ in range(8)), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(*blocks).to("meta", torch.bfloat16)


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def planned(zero: int, **settings: object) -> sw.Plan:
    batch = torch.zeros(2**17, 2048, dtype=torch.bfloat16, device="meta")
    mesh = sw.Mesh(dp=64)
    return sw.plan(chain(2048, 4), batch, "h100-8x8", loss=squares, mesh=mesh, zero=zero, **settings).plan  # type: ignore[arg-type]


def seconds(plan: sw.Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.simulated_seconds


@pytest.mark.parametrize("zero", [1, 3])
def test_sharded_parameters_travel_in_larger_messages_between_nodes(zero: int) -> None:
    free, usual = planned(zero), planned(zero, bucket_bytes=25 * MIB)
    assert free.bucket_bytes in planner.BUCKET_SIZES
    assert usual.bucket_bytes == 25 * MIB
    assert seconds(free) < 0.95 * seconds(usual)
    assert sw.Plan.from_json(free.to_json()) == free


def peak(plan: sw.Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.peak_bytes


def test_memory_bounds_the_messages() -> None:
    limit = int(peak(planned(3, bucket_bytes=25 * MIB)))
    assert peak(planned(3, memory_bytes=limit)) <= limit
    assert peak(planned(3)) > limit, "larger messages hold more"


class Uneven(nn.Module):
    """A layer with few columns hides no gather of one with many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, width, 8 * width] * 4 + [width]
        layers = (nn.Sequential(nn.Linear(a, b, bias=False), nn.ReLU()) for a, b in pairwise(sizes))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_gathers_start_earlier_where_one_layer_hides_none_and_memory_allows() -> None:
    with torch.device("meta"):
        module, batch = Uneven(2048).to(torch.bfloat16), torch.zeros(2**17, 2048, dtype=torch.bfloat16)
    settings: dict[str, object] = {"mesh": sw.Mesh(dp=64), "zero": 3, "recompute": "none"}
    usual, free = (
        sw.plan(module, batch, "h100-8x8", **settings, **more).plan  # type: ignore[arg-type]
        for more in ({"bucket_bytes": 25 * MIB}, {})
    )
    assert (usual.prefetch, free.prefetch, free.bucket_bytes) == (1, 2, usual.bucket_bytes)
    assert seconds(free) < (1 - planner.BUCKET_GAIN) * seconds(usual)
    assert peak(free) > peak(usual), "what was gathered earlier is held for longer"
    assert sw.Plan.from_json(free.to_json()) == free
    assert '"prefetch"' not in usual.to_json()
    limit = int(peak(usual))
    bounded = sw.plan(module, batch, "h100-8x8", memory_bytes=limit, **settings).plan  # type: ignore[arg-type]
    assert bounded.prefetch == 1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_steps_that_gather_earlier_equal_those_of_one_device(recompute: str) -> None:
    batch, settings = (torch.randn(4, 6),), {"mesh": sw.Mesh(dp=2), "zero": 3, "recompute": recompute}
    usual = sw.plan(Uneven(6), batch, 2, bucket_bytes=300, mode="data_parallel", **settings).plan  # type: ignore[arg-type]
    earlier = replace(usual, prefetch=3)
    report = sw.verify(Uneven(6), batch, earlier, steps=1)
    assert report.ok, str(report)
    assert list(report.forward[:3]) == [c for c in report.forward if c.kind == "all_gather"][:3]


def test_small_models_keep_the_usual_size() -> None:
    plan = sw.plan(chain(64, 2), torch.zeros(8, 64, dtype=torch.bfloat16, device="meta"), "h100-2x8", loss=squares).plan
    assert plan.bucket_bytes == 25 * MIB
