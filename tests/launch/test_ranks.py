"""A process finds its place among the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import LaunchError
from shardwise.runtime.ranks import Place, device, finish, init_ranks, rank, read_place, world_size

FULL = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*FULL, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    finish()


def test_the_variables_of_torchrun_are_understood() -> None:
    place = read_place({**FULL, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert place == Place(rank=5, world_size=8, local_rank=1, local_world_size=4, master=("node0", 29500))


def test_the_variables_of_mpirun_are_understood_on_one_machine() -> None:
    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert read_place(open_mpi) == Place(1, 2, 1, 2, ("127.0.0.1", 29500))
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    assert read_place(mpich) == Place(0, 2, 0, 2, ("node0", 1234))


def test_mpirun_on_several_machines_needs_an_address() -> None:
    with pytest.raises(LaunchError, match="but not MASTER_ADDR, MASTER_PORT"):
        read_place({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize("missing", sorted(FULL))
def test_a_partial_environment_names_what_is_missing_and_the_mend(missing: str) -> None:
    partial = {name: value for name, value in FULL.items() if name != missing}
    with pytest.raises(LaunchError, match=f"but not {missing}\n  fix: .* shardwise run -n 8 train.py"):
        read_place(partial)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "8", "RANK=8 is not one of the ranks 0 to 7"),
        ("RANK", "-1", "RANK=-1 is not one of the ranks 0 to 7"),
        ("LOCAL_RANK", "9", "LOCAL_RANK=9 is not one of"),
        ("WORLD_SIZE", "eight", "WORLD_SIZE='eight' in the environment is not a whole number"),
        ("MASTER_PORT", "", "MASTER_PORT='' in the environment is not a whole number"),
    ],
)
def test_a_contradictory_environment_is_an_error(name: str, value: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_place({**FULL, name: value})


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
    with pytest.raises(LaunchError, match="already connected with gloo, not nccl"):
        init_ranks("nccl")


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("num_gpus", [0, 2])
def test_nccl_without_a_gpu_for_this_rank_is_an_error(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name, value in {**FULL, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"local rank 2 has no GPU: this machine shows {num_gpus}"):
        init_ranks("nccl")
