"""Folders of checkpoints that are torn, damaged or hostile, and such as two jobs save to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from raising import raises
from shardwise.train import retention, saving
from shardwise.train.files import StagedFile
from shardwise.train.manifest import Manifest, parse_manifest
from shardwise.train.names import FILE
from shardwise.train.retention import checkpoints_in, rename_later_checkpoints
from shardwise.train.sharing import PlannedFile
from shardwise.train.stores import Folder, folder_of
from shardwise.train.values import decode
from train.runs import saved

# --------------------------------------------------------------------------------------------------- torn and damaged


def test_torn_and_damaged_ones_are_skipped_and_named(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    (tmp_path / "step-4").rename(tmp_path / "step-4.incomplete")
    (tmp_path / "step-3" / FILE).write_text("{}")
    data = next((tmp_path / "step-2").glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    model, optimizer = saved(tmp_path / "elsewhere", 7)
    with pytest.warns(sw.errors.PlanWarning) as said:
        assert sw.load_checkpoint(tmp_path, model, optimizer).step == 1
    text = "\n".join(str(one.message) for one in said)
    assert "step-4.incomplete is skipped: its save did not finish" in text
    assert "step-3 is skipped" in text
    assert "step-2 is skipped" in text
    with raises(sw.errors.CheckpointError, "step-2", "damaged", "wrong checksum"):
        sw.load_checkpoint(tmp_path / "step-2", model)
    data.write_bytes(content[:-1])
    with raises(sw.errors.CheckpointError, "25,639", "25,640"):
        sw.load_checkpoint(tmp_path / "step-2", model)
    with raises(sw.errors.CheckpointError, tmp_path / "nowhere", "no checkpoint"):
        sw.load_checkpoint(tmp_path / "nowhere", model)
    (tmp_path / "empty").mkdir()
    with raises(sw.errors.CheckpointError, tmp_path / "empty", "is complete"):
        sw.load_checkpoint(tmp_path / "empty", model)


def test_what_is_set_aside_again_replaces_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        saved(tmp_path, 2)
        rename_later_checkpoints(folder_of(tmp_path), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-2.1.damaged",
        "step-2.2.damaged",
        "step-2.damaged",
    ]
    assert checkpoints_in(folder_of(tmp_path)) == ({}, [])


def test_what_is_not_of_this_run_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    saved(tmp_path)
    folder = tmp_path / "step-1"

    def refused(values: Any, model: nn.Module, optimizer: Any = None, **more: Any) -> None:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with raises(sw.ShardwiseError, values):
            sw.load_checkpoint(folder, model, optimizer, **more)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    refused(("0.weight is f32[17, 8] in the module and f32[16, 8]"), nn.Sequential(nn.Linear(8, 17)))
    refused("2.weight is in the module but not in", nn.Sequential(*model, nn.Linear(16, 2)))
    refused("1.running_mean is in the checkpoint but not in", nn.Sequential(nn.Linear(8, 16)))
    integers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    integers[0].weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.int32), requires_grad=False)
    refused(("0.weight is i32[16, 8] in the module and f32[16, 8]"), integers)
    sgd = torch.optim.SGD(model.parameters())
    refused("has states of Adam, but optimizer= is SGD", model, sgd)
    groups = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    del groups.param_groups[0]["params"][:]
    groups.param_groups[0]["params"] += [*model[0].parameters(), nn.Parameter(torch.ones(2))]
    refused("parameters that are not the module's", model, groups)
    adam = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1)
    refused("the states of 0 schedulers, and 1 are given", model, adam, schedulers=scheduler)
    refused("scaler=", model, adam, scaler=torch.amp.GradScaler("cpu"))
    data = [TensorDataset(torch.zeros(count, 8)) for count in (9, 12)]
    loader, longer = (sw.DataLoader(samples, model, 4) for samples in data)
    next(iter(loader))
    sw.save_checkpoint(tmp_path / "with data", model, adam, step=1, data=loader)
    folder = tmp_path / "with data"
    other = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    adam = torch.optim.Adam(other.parameters(), lr=7.0)
    refused(("samples in the data set 9", "this loader has 12"), other, adam, data=longer)
    refused("AssertionError: 2 workers", other, adam, data=Elsewhere())
    assert (longer.cursor, adam.param_groups[0]["lr"], len(adam.state)) == (0, 7.0, 0)
    with raises(sw.errors.CheckpointError, "exists already", "never overwritten"):
        sw.save_checkpoint(folder, model, step=2)
    with raises(sw.ShardwiseError, "step", "a number", 0, -1):
        sw.save_checkpoint(tmp_path / "x", model, step=-1)
    with raises(sw.ShardwiseError, "metric loss", "is nan"):
        sw.save_checkpoint(tmp_path / "x", model, step=1, metrics={"loss": math.nan})
    assert not (tmp_path / "x.incomplete").exists()


class Elsewhere:
    """A loader of somebody else's, which has checks of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("2 workers")


