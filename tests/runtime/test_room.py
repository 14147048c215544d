"""A GPU without room for a rank's program is told before anything is put there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwise as sw
from raising import raises
from shardwise.costs import probe
from shardwise.errors import OutOfDeviceMemoryError
from shardwise.runtime.memory_check import require_memory


@pytest.fixture
def alone() -> Iterator[None]:
    sw.init_ranks("gloo")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_plan_that_needs_more_than_the_gpu_has_left_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(256, 256), torch.zeros(8, 256)
    plan = sw.plan(model, x, 1, loss=lambda y: y.sum(), search="dynamic_programming")
    peak = plan.prediction.memory_bytes
    asked = []

    def room(index: int) -> tuple[int, int]:
        asked.append(index)
        return left, 2**30

    monkeypatch.setattr(probe, "room", room)
    left = int(peak)
    require_memory(plan, torch.device("cuda", 3))
    assert asked == [3]
    left = int(peak / 1.06)
    with raises(OutOfDeviceMemoryError, 0, "1 GiB", "GPU", "memory_bytes=", facts=["peak"]):
        require_memory(plan, torch.device("cuda", 3))
    require_memory(plan, torch.device("cpu"))
    require_memory(replace(plan.plan, predicted=None), torch.device("cuda", 3))


@pytest.mark.usefixtures("alone")
def test_states_that_the_machine_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(256, 257), torch.zeros(8, 256)
    cluster = sw.Cluster.load("h100").with_nodes(1, 1)
    plan = sw.plan(model, x, cluster, loss=lambda y: y.sum(), mode="stand_alone", optimizer="adamw on host")
    pinned = 2 * (1 << 19)  # two states of 257 x 256 numbers, each in the next power of two; the bias stays
    monkeypatch.setattr(probe, "room", lambda index: (2**30, 2**30))
    monkeypatch.setattr(probe, "memory_bytes", lambda: left)
    left = pinned
    require_memory(plan, torch.device("cuda", 3), {"weight", "bias"})
    left = pinned - 1
    with raises(OutOfDeviceMemoryError, "1 MiB", "1 ranks", fix="zero=1", facts=["pinned"]):
        require_memory(plan, torch.device("cuda", 3), {"weight", "bias"})
    require_memory(plan, torch.device("cuda", 3), {"bias"})
    require_memory(plan, torch.device("cpu"), {"weight", "bias"})
