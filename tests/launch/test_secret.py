"""The secret that the launchers of a job share: where it comes from, and what is refused."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from launch.jobs import Job
from raising import raises
from shardwise.errors import LaunchError
from shardwise.launch.channel import job_secret


def test_the_first_launcher_makes_the_file_and_the_others_read_it(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(job_secret({"XDG_CONFIG_HOME": str(tmp_path)}))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = (tmp_path / "shardwise").iterdir()
    assert [*{*found}] == [path.read_bytes().strip()]
    assert len(found) == 8
    assert len(found[0]) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert job_secret({"SHARDWISE_JOB_SECRET_FILE": str(path)}) == found[0]
    assert (
        job_secret({"SHARDWISE_JOB_SECRET": "sixteen letters.", "SHARDWISE_JOB_SECRET_FILE": "/"})
        == b"sixteen letters."
    )


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "readable", "short", "empty", "unwritable"])
def test_what_others_may_read_or_have_put_there_is_no_secret(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "secret", tmp_path / "other"
    other.write_text("x" * 32)
    other.chmod(0o600)
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "unwritable":
        path = other / "secret"
    else:
        path.write_text({"readable": "x" * 32, "short": "x" * 15}.get(kind, ""))
        path.chmod(0o644 if kind == "readable" else 0o600)
    said = {"readable": "other users may read", "short": "has 15 bytes", "empty": "has 0 bytes"}
    with raises(LaunchError, said.get(kind, "[Errno"), tmp_path):
        job_secret({"SHARDWISE_JOB_SECRET_FILE": str(path)})
    with raises(LaunchError, "SHARDWISE_JOB_SECRET has 3 bytes"):
        job_secret({"SHARDWISE_JOB_SECRET": "abc"})


def test_ranks_do_not_get_the_secret(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_JOB_SECRET", "sixteen letters.")
    assert job("print([name for name in os.environ if 'SECRET' in name])", 1).stdout == "[]\n"
