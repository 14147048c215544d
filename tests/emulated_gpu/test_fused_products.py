"""Messages joined with their products by the operators of symmetric memory, on emulated GPUs."""

from __future__ import annotations

from collections import Counter
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
from shardwise.runtime import fused_products, program_cache
from shardwise.runtime.local_shards import shard


def model() -> tuple[Llama, Tensor]:
    torch.manual_seed(0)
    return Llama(layers=1).double(), torch.randint(0, 32, (4, 8))


def train_fused(plan: str) -> tuple[float, float, Counter[str]]:
    """(loss, largest error of a gradient, fused operators that ran). torch's test mode runs what they stand for."""
    ran: Counter[str] = Counter()
    forward = fused_products.RunFusedProduct.forward

    def counted(module: Any, *operands: Tensor) -> Any:
        ran["gathers" if module.instruction.gathers else "scatters"] += 1
        return forward(module, *operands)

    module, batch = model()
    whole, _ = model()
    whole(batch).backward()
    with (
        mock.patch.object(program_cache, "have_symmetric_memory", return_value=True),
        mock.patch.object(fused_products.RunFusedProduct, "forward", counted),
        _symmetric_memory._test_mode(),
    ):
        par = sw.parallelize(module, sw.Plan.from_json(plan) if dist.get_rank() == 0 else None, compile=False)
        loss = par.step(batch.cuda()).item()
    worst = 0.0
    for name, parameter in par.named_parameters():
        want = shard(whole.get_parameter(name).grad, par.layouts[name], par.coordinates)
        worst = max(worst, float((parameter.grad.cpu() - want).abs().max()))
    return loss, worst, ran


@pytest.mark.parametrize("axes", [{"tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.long)])
def test_fused_operators_train_as_one_device(axes: dict[str, int], run_gpu_ranks: RunRanks) -> None:
    module, batch = model()
    mesh = sw.Mesh(**axes)
    plan = sw.plan(module, batch, mesh.num_devices, mesh=mesh, strategies=SEQUENCES)
    want = module(batch).item()
    for loss, worst, ran in run_gpu_ranks(train_fused, mesh.num_devices, plan.to_json()):
        assert abs(loss - want) < 1e-12
        assert worst < 1e-12
        assert ran == {"gathers": 3, "scatters": 1}
