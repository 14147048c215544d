"""What goes on after a checkpoint: modules of stages, low precision, other optimizers, ranks that were killed."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from train.runs import split, tools, train

SIZES = {"a": (4, 6), "b": (6, 3)}


def stages(folder: str) -> None:
    """On a rank: a module of which every rank holds a part only, as the stages of a pipeline do."""
    own = "ab"[dist.get_rank()]
    torch.manual_seed(0)
    whole = nn.ModuleDict({name: nn.Linear(*size) for name, size in SIZES.items()})
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
    whole["b"](whole["a"](torch.ones(2, 4))).sum().backward()
    optimizer.step()
    part = nn.ModuleDict({own: whole[own]})
    of_part = torch.optim.Adam(part.parameters(), lr=0.1)
    of_part.state.update({p: optimizer.state[p] for p in part.parameters()})
    sw.save_checkpoint(f"{folder}/stages", part, of_part, step=1)
    again = nn.ModuleDict({name: nn.Linear(*size) for name, size in SIZES.items()})
    of_again = torch.optim.Adam(again.parameters(), lr=9.0)
    sw.load_checkpoint(f"{folder}/stages", again, of_again)
    assert all(map(torch.equal, again.parameters(), whole.parameters()))
    sw.save_checkpoint(f"{folder}/whole", again, of_again, step=2)
    fresh = nn.ModuleDict({own: nn.Linear(*SIZES[own])})
    of_fresh = torch.optim.Adam(fresh.parameters(), lr=3.0)
    sw.load_checkpoint(f"{folder}/whole", fresh, of_fresh)
    for p, q in zip(fresh.parameters(), part.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(of_fresh.state[p]["exp_avg"], optimizer.state[q]["exp_avg"])
    assert of_fresh.param_groups[0]["lr"] == 0.1
    alone = nn.ModuleDict({"a": nn.Linear(*SIZES["a"])})  # nobody wants b
    with raises(sw.ShardwiseError, "b.bias", "b.weight"):
        sw.load_checkpoint(f"{folder}/whole", alone)


def low_precision(folder: str) -> None:
    """On a rank: bfloat16, a learning rate that is a tensor, a third state, and a fused optimizer."""
    settings: dict[str, Any] = {"precision": sw.Precision(parameter=torch.bfloat16), "dtype": torch.float32}
    kinds: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
        "amsgrad": lambda p, lr: torch.optim.AdamW(p, amsgrad=True, lr=torch.tensor(lr), foreach=False),
        "fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    }
    for name, kind in kinds.items():
        runs = []
        for seed in (0, 3):
            par = split("tp2", seed=seed, **settings)
            optimizer = kind(par.parameters(), 0.01 if seed == 0 else 5.0)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
            if seed == 0:
                train(par, optimizer, scheduler, 0, 2)
                sw.save_checkpoint(f"{folder}/{name}", par, optimizer, step=2, schedulers=scheduler)
            else:
                sw.load_checkpoint(f"{folder}/{name}", par, optimizer, schedulers=scheduler)
            runs.append(train(par, optimizer, scheduler, 2, 4))
        assert runs[0] == runs[1], name


def in_parts(folder: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # low precision loses updates, and says so
        stages(folder)
        low_precision(folder)


def test_stages_and_low_precision_go_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(in_parts, 2, str(tmp_path))


def killed_while_saving(folder: str) -> None:
    par = split("dp2")
    optimizer, scheduler = tools(par)
    sw.save_checkpoint(f"{folder}/good", par, optimizer, step=1, schedulers=scheduler)
    dist.barrier()
    if dist.get_rank() == 1:
        with mock.patch("os.write", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            sw.save_checkpoint(f"{folder}/torn", par, optimizer, step=2, schedulers=scheduler)
    sw.save_checkpoint(f"{folder}/torn", par, optimizer, step=2, schedulers=scheduler)


def resumed(folder: str) -> tuple[str, list[str]]:
    par = split("dp1")
    optimizer, scheduler = tools(par)
    with warnings.catch_warnings(record=True, action="always") as said:
        found = sw.load_checkpoint(folder, par, optimizer, schedulers=scheduler)
    return found.path.name, [str(one.message) for one in said]


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_saves_leaves_the_older_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    with raises(RuntimeError, "rank 1 died"):
        run_ranks(killed_while_saving, 2, str(tmp_path), time_limit_seconds=60)
    ((name, said),) = run_ranks(resumed, 1, str(tmp_path), time_limit_seconds=60)
    assert name == "good"
    assert any("torn.incomplete is skipped: its save did not finish" in text for text in said)
