"""``Precision(products=torch.float8_e4m3fn)``: products have the price of another dtype, and are not executed in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from raising import raises
from shardwise.costs.cluster_file import format_cluster, parse

F8 = sw.Precision(compute=torch.bfloat16, products=torch.float8_e4m3fn)


def planned(cluster: str = "h800-1x8", **precision: Any) -> Any:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.GELU(), nn.Linear(8192, 8192, bias=False))
        batch = torch.empty(16384, 8192)
    options = {"mesh": sw.Mesh(dp=8), "mode": "data_parallel", "search": "dynamic_programming"}
    return sw.plan(module, batch, sw.Cluster.load(cluster), precision=sw.Precision(**precision), **options)


def test_products_in_fp8_have_their_own_rate() -> None:
    device = sw.Cluster.load("h800-1x8").device
    half, eighth = (planned(compute=torch.bfloat16, products=dtype) for dtype in (None, torch.float8_e4m3fn))
    flops = (2 + 3) * 2 * 16384 * 8192 * 8192 / 8  # nothing needs the gradient of the input
    saved = flops / device.matmul_flops("bf16") - flops / (1978.9e12 * 0.71)
    assert half.prediction.compute - eighth.prediction.compute == pytest.approx(saved, rel=0.1)
    assert half.prediction.memory_bytes == eighth.prediction.memory_bytes, "values are kept as computed"
    single = planned(products=torch.float8_e4m3fn)
    assert single.prediction.compute == planned().prediction.compute, "products in float32 stay what they are"


def test_such_a_plan_is_saved_and_read_and_says_what_it_is(tmp_path: Path) -> None:
    plan = planned(compute=torch.bfloat16, products=torch.float8_e4m3fn)
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again == plan.plan
    assert again.precision == F8
    assert "products f8" in str(again)
    assert 'products = "f8"' in again.pricing.cluster


def test_such_a_plan_is_not_executed() -> None:
    module, batch = nn.Linear(16, 16), torch.zeros(4, 16)
    plan = sw.plan(
        module, batch, sw.Cluster.load("h800-1x8").with_devices(2), precision=F8, search="dynamic_programming"
    )
    with raises(sw.errors.ShardwiseError, "sw.verify", "float8_e4m3fn", fix="without products="):
        sw.verify(module, batch, plan)
    with raises(sw.errors.ShardwiseError, "sw.parallelize", "float8_e4m3fn", fix="without products="):
        plan.precision.check_executed("sw.parallelize")


def test_what_has_no_rate_is_refused() -> None:
    with raises(sw.errors.ShardwiseError, "products", fix="torch.float8_e4m3fn"):
        sw.Precision(products=torch.bfloat16)
    with raises(sw.errors.ShardwiseError, "A100", "f8", fix="leave products= out"):
        planned("a100-80-1x8", compute=torch.bfloat16, products=torch.float8_e4m3fn)


def test_a_cluster_file_has_the_products_of_its_devices() -> None:
    cluster = sw.Cluster.load("h800-1x8").with_products("f8")
    assert parse(format_cluster(cluster), "the text").device == cluster.device
    text = format_cluster(cluster).replace('products = "f8"', 'products = "f4"')
    with raises(sw.errors.ShardwiseError, "f4", "device.flops"):
        parse(text, "the text")
