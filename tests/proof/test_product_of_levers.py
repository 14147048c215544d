"""Storage in parts, values made again or on the host, micro-batches and precisions on real models, every pair of
settings of two levers somewhere: equal to one device on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from models import tiny_models
from models.zoo import ZOO

BATCH = 8
MIXED = sw.Precision(torch.bfloat16, torch.float32, torch.float32)
MODELS = {
    "gpt2": tiny_models.gpt2(),
    "llama": tiny_models.llama(),
    "vit": tiny_models.vit(),
    "resnet": tiny_models.resnet(),
    "mixtral": ZOO["mixtral"],
    "dlrm": ZOO["dlrm"],
}
LEVERS: dict[str, tuple[Any, ...]] = {
    "zero": (None, 1, 2, 3),
    "recompute": ("none", "cheap", "full"),
    "offload": ("none", "all"),
    "micro_batch": (BATCH, BATCH // 2, BATCH // 4),
    "precision": (None, MIXED),
}
Settings = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore")


def pairs(settings: Settings) -> set[tuple[str, Any, str, Any]]:
    return {(a, settings[a], b, settings[b]) for a, b in combinations(settings, 2)}


def covering() -> Iterator[Settings]:
    """As few settings as a greedy choice needs for every pair of two levers."""
    every = [dict(zip(LEVERS, values, strict=True)) for values in product(*LEVERS.values())]
    left = set().union(*map(pairs, every))
    while left:
        best = max(every, key=lambda settings: len(pairs(settings) & left))
        left -= pairs(best)
        yield best


def verified(name: str, settings: Settings) -> None:
    torch.manual_seed(0)
    tiny = MODELS[name]
    module: nn.Module = tiny.build().train()
    inputs = tiny.inputs(BATCH)
    if name == "mixtral":
        module.config.output_router_logits = False  # its auxiliary loss is no sum over micro-batches
    chosen = {key: value for key, value in settings.items() if value is not None}
    if chosen["micro_batch"] < BATCH:
        chosen["global_batch"] = BATCH
    else:
        del chosen["micro_batch"]
    cluster = sw.Cluster.load("h100").with_nodes(1, 2)
    plan = sw.plan(module, (), cluster, kwargs=inputs, mode="data_parallel", **chosen)
    report = sw.verify(module, (), plan, kwargs=inputs, steps=2)
    assert report.ok, f"{name}, {settings}: {report}"
    if settings["recompute"] != "none" and name != "dlrm":  # whose blocks are single layers: nothing is between
        assert any(op.again for op in plan.operators), f"{name}, {settings}"
    if settings["zero"] == 3:
        assert any(parameter.again for parameter in plan.parameters), f"{name}, {settings}"


def test_the_settings_have_every_pair() -> None:
    chosen = list(covering())
    assert len(chosen) < 20
    assert len(set().union(*map(pairs, chosen))) == sum(
        len(LEVERS[a]) * len(LEVERS[b]) for a, b in combinations(LEVERS, 2)
    )


@pytest.mark.parametrize(("name", "number"), [("gpt2", 0), ("resnet", 1)])
@pytest.mark.sampled(1)
def test_levers_together_on_a_model(name: str, number: int) -> None:
    with mock.patch("shardwise.programs.activation_offload.SMALLEST_BYTES", 1):
        verified(name, list(covering())[number])


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_pair_of_levers_on_every_model(name: str) -> None:
    with mock.patch("shardwise.programs.activation_offload.SMALLEST_BYTES", 1):
        for settings in covering():
            verified(name, settings)
