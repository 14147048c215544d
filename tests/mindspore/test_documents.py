"""The programs of documents 002 and 003 as their scripts run them: on eight ranks, with and without MPI.

The programs draw their weights; here they start from stated ones, so that losses can be compared. What else a test
changes in a program is one line of its context.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise
from mindspore.ir_reader import read
from spec.cases import CASES

EXAMPLES = Path(__file__).parents[2] / "examples/mindspore"
MPIRUN = shutil.which("mpirun")
RANKS = 8
TIME_LIMIT = 300.0  # seconds, for a machine that is busy with other things
LOSS = re.compile(r"epoch: (\d+) step: (\d+), loss is (\S+)")
FLOAT32 = 1e-6  # relative: a few roundings
Losses = dict[tuple[int, int], list[float]]  # (epoch, step) -> what was printed, in order

FIXED_WEIGHTS = """
import numpy as np
import shardwise.mindspore as ms

numbers = np.random.RandomState(0)


def initializer(init, shape):
    assert init == "normal"
    return ms.Tensor(numbers.normal(0, 0.01, shape).astype(np.float32))
"""
THEIR_WEIGHTS = "from shardwise.mindspore.common.initializer import initializer"

# Document 003 from these weights, which numpy draws, at the learning rate of its log (row G6).
QUICK_START = {
    (1, 1): 0.385701, (3, 2): 0.369642, (3, 3): 0.357704, (3, 4): 0.337634, (4, 1): 0.305414, (4, 2): 0.257695,
    (5, 4): 0.05963,
}  # fmt: skip
# The mean of each rank's rows of document 002's first loss vector (row G9).
LOCAL_MEANS = (23.03, 21.96, 20.16, 22.46, 19.17, 23.45, 24.06, 23.19)


def copied(example: str, program: str, folder: Path, changes: tuple[tuple[str, str], ...] = ()) -> Path:
    """A directory of examples with stated weights, and lines of its program changed."""
    target = folder / example
    shutil.copytree(EXAMPLES / example, target, ignore=shutil.ignore_patterns("device*", "log", "saved_graph"))
    text = (target / program).read_text()
    for before, after in ((THEIR_WEIGHTS, "from fixed_weights import initializer"), *changes):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (target / program).write_text(text)
    (folder / "fixed_weights.py").write_text(FIXED_WEIGHTS)
    return target


def run(directory: Path, *command: str, **environment: str) -> str:
    """A command in a directory, and all that it starts; returns what it printed."""
    theirs = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs) and name not in own}
    source = Path(shardwise.__file__).parents[1]
    environment |= {
        "PYTHONPATH": f"{source}{os.pathsep}{directory.parent}", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        command, cwd=directory, env=kept | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    logs = "".join(path.read_text() for path in directory.glob("device/train.log"))
    assert process.returncode == 0, output + logs
    return output


def losses(text: str) -> Losses:
    found: Losses = {}
    for epoch, step, loss in LOSS.findall(text):
        found.setdefault((int(epoch), int(step)), []).append(float(loss))
    return found


def alone(losses: Losses) -> dict[tuple[int, int], float]:
    assert all(len(own) == 1 for own in losses.values())
    return {step: own[0] for step, own in losses.items()}


# ----------------------------------------------------------------------------------- document 002, operator by operator


@pytest.fixture(scope="module")
def operator_parallel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = copied("operator_parallel", "train.py", tmp_path_factory.mktemp("operator_parallel"))
    return directory, run(directory, "bash", "run.sh", "8")


def test_the_log_of_device_0_shows_the_losses_of_document_002(operator_parallel: tuple[Path, str]) -> None:
    directory, output = operator_parallel
    log = (directory / "device0/train.log0").read_text()
    shown = alone(losses(log))
    assert list(shown) == [(1, step) for step in range(1, 5)]
    values = list(shown.values())
    assert abs(values[0] - 23.03) < 0.05
    assert all(later < earlier for earlier, later in itertools.pairwise(values))
    assert alone(losses(output)) == shown, "the script shows rank 0"


def test_every_device_logs_the_mean_of_its_own_rows(operator_parallel: tuple[Path, str]) -> None:
    directory, _ = operator_parallel
    for rank, mean in enumerate(LOCAL_MEANS):
        shown = alone(losses((directory / f"device{rank}/train.log{rank}").read_text()))
        assert len(shown) == 4
        assert abs(shown[1, 1] - mean) < 0.06


def test_document_002_alone_has_the_mean_of_all_rows(operator_parallel: tuple[Path, str], tmp_path: Path) -> None:
    changed = (('parallel_mode="semi_auto_parallel"', 'parallel_mode="stand_alone"'),)
    whole = alone(losses(run(copied("operator_parallel", "train.py", tmp_path, changed), sys.executable, "train.py")))
    logs = [operator_parallel[0] / f"device{rank}/train.log{rank}" for rank in range(RANKS)]
    ranks = [alone(losses(path.read_text())) for path in logs]
    assert len(whole) == 4
    for step, loss in whole.items():
        assert sum(own[step] for own in ranks) / RANKS == pytest.approx(loss, rel=FLOAT32)


def test_a_rank_table_that_there_is_not_is_refused(tmp_path: Path) -> None:
    directory = copied("operator_parallel", "train.py", tmp_path)
    refused = subprocess.run(["bash", "run.sh", "4"], cwd=directory, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "there is no rank_table_4pcs.json for 4 devices" in refused.stderr


# ---------------------------------------------------------------------------------------- document 003, the quick start


def with_mpi(directory: Path) -> None:
    """The script leaves training in the background: the shell that has read it waits for that."""
    root = "--allow-run-as-root" if os.geteuid() == 0 else ""
    run(directory, "bash", "-c", ". ./run_with_mpi.sh; wait $!", MPIRUN=f"{MPIRUN} {root} --bind-to none")


def without_mpi(directory: Path) -> None:
    run(directory, "bash", "run.sh")


WITH_MPI = pytest.param(
    with_mpi,
    id="mpirun",
    marks=[pytest.mark.long, pytest.mark.skipif(not MPIRUN, reason="no mpirun here (make openmpi)")],
)


@pytest.fixture(scope="module", params=[pytest.param(without_mpi, id="shardwise run"), WITH_MPI])
def quick_start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copied("distributed_training_quickstart", "net.py", tmp_path_factory.mktemp("quick_start"))
    request.param(directory)
    return directory


def test_the_script_of_document_003_asks_mpirun_for_eight_ranks_of_the_program(tmp_path: Path) -> None:
    directory = copied("distributed_training_quickstart", "net.py", tmp_path)
    run(directory, "bash", "-c", ". ./run_with_mpi.sh; wait $!", MPIRUN="echo mpirun")
    assert (directory / "device/train.log").read_text() == f"mpirun -n 8 --oversubscribe {sys.executable} net.py\n"
    assert (directory / "device/net.py").read_text() == (directory / "net.py").read_text()


@pytest.fixture(scope="module")
def quick_start_alone(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    changed = (("parallel_mode=ms.ParallelMode.AUTO_PARALLEL", "parallel_mode=ms.ParallelMode.STAND_ALONE"),)
    directory = copied("distributed_training_quickstart", "net.py", tmp_path_factory.mktemp("alone"), changed)
    return losses(run(directory, sys.executable, "net.py"))


def test_all_ranks_log_the_curve_of_the_quick_start(quick_start: Path, quick_start_alone: Losses) -> None:
    shown = losses((quick_start / "device/train.log").read_text())
    whole = alone(quick_start_alone)
    assert list(shown) == list(whole) == [(epoch, step) for epoch in range(1, 6) for step in range(1, 5)]
    for step, of_ranks in shown.items():
        assert len(of_ranks) == RANKS
        assert len(set(of_ranks)) == 1
        assert of_ranks[0] == pytest.approx(whole[step], rel=FLOAT32)
    for step, loss in QUICK_START.items():
        assert abs(shown[step][0] - loss) < 1e-4
    expected = CASES["doc-003-loss"]["expected"]
    for name, (epoch, step) in {"e1s1": (1, 1), "e3s2": (3, 2), "e4s2": (4, 2), "e5s4": (5, 4)}.items():
        assert abs(shown[epoch, step][0] - expected[name]) < expected["tolerance"]


def test_every_rank_of_the_quick_start_saves_its_parts(quick_start: Path) -> None:
    for rank in range(RANKS):
        names = {path.name for path in (quick_start / f"device/{rank}").iterdir()}
        assert names == {"CKP-4_4.ckpt", *(f"CKP-5_{step}.ckpt" for step in range(1, 5))}
        saved = torch.load(quick_start / f"device/{rank}/CKP-5_4.ckpt", weights_only=True)["parameters"]
        parts = {"w": (8, 16), "w2": (4, 16)}
        states = {f"moments.{name}": part for name, part in parts.items()} | {"global_step": ()}
        assert {name: tuple(own["data"].shape) for name, own in saved.items()} == parts | states


def test_every_rank_of_the_quick_start_prints_its_programs(quick_start: Path) -> None:
    for rank in range(RANKS):
        folder = quick_start / f"saved_graph/rank_{rank}"
        (begin,), (execute,) = folder.glob("step_parallel_begin_*.ir"), folder.glob("18_execute_*.ir")
        whole = {line.instance: line.in_strategy for line in read(begin)}
        assert (whole["relu"], whole["matmul2"]) == (((2, 4),), ((2, 4), (4, 1)))
        (product,) = [line for line in read(execute) if line.instance == "matmul"]
        assert (product.shapes, product.shape) == ([[8, 8], [8, 16]], [8, 16])
        assert product.code[0].endswith("/ out = self.matmul(x, self.weight)/")
        assert "/device/net.py(" in product.code[0]
