"""The printed form: golden plans of the example model, and the rules by which equal layers share a line.

After a change that is meant: ``SHARDWISE_GOLDEN=write pytest tests/plans/test_printing.py`` writes the files anew; what
changed is then read in the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from runtime.small_gpt import example_module
from shardwise.plans.printing import merged_operators, merged_tensors
from shardwise.plans.quantities import format_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
TENSOR_PARALLEL = {"blocks.*.attention.qkv": "n@tp", "blocks.*.mlp.up": "n@tp", "tokens": "v@tp", "head": "n@tp"}
CHOICES = {
    "gpt-dp8": {"mesh": sw.Mesh(dp=8)},
    "gpt-dp2-tp4": {"mesh": sw.Mesh(dp=2, tp=4), "strategies": TENSOR_PARALLEL},
}


def gpt_plan(name: str) -> sw.Plan:
    gpt = example_module("gpt")
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(layers=3, context=16, width=32, heads=4))
        ids, labels = torch.empty(2, 8, 16, dtype=torch.int64)
    cluster = sw.Cluster.load("local").with_devices(8)
    return sw.plan(model, (ids, labels), cluster, search="sharding_propagation", **CHOICES[name])


@pytest.mark.parametrize("name", CHOICES)
def test_the_plan_of_the_example_prints_as_it_did(name):
    path, text = GOLDEN / f"{name}.txt", str(gpt_plan(name)) + "\n"
    if os.environ.get("SHARDWISE_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_equal_layers_share_a_line_and_layers_that_differ_do_not():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.fc(x))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    mesh = sw.Mesh(dp=2, tp=2)
    text = str(sw.plan(Stack(), torch.randn(8, 8), 4, mesh=mesh, strategies={"layers.[14].fc": "n@tp"}))
    assert "  layers.0.fc.weight       f32[8, 8]\n" in text
    assert "  layers.1,4.fc.weight     f32[8@tp, 8]\n" in text
    assert "  layers.2-3,5.fc.weight   f32[8, 8@tp]\n" in text
    assert text.count("layers.2-3,5.fc/linear ") == 1


def test_numbers_of_sizes_and_strategies_are_no_numbers_of_names():
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4))
    plan = sw.plan(net, torch.randn(8, 8), 2, mesh=sw.Mesh(dp=2), strategies={"1": "n@dp"}, mode="semi_auto")
    tensors = merged_tensors(plan.parameters)
    assert ("0.bias", "f32[16]") in tensors
    assert not {layout for _, layout in tensors} - {entry.layout for entry in plan.parameters}
    splits = merged_operators(plan.stages[0])[0]
    assert not {row[1] for row, _ in splits} - {operator.strategy or "whole" for operator in plan.operators}


def test_a_plan_says_what_a_device_holds_and_sends():
    text = str(gpt_plan("gpt-dp2-tp4"))
    assert "parameters 215 KiB, of which a device holds 57.2 KiB" in text
    assert "plan for Mesh(dp=2, tp=4), 8 devices" in text
    assert "      weight: f32[256@tp, 32] -> f32[256@tp, 32] replicated(dp)    none / all_reduce(dp, 8 KiB)" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (65536, "64 KiB"), (1536 * 1024, "1.5 MiB"), (2**42, "4 TiB")],
)
def test_bytes_print_with_three_digits(count, text):
    assert format_bytes(count) == text


def test_waits_for_copies_of_the_host_are_no_waits_for_messages():
    with torch.device("meta"):
        net, batch = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), torch.empty(64, 2048)
    cluster = sw.Cluster.load("h100-1x1")
    plan = sw.plan(net, batch, cluster, loss=lambda out: out.square().mean(), optimizer="adamw on host")
    text = str(plan)
    assert "waits for copies from and to the host: use a larger batch" in text
    assert "waits for messages" not in text
    assert plan.prediction.message_wait == pytest.approx(0.0, abs=1e-9)


def test_a_tiny_step_in_a_lower_precision_says_that_casts_take_longer_than_they_save():
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(8, 16)
    lower = sw.Precision(compute=torch.bfloat16, parameter=torch.float32)
    own, cast = (
        sw.plan(net, inputs, "h100-1x4", loss=lambda y: y.square().mean(), mode="data_parallel", precision=precision)
        for precision in (None, lower)
    )
    assert "casts of parameters" in str(cast)
    assert "casts of parameters" not in str(own)
    more = cast.prediction.default_seconds - own.prediction.default_seconds
    assert cast.prediction.cast_seconds == pytest.approx(more, rel=0.1)
