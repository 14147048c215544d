"""A rank of one stage hangs or ends: the others name its stage, rank and micro-batch."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks, wait_for_all_ranks
from raising import message
from runtime.staged_model import Staged, staged_batch
from shardwise.runtime import communicator
from shardwise.runtime.heartbeat_file import HeartbeatFile, trail
from shardwise.runtime.stage import StageWorker


class Gone(Exception):
    """What ends a rank."""


def stops(folder: str, schedule: str, stages: int, kind: str, micro_batch: int, hangs: bool) -> str:
    """The last rank stops in the middle of a step: it hangs until the others have noticed, or it ends. What the others
    say; for what they waited is on their pages, and on its own that it was at work."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    store = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    model, plan = Staged(), None
    if rank == 0:
        options = {"schedule": schedule, "micro_batch": 2, "search": "sharding_propagation"}
        plan = sw.plan(model, staged_batch(8), last + 1, stages=stages, **options)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(communicator, "group_timeout", return_value=timedelta(seconds=8)))
        par = sw.parallelize(model, plan)
        par.step(*staged_batch(8))
    page = HeartbeatFile.create(f"{folder}/page-{rank}")
    trail.write_to(f"{folder}/page-{rank}")
    dist.barrier()
    done = getattr(StageWorker, kind)
    waits: list[bool] = []

    def broken(self: StageWorker, number: int, *args: Any) -> Any:
        if number == micro_batch:
            while hangs and not store.check([f"noticed {peer}" for peer in range(last)]):
                time.sleep(0.05)
            waits.append(page.read().waits)
            raise Gone
        return done(self, number, *args)

    if rank == last:
        with mock.patch.object(StageWorker, kind, broken), pytest.raises((Gone, RuntimeError)):
            par.step(*staged_batch(8))
        assert waits == [False]
        return ""
    with pytest.raises(sw.ShardwiseError) as error:
        par.step(*staged_batch(8))
    store.set(f"noticed {rank}", "")
    assert type(error.value).__name__ == "CollectiveError"
    seen = page.read()
    assert seen.waits, "what failed is not left"
    where = re.search(r"at (stage \d, .*? of micro-batch \d)", str(error.value))
    assert where is not None, str(error.value)
    if rank == 0:
        assert seen.what == f"messages of other stages, ahead of {where[1]}"
    return str(error.value)


@pytest.mark.parametrize(
    ("schedule", "stages", "kind", "micro_batch", "hangs"),
    [
        ("1F1B", 2, "backward", 1, True),
        ("Solved", 4, "forward", 2, False),
        pytest.param("ZBVZeroBubble", 4, "backward", 2, True, marks=pytest.mark.long),
        pytest.param("GPipe", 2, "forward", 2, False, marks=pytest.mark.long),
    ],
)
def test_a_stage_that_stops_is_named(
    schedule: str, stages: int, kind: str, micro_batch: int, hangs: bool, run_ranks: RunRanks, tmp_path: Path
) -> None:
    text, _ = run_ranks(stops, 2, str(tmp_path), schedule, stages, kind, micro_batch, hangs)
    first = text.split("\n")[0]
    stage = re.search(r"^rank 0 at stage (\d), \w+( \(\w+ part\))? of micro-batch (\d)", first)
    assert stage is not None, text
    assert re.search(r"the exchange with stage \d \(rank 1\)", first), text
    if hangs:
        assert "timed out; rank 1 did not arrive" in first, text
    else:
        assert re.search(
            rf"failed: rank 1 has left this call: Gone, on rank 1, at stage \d, {kind}.* of micro-batch {micro_batch}",
            first,
        ), text
    if schedule == "1F1B":
        assert stage.groups() == ("0", None, "1"), "it waits for the cotangents of that micro-batch"


@pytest.mark.long
def test_the_ranks_of_all_stages_find_the_one_that_hangs(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Two stages on two ranks each: rank 3 hangs; its own stage, and those of the other one, name it."""
    texts = run_ranks(stops, 4, str(tmp_path), "1F1B", 2, "backward", 1, True)[:3]
    assert "stage 0, backward of micro-batch 1: the exchange with stage 1 (rank 3) timed out; rank 3" in texts[1]
    assert "stage:  rank 2 is at stage 1, backward of micro-batch 1" in texts[2] or "stage 1" in texts[2]
    for text in texts:
        assert "rank 3 did not arrive" in text, text
        assert "micro-batch" in text, text


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).square().mean()


def frozen(case: str) -> str:
    """What a rank says where one of two copies of a stage has frozen or replaced a weight, or both."""
    torch.manual_seed(0)
    net, x = TwoLayers().double(), torch.randn(8, 4, dtype=torch.float64)
    plan = sw.plan(net, x, 4, mesh=sw.Mesh(dp=2), stages=2, mode="data_parallel") if dist.get_rank() == 0 else None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(communicator, "group_timeout", return_value=timedelta(seconds=8)))
        par = sw.parallelize(net, plan)
        par.step(x)
        par.step(x)
    held = dict(par.named_parameters())
    if "first.weight" in held and ("alike" in case or dist.get_rank() == 1):
        if "frozen" in case:
            held["first.weight"].requires_grad_(False)
        else:
            par.first.weight = torch.nn.Parameter(2 * held["first.weight"].detach())
    said = message(lambda: par.step(x))
    wait_for_all_ranks()
    return said


@pytest.mark.parametrize("case", ["frozen", "replaced", "frozen alike", "replaced alike"])
@pytest.mark.sampled(1)
def test_copies_of_a_stage_that_are_not_treated_alike_are_named(case: str, run_ranks: RunRanks) -> None:
    said = run_ranks(frozen, 4, case)
    if "alike" in case:  # the ranks of the other stage have no such tensor
        assert said == [""] * 4
    else:
        assert all(f"{case} first.weight" in one for one in said), said
        assert all("ranks make different calls" in one for one in said), said
