"""A step of DeepSeek-V3 as its software runs it, from the seconds of a layer."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.costs.cluster import Cluster
from shardwise.costs.timeline import Event

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def dual_pipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("dual_pipe")


def test_a_pair_takes_what_kernels_or_exchanges_take(dual_pipe: ModuleType) -> None:
    cluster = Cluster.load("h800-2x8")
    layer = dual_pipe.Layer(forward=1.0, backward=2.0, again=0.5, weights=0.75, once=0.25)
    pipe = dual_pipe.DualPipe(places=4, layers=7, micro_batches=10, tokens=0, width=8, nodes=2, reached=1)
    sent = 2 * cluster.levels[-1].latency  # both ways of a direction, without tokens
    pair = 3.5 * 132 / 112
    bubble = pair + 2.5 + sent - 3 * 0.75
    assert pipe.seconds(layer, cluster) == pytest.approx(2 * (10 * pair + bubble + 0.25))
    far = replace(pipe, tokens=10**9, width=46)
    one_way = far.exchange(cluster, 1 + 4 / 128) + far.exchange(cluster, 2)
    assert one_way == pytest.approx(1e9 * 0.5 * 46 * (3 + 4 / 128) / 46e9, rel=1e-3), "half of the tokens stay"
    few = far.seconds(layer, cluster)
    assert replace(far, micro_batches=11).seconds(layer, cluster) - few == pytest.approx(2 * max(pair, 2 * one_way))


def test_a_layer_is_what_has_its_name(dual_pipe: ModuleType) -> None:
    events = (
        Event("layers.0.mlp/linear", "forward", (), 0.0, 7.0),
        Event("layers.1.self_attn.q_b_proj/linear", "forward", (), 0.0, 0.25),
        Event("layers.1.mlp.experts/grouped_mm", "forward", (), 0.0, 0.5),
        Event("layers.1.mlp.experts/mul", "forward", (), 0.0, 0.125),
        Event("layers.1.mlp.experts/mul", "backward", (), 0.0, 2.0),
        Event("row_exchange", "forward", ("ep",), 0.0, 11.0),
        Event("reduce_scatter", "backward", ("dp",), 0.0, 1.0),
    )
    layer = dual_pipe.Layer.of(events, "layers.1.", 2)
    assert layer == dual_pipe.Layer(0.875, 2.0, again=0.375, weights=0.75, once=0.5)
