"""A process joins the other ranks, or says why it cannot."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.errors import LaunchError
from shardwise.hosts import free_port
from shardwise.launch import ranks
from shardwise.launch.ranks import device, finish, init_ranks, rank, world_size

FULL = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*FULL, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    finish()


@pytest.mark.usefixtures("no_launcher")
def test_a_process_without_a_launcher_is_a_world_of_one() -> None:
    assert (rank(), world_size()) == (0, 1)
    init_ranks()
    assert (rank(), world_size(), device()) == (0, 1, torch.device("cpu"))
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]
    finish()
    finish()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("no_launcher")
def test_another_backend_than_that_of_the_existing_group_is_an_error() -> None:
    init_ranks("gloo")
    with raises(LaunchError, "with gloo", "not nccl", fix="destroy_process_group()"):
        init_ranks("nccl")


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("num_gpus", [0, 2])
def test_nccl_without_a_gpu_for_this_rank_is_an_error(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name, value in {**FULL, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with raises(LaunchError, 2, "GPU", num_gpus):
        init_ranks("nccl")


@pytest.mark.usefixtures("no_launcher")
def test_a_task_to_which_slurm_shows_only_its_own_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(ranks, "_join", lambda place, backend, *rest: chosen.append(backend))
    for name, value in {**FULL, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    init_ranks()
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    init_ranks()
    assert chosen == ["gloo", torch.device("cuda", 0), "nccl"]


@pytest.mark.usefixtures("no_launcher")
def test_a_port_that_is_taken_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with raises(LaunchError, 0, port, "--master-port"):
            init_ranks("gloo")


@pytest.mark.usefixtures("no_launcher")
def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ranks, "_NOTICE_SECONDS", 0.0)
    port = str(free_port())
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with raises(LaunchError, "1, 2", 3, f"127.0.0.1:{port}", 0.2):
        init_ranks("gloo", timeout_seconds=0.2)
    assert capfd.readouterr().err == "shardwise: rank 0 still waits for ranks 1, 2 of 3\n"


def leave() -> None:
    """Leave the group, but not while others still connect to this rank."""
    dist.barrier()
    finish()


def join_twice(ports: list[int]) -> list[str]:
    """What three ranks say, the second time while one pretends to have an older torch."""
    number = rank()
    leave()
    os.environ.update(RANK=str(number), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1")
    said = []
    for port, version in zip(ports, (torch.__version__, "2.11.0"), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if number == 1:
            torch.__version__ = version
        try:
            init_ranks("gloo", timeout_seconds=30.0)
            said.append(f"rank {rank()} of {world_size()}")
            leave()
        except LaunchError as error:
            said.append(str(error))
    return said


def test_ranks_with_different_versions_all_say_who_runs_which(run_ranks: RunRanks) -> None:
    joined, refused = zip(*run_ranks(join_twice, 3, [free_port(), free_port()]), strict=True)
    assert joined == ("rank 0 of 3", "rank 1 of 3", "rank 2 of 3")
    versions = f"ranks 0, 2: torch {torch.__version__} and shardwise {shardwise.__version__}; rank 1: torch 2.11.0 and "
    assert refused[0].startswith(f"the ranks run different versions: {versions}")
    assert "\n  fix:    install the same versions" in refused[0]
    assert refused[0] == refused[1] == refused[2]


def test_two_ranks_on_one_gpu_are_told_under_nccl() -> None:
    same = b"torch 2 and shardwise 1"
    assert ranks._difference([same + b"\n", same + b"\n"]) == ""  # gloo
    assert ranks._difference([same + b"\nGPU-a", same + b"\nGPU-b"]) == ""
    told = ranks._difference([same + b"\nGPU-a", same + b"\nGPU-b", same + b"\nGPU-a"])
    assert "NCCL needs a GPU for each rank: ranks 0, 2 on GPU-a" in told
    assert "CUDA_VISIBLE_DEVICES" in told
    assert "different versions" in ranks._difference([same + b"\n", b"torch 3 and shardwise 1\n"])


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_the_store_of_one_machine_listens_on_its_loopback_address(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": master, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    for _ in range(2):  # again after the end, at the same port
        init_ranks("gloo")
        listening = [
            line.split()[1]
            for kind in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{kind}").read_text().splitlines()
            if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        ]
        assert listening == [f"0100007F:{port:04X}"]
        finish()


def test_a_store_whose_name_leads_to_no_address_of_the_machine_says_where_it_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "own_address", lambda _: "")
    assert ranks._listen("node1", 1) is None
    assert "the store listens on all addresses: node1 resolves to none that others can reach" in capsys.readouterr().err
