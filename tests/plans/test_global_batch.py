"""A step of several passes: what a plan says of it, which micro-batch is chosen, and which are refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import shardwise as sw
from raising import raises
from shardwise.api import step_memory
from shardwise.plans.file import VERSION

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
        (12, ("8 samples", "12 / 8")),
        (0, ("global_batch", 0)),
        (True, ("global_batch", "True")),
    ],
)
def test_batches_that_do_not_divide_are_refused(global_batch, said):
    with raises(sw.ShardwiseError, said):
        planned(global_batch)


def small(global_batch=None, micro_batch=None, x=X, **options):
    return sw.plan(
        Mlp(),
        x,
        2,
        mesh=sw.Mesh(dp=2),
        mode="data_parallel",
        global_batch=global_batch,
        micro_batch=micro_batch,
        **options,
    )


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "said"),
    [
        (8, 3, ("micro_batch", 3, "global_batch", "8 / 3 = 2.667")),
        (8, 16, ("micro_batch", 16, "global_batch", "8 / 16 = 0.5")),
        (8, 0, ("micro_batch", 0)),
        (8, -2, ("micro_batch", -2)),
        (8, True, ("micro_batch", "True")),
        (8, 2.0, ("micro_batch", "2.0")),
        (32, 4, ("8 samples", "(4)", "(32)", "micro-batch-size")),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused_with_the_arithmetic(global_batch, micro_batch, said):
    with raises(sw.ShardwiseError, said):
        small(global_batch, micro_batch)


def test_samples_of_no_input_are_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (self.weight * x).sum()

    with raises(sw.ShardwiseError, "global_batch", "micro_batch", "example"):
        sw.plan(Scaled(), torch.tensor(3.0), 2, mode="data_parallel", global_batch=8, micro_batch=2)


def test_example_inputs_of_a_micro_batch_and_of_the_whole_batch_give_one_plan():
    of_micro_batch, of_batch = small(32), small(32, 8, torch.randn(32, 16))
    assert (of_micro_batch.micro_batch, of_micro_batch.micro_batches) == (8, 4)
    assert of_micro_batch == of_batch


def test_passes_are_in_the_file_the_digest_and_the_difference():
    one, four = small(), small(8, 2)
    assert one.digest != four.digest
    assert sw.Plan.from_json(four.to_json()) == four
    assert "micro_batches" not in one.to_json(), "a plan of one pass has the digest that it always had"
    assert ("micro_batches", "1", "4") in one.diff(four).settings
    assert "a step is 4 passes over 2 samples" in str(four)
    assert "communication per pass and device" in str(four)
    data = json.loads(one.to_json())
    assert data["version"] == VERSION


def test_the_micro_batch_is_the_largest_that_fits_unless_smaller_ones_are_faster():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 4096), nn.Linear(4096, 4)

        def forward(self, x):
            return self.down(torch.relu(self.up(x))).square().mean()

    cluster, x = sw.Cluster.load("h100-1x2"), torch.empty(256, 64, device="meta")
    with torch.device("meta"):
        module = Wide()
    free = sw.plan(module, x, cluster, mesh=sw.Mesh(dp=2), global_batch=256)
    assert free.micro_batches == 1
    least = free.prediction.peak_bytes
    tight = sw.plan(module, x, cluster, mesh=sw.Mesh(dp=2), global_batch=256, memory_bytes=0.4 * least)
    assert tight.micro_batches > 1
    assert tight.prediction.peak_bytes <= 0.4 * least
    tried = tight.report.explain("micro_batch")
    assert tried.tried[0].micro_batch == 256
    assert "no plan fits" in tried.tried[0].refused
    assert str(tried).startswith(f"a micro-batch has {tight.micro_batch} samples; tried, the largest first")


def test_a_batch_that_does_not_fit_in_a_pass_is_planned_in_passes_without_being_asked():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 4)

        def forward(self, x):
            return self.down(torch.relu(self.up(x))).square().mean()

    cluster, x, mesh = sw.Cluster.load("h100-1x2"), torch.randn(4096, 64), sw.Mesh(dp=2)
    free = sw.plan(Wide(), x, cluster, mesh=mesh)
    assert free.micro_batches == 1
    assert not free.report.explain("micro_batch").tried
    limit = 0.3 * free.prediction.peak_bytes
    tight = sw.plan(Wide(), x, cluster, mesh=mesh, memory_bytes=limit)
    assert tight.micro_batches > 1
    assert tight.prediction.peak_bytes <= limit
    assert "no plan fits" in tight.report.explain("micro_batch").tried[0].refused
    assert sw.verify(Wide(), x, tight, steps=1).ok
    answer = sw.fits(Wide(), x, cluster, mesh=mesh, memory_bytes=limit, seconds=0)
    assert answer.ok
    assert f"{tight.micro_batches} micro-batches of {tight.micro_batch} samples" in str(answer)
    with raises(sw.errors.NothingFits, section="nothing-fits", facts=["needed", "largest", "least", "fixes"]):
        sw.plan(Wide(), x, cluster, mesh=mesh, memory_bytes=1000)


def test_gradients_of_earlier_passes_are_counted_in_every_pass():
    module = Mlp()
    held = 4 * sum(p.numel() for p in module.parameters())
    once, twice = small(8, 4, x=X[:4]), small(4, 4, x=X[:4])
    passes = [step_memory(module, X[:4], plan).peak_of["forward"].num_bytes for plan in (once, twice)]
    assert passes[0] == passes[1] + held


@pytest.mark.parametrize("mesh", [None, sw.Mesh(dp=1), sw.Mesh()])
@pytest.mark.sampled(1)
def test_one_device_has_one_plan(mesh):
    plan = sw.plan(Mlp(), X, sw.Cluster.load("h100-1x1"), mesh=mesh)
    assert plan.optimality_gap == 0
    assert not any("@" in entry.strategy for entry in plan.operators)
    assert sw.verify(Mlp(), X, plan).ok
