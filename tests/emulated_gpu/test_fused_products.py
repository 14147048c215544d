"""Messages joined with their products by the operators of symmetric memory, on emulated GPUs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

import shardwise as sw
from launch.gloo_ranks import RunRanks
from programs.test_row_chunks import SEQUENCES, Llama
from shardwise.runtime import transit
from shardwise.runtime.local_shards import shard

STEPS = 2
TOLERANCE = 1e-12


def model() -> tuple[Llama, Tensor]:
    torch.manual_seed(0)
    return Llama(layers=1).double(), torch.randint(0, 32, (4, 8))


def train_fused(plan: str, fault: bool) -> tuple[float, Counter[str], str]:
    """(largest error of a loss, gradient or parameter, fused operators that ran, the error of one that fails). torch's
    test mode runs what they stand for. ``fault``: they gather and scatter another dim, and fail at the end."""
    ran: Counter[str] = Counter()
    failing: list[bool] = []
    said = ""
    start = transit.FusedMessage._start

    def counted(message: Any, *operands: Any) -> Any:
        ran["gathers" if message.instruction.gathers else "scatters"] += 1
        if failing:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        if fault:
            message.instruction = replace(message.instruction, dim=0)
        return start(message, *operands)

    module, batch = model()
    whole, _ = model()
    with (
        mock.patch.object(transit, "have_symmetric_memory", return_value=True),
        mock.patch.object(transit.FusedMessage, "_start", counted),
        _symmetric_memory._test_mode(),
    ):
        par = sw.parallelize(module, sw.Plan.from_json(plan) if dist.get_rank() == 0 else None, compile=False)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (par, whole)]
        worst = 0.0
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            want = whole(batch)
            want.backward()
            worst = max(worst, abs(par.step(batch.cuda()).item() - want.item()))
            for optimizer in optimizers:
                optimizer.step()
            for name, parameter in par.named_parameters():
                other = whole.get_parameter(name)
                for found, expected in ((parameter, other.detach()), (parameter.grad, other.grad)):
                    expected = shard(expected, par.layouts[name], par.coordinates)
                    worst = max(worst, float((found.detach().cpu() - expected).abs().max()))
        failing += [True] * fault
        try:
            par.step(batch.cuda())
        except sw.ShardwiseError as error:
            said = str(error)
    return worst, ran, said


@pytest.mark.parametrize("axes", [{"tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.long)])
def test_fused_operators_train_as_one_device(axes: dict[str, int], run_gpu_ranks: RunRanks) -> None:
    module, batch = model()
    mesh = sw.Mesh(**axes)
    plan = sw.plan(module, batch, mesh.num_devices, mesh=mesh, strategies=SEQUENCES, row_chunks="fused").to_json()
    for worst, ran, _ in run_gpu_ranks(train_fused, mesh.num_devices, plan, False):
        assert worst < TOLERANCE
        assert ran == {"gathers": 3 * (STEPS + 1), "scatters": STEPS + 1}
    for worst, _, said in run_gpu_ranks(train_fused, mesh.num_devices, plan, True):
        assert worst > 1e-3
        assert "all_gather" in said, said
        assert "layers.0" in said, "the operator"
