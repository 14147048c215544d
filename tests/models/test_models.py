"""Real models in train mode, with dropout: under a plan they are the models of one device, and the plan splits them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from models.full_width import CASES, measure
from models.share import SplitShare, share_of_plan
from models.tiny_models import MODELS, TinyModel, gpt2, llama, resnet, token_inputs
from proving import prove
from shardwise.graph.capture import capture


def build(tiny: TinyModel, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return tiny.build().train(), tiny.inputs(batch)


def verified_share(tiny: TinyModel, mesh: sw.Mesh, *, batch: int = 8, **choices: Any) -> SplitShare:
    model, inputs = build(tiny, batch)
    plan = sw.plan(model, (), mesh.num_devices, kwargs=inputs, mesh=mesh, search="sharding_propagation", **choices)
    report = prove(model, (), plan, kwargs=inputs)
    assert not report.untraceable
    kinds = {difference.kind for difference in report.differences}
    assert {"loss", "output", "gradient", "parameter"} <= kinds, kinds
    return share_of_plan(plan, capture(model, (), inputs).graph)


@pytest.mark.parametrize("name", ["llama", "vit"])
@pytest.mark.sampled(1)
def test_the_propagated_plan_on_eight_devices_equals_one_device_and_splits_all_of_the_arithmetic(name):
    share = verified_share(MODELS[name], sw.Mesh(dp=8))
    assert share.without_rule == ()
    assert share.flops == pytest.approx(1.0)
    assert share.parameters is None


@pytest.mark.parametrize("name", ["gpt2", "bert"])  # the zoo has tensor-parallel plans of the others
@pytest.mark.sampled(1)
def test_a_data_by_tensor_plan_equals_one_device_and_splits_arithmetic_and_parameters(name):
    share = verified_share(MODELS[name], sw.Mesh(dp=2, tp=4), strategies=MODELS[name].strategies)
    assert share.without_rule == ()
    assert share.flops is not None
    assert share.flops >= 0.95
    assert share.parameters is not None
    assert share.parameters >= 0.85  # norms and positions are no longer small against matrices 32 wide


def test_the_batch_of_gpt2_is_divided_over_six_devices():
    share = verified_share(gpt2(), sw.Mesh(x=6), batch=6)
    assert share.flops == pytest.approx(1.0)


@pytest.mark.long
def test_heads_that_do_not_divide_are_shared_out_unevenly():
    share = verified_share(gpt2(heads=4), sw.Mesh(dp=2, tp=3), batch=4, strategies=gpt2().strategies)
    assert share.flops is not None
    assert share.flops >= 0.95
    assert all("whole" not in item.reason for item in share.operators_unsplit), share.operators_unsplit
    assert {item.reason for item in share.operators_unsplit if item.name.endswith("c_attn/mm")} == {"n: 4 over 3"}


@pytest.mark.parametrize("mesh", [sw.Mesh(dp=2, tp=3), sw.Mesh(dp=1, tp=8)], ids=str)
@pytest.mark.long
def test_llama_runs_with_more_tensor_ranks_than_key_heads(mesh):
    tiny = llama(heads=6 if mesh.num_devices == 6 else 8, key_heads=2)
    share = verified_share(tiny, mesh, batch=4, strategies=tiny.strategies)
    assert share.without_rule == ()
    assert share.flops is not None
    assert share.flops >= 0.95


def test_batch_norm_takes_the_statistics_of_the_whole_batch():
    model, inputs = build(resnet(), 16)
    report = prove(model, (), sw.plan(model, (), 8, kwargs=inputs, search="sharding_propagation"), kwargs=inputs)
    assert not report.untraceable
    compared = {difference.name for difference in report.differences if difference.kind == "buffer"}
    assert compared == {name for name, _ in model.named_buffers()}
    assert any(name.endswith("running_var") for name in compared)


def test_a_model_on_the_meta_device_keeps_its_tied_weights_in_a_verification():
    with torch.device("meta"):
        model = gpt2().build().train()
    inputs = token_inputs(8)
    plan = sw.plan(model, (), 8, kwargs=inputs, search="sharding_propagation")
    report = prove(model, (), plan, kwargs=inputs)
    assert not report.untraceable


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1)
def test_at_full_width_a_data_by_tensor_plan_splits_95_percent_of_arithmetic_and_parameters(name):
    share = measure(CASES[name])
    assert share.without_rule == ()
    assert share.flops is not None
    assert share.flops >= 0.95, share.operators_unsplit
    assert share.parameters is not None
    assert share.parameters >= 0.95, share.parameters_unsplit
