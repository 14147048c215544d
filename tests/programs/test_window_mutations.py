"""The proof must be able to fail: windows whose rows come from the wrong neighbour, or whose cotangents are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from programs.building import STEPS, WINDOWED, Program, program_of_sample, random_program
from programs.running import run
from rules.samples import Sample, call, x
from shardwise.layouts.conversions import Move
from shardwise.layouts.mesh import Mesh
from shardwise.programs.moves import LocalMove
from shardwise.proof import virtual
from shardwise.proof.virtual import VirtualCluster

aten = torch.ops.aten

SAMPLES: tuple[Sample, ...] = (
    call(aten.conv1d.default, x(1, 2, 12), x(2, 2, 3), None, [1], [1]),
    call(aten.conv1d.default, x(1, 2, 12), x(2, 2, 5), None, [1], [2]),
    call(aten.roll.default, x(12, 2), [5], [0]),
    call(aten.avg_pool1d.default, x(1, 2, 12), [3], [1], [1]),
)


@cache
def programs(kind: str) -> tuple[Program, ...]:
    if kind == "samples":
        return tuple(map(program_of_sample, SAMPLES))
    return tuple(random_program(seed, WINDOWED * 2 + STEPS) for seed in range(12))


def is_caught(kind: str) -> bool:
    """Whether some run of some program differs, or can no longer be executed at all."""
    # Three devices along one axis: the second has two neighbours.
    mesh, seeds = (Mesh(a=2, b=2), 8) if kind == "samples" else (Mesh(x=3), 3)
    for program in programs(kind):
        for seed in range(seeds):
            try:
                if run(program, seed, mesh, by_hand=kind == "split by hand").error > 1e-10:
                    return True
            except (AssertionError, RuntimeError):
                return True
    return False


KINDS = ("samples", "random", "split by hand")


def test_nothing_is_caught_when_nothing_is_broken() -> None:
    assert not is_caught("samples")  # test_random_programs runs the others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fault", ["lost", "from the other neighbour", "doubled"])
def test_a_broken_exchange_of_halos_is_caught(
    fault: str, backward: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``lost``: what comes from others is not added (or is zero)."""
    broken_exchange(monkeypatch, fault, lambda move, is_backward: move.cut is not None and is_backward == backward)
    assert is_caught(kind)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fault", ["lost", "from the other neighbour", "doubled"])
def test_a_broken_way_from_windows_into_slices_is_caught(
    fault: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_exchange(monkeypatch, fault, lambda move, is_backward: bool(move.reverse) and is_backward == backward)
    assert is_caught("split by hand")


def broken_exchange(monkeypatch: pytest.MonkeyPatch, fault: str, hits: Callable[[Move, bool], bool]) -> None:
    """Exchanges go wrong where ``hits`` (move, whether it is backward) says so."""
    now: list[tuple[Move, bool]] = []
    perform, exchange = VirtualCluster.perform, virtual.exchange_all

    def noting(self: VirtualCluster, move: Move, tensors: Sequence[Tensor], is_backward: bool) -> list[Tensor]:
        now.append((move, is_backward))
        return perform(self, move, tensors, is_backward)

    def broken(mesh: Mesh, own: Sequence[LocalMove], packed: Any) -> list[list[Tensor]]:
        answers = exchange(mesh, own, packed)
        if not hits(*now[-1]):
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
