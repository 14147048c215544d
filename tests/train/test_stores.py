"""Checkpoints in object stores: on fsspec's memory, with faults put into its calls. A real S3 server: test_s3.py."""

from __future__ import annotations

import json
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.train import object_folder, saving
from shardwise.train.local_folder import LocalFolder
from shardwise.train.manifest import Manifest
from shardwise.train.names import FILE, OWNER
from shardwise.train.object_folder import without_secrets
from shardwise.train.retention import checkpoints_in, prune
from shardwise.train.stores import folder_of
from train.runs import saved

MEMORY = MemoryFileSystem.store  # of the whole process: path -> file


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place of its own in memory."""
    monkeypatch.setattr(object_folder, "_FIRST_PAUSE_SECONDS", 0.001)
    place = f"memory://{uuid.uuid4().hex}/run"
    yield place
    for path in [path for path in MEMORY if path.startswith(place.removeprefix("memory:/"))]:
        del MEMORY[path]


def stored(url: str) -> set[str]:
    base = url.removeprefix("memory:/") + "/"
    return {path.removeprefix(base) for path in MEMORY if path.startswith(base)}


def faulty(monkeypatch: pytest.MonkeyPatch, call: str, fault: Callable[[Any, str], Any]) -> None:
    """Let ``fault(real call, path)`` decide what a call of the store does; None: what it always does."""
    real = getattr(MemoryFileSystem, call)

    def changed(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        fault(self, path)
        return real(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, call, changed)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_run_is_saved_kept_and_loaded_as_in_a_folder(url: str, tmp_path: Path) -> None:
    keep = sw.Keep(last=2)
    for step in (1, 2, 3):
        model, optimizer = saved(folder_of(url), step, keep=keep, extra={"note": step})
        saved(folder_of(tmp_path), step, keep=keep, extra={"note": step})
    kept, torn = checkpoints_in(folder_of(url))
    assert [(one.name, manifest.step) for one, manifest in kept.items()] == [("step-2", 2), ("step-3", 3)]
    assert not torn
    assert {name.rpartition("/")[2].split("-")[0] for name in stored(url)} == {"shard", FILE, OWNER}
    again = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    adam = torch.optim.Adam(again.parameters())
    found = sw.load_checkpoint(url, again, adam)
    assert (found.path, found.step, found.extra) == (f"{url}/step-3", 3, {"note": 3})
    assert found.num_bytes_read == sw.load_checkpoint(tmp_path, again, adam).num_bytes_read
    assert same(again, model)
    for parameter, other in zip(again.parameters(), model.parameters(), strict=True):
        for key, value in adam.state[parameter].items():
            assert torch.equal(value, optimizer.state[other][key])
    with raises(sw.errors.CheckpointError, f"{url}/step-3", "exists already"):
        sw.save_checkpoint(f"{url}/step-3", model, step=3)
    with raises(sw.errors.CheckpointError, f"{url}/nowhere", "no checkpoint"):
        sw.load_checkpoint(f"{url}/nowhere", model)


def trains(url: str) -> dict[str, Any]:
    """On a rank: 5 steps, and 3 more by a second trainer, beside 8 by one."""

    def trainer(folder: str | None) -> sw.Trainer:
        torch.manual_seed(0)
        model, data = nn.Linear(8, 4), TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
        plan = sw.plan(model, data[:8], 1, mesh=sw.Mesh(dp=1), loss=nn.functional.cross_entropy)
        par = sw.parallelize(model, plan, loss=nn.functional.cross_entropy)
        optimizer, loader = torch.optim.AdamW(par.parameters()), sw.DataLoader(data, par, batch_size=8)
        saves: dict[str, Any] = {"save_every": 2, "keep": sw.Keep(last=2), "folder": folder} if folder else {}
        return sw.Trainer(par, optimizer, loader, log_every=1, progress=False, **saves)

    trainer(url).fit(5)
    second, whole = trainer(url), trainer(None)
    second.fit(8)
    whole.fit(8)
    with raises(sw.ShardwiseError, "tensorboard", url):
        sw.Trainer(whole.par, whole.optimizer, whole.loader, folder=url, tensorboard=True)
    log = folder_of(f"{url}/log")
    return {
        "same": all(map(torch.equal, second.par.parameters(), whole.par.parameters())),
        "lines": [json.loads(line)["step"] for name in sorted(log.names()) for line in log.read(name).splitlines()],
        "names": folder_of(url).names(),
    }


def test_the_trainer_goes_on_in_a_store(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(trains, 1, "memory://run")
    assert found == {"same": True, "lines": [*range(1, 9)], "names": {"log", "step-6", "step-8"}}


def test_what_is_later_than_the_loaded_state_is_set_aside(url: str) -> None:
    for _ in range(2):
        for step in (1, 2):
            if not folder_of(f"{url}/step-{step}").exists():
                saved(folder_of(url), step)
        whole = stored(f"{url}/step-2")
        first = next(name for name in whole if name.startswith("shard"))
        file = MEMORY[f"{url.removeprefix('memory:/')}/step-2/{first}"]
        file.seek(0, 2)
        file.write(b"x")  # torn: another length
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        recovery = sw.Recovery(model, torch.optim.Adam(model.parameters()), folder=url)
        with pytest.warns(sw.errors.PlanWarning, match=f"{url}/step-2 is skipped.*bytes"):
            assert recovery.resume() == 1
    assert {name.split("/")[0] for name in stored(url)} == {"step-1", "step-2.damaged", "step-2.1.damaged"}
    assert stored(f"{url}/step-2.1.damaged") == whole


def job_of(url: str, token: str, rank: int, num_ranks: int, seconds: float) -> saving.SaveJob:
    manifest = Manifest(num_ranks=num_ranks, tensors={}, tied={})
    return saving.SaveJob(folder_of(url), token, rank, num_ranks, [], manifest, None, seconds)


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_save_to_a_store_that_does_not_say_when_an_object_was_written(
    url: str, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    def modified(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "modified", modified)
    monkeypatch.setattr(saving, "write", mock.Mock(side_effect=OSError("disk")))
    token = saving.make_room(folder_of(f"{url}/step-1"), ExitStack())
    first, second = (job_of(f"{url}/step-1", token, rank, 2, 2.0) for rank in (0, 1))
    saves = [saving.Saving(first), saving.Saving(replace(second, files=[mock.Mock()]) if failed else second)]
    for save in saves:
        if failed:
            with raises(sw.errors.CheckpointError, "rank 1: disk"):
                save.wait()
        else:
            assert save.wait() == f"{url}/step-1"


def test_a_rank_that_waits_for_others_waits_for_all_of_them_until_one_moment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 400.0:
            job.staging.put(job.note(9), Manifest(num_ranks=10, tensors={}).to_text())  # rank 0 says nothing

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    job = job_of(f"{url}/step-1", "token", 8, 10, 600.0)
    job.staging.put(OWNER, "token")
    with raises(sw.errors.CheckpointError, "rank 8 ", "600 s", "rank 0 "):
        saving._save(job)
    assert now == pytest.approx(600.0, abs=5.0)


# --------------------------------------------------------------------------------------------------------- faults


def test_calls_that_fail_are_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}

    def twice(_: Any, path: Any) -> None:
        counts[str(path)] = counts.get(str(path), 0) + 1
        if counts[str(path)] % 3:
            raise RuntimeError("500 Internal Server Error")  # libraries of stores have errors of their own

    for call in ("open", "cat_file", "ls"):  # its exists() takes an error of info() for an answer
        faulty(monkeypatch, call, twice)
    model, _ = saved(folder_of(url), 1)
    again = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    assert sw.load_checkpoint(url, again).step == 1
    assert same(again, model)
    assert max(counts.values()) > 2


def test_a_store_that_stays_away_costs_the_save_and_nothing_else(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = saved(folder_of(url), 1)

    def away(_: Any, path: str) -> None:
        if "shard" in path:
            raise OSError("503 Slow Down")

    with monkeypatch.context() as patch:
        faulty(patch, "open", away)
        with raises(sw.errors.CheckpointError, f"{url}/step-2", "rank 0: OSError: 503 Slow Down (6 attempts)"):
            sw.save_checkpoint(f"{url}/step-2", model, optimizer, step=2)
    with pytest.warns(sw.errors.PlanWarning, match=f"{url}/step-2 is skipped: its save did not finish"):
        assert sw.load_checkpoint(url, model, optimizer).step == 1
    sw.save_checkpoint(f"{url}/step-2", model, optimizer, step=2)  # of the failed one nothing is in the way, or stays
    assert not [name for name in stored(url) if "failed" in name or "written" in name]
    assert sw.load_checkpoint(url, model, optimizer).step == 2


def test_a_complete_save_whose_older_checkpoints_cannot_be_read_has_not_failed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = sw.Keep(last=1)
    model, _ = saved(folder_of(url), 1)

    def away(_: Any, path: str) -> None:
        if f"step-1/{FILE}" in path:
            raise ConnectionError("503 Slow Down")

    with monkeypatch.context() as patch:
        faulty(patch, "cat_file", away)
        with pytest.warns(sw.errors.PlanWarning, match=f"{url}/step-2 is saved.*503 Slow Down"):
            sw.save_checkpoint(f"{url}/step-2", model, step=2, keep=keep)
        saving = sw.save_checkpoint(f"{url}/step-3", model, step=3, keep=keep, blocking=False)
        with pytest.warns(sw.errors.PlanWarning, match=f"{url}/step-3 is saved"):
            assert saving.wait() == f"{url}/step-3"
        assert saving.error is None
    assert {name.split("/")[0] for name in stored(url)} == {"step-1", "step-2", "step-3"}
    sw.save_checkpoint(f"{url}/step-4", model, step=4, keep=keep)
    assert {name.split("/")[0] for name in stored(url)} == {"step-4"}


@pytest.mark.parametrize("what", ["shard", FILE])
def test_a_store_that_does_not_answer_is_no_reason_to_load_an_older_state(
    url: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    saved(folder_of(url), 1)
    model, _ = saved(folder_of(url), 2)
    before = [tensor.clone() for tensor in model.state_dict().values()]

    def away(_: Any, path: str) -> None:
        if f"step-2/{what}" in path:
            raise PermissionError("The provided token has expired")

    faulty(monkeypatch, "cat_file", away)
    for place in (url, f"{url}/step-2"):
        with raises(sw.ShardwiseError, f"{url}/step-2", "expired") as error:
            sw.load_checkpoint(place, model)
        assert not isinstance(error.value, sw.errors.CheckpointError)
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_a_store_that_does_not_answer_is_not_one_without_checkpoints(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = saved(folder_of(url), 1)

    def away(_: Any, path: str) -> None:
        if path.rstrip("/").endswith("/run"):
            raise ConnectionError("503 Slow Down")

    faulty(monkeypatch, "ls", away)
    for act in (
        lambda: sw.load_checkpoint(url, model, optimizer),
        sw.Recovery(model, optimizer, folder=url).resume,
    ):
        with raises(sw.ShardwiseError, url, "503 Slow Down") as error:
            act()
        assert not isinstance(error.value, sw.errors.CheckpointError)


def test_a_manifest_that_is_not_answered_when_it_is_read_again_is_no_damage(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder_of(url), 1)
    model, _ = saved(folder_of(url), 2)
    reads: list[str] = []

    def away(_: Any, path: str) -> None:
        reads.append(path)
        if sum(f"step-2/{FILE}" in read for read in reads) > 1:
            raise ConnectionError("503 Slow Down")

    faulty(monkeypatch, "cat_file", away)
    with raises(sw.ShardwiseError, f"{url}/step-2/{FILE}", "503 Slow Down"):
        sw.load_checkpoint(url, model)


def is_asked_in_vain(folder: str) -> dict[str, str]:
    """On a rank: what is raised where the folder answers the other rank only."""
    torch.manual_seed(0)
    model, data = nn.Linear(8, 4), TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
    plan = sw.plan(model, data[:8], 2, mesh=sw.Mesh(dp=2), loss=nn.functional.cross_entropy)
    par = sw.parallelize(model, plan, loss=nn.functional.cross_entropy)
    optimizer, loader = torch.optim.AdamW(par.parameters()), sw.DataLoader(data, par, batch_size=8)
    trainer = sw.Trainer(par, optimizer, loader, folder=folder, save_every=1, progress=False)
    trainer.fit(1)
    recovery = sw.Recovery(par, optimizer, folder=folder)
    names = LocalFolder.names
    asked: list[int] = []

    def later(self: LocalFolder) -> set[str]:
        if self.path == Path(folder):
            asked.append(1)
            if len(asked) == 4:  # behind the choice and the load: what is later is to be renamed
                raise OSError(5, "Input/output error")
        return names(self)

    faults: dict[str, tuple[str, Any, Callable[[], Any]]] = {
        "load": ("names", OSError(5, "Input/output error"), lambda: sw.load_checkpoint(folder, par)),
        "choose": ("names", OSError(5, "Input/output error"), recovery.resume),
        "rename": ("names", later, recovery.resume),
        "exists": ("exists", OSError(5, "Input/output error"), lambda: trainer.fit(1)),
    }
    found = {}
    for name, (call, fault, act) in faults.items():
        failing = mock.patch.object(LocalFolder, call, autospec=True, side_effect=fault)
        with (
            failing if dist.get_rank() == 0 else nullcontext(),
            raises(sw.ShardwiseError, "Input/output error") as error,
        ):
            act()
        assert not isinstance(error.value, sw.errors.CheckpointError)
        found[name] = str(error.value)
    return found


def test_a_folder_that_does_not_answer_rank_zero_is_said_on_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(is_asked_in_vain, 2, str(tmp_path / "run"))
    assert first == second
    assert all(str(tmp_path / "run") in text for text in first.values())


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_manifest_whose_answer_was_lost_is_looked_for(
    url: str, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    pipe = MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        if path.endswith(FILE):
            if is_stored:
                pipe(self, path, value)
            raise TimeoutError("no answer")
        pipe(self, path, value, **kwargs)

    model, _ = saved(folder_of(url), 1)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        if is_stored:
            sw.save_checkpoint(f"{url}/step-2", model, step=2)
        else:
            with raises(sw.errors.CheckpointError, f"{url}/step-2", "no answer"):
                sw.save_checkpoint(f"{url}/step-2", model, step=2)
    with warnings.catch_warnings(action="ignore"):
        assert sw.load_checkpoint(url, model).step == 1 + is_stored


def test_an_upload_that_the_store_tore_is_made_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torn: list[str] = []
    real = MemoryFileSystem.info

    def info(self: Any, path: str, **kwargs: Any) -> Any:
        if "shard" in path and path not in torn:
            torn.append(path)
            MEMORY[self._strip_protocol(path)].truncate(100)
        return real(self, path, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    model, _ = saved(folder_of(url), 1)
    assert len(torn) == 1
    again = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    sw.load_checkpoint(url, again)
    assert same(again, model)


def test_a_byte_that_changed_is_damage(url: str) -> None:
    saved(folder_of(url), 1)
    model, _ = saved(folder_of(url), 2)
    (name,) = (name for name in stored(url) if name.startswith("step-2/shard"))
    content = MEMORY[f"{url.removeprefix('memory:/')}/{name}"].getbuffer()
    content[-9] ^= 1
    del content
    with pytest.warns(sw.errors.PlanWarning, match="step-2 is skipped: .*damaged: wrong checksum"):
        assert sw.load_checkpoint(url, model).step == 1


@pytest.mark.parametrize("when", ["while it fills", "ahead of the manifest", "behind the manifest"])
def test_of_two_that_save_under_one_name_one_is_complete_and_the_other_hears_so(
    url: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    outcomes: list[str] = []

    def second() -> None:
        monkeypatch.undo()
        try:
            sw.save_checkpoint(f"{url}/step-1", models[1], step=2)
            outcomes.append("saved")
        except sw.errors.CheckpointError as error:
            outcomes.append(str(error))

    if when == "while it fills":
        real = saving.write

        def write(*args: Any) -> Any:
            file = real(*args)
            second()
            return file

        monkeypatch.setattr(saving, "write", write)
    else:
        pipe = MemoryFileSystem.pipe_file

        def pipe_file(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
            is_manifest = path.endswith(FILE)
            if is_manifest and when == "ahead of the manifest":
                second()
            pipe(self, path, value, **kwargs)
            if is_manifest and when == "behind the manifest":
                second()

        monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    try:
        sw.save_checkpoint(f"{url}/step-1", models[0], step=1)
        outcomes.insert(0, "saved")
    except sw.errors.CheckpointError as error:
        outcomes.insert(0, str(error))
    assert outcomes.count("saved") == 1
    assert any("another job began to save it" in text or "exists already" in text for text in outcomes)
    again = nn.Linear(8, 8)
    assert sw.load_checkpoint(url, again).step == 1 + outcomes.index("saved")
    assert same(again, models[outcomes.index("saved")])


def test_a_store_that_writes_over_what_it_is_told_to_create_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda self, path, value, **_: pipe(self, path, value))
    with pytest.warns(sw.errors.PlanWarning, match=f"{url}/step-1: the store writes over objects"):
        saved(folder_of(url), 1)
    assert sw.load_checkpoint(url, nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))).step == 1


def test_a_store_that_does_not_show_what_was_written_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: [])
    with raises(sw.errors.CheckpointError, f"{url}/step-1", "written to"):
        saved(folder_of(url), 1)


def test_lists_are_never_taken_from_a_cache(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's stores keep lists of folders, which other jobs change."""
    asked: list[str] = []
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: asked.append("cleared"))
    for call in ("ls", "info"):
        faulty(monkeypatch, call, lambda _, path, call=call: asked.append(call))
    folder = folder_of(f"{url}/step-1")
    folder.exists()
    folder.names()
    folder.written(OWNER)
    assert asked == ["cleared", "info", "cleared", "ls", "cleared"]


