"""Backward in halves: what the first half sends to the stage before is on its way while the second half runs, and must
not be written."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.runtime.stage import StageWorker

SHAPE = (1, 3, 4)  # of a micro-batch of one sample


class Shifts(nn.Module):
    """Of every layer the gradient of ``shift`` is a view of the cotangent of what the layer receives."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.shifts = nn.ParameterList(torch.rand(12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for shift in self.shifts:
            x = torch.tanh(x + shift.view(SHAPE))
        return x.square().sum()


def train() -> tuple[int, float]:
    """On a rank of two places: the cotangents that were sent, and how far gradients are from those of one device."""
    torch.manual_seed(0)
    module, x = Shifts().double(), torch.rand(4, *SHAPE[1:], dtype=torch.float64)
    reference = copy.deepcopy(module)
    marks = ["add", "add_1", "add_2", "add_3"]
    plan = sw.plan(module, x, 2, mesh=sw.Mesh(dp=1), stages=4, schedule="ZBVZeroBubble", micro_batch=1)
    assert [any(mark in entry.name for entry in plan.stages[i].operators) for i, mark in enumerate(marks)]
    par = sw.parallelize(module, plan)
    sent: list[tuple[Tensor, Tensor]] = []
    backward = StageWorker.backward

    def noted(worker: StageWorker, micro_batch: int, kind: Any, cotangents: Sequence[Any]) -> tuple[Tensor | None, ...]:
        found = backward(worker, micro_batch, kind, cotangents)
        sent.extend((tensor, tensor.clone()) for tensor in found if tensor is not None)
        return found

    with patch.object(StageWorker, "backward", noted):
        par.step(x)
    assert all(torch.equal(tensor, before) for tensor, before in sent), "what is on its way was written"
    torch.stack([reference(row) for row in x.split(1)]).sum().backward()
    whole = dict(reference.named_parameters())
    errors = [(p.grad - whole[name].grad).abs().max().item() for name, p in par.named_parameters()]
    return len(sent), max(errors)


def test_what_is_sent_back_is_not_written_while_the_second_half_runs(run_ranks: RunRanks) -> None:
    found = run_ranks(train, 2)
    assert sum(number for number, _ in found) >= 12, "three stages of four send, of four micro-batches"
    assert max(error for _, error in found) < 1e-13
