"""The size of messages that carry several parameters, chosen by price."""

from __future__ import annotations

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


def test_small_models_keep_the_usual_size() -> None:
    plan = sw.plan(chain(64, 2), torch.zeros(8, 64, dtype=torch.bfloat16, device="meta"), "h100-2x8", loss=squares).plan
    assert plan.bucket_bytes == 25 * MIB
