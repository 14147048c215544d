"""A step of several accumulated batches: what its optimizer's update costs is shared by its passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw

X = torch.randn(8, 16)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def planned(global_batch: int | None) -> sw.Plan:
    return sw.plan(
        Mlp(),
        X,
        sw.Cluster.load("h100-1x2"),
        mesh=sw.Mesh(dp=2),
        search="dynamic_programming",
        global_batch=global_batch,
    )


def test_a_step_has_as_many_passes_as_batches_and_one_update():
    one, four = planned(None).prediction, planned(32).prediction
    assert one is not None
    assert four is not None
    assert (one.passes, four.passes) == (1, 4)
    assert four.step_seconds == pytest.approx(4 * four.pass_seconds)
    assert four.pass_seconds < one.pass_seconds, "a quarter of the update is left to each pass"
    assert four.step_seconds < 4 * one.step_seconds
    assert planned(8).prediction == one
    again = sw.Plan.from_json(planned(32).to_json())
    assert again.prediction == four
    assert "(4 passes of " in str(again)


@pytest.mark.parametrize(
    ("global_batch", "said"),
    [
        (12, "the example inputs have 8 samples: 12 / 8 is not whole"),
        (0, "global_batch is 0"),
        (True, "global_batch is True"),
    ],
)
def test_batches_that_do_not_divide_are_refused(global_batch, said):
    with pytest.raises(sw.ShardwiseError) as caught:
        planned(global_batch)
    assert said in str(caught.value)


@pytest.mark.parametrize("mesh", [None, sw.Mesh(dp=1), sw.Mesh()])
def test_one_device_has_one_plan(mesh):
    plan = sw.plan(Mlp(), X, sw.Cluster.load("h100-1x1"), mesh=mesh)
    assert plan.optimality_gap == 0
    assert not any("@" in entry.strategy for entry in plan.operators)
    assert sw.verify(Mlp(), X, plan).ok
