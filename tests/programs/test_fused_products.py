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
from shardwise.programs import fused_products
from shardwise.programs.fused_products import FusedProduct, with_fused_products
from shardwise.programs.invariants import check_program
from shardwise.programs.rank_program import RankProgram
from shardwise.proof import ranks


def fused_of(program: RankProgram) -> list[list[tuple[bool, int]]]:
    """(gathers, number of products) of each, forward and backward."""
    halves = program.forward, program.backward
    return [[(i.gathers, len(i.transposed)) for i in half if isinstance(i, FusedProduct)] for half in halves]


def fused(program: RankProgram) -> RankProgram:
    result = with_fused_products(program, lambda axes: True)
    check_program(result)
    return result


def planned(mesh: sw.Mesh, **options: Any) -> tuple[Llama, torch.Tensor, Any]:
    torch.manual_seed(0)
    module, batch = Llama(), torch.randint(0, 32, (4, 8))
    return module, batch, sw.plan(module, batch, mesh.num_devices, mesh=mesh, strategies=SEQUENCES, **options)


def test_messages_of_sequences_are_joined_with_the_products_that_read_or_feed_them() -> None:
    program = rank_program(*planned(sw.Mesh(tp=2)))
    forward, backward = fused_of(fused(program))
    assert Counter(forward) == {(True, 3): 2, (True, 2): 2, (False, 1): 3}, "q k v; gate up; o o down"
    assert backward, "the gather of the cotangent of o"
    assert fused_of(with_fused_products(program, lambda axes: False)) == [[], []]


@pytest.mark.parametrize("options", [{"mesh": sw.Mesh(tp=4)}, {"mesh": sw.Mesh(dp=2, tp=2), "zero": 3}])
def test_every_number_is_that_of_one_device(options: dict[str, Any]) -> None:
    module, batch, plan = planned(**options)
    found: list[int] = []
    report = verified(module, batch, plan, found)
    assert report.ok, report
    assert min(found) >= 4


def test_parts_of_another_dim_are_found() -> None:
    module, batch, plan = planned(sw.Mesh(tp=2))
    joined = fused_products._joined

    def of_batch(*args: Any, **kwargs: Any) -> FusedProduct:
        return replace(joined(*args, **kwargs), dim=0)

    def is_right() -> None:
        report = verified(module, batch, plan, [])
        assert report.ok, "wrong numbers"

    is_right()
    wrong = (AssertionError, RuntimeError, sw.ShardwiseError)
    with mock.patch.object(fused_products, "_joined", of_batch), pytest.raises(wrong):
        is_right()


def verified(module: Any, batch: Any, plan: Any, found: list[int]) -> Any:
    differentiate = ranks.differentiate

    def with_fused(*args: Any, **kwargs: Any) -> RankProgram:
        program = fused(differentiate(*args, **kwargs))
        found.append(sum(map(len, fused_of(program))))
        return program

    with mock.patch.object(ranks, "differentiate", with_fused):
        return sw.verify(module, batch, plan)
