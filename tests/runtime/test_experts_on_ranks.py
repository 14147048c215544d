"""Tokens that travel to their experts on two real ranks, in float64, beside one process: batches whose sizes change and
do not divide, compiled programs, micro-batches, and a checkpoint that one process reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.test_expert_exchange import Routed
from runtime.interpreted import interpret_section
from runtime.training import Trained, call_and_differentiate, check_close, state_of, step_or_differentiate, train
from shardwise.programs.keyed_rows import RowCounts
from shardwise.runtime import compiled

SIZES = (4, 4, 3, 1)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "changing batches": ({}, {}),
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
    return {"changing batches": SIZES, "micro-batches": (4, 4, 2)}.get(case, (4, 4, 3))


def train_model(module: nn.Module, case: str, optimizer: torch.optim.Optimizer) -> Trained:
    batches = [batch(step, size) for step, size in enumerate(sizes_of(case))]
    differentiate = step_or_differentiate if case == "micro-batches" else call_and_differentiate
    return train(module, batches, optimizer, differentiate=differentiate)


def alone(case: str) -> Trained:
    module = Routed().double()
    return train_model(module, case, torch.optim.AdamW(module.parameters(), lr=0.1))


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
        found[case] = train_model(par, case, optimizer).losses
        if "micro" not in case:
            assert len(reads) == len(sizes_of(case)), (
                "the host reads once a layer how many rows travel, forward and backward"
            )
        sw.save_checkpoint(folder / case.replace(", ", "-"), par, optimizer, step=1)
    return found


def test_ranks_train_as_one_process_and_save_what_it_has(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(train_on_rank, 2, tmp_path)
    for case in CASES:
        wanted = alone(case)
        assert all(found[case] == pytest.approx(wanted.losses, rel=1e-11) for found in ranks), case
        module = Routed().double()
        sw.load_checkpoint(tmp_path / case.replace(", ", "-"), module)
        check_close(state_of(module), wanted.state, rtol=1e-9, atol=1e-12, what=case)
