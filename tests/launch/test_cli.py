"""The command ``shardwise``, and a real job of gloo ranks under it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise import cli

ONE_RAISES = """
import torch, torch.distributed as dist
import shardwise.launch.ranks as ranks

ranks.init_ranks()
total = torch.ones(4) * ranks.rank()
dist.all_reduce(total)
if ranks.rank() == 0:
    print(total.tolist())
if ranks.rank() == 2:
    raise RuntimeError("only rank 2 is wrong")
dist.all_reduce(total)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [["-n", "2", "train.py", "--tag", "-n", "3"], ["-n2", "--", "train.py", "--tag", "-n", "3"]],
)
def test_what_follows_the_script_belongs_to_it(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *arguments]) == 0
    assert capfd.readouterr().out == "['--tag', '-n', '3']\n"


@pytest.mark.usefixtures("folder")
def test_options_reach_the_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-n", "1", "--tag", "--log-dir", "logs", "-m", "base64", "-t"]) == 0
    assert "[rank 0] b'Aladdin:open sesame'" in capfd.readouterr().out
    assert "Aladdin" in Path("logs/rank-0.log").read_text()


@pytest.mark.usefixtures("folder")
def test_a_mistake_in_the_command_gets_a_message_and_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-n", "2", "trian.py"]) == 2
    assert capfd.readouterr().err.startswith("shardwise: there is no script 'trian.py' in ")


def test_a_command_that_lacks_an_argument_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "train.py"]) == 2
    assert "the number of ranks is missing\n  fix:    give it with -n/--num-ranks" in capfd.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "COMMAND" in capfd.readouterr().err


def test_the_version_names_torch_and_python(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capfd.readouterr().out.startswith("shardwise ")


def test_a_rank_that_raises_ends_peers_that_wait_in_an_all_reduce(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ONE_RAISES)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "run", "-n", "3", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - began < 40
    assert done.returncode == 1, done.stderr
    assert done.stdout == "[3.0, 3.0, 3.0, 3.0]\n"
    assert done.stderr.startswith("Traceback (most recent call last):\n"), done.stderr
    assert done.stderr.count("Traceback") == 1
    summary = (
        "shardwise: rank 2 failed with exit code 1 (RuntimeError: only rank 2 is wrong); stopped the other 2 ranks"
    )
    assert summary in done.stderr


def test_a_job_that_ends_well_ends_without_warnings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ONE_RAISES.replace("== 2", "== 9"))
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1.0, 1.0, 1.0, 1.0]\n", "")