class Trap:
    def __reduce__(self) -> Any:
        return (open, ("trap-was-sprung", "w"))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_damaged_manifests_raise_errors_that_users_understand(tmp_path: Path, count: int) -> None:
    saved(tmp_path)
    text = (tmp_path / "step-1" / FILE).read_text()
    content = json.loads(text)["content"]
    draw = random.Random(0)
    words: list[Any] = [
        -1,
        2**63,
        1e300,
        None,
        True,
        "x",
        "../../etc/passwd",
        [],
        {},
        [[]],
        "$tensor",
        0.5,
        {"$set": [[]]},
    ]

    def mutated(value: Any, depth: int) -> Any:
        if depth == 0 or not isinstance(value, (dict, list)) or not value:
            return draw.choice(words)
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        if draw.random() < 0.1:
            del copy[key]
        else:
            copy[key] = mutated(value[key], depth - 1)
        return copy

    import zlib

    refused = 0
    for round in range(count):
        if round % 4:  # a change that its writer sealed with a checksum
            changed = mutated(content, draw.randrange(1, 7))
            seal = zlib.crc32(json.dumps(changed, sort_keys=True, separators=(",", ":")).encode())
            candidate = json.dumps({"format": "shardwise checkpoint", "version": 1, "crc32": seal, "content": changed})
        else:
            characters = list(text)
            for _ in range(draw.randrange(1, 4)):
                characters[draw.randrange(len(characters))] = chr(draw.randrange(1, 128))
            candidate = "".join(characters)
        try:
            manifest = parse_manifest(candidate)
            for value in manifest.values.values():
                decode(value)
        except sw.ShardwiseError:
            refused += 1
            continue
        (tmp_path / "step-1" / FILE).write_text(candidate)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with contextlib.suppress(sw.ShardwiseError):  # and nothing else
            sw.load_checkpoint(tmp_path / "step-1", model, optimizer)
    assert refused > count // 2


def test_damaged_folders_never_change_a_module_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.chdir(tmp_path)
    draw, folder = random.Random(1), tmp_path / "step-1"
    want, _ = saved(tmp_path / "same")
    for round in range(30):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        victim = draw.choice(sorted(copy.iterdir()))
        content = bytearray(victim.read_bytes())
        kind = draw.randrange(4)
        if kind == 0:
            content = content[: draw.randrange(len(content))]
        elif kind == 1:
            content = bytearray(torch.serialization.pickle.dumps(Trap()))
        else:
            for _ in range(draw.randrange(1, 5)):
                content[draw.randrange(len(content))] = draw.randrange(256)
        victim.write_bytes(content)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        optimizer = torch.optim.Adam(model.parameters())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            sw.load_checkpoint(copy, model, optimizer)
        except sw.ShardwiseError:
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), round
        else:  # what was changed is no part of what is loaded: a header, or the same bytes
            assert all(torch.equal(tensor, want.state_dict()[name]) for name, tensor in model.state_dict().items()), (
                round
            )
        shutil.rmtree(copy)
    assert not (tmp_path / "trap-was-sprung").exists()


# ------------------------------------------------------------------------------------------- two jobs, and odd places


