"""What completes a plan when the user gives nothing, something, or everything; and operators without a rule."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from proving import prove
from search.small_models import Mlp, conversions_into, kinds, planned, strategies

MESH = sw.Mesh(dp=2, tp=4)
PRODUCTS = ("up/linear", "/relu", "down/linear")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 8)


def test_stand_alone_splits_nothing_and_communicates_nothing(x):
    plan = planned(Mlp(), (x,), mode="stand_alone")
    assert strategies(plan, *PRODUCTS) == ["", "", ""]
    assert kinds(plan) == kinds(plan, backward=True) == []
    assert plan.inputs[0].layout == "f32[16, 8]"


def test_data_parallel_splits_the_batch_over_all_axes_and_reduces_every_gradient_once(x):
    plan = planned(Mlp(), (x,), mesh=MESH, mode="data_parallel")
    assert strategies(plan, *PRODUCTS) == ["m@(dp,tp)", "d0@(dp,tp)", "m@(dp,tp)"]
    assert kinds(plan, backward=True) == ["all_reduce@(dp,tp)"]  # the four of them in one message
    apart = planned(Mlp(), (x,), mesh=MESH, mode="data_parallel", bucket_bytes=0)
    assert kinds(apart, backward=True) == ["all_reduce@(dp,tp)"] * 4
    assert plan.inputs[0].layout == "f32[16@(dp,tp), 8]"
    assert {entry.layout for entry in plan.parameters} == {"f32[16, 8]", "f32[16]", "f32[8, 16]", "f32[8]"}


@pytest.mark.parametrize("mesh", [sw.Mesh(dp=4), sw.Mesh(a=2, b=2), sw.Mesh(dp=2, tp=4), sw.Mesh(dp=6)], ids=str)
@pytest.mark.parametrize("samples", [5, 6, 7, 9, 10, 13])
@pytest.mark.sampled(8)
def test_every_device_has_a_share_of_a_batch_that_does_not_divide(mesh: sw.Mesh, samples: int) -> None:
    model, batch = Mlp(), torch.randn(samples, 8)
    few = samples < mesh.num_devices
    with pytest.warns(sw.errors.PlanWarning, match="devices repeat the work") if few else warnings.catch_warnings():
        plan = sw.plan(model, batch, mesh.num_devices, mode="data_parallel", mesh=mesh)
    layout = plan.layouts["args[0]"]
    rows = [layout.local_shape(mesh.coordinates(rank))[0] for rank in range(mesh.num_devices)]
    if not few:
        assert sum(rows) == samples
        assert max(rows) - min(rows) <= 1
    prove(model, batch, plan, steps=1)


def test_propagation_is_data_parallel_where_nothing_is_fixed(x):
    propagated = planned(Mlp(), (x,), search="sharding_propagation")
    assert propagated.operators == planned(Mlp(), (x,), mode="data_parallel").operators


def test_auto_follows_a_column_split_into_a_row_split(x):
    plan = planned(Mlp(), (x,), mesh=MESH, strategies={"up": "n@tp"})
    assert strategies(plan, *PRODUCTS) == ["m@dp n@tp", "d0@dp d1@tp", "m@dp k@tp"]
    assert [entry.layout for entry in plan.parameters] == ["f32[16@tp, 8]", "f32[16@tp]", "f32[8, 16@tp]", "f32[8]"]


def test_semi_auto_defaults_operators_without_a_strategy_to_data_parallelism(x):
    plan = planned(Mlp(), (x,), mesh=MESH, mode="semi_auto", strategies={"up": "n@tp"})
    assert strategies(plan, *PRODUCTS) == ["m@dp n@tp", "d0@dp", "m@dp"]
    assert conversions_into(plan, "/relu") == ["all_gather@tp"]


def test_semi_auto_lets_the_bias_follow_the_product_that_has_the_strategy(x):
    plan = planned(Mlp(), (x,), mesh=MESH, mode="semi_auto", strategies={"up": "n@tp"})
    assert strategies(plan, "up/add", "down/add") == ["d0@dp d1@tp", "d0@dp"]


def test_semi_auto_without_strategies_is_data_parallel(x):
    assert strategies(planned(Mlp(), (x,), mode="semi_auto"), *PRODUCTS) == ["m@dp", "d0@dp", "m@dp"]


def test_axes_that_nothing_mentions_split_the_batch_whatever_their_names(x):
    plan = planned(Mlp(), (x,), mesh=sw.Mesh(a=2, b=4), strategies={"up": "n@b"})
    assert plan.inputs[0].layout == "f32[16@a, 8]"


def test_a_partial_sum_is_scattered_rather_than_reduced_for_everyone(x):
    plan = planned(Mlp(), (x,), mesh=MESH, strategies={"up": "n@tp"})
    assert conversions_into(plan, "/square") == ["reduce_scatter@tp"]


# ------------------------------------------------------------------------------------- operators without a rule


@torch.library.custom_op("shardwise_test::swirl", mutates_args=())
def swirl(x: Tensor) -> Tensor:
    return x.roll(1, 0) * 2


@swirl.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


swirl.register_autograd(lambda ctx, gradient: gradient.roll(-1, 0) * 2)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.core = nn.Linear(8, 8), nn.Parameter(torch.eye(8) * 3 + torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (swirl(swirl(self.fc(x))) * nn.functional.pdist(self.core).sum()).square().mean()


def test_operators_without_a_rule_run_whole_with_one_warning_that_names_each_kind_once(x):
    model = Unknown()
    with pytest.warns(sw.errors.UnsplitWarning) as caught:
        plan = sw.plan(model, (x,), mesh=MESH, cluster=8, strategies={"fc": "n@tp"})
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.count("shardwise_test.swirl.default (/swirl, ") == 1
    assert text.count("aten.pdist.default (/pdist, ") == 1
    assert "test_modes.py:" in text
    assert caught[0].filename == __file__, "the warning points at the call of sw.plan"
    names = {entry.name.rpartition("/")[2] for entry in plan.operators if not entry.strategy}
    assert {"swirl", "swirl_1"} <= names
    with warnings.catch_warnings(action="error"):  # said once, when the plan was made
        report = sw.verify(model, (x,), plan)
    assert report.ok, str(report)
