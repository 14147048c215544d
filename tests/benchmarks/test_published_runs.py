"""The benchmark of published runs: every row is priced with its settings or counted, and judged as it says."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from math import exp, log
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {
    "id": "tiny", "family": "tiny", "framework": "Megatron-DeepSpeed", "gpu": "A100-80GB", "gpus": 4, "tp": 2, "pp": 2,
    "dp": 1, "zero": 0, "seq": 64, "micro_batch": 2, "global_batch": 16, "recompute": "full", "precision": "fp16",
    "interconnect": "NVLink3", "status": "ok", "step_time_s": 1.0, "notes": None,
    "arch": {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 512, "gated_mlp": False},
}  # fmt: skip


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_prices")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_runs")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_memory")


def test_a_layer_takes_its_kernels_or_what_the_host_needs_to_start_them(prices: ModuleType) -> None:
    busy = prices.Half(2e-3, 20)
    assert busy.seconds(1e-6) == 2e-3
    assert busy.seconds(1e-3) == pytest.approx(20e-3)


def test_small_work_is_as_fast_as_its_host_and_large_work_is_not(prices: ModuleType) -> None:
    small = prices.pass_of(TINY, 2)
    twice = prices.pass_of(TINY, 4)
    started = small.forward / prices.MEGATRON_LAUNCH
    assert started == pytest.approx(round(started))  # so many kernels and messages
    assert 15 < started < 40
    assert twice.forward == small.forward  # not one kernel more
    wide = {**TINY, "seq": 2048, "arch": {**TINY["arch"], "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32}}
    wide["arch"] = dict(wide["arch"])
    assert prices.pass_of(wide, 4).forward > 1.5 * prices.pass_of(wide, 2).forward


def test_passes_and_stages_add_up(prices: ModuleType) -> None:
    """One pass more takes the slowest stage once more; one pass takes all stages."""
    steps = [prices.seconds_of({**TINY, "global_batch": 2 * passes}) for passes in (2, 3, 4)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    own = prices.pass_of(TINY, 2)
    layer = 2 * own.forward + own.backward
    assert steps[1] - steps[0] == pytest.approx(2 * layer + own.rest, rel=0.02)
    assert steps[0] > 2 * (2 * layer + own.rest) + 2 * layer  # the other stage once


def test_stages_of_their_own_are_read_from_the_row(prices: ModuleType) -> None:
    notes = "plan: layer_partitions [3, 1], devices [[1, 2], [1, 2]], GA steps 8, per-stage [mbs,dp,tp] "
    notes += "[[2, 2, 1, 0.5], [2, 2, 1, 0.0]]; per-stage peak"
    row = {**TINY, "recompute": "per stage: [2, 0]", "notes": notes, "tp": 1, "dp": 2}
    assert prices.stages_of(row) == [prices.Stage(3, 2, 2, 2), prices.Stage(1, 0, 2, 2)]
    assert prices.unpriced(row) == ""
    assert prices.unpriced({**row, "notes": None}) == "stages that differ and are not listed"
    assert prices.stages_of(TINY) == [prices.Stage(2, 2, 2, 1)] * 2
    assert prices.stages_of({**TINY, "recompute": "selective(op)"})[0].again == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step_time_s": None}, "no seconds published"),
        ({"status": "oom"}, "ran out of memory: no seconds"),
        ({"gpu": "Z1"}, "no bundled device: Z1"),
        ({"seq": None}, "a field that prices need is not stated"),
        ({"ep": 4}, "expert parallelism on axes of its own"),
    ],
)
def test_what_is_not_priced_has_a_reason(prices: ModuleType, change: dict[str, Any], why: str) -> None:
    assert prices.unpriced(TINY) == ""
    assert prices.unpriced({**TINY, **change}) == why


def test_boards_of_four_are_slower_than_one_of_eight(prices: ModuleType) -> None:
    whole = prices.cluster_of("A100-80GB", 8, 8, "NVLink3 in node")
    boards = prices.cluster_of("A100-80GB", 8, 8, "NVLink 4 inter-GPU connects")
    assert [level.size for level in boards.levels] == [4, 2]
    assert boards.num_devices == whole.num_devices
    assert not boards.levels[1].lines
    import shardwise as sw
    from shardwise.costs.collectives import Links

    seconds = [Links(one, sw.Mesh(tp=8)).seconds("all_reduce", ("tp",), 2**28) for one in (whole, boards)]
    assert seconds[1] > 2 * seconds[0]


def test_approximations_are_said(prices: ModuleType) -> None:
    assert prices.approximated(TINY) == ""
    said = prices.approximated({**TINY, "precision": "fp8", "cp": 2, "gpu": "H100-96GB-HBM2e-500W"})
    assert all(word in said for word in ("fp8", "cp", "device"))


def test_heads_that_tensor_cores_do_not_take_and_an_odd_vocabulary_are_dearer(prices: ModuleType) -> None:
    arch = {**TINY["arch"], "hidden": 4 * 1024, "heads": 4}
    wide = {**TINY, "tp": 1, "gpus": 2, "seq": 1024, "arch": arch}
    odd = {**wide, "arch": {**arch, "vocab": 511}}
    assert prices.pass_of(odd, 2).rest > prices.pass_of(wide, 2).rest
    heads = {**wide, "arch": {**arch, "hidden": 4 * 1020}}
    assert prices.pass_of(heads, 2).forward > prices.pass_of(wide, 2).forward


def row_of(layers: int, batch: int, ratio: float) -> dict[str, Any]:
    return {**TINY, "arch": {**TINY["arch"], "layers": layers}, "global_batch": batch, "step_time_s": ratio}


def test_factors_come_from_whole_groups_that_are_not_judged(runs: ModuleType) -> None:
    found = [runs.Found(row_of(layers, batch, 1.3), 1.0) for layers in range(10, 18) for batch in (1, 2, 3)]
    judged, used = runs.calibrated(found)
    assert used == 6
    assert len(judged) == 18
    assert all(one.factor == pytest.approx(1.3) and one.error < 1e-9 and one.inside for one in judged)
    few, used = runs.calibrated([one for one in found if one.row["arch"]["layers"] < 13])
    assert used == 0
    assert all(one.factor == 1 for one in few)


def test_a_factor_for_what_is_judged_comes_from_other_groups(runs: ModuleType) -> None:
    found = [runs.Found(row_of(layers, 1, 1 + layers / 10), 1.0) for layers in range(10, 14)]
    groups = {one.group for one in found}
    judged = {found[0].group, found[1].group, found[2].group}
    assert runs.quarter(groups) == {found[0].group}
    assert runs.quarter(groups, judged) == {found[3].group}
    assert runs.quarter(groups, groups) == frozenset()
    assert runs.quarter(judged) == frozenset(), "too few"
    factor = runs.Factor.of(found, runs.quarter(groups, judged))
    assert exp(factor.center) == pytest.approx(2.3)
    assert factor.rows == 1
    assert runs.Factor.of(found, ()).center == 0


@pytest.mark.parametrize("spread", [0.05, 0.15])
def test_intervals_hold_nine_of_ten_where_groups_are_many(runs: ModuleType, spread: float) -> None:
    draw = random.Random(3)
    found = [
        runs.Found(row_of(layers, batch, exp(draw.gauss(log(1.2), spread))), 1.0)
        for layers in range(100, 300)
        for batch in range(4)
    ]
    judged, _ = runs.calibrated(found)
    assert sum(one.inside for one in judged) / len(judged) == pytest.approx(0.9, abs=0.04)


def test_every_row_is_a_figure_or_a_reason(tmp_path: Path) -> None:
    rows = [TINY, {**TINY, "id": "no seconds", "step_time_s": None}, {"family": "golden"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, str(BENCHMARKS / "published_runs.py"), "--data", str(tmp_path / "rows.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "| tiny | 1 of 2 |" in ended.stdout
    assert "| tiny | not: 1: no seconds published |" in ended.stdout
    assert "| golden | not: 1:" in ended.stdout


# -- memory ------------------------------------------------------------------------------------------------------------

GOLDEN = {"group": "gpt", "gpus": 8, "mem_allocated_bytes": 1.0, "test": "tiny"}


@pytest.mark.parametrize(
    ("args", "why", "at_peak"),
    [
        ({}, "", ""),
        ({"swiglu": True}, "gated layers", ""),  # True is 1, and no default for that
        ({"untie-embeddings-and-output-weights": True}, "a table and a head of their own", ""),
        ({"untie-embeddings-and-output-weights": True, "pipeline-model-parallel-size": 2}, "", ""),
        ({"num-layers-per-virtual-pipeline-stage": 1}, "", "several stages of a rank"),
    ],
)
def test_options_that_are_not_priced_are_seen(memory: ModuleType, args: dict[str, Any], why: str, at_peak: str) -> None:
    row = {**GOLDEN, "args": args}
    assert memory._unpriced(row) == why
    found = memory._missing(row, memory.MISSING_AT_PEAK, memory.MISSING_AT_PEAK_BY_NAME)
    assert found == ([at_peak] if at_peak else [])


def test_a_stage_holds_what_it_was_sent_last_and_its_gradient(memory: ModuleType) -> None:
    args = {"num-layers": 12, "micro-batch-size": 4, "seq-length": 1024, "hidden-size": 512}
    value = 2 * 4 * 1024 * 512
    assert memory.received(args) == 0
    staged = {**args, "pipeline-model-parallel-size": 4}
    assert memory.received(staged) == 2 * value
    assert memory.received({**staged, "num-layers-per-virtual-pipeline-stage": 1}) == 3 * 2 * value
    parts = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "context-parallel-size": 2}
    assert memory.received(staged | parts) == 2 * value / 4


@pytest.mark.parametrize("scores", [False, True])
def test_the_peak_is_that_of_published_formulas(memory: ModuleType, scores: bool) -> None:
    """34 bytes a layer for every element between layers, and 5 for every score (Korthikanti et al., 2022); 2 % for the
    statistics of norms and of attention."""
    shape = memory.Shape(
        width=256, heads=4, layers=2, sequence=64, batch=2, scores=scores, splits_sequence=False, vocab=512
    )
    tokens, all_scores = 2 * 64, 4 * 2 * 64**2
    values = tokens * 256
    layer = 34 * values + (5 * all_scores if scores else 2 * values)
    expected = 2 * layer + (1 + 2 * 2) * values + 2 * 64**2 + 6 * tokens * 512
    assert memory.at_loss(shape, 1, 1, 0.1) == pytest.approx(expected, rel=0.02)
    assert memory.at_loss(shape, 1, 1, 0.0) == memory.at_loss(shape, 1, 1, 0.1) - 5 * values
