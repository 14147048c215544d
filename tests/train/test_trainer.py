"""The loop: what it computes is what the calls in it compute, and it stops and goes on without a difference."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.train.trainer import _Log
from train.runs import split, tools


def data() -> TensorDataset:
    return TensorDataset(*torch.randint(0, 14, (2, 60, 5), generator=torch.Generator().manual_seed(1)))


def trainer(folder: Path | None, **more: Any) -> sw.Trainer:
    par = split("dp2")
    optimizer, scheduler = tools(par)
    loader = sw.DataLoader(data(), par, 12, seed=5)
    return sw.Trainer(
        par, optimizer, loader, scheduler=scheduler, accumulate=2, clip_norm=0.5, folder=folder, log_every=1, **more
    )


def by_hand(num_steps: int) -> list[float]:
    par = split("dp2")
    optimizer, scheduler = tools(par)
    loader = sw.DataLoader(data(), par, 12, seed=5)
    batches = (batch for _ in range(99) for batch in loader)
    losses = []
    for _ in range(num_steps):
        loss = sum(par.step(*next(batches)) for _ in range(2)) / 2
        losses.append(float(loss))
        for p in par.parameters():
            if p.grad is not None:
                p.grad /= 2
        torch.nn.utils.clip_grad_norm_(par.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def on_ranks(folder: str) -> list[float]:
    """On a rank: a run that is told to stop, goes on, and is evaluated."""
    where, rank = Path(folder) / "run", dist.get_rank()

    def evaluate(par: nn.Module) -> dict[str, float]:
        assert not par.training
        assert not torch.is_grad_enabled()
        return {"validation": par(*(t[:12] for t in data().tensors)).item()}

    settings: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": 4, "save_every": 2, "tensorboard": True}

    def scaler() -> torch.amp.GradScaler:  # powers of two change no bit of a gradient
        return torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3)

    first = trainer(where, keep=sw.Keep(last=2, best="validation"), scaler=scaler(), **settings)
    real = first.par.step

    def told(*batch: Any, **scaled: Any) -> torch.Tensor:
        if first.step == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank only
        return real(*batch, **scaled)

    with mock.patch.object(first.par, "step", told):
        first.fit(9)
    dist.barrier()  # rank 0 deletes what does not stay
    assert first.stopped
    assert first.step == 5
    assert {path.name for path in where.glob("step-*")} == {"step-4", "step-5"}
    second = trainer(where, keep=sw.Keep(last=1), scaler=scaler(), **settings)
    second.fit(9)
    assert second.scaler.get_scale() == 2.0**9, "three growths in nine steps, some of them before it was resumed"
    dist.barrier()
    assert (second.step, second.stopped) == (9, False)
    assert {path.name for path in where.glob("step-*")} == {"step-9"}
    second.fit(9)  # nothing is left to do
    assert second.step == 9
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    damaged(Path(folder) / "damaged", rank)
    called_back(rank)
    return by_hand(9)


def called_back(rank: int) -> None:
    """Every rank is called with every line, and one of them ends training; its model FLOPs are counted."""
    lines: list[tuple[int, Any]] = []

    def told(own: sw.Trainer, line: Any) -> None:
        lines.append((own.step, line))
        if own.step == 3 and rank == 1:
            own.stop()

    own = trainer(None, callbacks=[told], evaluate=lambda par: {"half": 0.5}, evaluate_every=2)
    own.fit(5)
    assert own.stopped
    assert [step for step, _ in lines] == [1, 2, 2, 3]
    assert lines[2][1] == {"half": 0.5}
    products = 5 * (12 * 36 + 12 * 12 + 2 * 12 * 10 + 12 * 14) + 2 * 6 * 5 * 5 * 2  # of a sample: weights, attention
    peak = 2 * sw.Cluster.of(2).device.peak_flops("f64")
    for _, line in lines[:2]:
        assert line["mfu"] * peak / line["samples_per_second"] == pytest.approx(3 * 2 * products)
    own.fit(2)  # from the start, as there is no folder
    assert (own.step, own.stopped) == (2, False)


def damaged(where: Path, rank: int) -> None:
    """The newest checkpoint is damaged: a run goes on from the one before it, and saves under the same name."""
    trainer(where, save_every=1).fit(2)
    dist.barrier()
    if rank == 0:
        file = max((where / "step-2").glob("*.safetensors"), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    dist.barrier()
    again = trainer(where, save_every=1)
    with warnings.catch_warnings(record=True, action="always") as said:
        again.fit(3)
    assert rank > 0 or any("step-2 is skipped" in str(one.message) for one in said)
    dist.barrier()
    assert {path.name for path in where.glob("step-*")} == {"step-1", "step-2", "step-2.damaged", "step-3"}
    par = split("dp2")
    optimizer, _ = tools(par)
    nothing = sw.DataLoader(data(), par, 1000, seed=5, drop_last=True)
    with raises(sw.ShardwiseError, "loader", "drop_last=False"):
        sw.Trainer(par, optimizer, nothing).fit(1)


def test_logged_steps_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (True, False):
        with _Log(None, False, progress, 3) as log:
            log.write(2, {"loss": 1.25, "lr": 0.001})
    assert capsys.readouterr().out.strip() == "step 2: loss 1.25, lr 0.001"


def test_the_loop_is_its_parts_and_survives_a_signal(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    want = run_ranks(on_ranks, 2, str(tmp_path))[0]
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert [steps[step]["loss"] for step in range(1, 10)] == pytest.approx(want, rel=1e-12)
    assert all({"lr", "grad_norm", "samples_per_second"} <= line.keys() for line in steps.values())
    assert [line["step"] for line in lines if "validation" in line] == [4, 8, 9]
    assert list((tmp_path / "run").glob("events.*"))


def odd_runs(folder: str) -> None:
    """On a rank: metrics that are no numbers, a norm that stays in eval(), and a loop in a thread."""
    where = Path(folder) / "odd"
    found = iter((0.5, math.nan, math.inf, 0.7))
    first = trainer(
        where, keep=sw.Keep(last=1, best="v"), evaluate=lambda par: {"v": next(found)}, evaluate_every=1, save_every=1
    )
    norm = first.par.get_submodule("batch_norm")
    norm.eval()
    first.fit(4)
    assert not norm.training
    assert first.par.training
    assert first.par.get_buffer("batch_norm.num_batches_tracked") == 0
    dist.barrier()
    assert {path.name for path in where.glob("step-*")} == {"step-1", "step-4"}
    said: list[str] = []

    def in_a_thread() -> None:
        with warnings.catch_warnings(record=True, action="always") as heard:
            second = trainer(None)
            second.fit(1)
            assert second.step == 1
            said.extend(str(one.message) for one in heard)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert any("signals cannot be caught" in one for one in said), said


def test_odd_metrics_modes_and_threads_end_no_run(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(odd_runs, 2, str(tmp_path))

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (tmp_path / "odd/log.jsonl").read_text().splitlines()
    metrics = [line["v"] for line in (json.loads(text, parse_constant=no_constant) for text in lines) if "v" in line]
    assert metrics == [0.5, "nan", "inf", 0.7]


def test_settings_that_cannot_be_are_refused() -> None:
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    loader: Any = None
    for wrong in ({"accumulate": 0}, {"log_every": True}, {"save_every": 2}, {"tensorboard": True}):
        with pytest.raises(sw.ShardwiseError):
            sw.Trainer(model, optimizer, loader, **wrong)
