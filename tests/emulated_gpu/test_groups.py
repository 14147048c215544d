"""Process groups that a script creates itself, on emulated GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.errors import LaunchError
from shardwise.layouts.placement import Placement
from shardwise.runtime.communicator import Communicator, backend_of, group_timeout


def create_group(backend: str | None, folder: str, *, sets_device: bool) -> None:
    """What a script does without shardwise."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.cuda.set_device(rank if sets_device else 0)
    address = f"file://{folder}/{backend}-{sets_device}".replace(",", "-")
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(minutes=7))


def train_in_groups(folder: str) -> list[tuple[str, str, float]]:
    """(device, backend, loss of a step) in each kind of group."""
    found = []
    rank = dist.get_rank()
    for backend in (None, "cpu:gloo,cuda:nccl", "nccl", "gloo"):
        create_group(backend, folder, sets_device=True)
        torch.manual_seed(0)
        module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).double(), torch.randn(4, 8).double()

        def loss(y: torch.Tensor) -> torch.Tensor:
            return y.square().mean()

        plan = sw.plan(module, x, 2, loss=loss, mode="data_parallel") if rank == 0 else None
        model = sw.parallelize(module, plan, loss=loss, compile=False)
        # The emulated gloo has no tensors of a GPU; with the real one the module is on the CPU too.
        found.append((str(model.device), backend_of(), float(model.step(x.to(model.device)))))
        assert group_timeout() == timedelta(minutes=7)
    return found


def join_groups(folder: str) -> None:
    rank = dist.get_rank()
    create_group(None, folder, sets_device=False)
    sw.init_ranks()
    sw.init_ranks("nccl")
    assert torch.cuda.current_device() == 0, "the only rank of a machine, by its environment"
    with raises(LaunchError, "nccl", "gloo", fix="call init_ranks once"):
        sw.init_ranks("gloo")
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1"):
        sw.init_ranks()
    assert torch.cuda.current_device() == rank


def test_the_backend_of_the_device_decides_where_a_module_is(run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).double(), torch.randn(4, 8).double()
    want = float(module(x).detach().square().mean())
    for rank, found in enumerate(run_gpu_ranks(train_in_groups, 2, str(tmp_path))):
        assert [where[:2] for where in found] == [(f"cuda:{rank}", "nccl")] * 3 + [("cpu", "gloo")]
        assert all(abs(loss - want) < 1e-12 for *_, loss in found)


def test_init_ranks_joins_the_group_of_the_script(run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    run_gpu_ranks(join_groups, 2, str(tmp_path))


def split_by_urgency() -> list[tuple[int, dict[str, bool]]]:
    """(collective splits so far, axes -> whether their stream has high priority) after each of three programs."""
    from emulated_gpu.device import splits

    splits[0] = 0
    communicator, found = Communicator(Placement.whole(sw.Mesh(dp=2, tp=2))), []
    sets: list[tuple[str, ...]] = [("dp",), ("tp",), ("dp", "tp")]
    for urgent in ([("tp",)], [("tp",)], [("tp",), ("dp", "tp")]):
        communicator.create_groups(sets, frozenset(map(frozenset, urgent)))
        options = {"".join(axes): communicator.group(axes)._get_backend(torch.device("cuda")).options for axes in sets}
        found.append((splits[0], {name: of.is_high_priority_stream for name, of in options.items()}))
        assert all(of._timeout == group_timeout() for of in options.values())
    value = torch.tensor(10.0 ** dist.get_rank(), device="cuda")
    dist.all_reduce(value, group=communicator.group(("dp", "tp")))
    assert value.item() == 1111.0
    whole = [list(range(4))]
    for refused in (object(), options["tp"]):
        try:
            dist.split_group(split_ranks=whole, pg_options=refused)
        except RuntimeError:
            continue
        raise AssertionError("NCCL takes its own options only, and torch writes into them")
    return found


def test_groups_that_kernels_wait_for_have_high_priority(run_gpu_ranks: RunRanks) -> None:
    """The job's own group stays as the script made it: a set of all ranks that is urgent gets a communicator."""
    ordinary = {"dp": False, "tp": True, "dptp": False}
    want = [(2, ordinary), (2, ordinary), (3, ordinary | {"dptp": True})]
    assert run_gpu_ranks(split_by_urgency, 4) == [want] * 4


def split_once() -> tuple[int, float, float]:
    """(collective splits of the communicator, what the sums over each axis are)"""
    from emulated_gpu.device import splits

    splits[0] = 0
    communicator = Communicator(Placement.whole(sw.Mesh(dp=2, tp=2)))
    communicator.create_groups([("dp",), ("tp",), ("dp", "tp")])
    sums = []
    for axis in ("dp", "tp"):
        value = torch.tensor(10.0 ** dist.get_rank(), device="cuda")
        dist.all_reduce(value, group=communicator.group((axis,)))
        sums.append(value.item())
    return splits[0], sums[0], sums[1]


def test_the_groups_of_an_axis_are_one_split(run_gpu_ranks: RunRanks) -> None:
    """Ranks 0 and 1 have one coordinate of dp, ranks 0 and 2 one of tp."""
    assert run_gpu_ranks(split_once, 4) == [
        (2, 101.0, 11.0),
        (2, 1010.0, 11.0),
        (2, 101.0, 1100.0),
        (2, 1010.0, 1100.0),
    ]
