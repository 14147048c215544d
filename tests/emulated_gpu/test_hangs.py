"""Ranks that do not come to a collective between GPUs: the others say which operator waits, and for whom."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import CollectiveError
from shardwise.runtime import gpu_watcher, messages

RunRanks = Callable[..., list[Any]]
LATE_SECONDS = 3.0  # the emulated time-out


def planned(rank: int) -> sw.Parallel:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).double()

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    strategies = {"0": "n@tp"}
    plan = sw.plan(module, torch.zeros(4, 8).double(), 2, loss=loss, mesh=sw.Mesh(tp=2), strategies=strategies)
    return sw.parallelize(module, plan if rank == 0 else None, loss=loss, compile=False)


def hang(how: str) -> tuple[str, tuple[int, ...], str]:
    """Rank 1 fails in its third step, or makes none. Returns what rank 0 hears of it."""
    from emulated_gpu.device import gpu

    gpu.set_patience(100)  # a stream waits for this long, in ms, before its host runs ahead
    rank = dist.get_rank()
    model, x = planned(rank), torch.ones(4, 8, dtype=torch.float64, device="cuda")
    for _ in range(2):
        model.step(x).item()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if how == "fails":
            broken = mock.patch.object(messages.CollectiveMessage, "launch", side_effect=RuntimeError("broken here"))
            with broken, pytest.raises(RuntimeError, match="broken here"):
                model.step(x)
        store.wait(["rank 0 has heard"])  # alive, and nowhere
        return "", (), ""
    returned = False
    try:
        loss = model.step(x)  # returns: the host runs ahead of the device
        returned = True
        loss.item()
        return "nothing", (), ""
    except CollectiveError as error:
        return f"{type(error).__name__} {returned}", tuple(error.blames), str(error)
    finally:
        store.set("rank 0 has heard", "")


def hang_until_late(how: str) -> tuple[str, tuple[int, ...], str]:
    with mock.patch.object(gpu_watcher, "group_timeout", return_value=timedelta(seconds=LATE_SECONDS)):
        return hang(how)


def test_a_rank_that_fails_is_named_where_the_host_waits(run_gpu_ranks: RunRanks) -> None:
    (kind, ranks, text), _ = run_gpu_ranks(hang, 2, "fails")
    assert (kind, ranks) == ("CollectiveError True", (1,)), text
    assert "rank 1 has left this call: RuntimeError: broken here" in text


def test_a_rank_that_does_not_come_is_named_with_the_operator(run_gpu_ranks: RunRanks) -> None:
    (kind, ranks, text), _ = run_gpu_ranks(hang_until_late, 2, "stays away")
    assert (kind, ranks) == ("CollectiveError True", (1,)), text
    assert "over tp" in text
    assert "rank 1 did not arrive" in text
    assert "test_hangs.py" in text, "the line of the operator"
