"""The state of training leaves emulated GPUs and comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from emulated_gpu.cases import Case, batch, build, make_plan, small_models
from shardwise.runtime import program_cache

RunRanks = Callable[..., list[Any]]

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def made(case: Case, plan: str) -> tuple[sw.Parallel, torch.optim.Optimizer]:
    given = sw.Plan.from_json(plan) if dist.get_rank() == 0 else None
    model = sw.parallelize(build(case.model), given, inputs="local", compile=False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state(model: sw.Parallel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [t for p in model.parameters() for _, t in sorted(optimizer.state.get(p, {}).items())]
    return [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers(), *kept)]


def step_of(case: Case, number: int, model: sw.Parallel, optimizer: torch.optim.Optimizer) -> None:
    parts = {name: x.chunk(2)[dist.get_rank()].cuda() for name, x in batch(case.model, number).items()}
    model.step(**parts)
    optimizer.step()
    optimizer.zero_grad()


def save_and_load(case: Case, plan: str, folder: str) -> tuple[list[str], bool, set[str]]:
    from emulated_gpu.device import record

    with small_models(program_cache):
        model, optimizer = made(case, plan)
        record.clear()
        for step in range(2):
            step_of(case, step, model, optimizer)
        saving = sw.save_checkpoint(Path(folder, "a"), model, optimizer, step=2, blocking=False)
        saved = state(model, optimizer)
        step_of(case, 2, model, optimizer)  # while the files are written
        saving.wait()
        sw.load_checkpoint(Path(folder, "a"), model, optimizer)
        devices = {v.device.type for p in model.parameters() for v in (p, optimizer.state[p]["exp_avg"])}
        pairs = zip(state(model, optimizer), saved, strict=True)
        return list(record.races), all(torch.equal(one, two) for one, two in pairs), devices


def test_a_checkpoint_is_saved_beside_a_step_and_loaded(run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    case = Case("llama", {"dp": 2}, {"zero": 3})
    for found in run_gpu_ranks(save_and_load, 2, case, make_plan(case).to_json(), str(tmp_path)):
        assert found == ([], True, {"cuda"})
