"""Callbacks that record a run and take it up again, and distributions and functions beside their formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shardwise.mindspore.nn.probability import distribution

import shardwise.mindspore as ms
from raising import raises
from shardwise.mindspore import Tensor, nn, ops


def _rows() -> list[tuple[Tensor, Tensor]]:
    numbers = np.random.RandomState(0)
    return [(Tensor(numbers.rand(4, 3), ms.float32), Tensor(numbers.rand(4, 2), ms.float32)) for _ in range(3)]


def _trained(*callbacks: ms.Callback) -> np.ndarray[Any, Any]:
    ms.set_seed(1)
    net = nn.Dense(3, 2)
    model = ms.Model(net, nn.MSELoss(), nn.Adam(net.trainable_params(), 0.1))
    model.train(2, _rows(), callbacks=list(callbacks), dataset_sink_mode=False)
    found: np.ndarray[Any, Any] = net.weight.asnumpy()
    return found


def test_losses_are_written_for_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _trained(ms.SummaryCollector(str(tmp_path), collect_freq=2))
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 4, 6]
    np.testing.assert_allclose([event.value for event in events.Scalars("learning_rate")], 0.1, rtol=1e-6)
    assert "weight/auto" in events.Tags()["histograms"]


def test_distributions_are_their_formulas() -> None:
    normal = distribution.Normal(1.0, 2.0)
    x = Tensor([0.5, 3.0], ms.float32)
    want = np.exp(-(((np.array([0.5, 3.0]) - 1) / 2) ** 2) / 2) / (2 * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(normal.prob(x).asnumpy(), want, rtol=1e-6)
    np.testing.assert_allclose(distribution.Normal().prob(x, 1.0, 2.0).asnumpy(), want, rtol=1e-6)
    # KL(N(1, 2) || N(0, 1)) = ln(1 / 2) + (4 + 1) / 2 - 1 / 2
    np.testing.assert_allclose(float(normal.kl_loss("Normal", 0.0, 1.0)), math.log(0.5) + 2, rtol=1e-6)
    np.testing.assert_allclose(distribution.Normal(1.0, 2.0).prob(value=x).asnumpy(), want, rtol=1e-6)
    with raises(TypeError, "Normal has no parameter scale", fix="its parameters are mean, sd"):
        distribution.Normal().prob(x, 1.0, scale=2.0)
    np.testing.assert_allclose(float(distribution.Categorical([0.5, 0.5]).entropy()), math.log(2), rtol=1e-6)
    with raises(NotImplementedError, "Poisson has no cdf"):
        distribution.Poisson(1.0).cdf(x)


def test_functions_are_their_formulas() -> None:
    x = Tensor(np.arange(16).reshape(1, 1, 4, 4), ms.float32)
    square = x[0, 0]
    turned = ops.ReverseSequence(seq_dim=1)(square, Tensor([1, 2, 3, 4], ms.int32))
    assert turned.asnumpy().tolist() == [[0, 1, 2, 3], [5, 4, 6, 7], [10, 9, 8, 11], [15, 14, 13, 12]]
    squares = Tensor(np.arange(1, 5).reshape(1, 4, 1, 1), ms.float32)
    want = np.arange(1, 5) / np.sqrt(1 + np.array([5, 14, 29, 25]))  # squares of the channel and its neighbours
    np.testing.assert_allclose(ops.LRN(depth_radius=1)(squares).asnumpy().reshape(-1), want, rtol=1e-6)
    with raises(ValueError, "norm_region"):
        ops.lrn(squares, norm_region="WITHIN_CHANNEL")


def test_a_profiler_writes_a_trace_of_what_ran_meanwhile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = ms.Profiler(output_path=str(tmp_path), start_profile=False)
    with raises(RuntimeError, "recorded nothing"):
        profiler.analyse()
    for on, function in ((False, ops.sin), (True, ops.cos)):
        if on:
            profiler.start()
        function(Tensor([1.0]))
    profiler.analyse(pretty=True)
    assert "Profiler.analyse(pretty) has no effect here" in capsys.readouterr().err
    names = {event["name"] for event in json.loads((tmp_path / "rank_0_trace.json").read_text())["traceEvents"]}
    assert "aten::cos" in names
    assert "aten::sin" not in names
