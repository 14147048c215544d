"""Checkpoints on a real S3 server on this machine, with faults in its answers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.train import object_folder
from shardwise.train.stores import folder_of
from train.runs import split, tools, train
from train.s3_server import CREDENTIALS, Server, s3_server, tear

for package in ("moto", "s3fs", "flask_cors"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install s3fs 'moto[s3]' flask flask-cors")


@pytest.fixture(scope="module")
def listening() -> Iterator[Server]:
    with s3_server("bucket") as server:
        yield server


@pytest.fixture
def server(listening: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in listening.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_folder, "_FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(object_folder, "_PART_BYTES", 5 * 2**20)  # the least that S3 takes
    yield listening
    listening.fault = lambda environ: None
    listening.requests.clear()


@pytest.fixture
def url() -> str:
    return f"s3://bucket/{uuid.uuid4().hex}"


def large() -> nn.Module:
    return nn.Linear(1024, 3000)  # 12 MB: parts of 8 MiB and 4 MB


def is_part(environ: dict[str, Any]) -> bool:
    return environ["REQUEST_METHOD"] == "PUT" and "partNumber" in environ["QUERY_STRING"]


def saves(environment: dict[str, str], url: str) -> list[float]:
    os.environ.update(environment)
    object_folder._FIRST_PAUSE_SECONDS = 0.01
    par = split("zero2")
    optimizer, scheduler = tools(par)
    losses = train(par, optimizer, scheduler, 0, 2)
    saving = sw.save_checkpoint(f"{url}/step-2", par, optimizer, step=2, schedulers=scheduler, blocking=False)
    losses += train(par, optimizer, scheduler, 2, 4)
    assert saving.wait() == f"{url}/step-2"
    other = split("tp2", seed=9)
    optimizer, scheduler = tools(other, 5.0)
    assert sw.load_checkpoint(url, other, optimizer, schedulers=scheduler).step == 2
    return losses[2:] + train(other, optimizer, scheduler, 2, 4)


def test_ranks_save_and_go_on_under_another_plan_though_the_server_fails_now_and_then(
    server: Server, url: str, run_ranks: RunRanks
) -> None:
    draw = random.Random(0)

    def now_and_then(environ: dict[str, Any]) -> str | None:
        return draw.choice(["InternalError", "SlowDown"]) if draw.random() < 0.15 else None

    server.fault = now_and_then
    for losses in run_ranks(saves, 2, server.environment, url):
        assert losses[2:] == pytest.approx(losses[:2], rel=1e-12)


def test_parts_that_are_slow_torn_or_refused_are_sent_again(server: Server, url: str) -> None:
    done: list[str] = []

    def faults(environ: dict[str, Any]) -> str | None:
        if not is_part(environ):
            return None
        time.sleep(0.1)
        if "partNumber=2" in environ["QUERY_STRING"] and done.count("refused") < 2:
            done.append("refused")
            return "InternalError"
        if "partNumber=1" in environ["QUERY_STRING"] and "torn" not in done:
            done.append("torn")
            tear(environ, 6 * 2**20)
        return None

    server.fault = faults
    model, again = large(), large()
    sw.save_checkpoint(f"{url}/step-1", model, step=1)
    assert sorted(done) == ["refused", "refused", "torn"]
    sw.load_checkpoint(url, again)
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again.bias, model.bias)
    reads = sum(request.startswith("GET") and "shard" in request for request in server.requests)
    assert reads == 2, "12 MB in ranges of 8 MiB, whatever number of tensors and blocks"
    fs = folder_of(url).store.fs  # type: ignore[attr-defined]
    assert not fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads"), "torn uploads were ended"


def test_credentials_that_expire_during_a_save_are_named_and_never_printed(server: Server, url: str) -> None:
    model = large()
    sw.save_checkpoint(f"{url}/step-1", model, step=1)
    server.fault = lambda environ: "ExpiredToken" if is_part(environ) else None
    with pytest.raises(sw.errors.CheckpointError) as error:
        sw.save_checkpoint(f"{url}/step-2", model, step=2)
    text = "".join(traceback.format_exception(error.value))
    assert "the store refuses the credentials: ExpiredToken" in str(error.value)
    assert not [secret for secret in CREDENTIALS.values() if secret in text and secret != "us-east-1"]
    assert "Signature=..." in str(error.value)
    server.fault = lambda environ: None
    with pytest.warns(sw.errors.PlanWarning, match="step-2 is skipped: its save did not finish"):
        assert sw.load_checkpoint(url, model).step == 1


@pytest.mark.parametrize("conditional", [True, pytest.param(False, marks=pytest.mark.long)])
def test_of_two_jobs_that_save_one_name_at_once_the_whole_of_one_stays(
    server: Server, url: str, conditional: bool
) -> None:
    if not conditional:  # as of stores that know S3's older requests only
        server.fault = lambda environ: environ.pop("HTTP_IF_NONE_MATCH", None) and None
    models, outcomes = [large(), large()], ["", ""]
    meet = threading.Barrier(2)

    def save(number: int) -> None:
        meet.wait()
        try:
            sw.save_checkpoint(f"{url}/step-1", models[number], step=number)
        except sw.errors.CheckpointError as error:
            outcomes[number] = str(error)

    warnings.simplefilter("ignore")
    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outcomes.count("") == 1, outcomes
    assert any("another job" in text or "exists already" in text for text in outcomes), outcomes
    again = large()
    winner = sw.load_checkpoint(url, again).step
    assert outcomes[winner] == ""
    assert torch.equal(again.weight, models[winner].weight)


def test_the_endpoint_of_the_environment_is_read_at_each_save(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.save_checkpoint(f"{url}/step-1", nn.Linear(2, 2), step=1)
    with s3_server("bucket") as other:
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.address)
        sw.save_checkpoint(f"{url}/step-2", nn.Linear(2, 2), step=2)
        assert any("step-2/checkpoint.json" in request for request in other.requests)


def test_a_store_that_knows_no_conditions_is_named(server: Server, url: str) -> None:
    server.fault = lambda environ: environ.pop("HTTP_IF_NONE_MATCH", None) and None
    with pytest.warns(sw.errors.PlanWarning, match="writes over objects that it is told to create"):
        sw.save_checkpoint(f"{url}/step-1", nn.Linear(2, 2), step=1)


ENDS = """
import sys, torch, shardwise as sw
sw.save_checkpoint(sys.argv[1] + "/step-1", torch.nn.Linear(1024, 3000), step=1, blocking=False)
"""


@pytest.mark.long
def test_a_script_that_ends_without_waiting_still_completes_its_save(server: Server, url: str) -> None:
    environment = {**os.environ, "AWS_ENDPOINT_URL": server.address.replace("127.0.0.1", "localhost")}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, url], env=environment, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sw.load_checkpoint(url, large()).step == 1


@pytest.mark.long
def test_what_keep_leaves_and_a_resume_sets_aside_is_the_same_on_a_server(server: Server, url: str) -> None:
    model = large()
    for step in (1, 2, 3):
        sw.save_checkpoint(f"{url}/step-{step}", model, step=step, keep=sw.Keep(last=2))
    assert folder_of(url).names() == {"step-2", "step-3"}
    folder = folder_of(f"{url}/step-3")
    folder.remove([next(name for name in folder.names() if name.startswith("shard"))])
    with pytest.warns(sw.errors.PlanWarning, match=f"{url}/step-3 is skipped.*cannot be read"):
        assert sw.Recovery(large(), folder=url).resume() == 2
    assert folder_of(url).names() == {"step-2", "step-3.damaged"}