def test_what_killed_jobs_left_is_removed_after_a_day_by_the_stores_clock(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder_of(url), 1)
    for name, age in (("step-7", 2.0), ("step-8", 0.5), ("mine", 2.0)):
        folder = folder_of(f"{url}/{name}")
        folder.put(OWNER, "0123")
        folder.put("shard-00000-of-00002-0123.safetensors" if name != "mine" else "thesis.txt", "...")
        for path in [path for path in MEMORY if path.startswith(f"{url.removeprefix('memory:/')}/{name}/")]:
            MEMORY[path].modified = datetime.now(UTC) - timedelta(days=age)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # this machine's clock says nothing
    saved(folder_of(url), 2)
    assert {name.split("/")[0] for name in stored(url)} == {"step-1", "step-2", "step-8", "mine"}
    prune(folder_of(f"{url}/step-2"), sw.Keep(last=1))
    assert {name.split("/")[0] for name in stored(url)} == {"step-2", "step-8", "mine"}


def test_credentials_that_are_renewed_outside_are_read_again_and_others_end_the_save(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = saved(folder_of(url), 1)
    connects: list[int] = []
    connect = object_folder.ObjectStore.connect

    def counted(self: Any) -> None:
        connects.append(1)
        connect(self)

    monkeypatch.setattr(object_folder.ObjectStore, "connect", counted)

    def expired(_: Any, path: str) -> None:
        if "shard" in path and len(connects) < limit:
            raise PermissionError("The provided token has expired. x-amz-security-token: FwoGZXIvYXdzEBYaD")

    limit = 2
    with monkeypatch.context() as patch:
        faulty(patch, "open", expired)
        sw.save_checkpoint(f"{url}/step-2", model, step=2)
    limit = 99
    with monkeypatch.context() as patch:
        faulty(patch, "open", expired)
        with pytest.raises(sw.errors.CheckpointError) as error:
            sw.save_checkpoint(f"{url}/step-3", model, step=3)
    assert "rank 0: the store refuses the credentials: The provided token has expired" in str(error.value)
    assert "earlier checkpoints are unchanged, and training can go on" in str(error.value)
    assert "FwoGZXIvYXdzEBYaD" not in "".join(traceback.format_exception(error.value))
    with warnings.catch_warnings(action="ignore"):
        assert sw.load_checkpoint(url, model).step == 2


@pytest.mark.parametrize(
    "text",
    [
        "GET https://host/bucket/key?X-Amz-Credential=SEKRET&X-Amz-Signature=SEKRET failed",
        "cannot connect to https://user:SEKRET@host/bucket",
        "AKIASEKRETSEKRETSEKR is no key",
        'header {"Authorization": "AWS4-HMAC-SHA256 Credential=SEKRET/2026, Signature=SEKRET"}',
        "Authorization: Bearer SEKRET",
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=SEKRET;",
        "{'secret': 'SEKRET', 'session_token': 'SEKRET more'}",
        "x-amz-security-token: SEKRET",
        "options SEKRET-as-given",
        "secret: SEKRET",
        "session token : 'SEKRET more'",
        "the body was token: ya29.SEKRET, expired",
        "StringToSign ... Signature:SEKRET",
        "api_key: SEKRET",
        "password: SEKRET",
        "<Error><SecretAccessKey>SEKRET</SecretAccessKey><Code>no</Code></Error>",
        '<a:SessionToken type="x">SEKRET SEKRET</a:SessionToken>',
        "Authorization: SharedKey acc:SEKRET=",
        "got SharedKeyLite acc:SEKRET=",
        "Authorization: AWS me:SEKRET=",
        r"{\"secret\": \"SEKRET\"}",
        "secret='SEKRET more'",
    ],
)
def test_no_text_of_an_error_has_a_credential(text: str) -> None:
    class Store:
        storage_options = {"key": "abcdefgh", "client_kwargs": {"x": "SEKRET-as-given"}}  # noqa: RUF012

    said = without_secrets(text, Store())
    assert "SEKRET" not in said.replace("AKIASEKRET", "SEKRET")
    assert said != text
    for harmless in (
        "NoSuchKey: the key run/step-1 does not exist (FileNotFoundError)",
        "<Error><Code>NoSuchKey</Code><Key>run/step-1/checkpoint.json</Key></Error>",
        "The provided token has expired",
        "design: 3 of 4",
    ):
        assert without_secrets(harmless, Store()) == harmless


# ------------------------------------------------------------------------------------------------ places that cannot be


def test_places_that_cannot_be_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    for place, values in {
        "nothing://bucket/run": ("nothing://",),
        "s3://key:SEKRET@bucket/run": ("s3://", "password"),
        "s3://SEKRETID@bucket/run": ("s3://", "user"),
        "s3://key:SEK/RET@bucket/run": ("s3://", "user"),
        "gs://SEKRETID@bucket/run": ("gs://", "user"),
        "az://box/run?sig=SEKRET": ("az://", "query"),
        "memory://run/step-*": ("memory://run/step-*", "pattern"),
        "simplecache::memory://run": ("chains",),
        "memory://": ("no name",),
    }.items():
        with raises(sw.errors.CheckpointError, *values):
            sw.save_checkpoint(place, model, step=1)
        with pytest.raises(sw.errors.CheckpointError) as error:
            sw.load_checkpoint(place, model)
        assert "SEK" not in str(error.value)
    with raises(sw.errors.CheckpointError, "s3:/bucket/run", "pathlib"):
        sw.save_checkpoint(Path("s3://bucket/run"), model, step=1)
    with raises(sw.errors.CheckpointError, "memory://weights", "folder"):
        sw.save_pretrained(model, "memory://weights")
    assert not list(tmp_path.iterdir())
    sw.save_checkpoint(f"file://{tmp_path}/step-1", model, step=1)
    assert (tmp_path / "step-1" / FILE).is_file()


def test_a_store_whose_library_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str, **_: Any) -> Any:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with raises(sw.errors.CheckpointError, "gs://", "gcsfs", fix='pip install "shardwise[gs]"'):
        sw.load_checkpoint("gs://bucket/run", nn.Linear(2, 2))


def memory_of_each(url: str) -> str:
    with pytest.raises(sw.errors.CheckpointError) as error:
        sw.save_checkpoint(f"{url}/step-1", nn.Linear(2, 2), step=1)
    return str(error.value)


def test_a_store_that_ranks_do_not_share_is_named(run_ranks: RunRanks) -> None:
    for text in run_ranks(memory_of_each, 2, "memory://mine"):
        assert "rank 1 does not see memory://mine/step-1, which rank 0 created" in text
