"""A process finds its place among the ranks in the variables of its launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raising import raises
from shardwise.errors import LaunchError
from shardwise.launch.rank_environment import FIRST_JOB_PORT, NUM_JOB_PORTS, RankEnvironment, job_port, read_place

FULL = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
# As Open MPI 4.1.4 sets them for the second of two ranks on one machine.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "2091253761",
    "PMIX_NAMESPACE": "2091253761",
}
# The sixth of seven tasks: four on the first machine, three on the second.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[01-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_TASKS_PER_NODE": "8(x8)",
}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_the_variables_of_torchrun_are_understood() -> None:
    place = read_place({**FULL, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert place == RankEnvironment(rank=5, world_size=8, local_rank=1, local_world_size=4, master=("node0", 29500))


@pytest.mark.parametrize("missing", sorted(FULL))
def test_a_partial_environment_names_what_is_missing_and_the_mend(missing: str) -> None:
    with raises(LaunchError, f"not {missing}", fix="shardwise run -n 8 train.py"):
        read_place(without(FULL, missing))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "8", "RANK=8 is not one of the ranks 0 to 7"),
        ("RANK", "-1", "RANK=-1 is not one of the ranks 0 to 7"),
        ("LOCAL_RANK", "9", "LOCAL_RANK=9 is not one of"),
        ("WORLD_SIZE", "eight", "WORLD_SIZE='eight' in the environment is not a whole number"),
        ("MASTER_PORT", "", "MASTER_PORT='' in the environment is not a whole number"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 is not a port"),
    ],
)
def test_a_contradictory_environment_is_an_error(name: str, value: str, message: object) -> None:
    with raises(LaunchError, message):
        read_place({**FULL, name: value})


# --------------------------------------------------------------------------------------------------------- mpirun


def test_two_mpiruns_on_one_machine_meet_at_ports_of_their_own() -> None:
    place = read_place(OPEN_MPI)
    assert place.master is not None
    assert place == RankEnvironment(1, 2, 1, 2, ("127.0.0.1", place.master[1]))
    assert FIRST_JOB_PORT <= place.master[1] < FIRST_JOB_PORT + NUM_JOB_PORTS
    assert read_place({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).master == place.master
    for job in (str(int(OPEN_MPI["PMIX_NAMESPACE"]) + (1 << 16)), "prterun-node0-4711@1"):
        assert read_place({**OPEN_MPI, "PMIX_NAMESPACE": job}).master not in (None, place.master)


def test_an_open_mpi_without_a_job_number_meets_at_the_usual_port() -> None:
    assert read_place(without(OPEN_MPI, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")).master == ("127.0.0.1", 29500)


def test_mpirun_on_several_machines_needs_an_address_but_no_port() -> None:
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with raises(LaunchError, "mpirun", "4 ranks", "several machines", fix="mpirun -x MASTER_ADDR=node0"):
        read_place(several)
    master = read_place({**several, "MASTER_ADDR": "node0"}).master
    assert master == ("node0", (read_place(OPEN_MPI).master or ("", 0))[1])
    assert read_place({**several, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}).master == ("node0", 1234)


def test_the_variables_of_mpich_are_understood() -> None:
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert read_place(mpich) == RankEnvironment(0, 2, 0, 2, ("127.0.0.1", 29500))
    bare = without(mpich, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    assert read_place({**bare, "MASTER_ADDR": "node0"}) == RankEnvironment(0, 2, 0, 2, ("node0", 29500))
    with raises(LaunchError, "mpirun -genv MASTER_ADDR node0"):
        read_place(bare)


# ---------------------------------------------------------------------------------------------------------- Slurm


def test_the_variables_of_srun_are_understood() -> None:
    place = read_place(SLURM)
    assert place == RankEnvironment(5, 7, 1, 3, ("gpu07", int(job_port(str(8 * 4711)))))
    assert place.launcher == "srun"


def test_jobs_and_steps_of_slurm_meet_at_ports_of_their_own() -> None:
    ports = {
        (read_place({**SLURM, "SLURM_JOB_ID": str(4711 + job), "SLURM_STEP_ID": str(step)}).master or ("", 0))[1]
        for job in range(40)
        for step in range(8)
    }
    assert len(ports) == 320


@pytest.mark.parametrize(
    ("tasks", "count"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4,3"}, 3),
        ({"SLURM_TASKS_PER_NODE": "5,2"}, 2),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3"}, None),  # of another number of tasks
        ({"SLURM_STEP_TASKS_PER_NODE": "?", "SLURM_TASKS_PER_NODE": "3,4"}, 4),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_NODELIST": "gpu07", "SLURM_NODEID": "0"}, 7),
    ],
)
def test_tasks_on_this_machine_come_from_what_agrees_with_the_number_of_all(
    tasks: dict[str, str], count: int | None
) -> None:
    environment = {**without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), **tasks}
    if count is None:
        with raises(LaunchError, "7 tasks", "2 machines", fix="--ntasks-per-node"):
            read_place(environment)
    else:
        assert read_place(environment).local_world_size == count


def test_an_address_that_the_user_exports_counts_under_srun() -> None:
    assert read_place({**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}).master == ("10.0.0.7", 1234)


def test_a_list_of_machines_that_cannot_be_read_asks_for_the_address() -> None:
    with raises(LaunchError, "'gpu[a-b]'", fix="MASTER_ADDR"):
        read_place({**SLURM, "SLURM_STEP_NODELIST": "gpu[a-b]"})


@pytest.mark.parametrize(
    "environment",
    [
        without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NODELIST"),  # the batch script itself
        {**SLURM, "SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_NTASKS": "7", "SLURM_JOB_ID": "4711"},  # salloc without one
    ],
)
def test_a_process_in_a_slurm_job_that_srun_did_not_start_is_a_world_of_one(environment: dict[str, str]) -> None:
    assert read_place(environment) == RankEnvironment()


def test_a_step_of_fewer_tasks_than_the_job_has_its_own_world() -> None:
    place = read_place(
        {
            **SLURM,
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1,1",
        }
    )
    assert (place.rank, place.world_size, place.local_world_size) == (1, 2, 1)


@pytest.mark.parametrize(
    ("others", "launcher"),
    [
        ({"PMI_RANK": "5", "PMI_SIZE": "7"}, "srun"),  # srun --mpi=pmi2
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "mpirun"),
        (OPEN_MPI, "mpirun"),
        ({**FULL, "RANK": "3"}, "the environment"),  # shardwise run or torchrun, started by srun
    ],
)
def test_the_launcher_closest_to_the_process_counts(others: dict[str, str], launcher: str) -> None:
    assert read_place({**SLURM, **others}).launcher == launcher


def test_a_leftover_variable_that_contradicts_the_launcher_is_an_error() -> None:
    with raises(LaunchError, "WORLD_SIZE=16", "SLURM_NTASKS=7", fix="unset WORLD_SIZE"):
        read_place({**SLURM, "WORLD_SIZE": "16"})
    assert read_place({**SLURM, "WORLD_SIZE": "7"}).world_size == 7


# ----------------------------------------------------------------------------------------------------- rank tables


def test_a_process_started_for_a_device_of_a_rank_table_finds_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rank_table_3pcs.json"
    servers = [("10.0.0.1", [0, 2]), ("10.0.0.2", [1])]
    table = [
        {"server_id": name, "device": [{"device_id": str(i), "rank_id": str(rank)} for i, rank in enumerate(ranks)]}
        for name, ranks in servers
    ]
    path.write_text(json.dumps({"server_list": table}))
    started = {"RANK_TABLE_FILE": str(path), "RANK_ID": "2", "RANK_SIZE": "3", "DEVICE_ID": "1"}
    assert read_place(started) == RankEnvironment(2, 3, 1, 2, ("10.0.0.1", 29500))
    with raises(LaunchError, "RANK_ID=3", "RANK_SIZE=3", "0 to 2"):
        read_place({**started, "RANK_ID": "3"})
    assert read_place({"RANK_TABLE_FILE": str(path)}) == RankEnvironment()
