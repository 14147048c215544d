"""Where ``compile="graphs"`` is refused, and what it makes of a program. What it runs: ``tests/emulated_gpu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import shardwise as sw
from shardwise.runtime.cuda_graphs import check_graphs


@pytest.mark.parametrize(
    ("device", "settings", "error"),
    [
        ("cpu", {}, "captures CUDA graphs, and this rank runs on cpu"),
        ("cuda", {"stages": 2, "micro_batch": 2}, "for plans without stages"),
        ("cuda", {"offload": "all"}, "so that offload frees no memory"),
    ],
)
def test_graphs_are_refused_where_they_cannot_serve(device: str, settings: Mapping[str, Any], error: str) -> None:
    model, batch = nn.Sequential(*(nn.Linear(256, 256), nn.Tanh()) * 4), (torch.empty(512, 256),) * 2
    plan = sw.plan(model, batch, sw.Cluster.load("h100-1x2"), loss=mse_loss, **settings)
    with pytest.raises(sw.ShardwiseError, match=error) as caught:
        check_graphs(plan.plan, torch.device(device))
    assert "compile=True" in str(caught.value)
