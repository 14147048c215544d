"""Intervals: every predicted time and memory says between which figures it will be measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.costs.prediction import Prediction, between_bytes
from shardwise.plans.quantities import format_bytes, format_interval, format_seconds


def test_an_interval_is_printed_in_the_unit_of_its_figure() -> None:
    assert format_interval(1.34, 1.22, 1.49, format_seconds) == "1.34 s (1.22-1.49)"
    assert format_interval(0.9, 0.6, 1.35, format_seconds) == "900 ms (600-1350)"
    assert format_interval(3 * 2**30, 2.5 * 2**30, 3.5 * 2**30, format_bytes) == "3 GiB (2.5-3.5)"
    assert format_interval(0.0, 0.0, 0.0, format_seconds) == "0 us"


def test_operators_and_messages_are_as_uncertain_as_their_own_figures() -> None:
    cluster = sw.Cluster.load("h100-2x8")
    node, network = cluster.levels
    device = replace(cluster.device, spread=0.1, memory_spread=0.04)
    cluster = replace(cluster, device=device, levels=(replace(node, spread=0.2), replace(network, spread=0.5)))
    own = Prediction(exposed=0.2, compute=1.0, traffic=0.0, num_bytes=1.0, peak_bytes=104.0, passes=2)
    step = own.step_interval(cluster)
    assert step.value == pytest.approx(2.4)
    assert step.low == pytest.approx(2 * (1.0 / 1.1 + 0.2 / 1.5))
    assert step.high == pytest.approx(2 * (1.0 * 1.1 + 0.2 * 1.5))
    simulated = replace(own, simulated_seconds=1.1).step_interval(cluster)
    assert simulated.value == pytest.approx(2.2), "the simulated step, where there is one"
    held = between_bytes(own.peak_bytes, cluster)
    assert (held.low, held.high) == (pytest.approx(100.0), pytest.approx(108.16))


def test_a_plan_prints_intervals_where_its_cluster_knows_how_right_it_is() -> None:
    with torch.device("meta"):
        model, inputs = nn.Linear(256, 256), (torch.empty(64, 256),)
    cluster = sw.Cluster.load("h100-1x2")
    text = str(sw.plan(model, inputs, cluster))
    predicted = next(line for line in text.splitlines() if "priced step" in line)
    assert predicted.split("compute")[0].count("(") == 1
    assert predicted.split(":")[0].endswith(")")
    levels = tuple(replace(level, spread=0.0) for level in cluster.levels)
    unknown = replace(cluster, device=replace(cluster.device, spread=0.0), levels=levels)
    text = str(sw.plan(model, inputs, unknown))
    predicted = next(line for line in text.splitlines() if "priced step" in line)
    assert "(" not in predicted.split("compute")[0]
