"""Ranks that do not come to a collective between GPUs: the others say which operator waits, and for whom."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.errors import CollectiveError
from shardwise.runtime import gpu_watcher, messages
from shardwise.runtime.stage import StageWorker

LATE_SECONDS = 3.0  # the emulated time-out


def planned(rank: int, **options: Any) -> sw.Parallel:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).double()
    options = options or {"mesh": sw.Mesh(tp=2), "strategies": {"0": "n@tp"}}

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    plan = sw.plan(module, torch.zeros(4, 8).double(), 2, loss=loss, **options)
    return sw.parallelize(module, plan if rank == 0 else None, loss=loss, compile=False)


class InThisThread:
    """An executor of no thread."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        return SimpleNamespace(result=lambda: result)


def hang(how: str, steps_in: str = "main", reads_in: str = "main", **options: Any) -> tuple[str, tuple[int, ...], str]:
    """Rank 1 fails in its third step, or makes none. Returns what rank 0 hears of it, whose steps and whose reading of
    their losses are in these threads."""
    from emulated_gpu.device import gpu

    rank = dist.get_rank()
    model, x = planned(rank, **options), torch.ones(4, 8, dtype=torch.float64, device="cuda")
    threads: dict[str, Any] = {
        "main": InThisThread(),
        "another": ThreadPoolExecutor(1),
        "a third": ThreadPoolExecutor(1),
    }
    for _ in range(2):
        threads[reads_in].submit(threads[steps_in].submit(model.step, x).result().item).result()
    gpu.set_patience(100)  # a stream waits for this long, in ms, before its host runs ahead
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if how == "fails":
            owner, attribute = (StageWorker, "forward") if options else (messages.CollectiveMessage, "launch")
            broken = mock.patch.object(owner, attribute, side_effect=RuntimeError("broken here"))
            with broken, pytest.raises(RuntimeError):
                model.step(x)
        store.wait(["rank 0 has heard"])  # alive, and nowhere
        return "", (), ""
    returned = False
    try:
        loss = threads[steps_in].submit(model.step, x).result()  # returns: the host runs ahead of the device
        returned = True
        threads[reads_in].submit(loss.item).result()
        return "nothing", (), ""
    except CollectiveError as error:
        with pytest.raises(CollectiveError, match=f"rank {error.blames[0]}"):  # so does every later call
            model.step(x)
        same = pickle.loads(pickle.dumps(error))
        return f"{type(same).__name__} {returned}", tuple(same.blames), str(same)
    finally:
        store.set("rank 0 has heard", "")


def hang_in_pipeline() -> tuple[str, tuple[int, ...], str]:
    return hang("fails", stages=2, micro_batch=2, search="sharding_propagation")


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("steps_in", "reads_in"), [("another", "another"), ("another", "main"), ("main", "another"), ("another", "a third")]
)
def test_the_error_reaches_whoever_waits(steps_in: str, reads_in: str, run_gpu_ranks: RunRanks) -> None:
    (kind, ranks, text), _ = run_gpu_ranks(hang, 2, "fails", steps_in, reads_in)
    assert (kind, ranks) == ("CollectiveError True", (1,)), text


def test_a_stage_that_fails_is_named_where_the_host_waits(run_gpu_ranks: RunRanks) -> None:
    (kind, ranks, text), _ = run_gpu_ranks(hang_in_pipeline, 2)
    assert (kind, ranks) == ("CollectiveError True", (1,)), text
    assert "rank 1 has left this call: RuntimeError: broken here" in text