def test_a_second_job_that_saves_to_one_place_is_refused_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    model, began = nn.Linear(8, 8), threading.Event()
    go_on = threading.Event()
    real = saving.write

    def slow(*args: Any) -> Any:
        file = real(*args)
        began.set()
        go_on.wait(60)
        return file

    monkeypatch.setattr(saving, "write", slow)
    first = sw.save_checkpoint(tmp_path / "step-1", model, step=1, blocking=False)
    assert began.wait(60)
    monkeypatch.setattr(saving, "write", real)
    other = nn.Linear(8, 8)
    with raises(sw.errors.CheckpointError, "step-1", "saved", f"process {os.getpid()}"):
        sw.save_checkpoint(tmp_path / "step-1", other, step=1)  # the other job's
    sw.save_checkpoint(tmp_path / "step-2", other, step=2)
    assert (tmp_path / "step-1.incomplete").is_dir()  # of a live writer
    go_on.set()
    first.wait()
    with raises(sw.errors.CheckpointError, "step-1", "already"):
        sw.save_checkpoint(tmp_path / "step-1", other, step=1)
    for name, saved_model in (("step-1", model), ("step-2", other)):
        again = nn.Linear(8, 8)
        sw.load_checkpoint(tmp_path / name, again)
        assert torch.equal(again.weight, saved_model.weight)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2"}


def test_two_jobs_that_delete_checkpoints_in_one_folder_are_told(tmp_path: Path) -> None:
    script = f"""
import os, sys
import torch
import shardwise as sw
sw.save_checkpoint({str(tmp_path / "run")!r} + "/step-8", torch.nn.Linear(2, 2), step=8, keep=sw.Keep(last=1))
if os.fork():  # the child, such as a data worker, outlives it
    print("saved", flush=True)
sys.stdin.read()
"""
    model, keep = nn.Linear(2, 2), sw.Keep(last=1)
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"saved\n"
        with pytest.warns(sw.errors.PlanWarning, match=f"in {tmp_path / 'run'} .* process {first.pid} .*; end one"):
            sw.save_checkpoint(tmp_path / "run" / "step-9", model, step=9, keep=keep)
        assert {path.name for path in (tmp_path / "run").glob("step-*")} == {"step-8", "step-9"}
        first.kill()
        first.wait()
        sw.save_checkpoint(tmp_path / "run" / "step-10", model, step=10, keep=keep)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".keep=.lock", "step-10"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is written beside the folder"
    assert sw.load_checkpoint(tmp_path / "run", model).step == 10


@pytest.mark.parametrize("kind", ["is refused", "copies, and stops half-way"])
def test_a_file_system_whose_rename_is_not_atomic_costs_the_save_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As of object stores that are mounted as folders."""
    model, _ = saved(tmp_path, 1)

    def rename(source: Any, target: Any) -> None:
        if Path(source).is_dir() and "copies" in kind:  # the manifest first
            Path(target).mkdir()
            for name in (FILE, "owner"):
                shutil.copy(Path(source) / name, Path(target) / name)
        if Path(source).is_dir():
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        whole(source, target)

    whole = os.rename
    monkeypatch.setattr(os, "rename", rename)
    with raises(sw.errors.CheckpointError, "step-2", "not supported"):
        saved(tmp_path, 2)
    monkeypatch.undo()
    again = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    with pytest.warns(sw.errors.PlanWarning, match="step-2"):
        assert sw.load_checkpoint(tmp_path, again).step == 1
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("when", ["while it fills", "ahead of the rename", "behind the rename"])
def test_without_locks_a_save_whose_folder_another_job_takes_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """On a file system that has none, rank 0 and the others look whose the folder is."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    path, incomplete = tmp_path / "step-1", tmp_path / "step-1.incomplete"
    token = saving.make_room(folder_of(path), contextlib.ExitStack())
    staged = StagedFile.empty(PlannedFile("one.safetensors", b"", (), 0), pinned=False)
    manifest = Manifest(num_ranks=2, tensors={}, tied={})
    jobs = [
        saving.SaveJob(folder_of(path), token, rank, 2, [staged] * (rank == 0), manifest, None, 60.0)
        for rank in range(2)
    ]
    real = os.rename

    def taken() -> None:
        saving.make_room(folder_of(path), contextlib.ExitStack())
        (incomplete / "two.safetensors").write_text("the other job's")

    def rename(source: Any, target: Any) -> None:
        if Path(target) == path and when == "ahead of the rename":
            taken()
        real(source, target)
        if Path(target) == path and when == "behind the rename":
            real(path, tmp_path / "away")
            taken()
            real(incomplete, path)

    if when == "while it fills":
        taken()
    monkeypatch.setattr(os, "rename", rename)
    saves = [saving.Saving(job) for job in jobs]
    for save in saves:
        with raises(sw.errors.CheckpointError, "another job", "began"):
            save.wait()
    folder = incomplete if when == "while it fills" else path
    assert (folder / "two.safetensors").read_text() == "the other job's"
    assert not list(folder.glob("failed-*"))


