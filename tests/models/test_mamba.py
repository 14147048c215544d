"""A state-space model, whose loop over the sequence is several dozen small operators: a plan chosen by price splits
nearly all of them, the numbers are those of one device, and the collectives those of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

import shardwise as sw


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "intermediate_size": 64, "time_step_rank": 4}
        self.model = MambaForCausalLM(MambaConfig(**sizes, num_hidden_layers=1, use_cache=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def where_splitting_pays() -> sw.Cluster:
    cluster = sw.Cluster.load("h100-1x8")
    device = cluster.device
    flops = type(device.flops)({name: rate / 1e5 for name, rate in device.flops.items()})
    slow = replace(device, flops=flops, memory_bandwidth=device.memory_bandwidth / 1e4, kernel_latency=0.0)
    return replace(cluster, device=slow)


@pytest.mark.long
def test_collectives_of_a_mamba_model_are_those_of_its_plan() -> None:
    ids = torch.randint(0, 64, (8, 2), generator=torch.Generator().manual_seed(0))
    mesh = sw.Mesh(a=2, b=2, c=2)
    plan = sw.plan(Mamba(), (ids,), where_splitting_pays(), mesh=mesh, search="recursive_programming")
    assert sum(bool(op.strategy) for op in plan.operators) > 0.8 * len(plan.operators)
    report = sw.verify(Mamba(), (ids,), plan, steps=1)
    assert report.collectives_match, str(report)
    assert report.ok, str(report)
    assert not report.untraceable
    assert len(report.backward) > 20
