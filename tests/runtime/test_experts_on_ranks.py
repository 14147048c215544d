"""Tokens that travel to their experts on two real ranks, in float64, beside one process: batches whose sizes change and
do not divide, compiled programs, micro-batches, and a checkpoint that one process reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from models.test_expert_exchange import Routed
from runtime.interpreted import interpret_section
from shardwise.programs.keyed_rows import RowCounts
from shardwise.runtime import compiled

RunRanks = Callable[..., list[Any]]
SIZES = (4, 4, 3, 1)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "changing batches": ({}, {}),
    "compiled": ({}, {"compile": True}),
    "compiled, ZeRO 3": ({"zero": 3}, {"compile": True}),
    "micro-batches": ({"micro_batch": 2}, {}),
    "checked copies": ({"zero": 1}, {"check_replicas": 1}),
}


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(4, (size, 7, 2), generator=generator)
    if step == 1:
        chosen.zero_()  # the second rank gets no token
    return torch.randn(size, 7, 8, dtype=torch.float64, generator=generator), chosen


def sizes_of(case: str) -> tuple[int, ...]:
    return (4, 4, 2) if "micro" in case else SIZES


def train(module: Any, case: str, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step, size in enumerate(sizes_of(case)):
        optimizer.zero_grad()
        if case == "micro-batches" and isinstance(module, sw.Parallel):
            losses.append(float(module.step(*batch(step, size))))
        else:
            loss = module(*batch(step, size))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def alone(case: str) -> tuple[list[float], dict[str, Tensor]]:
    module = Routed().double()
    losses = train(module, case, torch.optim.AdamW(module.parameters(), lr=0.1))
    return losses, {name: p.detach().clone() for name, p in module.named_parameters()}


def train_on_rank(folder: Path) -> dict[str, list[float]]:
    compiled.compile_with_inductor = interpret_section
    reads: list[RowCounts] = []
    counted = RowCounts.__init__

    def noted(counts: RowCounts, sent: Tensor, received: Tensor) -> None:
        reads.append(counts)
        counted(counts, sent, received)

    RowCounts.__init__ = noted  # type: ignore[method-assign]
    found = {}
    for case, (plan_options, options) in CASES.items():
        module = Routed().double()
        plan = sw.plan(module, batch(0, 4), 2, mesh=sw.Mesh(ep=2), search="sharding_propagation", **plan_options)
        assert sum(c.kind == "row_exchange" for c in plan.collectives()) == 2, plan
        par = sw.parallelize(module, plan, **options)
        reads.clear()
        optimizer = torch.optim.AdamW(par.parameters(), lr=0.1)
        found[case] = train(par, case, optimizer)
        if "micro" not in case:
            assert len(reads) == len(SIZES), "the host reads once a layer how many rows travel, forward and backward"
        sw.save_checkpoint(folder / case.replace(", ", "-"), par, optimizer, step=1)
    return found


def test_ranks_train_as_one_process_and_save_what_it_has(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(train_on_rank, 2, tmp_path)
    for case in CASES:
        losses, parameters = alone(case)
        assert all(found[case] == pytest.approx(losses, rel=1e-11) for found in ranks), case
        module = Routed().double()
        sw.load_checkpoint(tmp_path / case.replace(", ", "-"), module)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), parameters[name], rtol=1e-9, atol=1e-12, msg=f"{case}, {name}"
            )