# What another process does with the folder {folder}: it saves under a name, waits where it says so, and tells.
OTHER = """
import os, sys, time
from pathlib import Path
import torch
import shardwise as sw
from shardwise.train import saving

folder, name, waits = sys.argv[1:]
real = saving.write


def slow(*args):
    Path(folder, "began").write_text(str(os.getpid()))
    while waits == "waits":
        time.sleep(0.01)
    return real(*args)


saving.write = slow
torch.manual_seed(1)
try:
    if name == "weights":
        sw.save_pretrained(torch.nn.Linear(8, 8), Path(folder, name))
    else:
        sw.save_checkpoint(Path(folder, name), torch.nn.Linear(8, 8), step=1)
except sw.errors.CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["step-1", "weights"])
@pytest.mark.sampled(1)
def test_what_a_killed_process_left_the_next_save_removes_and_never_a_live_ones(tmp_path: Path, name: str) -> None:
    def other(waits: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OTHER, str(tmp_path), name, waits]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def save(number: int) -> None:
        sw.save_checkpoint(tmp_path / f"step-{number}", nn.Linear(8, 8), step=number)

    strangers = [tmp_path / "mine.incomplete", tmp_path / "yours.deleted", tmp_path / "download.incomplete"]
    for stranger in strangers[:2]:
        stranger.mkdir()
        (stranger / "thesis.txt").write_text("")
    strangers[2].write_text("")
    torn = tmp_path / "step-0.deleted"
    torn.mkdir()
    (torn / "shard-00000-of-00001.safetensors").write_text("")
    first = other("waits")
    while not (tmp_path / "began").exists():
        assert first.poll() is None
        time.sleep(0.01)
    second = other("")
    said, _ = second.communicate(timeout=120)
    assert f"{name} is being saved by process {first.pid} on {socket.gethostname()}" in said
    save(2)
    fills = tmp_path / ("weights/.parts.incomplete" if name == "weights" else "step-1.incomplete")
    assert fills.is_dir()
    assert not torn.exists()
    first.kill()
    first.communicate(timeout=120)
    if name == "step-1":
        save(3)
        assert not fills.exists()
    third = other("")
    assert third.communicate(timeout=120)[0] == ""
    assert (tmp_path / name).is_dir()
    assert all(stranger.exists() for stranger in strangers)
    assert not [path for path in tmp_path.glob("*.incomplete") if path not in strangers]


def test_a_lock_that_is_no_file_of_ours_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".step-1.lock")
    (tmp_path / ".step-2.lock").symlink_to(tmp_path / "elsewhere")
    for number in (1, 2):
        with raises(sw.errors.CheckpointError, f".step-{number}.lock"):
            sw.save_checkpoint(tmp_path / f"step-{number}", nn.Linear(2, 2), step=1)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["a" * 300, "nul\0", "file/step", "/", "."])
def test_places_that_cannot_be_are_errors_of_ours(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    place = name if name in ("/", ".") else tmp_path / name
    with pytest.raises(sw.errors.CheckpointError):
        sw.save_checkpoint(place, model, step=1)
    if name != "/":
        with pytest.raises(sw.errors.CheckpointError):
            sw.load_checkpoint(tmp_path / "x" if name == "." else place, model)


def test_states_that_no_optimizer_takes_are_announced(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    sw.save_checkpoint(tmp_path / "one", model, optimizer, step=1)
    fewer = torch.optim.Adam(model[1].parameters())
    with pytest.warns(sw.errors.PlanWarning, match=r"the states of 0\.bias, 0\.weight are not loaded"):
        sw.load_checkpoint(tmp_path / "one", model, fewer)
    assert len(fewer.state) == 2


def test_a_checkpoint_that_another_job_deletes_meanwhile_is_no_error(tmp_path: Path, monkeypatch: Any) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    real = retention.read_manifest

    def deleted(folder: Folder) -> Any:
        manifest = real(folder)
        if folder.name == "step-1":
            shutil.rmtree(folder.path)
        return manifest

    monkeypatch.setattr(retention, "read_manifest", deleted)
    assert [path.name for path in checkpoints_in(folder_of(tmp_path))[0]] == ["step-1", "step-2"]
