"""Messages joined with their products: which ones, and that every number is that of one device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import shardwise as sw
from programs.test_row_chunks import SEQUENCES, Llama, rank_program
from shardwise.costs.product_messages import FusedProductCost
from shardwise.programs import fused_products
from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.invariants import check_program
from shardwise.programs.rank_program import RankProgram


def fused_of(program: RankProgram) -> list[list[tuple[bool, int]]]:
    """(gathers, number of products) of each, forward and backward."""
    halves = program.forward, program.backward
    return [[(i.gathers, len(i.transposed)) for i in half if isinstance(i, FusedProduct)] for half in halves]


def planned(mesh: sw.Mesh, **options: Any) -> tuple[Llama, torch.Tensor, Any]:
    torch.manual_seed(0)
    module, batch = Llama(), torch.randint(0, 32, (4, 8))
    return (
        module,
        batch,
        sw.plan(module, batch, mesh.num_devices, mesh=mesh, strategies=SEQUENCES, row_chunks="fused", **options),
    )


def test_messages_of_sequences_are_joined_with_the_products_that_read_or_feed_them() -> None:
    program = rank_program(*planned(sw.Mesh(tp=2)))
    check_program(program)
    forward, backward = fused_of(program)
    assert Counter(forward) == {(True, 3): 2, (True, 2): 2, (False, 1): 3}, "q k v; gate up; o o down"
    assert backward, "the gather of the cotangent of o"


@pytest.mark.parametrize("options", [{"mesh": sw.Mesh(tp=4)}, {"mesh": sw.Mesh(dp=2, tp=2), "zero": 3}])
def test_every_number_is_that_of_one_device(options: dict[str, Any]) -> None:
    module, batch, plan = planned(**options)
    assert sum(map(len, fused_of(rank_program(module, batch, plan)))) >= 4
    report = sw.verify(module, batch, plan)
    assert report.ok, report
    assert "run within products" in str(plan)
    assert sw.Plan.from_json(plan.to_json()) == plan.plan


def test_parts_of_another_dim_are_found() -> None:
    module, batch, plan = planned(sw.Mesh(tp=2))
    joined = fused_products._joined

    def of_batch(*args: Any, **kwargs: Any) -> FusedProduct:
        return replace(joined(*args, **kwargs), dim=0)

    def is_right() -> None:
        report = sw.verify(module, batch, plan)
        assert report.ok, "wrong numbers"

    is_right()
    wrong = (AssertionError, RuntimeError, sw.ShardwiseError)
    with mock.patch.object(fused_products, "_joined", of_batch), pytest.raises(wrong):
        is_right()


def seconds_of(row_chunks: Any, cluster: str = "h100-1x8") -> tuple[Any, float]:
    """(what the plan has, seconds of its simulated step) of wide layers, whose 8,184 rows no chunks divide."""
    with torch.device("meta"):
        module = Llama(32000, 4096, 14336, 32).to(torch.bfloat16)
        batch = torch.zeros(1, 8184, dtype=torch.int64)
    settings: dict[str, Any] = {"mesh": sw.Mesh(tp=8), "strategies": SEQUENCES, "search": "dynamic_programming"}
    plan = sw.plan(module, batch, cluster, **settings, row_chunks=row_chunks).plan
    assert plan.predicted is not None
    return plan.row_chunks, plan.predicted.simulated_seconds


def test_messages_run_within_products_where_that_is_faster_than_whole_rows_and_chunks() -> None:
    """NVLink in a node of H100, and PCIe between L40S, whose memory others do not read: they cost the same there."""
    assert seconds_of(None) == seconds_of("fused")
    assert seconds_of("fused", "l40s-1x8")[1] == pytest.approx(seconds_of(1, "l40s-1x8")[1])
    assert seconds_of(None, "l40s-1x8")[0] != "fused"


@pytest.mark.parametrize("gathers", [True, False])
def test_the_price_is_that_of_two_machines_in_a_row(gathers: bool) -> None:
    device = sw.Cluster.load("h100-1x8").device
    program = rank_program(*planned(sw.Mesh(tp=2)))
    fused = (i for i in program.forward if isinstance(i, FusedProduct) and i.gathers == gathers)
    instruction = next(fused)
    for parts, message in ((2, 1e-6), (2, 1e-3), (8, 7e-6), (8, 1e-3)):
        cost = FusedProductCost(instruction, program.forms, device, parts, message, 0.0)
        product, copy = cost.products / parts, message / (parts - 1)
        stages = [(0.0, product)] + [(copy, product)] * (parts - 1)
        ends = [0.0, 0.0]
        for stage in stages if gathers else [pair[::-1] for pair in stages[::-1]]:
            for machine, seconds in enumerate(stage):
                ends[machine] = max(ends[: machine + 1]) + seconds
        assert cost.seconds == pytest.approx(max(ends) + cost.moves)
