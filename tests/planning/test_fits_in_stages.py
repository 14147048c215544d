"""``sw.fits`` under stages: what it says of bubbles, stages and places is what the plan was predicted to be."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise import cli
from shardwise.costs.pipeline_simulation import PipelinePrediction
from shardwise.costs.units import parse_quantity
from shardwise.planning import suggestions as options
from shardwise.plans.request import PlanRequest
from shardwise.report.search_reports import SearchReport


class Texts(nn.Module):
    def __init__(self, layers: int = 8, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, width), nn.Linear(width, 64, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def asked(samples: int = 64, layers: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        ids = torch.zeros(samples, 32, dtype=torch.int64)
        return Texts(layers), (ids, ids)


def answered(cluster: str | sw.Cluster = "h100-1x4", **settings: Any) -> tuple[Any, sw.Plan, PipelinePrediction]:
    module, batch = asked()
    found = sw.fits(module, batch, cluster, **{"seconds": 0, **settings})
    assert found.asked.plan is not None
    assert found.asked.plan.pipeline is not None
    return found, found.asked.plan, found.asked.plan.pipeline


@pytest.mark.parametrize(
    ("schedule", "stages", "settings"),
    [
        ("1F1B", 2, {}),
        ("1F1B", 4, {"recompute": "full"}),
        ("GPipe", 2, {"optimizer": "adamw on host"}),
        ("Interleaved1F1B", 4, {"zero": 1}),
        ("ZBVZeroBubble", 4, {}),
        ("Solved", 4, {}),
    ],
)
def test_stages_and_places_hold_and_take_what_was_predicted(
    schedule: str, stages: int, settings: dict[str, Any]
) -> None:
    found, plan, pipeline = answered(stages=stages, schedule=schedule, micro_batch=8, **settings)
    assert found.ok
    assert found.step_seconds == pipeline.default_seconds
    assert (pipeline.compiled_seconds > 0) == (schedule not in ("ZBVZeroBubble", "Solved"))
    assert found.step.peak.num_bytes == round(pipeline.memory_bytes) == sum(found.step.peak.parts.values())
    assert all(size >= 0 for size in found.step.peak.parts.values())
    assert len(found.step.stages) == len(plan.stages) == stages
    for own, held in zip(pipeline.stages, found.step.stages, strict=True):
        assert held.num_bytes == round(own.peak_bytes) == sum(held.parts.values())
    if len({stage.placement.ranks for stage in plan.stages}) == stages:
        assert found.step.peak.num_bytes == max(held.num_bytes for held in found.step.stages)
    report = found.asked.found.report
    assert isinstance(report, SearchReport)
    for one, own in zip(report.passes(), pipeline.stages, strict=True):
        assert one.step.forward == pytest.approx(own.forward)
        rest = one.step.seconds - own.forward - own.backward
        assert rest * plan.micro_batches == pytest.approx(own.update, rel=1e-6, abs=1e-12)
    seconds = found.step.seconds
    assert seconds.low < seconds.value == pipeline.default_seconds < seconds.high
    spread = sw.Cluster.load("h100-1x4")
    most = max(spread.device.spread, *(level.spread for level in spread.levels))
    assert seconds.high <= seconds.value * (1 + most) * (1 + 1e-9)
    assert seconds.low >= seconds.value / (1 + most) * (1 - 1e-9)


def test_arithmetic_is_that_of_the_model_without_stages() -> None:
    staged, _, _ = answered(stages=2, micro_batch=8)
    module, batch = asked()
    whole = sw.fits(module, batch, "h100-1x4", seconds=0)
    assert whole.step is not None
    assert staged.step.flops == whole.step.flops > 0
    assert staged.tokens == whole.tokens == 64 * 32
    seconds, most = staged.step_seconds, staged.step.peak_flops
    assert staged.utilisation == pytest.approx(staged.step.flops / seconds / most)
    assert staged.rate == staged.tokens / staged.step_seconds


def test_it_prints_every_stage_and_the_bubble() -> None:
    found, plan, pipeline = answered(stages=2, micro_batch=8, price_per_hour=2.0)
    text = str(found)
    assert f"2 stages of {plan.stages[0].mesh}, 1F1B over 8 micro-batches, bubble {pipeline.bubble:.1%}" in text
    for number, own in enumerate(pipeline.stages):
        assert f"bubble {own.bubble:.1%}" in text
        assert f"stage {number}: forward" in text
    assert f"in stage {0 if pipeline.stages[0].peak_bytes >= pipeline.stages[1].peak_bytes else 1}, " in text
    assert "1e9 tokens cost" in text
    data = found.as_data()
    assert json.loads(json.dumps(data)) == data
    assert data["bubble"] == pipeline.bubble
    assert data["mesh"] is None
    assert [stage["peak_bytes"] for stage in data["stages"]] == [own.num_bytes for own in found.step.stages]
    assert data["step_seconds_between"][0] < data["step_seconds"] < data["step_seconds_between"][1]


def test_changes_are_other_stages_schedules_and_meshes_and_each_is_a_plan() -> None:
    module, batch = asked()
    found = sw.fits(module, batch, "h100-1x4", stages=4, global_batch=64, seconds=0)
    request = PlanRequest.of(module, batch, "h100-1x4", stages=4, global_batch=64)
    assert found.asked.plan is not None
    said = [what for what, _ in options.suggest_changes(request, found.asked.plan)]
    assert "2 stages (stages=2)" in said
    assert "no stages (stages=None)" in said
    assert 'another schedule (schedule="Interleaved1F1B", stages=8)' in said
    variants = dict(options.suggest_changes(request, found.asked.plan))
    none = options.try_request(variants["no stages (stages=None)"])
    assert none.plan is not None
    assert (
        none.step_seconds
        == sw.plan(module, batch, sw.Cluster.load("h100-1x4"), global_batch=64).prediction.default_seconds
    )
    other = options.try_request(variants["2 stages (stages=2)"]).plan
    assert other is not None
    assert len(other.stages) == 2


@pytest.mark.long
def test_stages_that_were_chosen_stay_while_other_things_change() -> None:
    module, batch = asked(8)
    found = sw.fits(module, batch, "h100-1x4", stages="auto", seconds=0)
    assert found.ok
    assert found.step is not None
    request = PlanRequest.of(module, batch, "h100-1x4", stages="auto")
    module, batch = asked()
    staged = sw.plan(module, batch, sw.Cluster.load("h100-1x4"), stages=2, micro_batch=8)
    twice = options.try_request(dict(options.suggest_changes(request, staged.plan))["2 times the batch (16 samples)"])
    assert twice.plan is not None
    assert (len(twice.plan.stages), twice.plan.schedule, twice.samples) == (2, "1F1B", 16)


def test_what_does_not_fit_in_stages_is_mended_and_what_does_not_fit_without_is_mended_by_stages() -> None:
    module, batch = asked(layers=3)
    settings: dict[str, Any] = {"stages": 2, "global_batch": 64, "micro_batch": 16, "recompute": "none"}
    free = sw.plan(module, batch, sw.Cluster.load("h100-1x2"), **settings)
    assert free.pipeline is not None
    limit = 0.3 * free.pipeline.memory_bytes
    found = sw.fits(module, batch, "h100-1x2", memory_bytes=limit, seconds=1000, **settings)
    assert not found
    assert found.step is None
    assert "does NOT fit" in str(found)
    assert found.options
    assert all(option.fits and option.peak_bytes <= limit for option in found.options)
    assert all("step " in line and "peak " in line for line in map(options.suggestion_line, found.options))
    request = PlanRequest.of(module, batch, "h100-1x2")
    staged = options.try_request(dict(options.suggest_fixes(request))["2 stages (stages=2)"])
    assert staged.plan is not None
    assert staged.plan.is_pipeline


def test_a_refusal_of_stages_names_the_fastest_fixes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_REFUSED_SECONDS", inf)
    monkeypatch.setattr(options, "MAX_SUGGESTION_SECONDS", inf)
    module, batch = asked(layers=2)
    settings: dict[str, Any] = {"stages": 2, "global_batch": 64, "micro_batch": 16, "recompute": "none"}
    free = sw.plan(module, batch, sw.Cluster.load("h100-1x2"), **settings)
    assert free.pipeline is not None
    limit = 0.45 * max(own.peak_bytes for own in free.pipeline.stages)
    with raises(sw.errors.NothingFits, section="nothing-fits") as caught:
        sw.plan(module, batch, sw.Cluster.load("h100-1x2"), memory_bytes=limit, **settings)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  fix ")]
    steps = [parse_quantity(line.partition(": step ")[2].partition(",")[0], "s") for line in lines]
    assert len(lines) == 3
    assert steps == sorted(steps)
    assert all("peak " in line for line in lines)


def test_settings_without_prices_are_refused_under_stages_too() -> None:
    module, batch = asked()
    with raises(sw.ShardwiseError, "sw.fits", "answers"):
        sw.fits(module, batch, "h100-1x4", stages=2, micro_batch=8, search="sharding_propagation")


def test_a_cluster_file_has_a_price_and_an_argument_takes_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'name = "ours"\nprice_per_hour = 2.5\n[device]\nlike = "h100"\n[[levels]]\nname = "node"\nsize = 4\n'
    (tmp_path / "ours.toml").write_text(text + 'bandwidth = "300 GB/s"\nlatency = "5 us"\n')
    cluster = sw.Cluster.load(tmp_path / "ours.toml")
    assert cluster.price_per_hour == 2.5
    module, batch = asked()
    for settings in ({}, {"stages": 2, "micro_batch": 8}):
        own = sw.fits(module, batch, cluster, seconds=0, **settings)
        assert own.price == pytest.approx(1e9 / own.rate / 3600 * 4 * 2.5)
        assert sw.fits(module, batch, cluster, seconds=0, price_per_hour=5.0, **settings).price == pytest.approx(
            2 * own.price
        )
    (tmp_path / "net.py").write_text(f"from {__name__} import asked\n\n\ndef build():\n    return asked()\n")
    few = ["--cluster", str(tmp_path / "ours.toml"), "--stages", "2", "--micro-batch", "8", "--seconds", "0", "--json"]
    assert cli.main(["fits", f"{tmp_path / 'net.py'}:build", *few]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["price_of_1e9"] == pytest.approx(own.price)
    assert data["schedule"] == "1F1B"
    assert data["micro_batches"] == 8
