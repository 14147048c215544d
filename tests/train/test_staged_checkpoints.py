"""Checkpoints of pipelines: every rank holds its stages alone, and any other plan goes on from what they saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from runtime.staged_model import Staged, staged_batch
from runtime.training import train

STEPS = 4


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return Staged().double()


def planned(**options: Any) -> sw.Plan | None:
    if dist.get_rank():
        return None
    return sw.plan(made(), staged_batch(8, 0), 2, search="sharding_propagation", **options)


def stepped(par: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    return train(par, (staged_batch(8, step) for step in steps), optimizer).losses


def on_ranks(folder: str) -> dict[str, Any]:
    plans: dict[str, dict[str, Any]] = {
        "stages": {"stages": 2, "micro_batch": 2, "global_batch": 8},
        "folded": {"stages": 4, "micro_batch": 2, "global_batch": 8, "schedule": "ZBVZeroBubble"},
        "zero": {"mesh": sw.Mesh(dp=2), "zero": 3},
    }
    alone = sw.parallelize(made(), planned(mesh=sw.Mesh(dp=2)), compile=False)
    wanted = stepped(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), range(STEPS))
    found: dict[str, Any] = {}
    for first, second in (("stages", "zero"), ("zero", "folded"), ("folded", "stages")):
        par = sw.parallelize(made(), planned(**plans[first]), compile=False)
        optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2)
        losses = stepped(par, optimizer, range(2))
        path = Path(folder) / f"{first}-{second}"
        sw.save_checkpoint(path, par, optimizer, step=2)
        other = sw.parallelize(made(), planned(**plans[second]), compile=False)
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        sw.load_checkpoint(path, other, optimizer)
        losses += stepped(other, optimizer, range(2, STEPS))
        found[f"{first} to {second}"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        weights = Path(folder) / f"weights-{first}"
        sw.save_pretrained(par, weights)
        dist.barrier()
        read = sw.parallelize(made(), planned(**plans[first]), weights=weights, compile=False)
        held = dict(par.named_parameters())
        same = [torch.equal(p, held[name]) for name, p in read.named_parameters()]
        found[f"weights of {first}"] = 0.0 if same and all(same) else 1.0
    return found


def test_what_stages_saved_any_plan_loads_and_the_other_way(run_ranks: RunRanks, tmp_path: Path) -> None:
    for found in run_ranks(on_ranks, 2, str(tmp_path)):
        assert len(found) == 6
        for name, error in found.items():
            assert error < 1e-11, (name, error)  # float64: sums in another order, through four steps of AdamW
