"""Real gloo ranks, of which one hangs, ends or has no memory left: what it and the others say."""

from __future__ import annotations

import os
import pickle
import re
import resource
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.launch.bootstrap import is_follow_up
from shardwise.layouts.placement import Placement
from shardwise.runtime import faults
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.faults import BlockedRank, is_out_of_memory

Outcome = tuple[str, str, bool]
MIB = 2**20


def outcome(action: Callable[[], Any]) -> Outcome:
    """(type, message, whether the launcher takes it for a consequence) of what an action raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), is_follow_up(error)
    return "", "", False


# -------------------------------------------------------------------------------------------- ranks that do not come


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


def all_but_one_step(lives_on: bool) -> Outcome:
    """On a rank of Mesh(dp=2, tp=2): rank 3 makes one step less than the others and lives on until they have noticed;
    or it leaves between forward and backward."""
    model, x = TwoLayers(), torch.randn(4, 8)
    strategies = {"up": "m@dp n@tp", "down": "m@dp k@tp"}
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    plan = None
    if rank == 0:
        plan = sw.plan(model, x, sw.Cluster.local(4), mesh=sw.Mesh(dp=2, tp=2), strategies=strategies)
    par = sw.parallelize(model, plan)
    par.step(x)
    loss = par.step(x) if lives_on else par(x)  # ranks agree on calls of another kind than the last
    if lives_on:
        dist.barrier()
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    if rank == 3:
        while lives_on and not store.check([f"noticed {peer}" for peer in range(3)]):
            time.sleep(0.05)
        return "", "", False
    found = outcome(lambda: par.step(x) if lives_on else loss.backward())
    store.set(f"noticed {rank}", "")
    return found


@pytest.mark.parametrize(
    ("lives_on", "how"), [(True, "timed out"), (False, "failed, a connection was lost")], ids=["hangs", "has left"]
)
def test_a_rank_that_does_not_arrive_is_named_with_the_operator_that_waits_for_it(
    lives_on: bool, how: str, run_ranks: RunRanks
) -> None:
    outcomes = run_ranks(all_but_one_step, 4, lives_on)
    for kind, text, follow_up in outcomes[:3]:
        assert kind == "CollectiveError"
        assert follow_up  # the launcher shows the rank that ended, where one did
        assert f"  pass:   {'forward, call 3' if lives_on else 'backward, call 2'}" in text
        recorded = r"gloo:\w+ of Float \[.*\], number \d+ of process group [\w/-]+, called in \w+\.py:\d+(, under way)?"
        assert re.search(rf"recorded: {recorded} \(torch's flight recorder, rank \d\)", text), text
    _, text, _ = outcomes[2]  # has the same part of the batch as rank 3
    first, op, value, *_ = text.split("\n")
    assert re.fullmatch(rf"\w+ over tp \(\d+ B\) {how}; rank 3 did not arrive", first)
    assert re.fullmatch(r"  op:     \S*/(square|mean|relu|linear) \(test_faults\.py:\d+\)", op)
    made = r"add_1 \(of down/add, test_faults\.py:\d+\): f32\[4@dp, 8\] partial\(sum@tp\) -> f32\[.*"
    assert re.fullmatch(f"  value:  {made if lives_on else 'gradient of .*'}", value)


def timeouts_of_groups() -> set[float]:
    """On a rank: those of all process groups, in seconds."""
    communicator = Communicator(Placement.whole(sw.Mesh(dp=2, tp=2)))
    communicator.create_groups([("dp",), ("tp",), ("dp", "tp")])
    groups = [communicator.group(axes) for axes in (("dp",), ("tp",), ("dp", "tp"))]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_every_group_has_the_time_out_of_all_ranks(run_ranks: RunRanks) -> None:
    assert run_ranks(timeouts_of_groups, 4, time_limit_seconds=47) == [{47.0}] * 4


def test_ranks_that_wait_for_each_other_are_followed_to_the_one_that_is_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = BlockedRank("Model", 7, "all_reduce over dp", (0, 2))
    known = {0: here, 2: BlockedRank("Model", 4, "all_gather over tp", (2, 3)), 5: here}
    monkeypatch.setattr(faults, "_ask", lambda own, rank: known)
    missing, facts = faults._who_is_missing(here, 0)
    assert missing == [3]
    assert facts == ["rank 0 waits here", "rank 2 waits in collective 4 of Model: all_gather over tp"]
    known[3] = BlockedRank("Model", 4, "all_gather over tp", (2, 3))
    assert faults._who_is_missing(here, 0)[0] == []
    known[2] = here
    assert faults._who_is_missing(here, 0) == ([], ["all of them arrived"])


def message(number: int, group: str, name: str = "all_reduce", retired: bool = False) -> dict[str, Any]:
    """An entry of torch's flight recorder."""
    return {
        "record_id": number,
        "process_group": (group, "undefined"),
        "profiling_name": f"gloo:{name}",
        "input_sizes": [[number]],
        "input_dtypes": ["Float"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "state": "scheduled",
        "retired": retired,
    }


@pytest.mark.parametrize(
    ("entries", "shown"),
    [
        ([message(1, "pair"), message(2, "all", retired=True)], "all_reduce of Float [1]"),
        ([message(1, "all", "all_gather"), message(2, "pair")], "all_reduce of Float [2]"),  # the first has ended
        ([message(1, "pair"), message(2, "all", "all_gather")], "all_reduce of Float [1]"),
        ([message(1, "pair", retired=True), message(2, "all", "all_gather")], "all_reduce of Float [1]"),
        ([message(1, "pair"), message(2, "pair", retired=True)], "all_reduce of Float [2]"),
        ([message(1, "others"), message(2, "all", retired=True)], "all_reduce of Float [1]"),  # of the user
    ],
)
def test_the_recorded_message_is_one_between_the_ranks_that_wait(
    entries: list[dict[str, Any]], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder has messages as under way that ended long ago: the thread that says so may get no core."""
    pair, everyone = object(), object()
    world = SimpleNamespace(
        pg_names={pair: "pair", everyone: "all"},
        pg_group_ranks={pair: {1: 0, 3: 1}, everyone: {0: 0, 1: 1, 2: 2, 3: 3}},
    )
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", lambda: pickle.dumps({"entries": entries}))
    assert faults.last_message((1, 3)).startswith(f"gloo:{shown}, number ")


def test_a_store_that_has_gone_leaves_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(own: BlockedRank, rank: int) -> dict[int, BlockedRank]:
        raise dist.DistNetworkError("Connection reset")

    monkeypatch.setattr(faults, "_ask", ask)
    missing, (fact,) = faults._who_is_missing(BlockedRank("Model", 7, "all_reduce over dp", (0, 2)), 2)
    assert missing == []
    assert fact == "rank 2 waits here for rank 0; the store cannot be reached (Connection reset)"


SCRIPT = """
    import os, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import shardwise as sw

    sw.init_ranks("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    mean = lambda out: out.mean()
    x = torch.randn(4, 8)
    strategies = {"0": "n@tp", "1": "k@tp"}
    plan = sw.plan(model, x, sw.Cluster.local(2), mesh=sw.Mesh(tp=2), strategies=strategies, loss=mean)
    par = sw.parallelize(model, plan, loss=mean)
    par.step(x)
    dist.barrier()
    for group in dist.distributed_c10d._world.pg_map:  # from here on ranks are not slow for other reasons
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)

    def load_data():
        if sw.rank() == 1:
            os._exit(7) if sys.argv[1] == "exit" else time.sleep(600)

    load_data()
    par.step(x)
"""


@pytest.mark.parametrize("how", ["hang", pytest.param("exit", marks=pytest.mark.long)])
def test_the_launcher_shows_what_hangs_and_before_that_what_ended(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "shardwise.cli", "run", "-n", "2", "train.py", how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    if how == "exit":
        assert ended.returncode == 7
        assert "rank 1 failed with exit code 7" in ended.stderr
        assert "CollectiveError" not in ended.stderr
    else:
        assert ended.returncode == 1
        assert re.search(r"CollectiveError: \w+ over tp \(\d+ B\) timed out; rank 1 did not arrive", ended.stderr)
        assert "where:  rank 1 was in load_data (train.py:" in ended.stderr


# ------------------------------------------------------------------------------------------------ memory


class Widens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(1, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x)


def gather_more_than_there_is() -> Outcome:
    """On a rank: its half of the output has 256 MiB, which fit; all of it does not."""
    num_rows = 2 * 256 * MIB // (64 * 4)
    model, x = Widens(), torch.zeros(num_rows, 1)
    plan = sw.plan(model, x, sw.Cluster.local(2), mesh=sw.Mesh(dp=2), strategies={"wide": "m@dp"})
    par = sw.parallelize(model, plan)
    with torch.no_grad():
        par(x[:2])
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 512 * MIB, limits[1]))
        try:
            return outcome(lambda: par(x))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_memory_that_does_not_suffice_for_a_gathered_value_names_it(run_ranks: RunRanks) -> None:
    for rank, (kind, text, follow_up) in enumerate(run_ranks(gather_more_than_there_is, 2)):
        assert kind == "OutOfDeviceMemoryError", text
        assert not follow_up
        assert f"out of memory on rank {rank}, converting linear (of wide/linear, test_faults.py:" in text
        assert "f32[2097152@dp, 64] -> f32[2097152, 64]" in text
        assert "512 MiB here afterwards, 256 MiB before" in text


def test_torch_s_own_errors_of_memory_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError("std::bad_alloc"))
    assert not is_out_of_memory(RuntimeError("Timed out waiting 3000ms for recv operation to complete"))
    assert issubclass(sw.errors.OutOfDeviceMemoryError, MemoryError)
    assert issubclass(sw.errors.OutOfDeviceMemoryError, RuntimeError)


CAUGHT = """
import sys
import torch
import shardwise as sw

sw.init_ranks()
torch.manual_seed(0)
module, x, y, loss = torch.nn.Linear(16, 8), torch.randn(8, 16), torch.randn(8, 8), torch.nn.functional.mse_loss
par = sw.parallelize(module, sw.plan(module, (x, y), 2, loss=loss, mode="data_parallel"), loss=loss)
par.step(x, y)
try:
    if sw.rank() == 0:
        par.predict(x)
    par.step(x, y)
except sw.ShardwiseError as error:
    print(error)
if "destroy" in sys.argv:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("ending", ["", "destroy"])
def test_ranks_that_caught_an_error_exit(ending: str, tmp_path: Path) -> None:
    (tmp_path / "caught.py").write_text(CAUGHT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "caught.py", ending],
            cwd=tmp_path,
            env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        told = [rank.communicate(timeout=60)[0] for rank in ranks]  # of gloo's, which waits for half an hour
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "ranks make different calls" in told[1], told
