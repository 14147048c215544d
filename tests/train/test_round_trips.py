"""What four data-parallel ranks saved of a GPT-2 goes on under tensor parallelism, in stages, on three uneven ranks
and in one process: as if the run had been under that plan from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.tiny_models import VOCABULARY, gpt2
from runtime.training import train
from train.test_checkpoints import whole_tensors

SAVED, STEPS = 4, 14
# float64: the same sums in other orders, through 14 steps of AdamW (measured: 1e-14).
TOLERANCE = 1e-11
TP = {f"net.{name}": text for name, text in gpt2().strategies.items()}
STAGES = {name: text for name, text in TP.items() if ".h." in name}  # all stages are to have what is named
PLANS: dict[str, dict[str, Any]] = {
    "dp4": {"mesh": sw.Mesh(dp=4)},
    "dp2 x tp2": {"mesh": sw.Mesh(dp=2, tp=2), "strategies": TP},
    "pp2 x tp2": {"stages": 2, "micro_batch": 3, "mesh": sw.Mesh(tp=2), "strategies": STAGES},
    "tp3": {"mesh": sw.Mesh(tp=3), "strategies": TP},  # four heads, 64 columns
    "one": {"mesh": sw.Mesh(dp=1)},
}


class Scored(nn.Module):
    """A GPT-2 whose loss is of its own dtype; transformers' is of float32 always."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt2().build()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.net(ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (12, 6), generator=torch.Generator().manual_seed(step % 2))


def made(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A parallel model with other initial values and another learning rate than the run has, but for ``seed=0``."""
    torch.manual_seed(seed)
    model = Scored().double()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # eager attention draws other masks on other ranks' parts
    plan = None
    if dist.get_rank() == 0:
        plan = sw.plan(model, batch(0), dist.get_world_size(), search="sharding_propagation", **PLANS[kind])
    par = sw.parallelize(model, plan, compile=False)
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-2 if seed == 0 else 0.5)
    return par, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def trained(par: Any, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> list[float]:
    return train(par, ((batch(step),) for step in range(first, last)), optimizer, scheduler).losses


def saves(folder: str) -> list[float]:
    par, optimizer, scheduler = made("dp4", 0)
    losses = trained(par, optimizer, scheduler, 0, SAVED)
    sw.save_checkpoint(f"{folder}/saved", par, optimizer, step=SAVED, schedulers=scheduler)
    return losses + trained(par, optimizer, scheduler, SAVED, STEPS)


def goes_on(folder: str, kind: str) -> tuple[list[float], list[float]]:
    """(losses after the checkpoint, losses of a run that was under this plan from the start). What was loaded is saved
    again."""
    whole = trained(*made(kind, 0), 0, STEPS)
    par, optimizer, scheduler = made(kind, 3)
    assert sw.load_checkpoint(f"{folder}/saved", par, optimizer, schedulers=scheduler).step == SAVED
    sw.save_checkpoint(f"{folder}/{kind}", par, optimizer, step=SAVED, schedulers=scheduler)
    return trained(par, optimizer, scheduler, SAVED, STEPS), whole


def on_four(folder: str) -> dict[str, Any]:
    return {"dp4": saves(folder), **{kind: goes_on(folder, kind) for kind in ("dp2 x tp2", "pp2 x tp2")}}


def alone(folder: str, kind: str) -> dict[str, Any]:
    return {kind: goes_on(folder, kind)}


@pytest.mark.long
def test_the_next_ten_losses_are_those_of_an_uninterrupted_run_under_each_plan(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    ranks = run_ranks(on_four, 4, str(tmp_path))
    assert all(found == ranks[0] for found in ranks)
    found = ranks[0]
    for count, kind in ((3, "tp3"), (1, "one")):
        found |= run_ranks(alone, count, str(tmp_path), kind)[0]
    saved = whole_tensors(tmp_path / "saved")
    assert sum("exp_avg" in name for name in saved) == 2 * sum(name.startswith("model.") for name in saved) - 2
    uninterrupted = found.pop("dp4")
    assert uninterrupted[-1] < 0.9 * uninterrupted[0]  # it learns
    for kind, (losses, whole) in found.items():
        assert len(losses) == 10
        assert losses == pytest.approx(whole[SAVED:], rel=TOLERANCE), kind
        assert losses == pytest.approx(uninterrupted[SAVED:], rel=TOLERANCE), kind
        again = whole_tensors(tmp_path / kind)
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[name], saved[name]) for name in saved), kind
