"""Storage in parts, values made again, precision and micro-batches in one plan: equal to one device on the whole batch,
and the file of the plan says all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from search.small_models import PreNorm
from shardwise.api import step_memory

MIXED = sw.Precision(torch.bfloat16, torch.float32, torch.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(PreNorm(8, 16, 0.2) for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (8, 4), generator=generator)
    labels = ids.clone()
    labels[0] = labels[3, :3] = -100  # micro-batches count different numbers of labels
    return ids, labels


@pytest.mark.parametrize(
    "choices",
    [
        {"zero": 3, "recompute": "full", "micro_batch": 2},
        {"zero": 3, "recompute": "cheap", "precision": MIXED},
        {"zero": sw.Zero(3, whole_below=20), "recompute": "full", "precision": MIXED, "micro_batch": 4},
        {"recompute": "full", "precision": sw.Precision(torch.float32, torch.float64), "micro_batch": 2},
    ],
    ids=["passes", "precision", "all", "narrow computation"],
)
@pytest.mark.sampled(1)
def test_levers_are_right_together(choices: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, inputs = Model(), batch()
    whole = {"global_batch": 8} if "micro_batch" in choices else {}
    plan = sw.plan(model, inputs, 2, mode="data_parallel", **choices, **whole)
    prove(model, inputs, plan, steps=2)
    assert plan.micro_batches == 8 // choices.get("micro_batch", 8)
    assert any(entry.again for entry in plan.operators)
    assert any(entry.again for entry in plan.parameters) == ("zero" in choices)
    assert plan.precision == choices.get("precision", sw.Precision())
    assert sw.Plan.from_json(plan.to_json()) == plan
    plain = sw.plan(model, inputs, 2, mode="data_parallel")
    assert step_memory(model, inputs, plan).kept_bytes < step_memory(model, inputs, plain).kept_bytes
