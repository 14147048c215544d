"""The proof must be able to fail: windows whose rows come from the wrong neighbour, or whose cotangents are lost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from programs.building import Program, program_of_sample
from programs.running import run
from rules.samples import Sample, call, x
from shardwise.layouts.conversions import Move
from shardwise.layouts.mesh import Mesh
from shardwise.runtime import virtual
from shardwise.runtime.moves import LocalMove
from shardwise.runtime.virtual import VirtualCluster

aten = torch.ops.aten

SAMPLES: tuple[Sample, ...] = (
    call(aten.conv1d.default, x(1, 2, 12), x(2, 2, 3), None, [1], [1]),
    call(aten.conv1d.default, x(1, 2, 12), x(2, 2, 5), None, [1], [2]),
    call(aten.roll.default, x(12, 2), [5], [0]),
    call(aten.avg_pool1d.default, x(1, 2, 12), [3], [1], [1]),
)


@cache
def programs() -> tuple[Program, ...]:
    return tuple(map(program_of_sample, SAMPLES))


def is_caught() -> bool:
    for program in programs():
        for seed in range(8):
            try:
                if run(program, seed, Mesh(a=2, b=2)).error > 1e-10:
                    return True
            except (AssertionError, RuntimeError):
                return True
    return False


def test_nothing_is_caught_when_nothing_is_broken() -> None:
    assert not is_caught()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fault", ["lost", "from the other neighbour", "doubled"])
def test_a_broken_exchange_of_halos_is_caught(fault: str, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``lost``: what comes from others is not added (or is zero)."""
    now: list[tuple[Move, bool]] = []
    perform, exchange = VirtualCluster.perform, virtual.exchange_all

    def noting(self: VirtualCluster, move: Move, tensors: Sequence[Tensor], is_backward: bool) -> list[Tensor]:
        now.append((move, is_backward))
        return perform(self, move, tensors, is_backward)

    def broken(mesh: Mesh, own: Sequence[LocalMove], packed: Any) -> list[list[Tensor]]:
        answers = exchange(mesh, own, packed)
        move, is_backward = now[-1]
        if move.cut is None or is_backward != backward:
            return answers
        if fault != "from the other neighbour":
            factor = 0.0 if fault == "lost" else 2.0
            return [[tensor * factor for tensor in answer] for answer in answers]
        turned = []
        for answer in answers:
            filled = [i for i, tensor in enumerate(answer) if tensor.numel()]
            places = dict(zip(filled, reversed(filled), strict=True))
            turned.append([answer[places.get(i, i)] for i in range(len(answer))])
        return turned

    monkeypatch.setattr(VirtualCluster, "perform", noting)
    monkeypatch.setattr(virtual, "exchange_all", broken)
    assert is_caught()
