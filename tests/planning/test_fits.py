"""``sw.fits``: what it says of a plan is the plan's, and what mends or improves is a plan of its own."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise.api import step_memory
from shardwise.planning import execute as planning
from shardwise.planning import suggestions as options
from shardwise.planning.execute import execute
from shardwise.planning.suggestions import suggest_changes, try_request
from shardwise.plans.request import PlanRequest
from shardwise.plans.result import PlanningResult
from shardwise.plans.stage_planner import choose_stage


class Texts(nn.Module):
    """A model over token ids, with a layer that is heavy enough to be split."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.up, self.down = (
            nn.Embedding(64, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return F.cross_entropy(self.head(x + self.down(F.gelu(self.up(x)))).flatten(0, 1), labels.flatten())


def asked(samples: int = 16) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        ids = torch.zeros(samples, 32, dtype=torch.int64)
        return Texts(), (ids, ids)


def test_its_figures_are_those_of_the_plan_and_of_arithmetic() -> None:
    module, batch = asked()
    answer = sw.fits(module, batch, "h100-1x2", seconds=0, price_per_hour=3.0)
    plan = sw.plan(module, batch, sw.Cluster.load("h100-1x2"))
    assert answer.step_seconds == plan.prediction.default_seconds < plan.prediction.planned_seconds
    assert answer.step is not None
    assert answer.step.peak == step_memory(module, batch, plan).peak
    tokens, width = 16 * 32, 256
    assert answer.tokens == tokens
    products = 2 * tokens * (2 * 4 * width * width + 64 * width)
    assert answer.step.flops == 3 * products  # the first product's operand needs a gradient too: the embedding's
    assert answer.utilisation == answer.step.flops / answer.step_seconds / answer.step.peak_flops
    assert answer.price == pytest.approx(1e9 / tokens * answer.step_seconds / 3600 * 2 * 3.0)
    assert answer.untried  # no time was given
    passes: dict[str, Any] = {"global_batch": 16, "micro_batch": 4}
    answer = sw.fits(module, batch, "h100-1x2", seconds=0, **passes)
    assert answer.step is not None
    assert answer.step.peak == step_memory(module, batch, sw.plan(module, batch, "h100-1x2", **passes)).peak
    assert answer.step.flops == 3 * products


@pytest.mark.long
def test_changes_are_plans_that_cost_less_and_say_by_how_much() -> None:
    module, batch = asked()
    answer = sw.fits(module, batch, "h100-1x2", seconds=600)
    assert answer.ok
    assert 1 <= len(answer.options) <= 3
    assert [o.price for o in answer.options] == sorted(o.price for o in answer.options)
    assert all(option.fits and option.price < answer.asked.price for option in answer.options)
    assert "less device time a sample" in str(answer)
    twice = next(option for option in answer.options if option.samples == 32)
    _, larger = asked(32)
    again = sw.plan(module, larger, sw.Cluster.load("h100-1x2"))
    assert twice.step_seconds == again.prediction.default_seconds


def test_suggested_meshes_are_named_by_what_they_split() -> None:
    module, batch = asked(64)
    answer = sw.fits(module, batch, "a100-80-2x4", seconds=0, price_per_hour=1.0)
    request = answer.asked.request
    variants = [variant for variant in suggest_changes(request, answer.asked.plan) if variant[1].candidates]
    assert variants
    for what, changed in variants:
        option = try_request(changed, what)
        assert what == f"another mesh ({option.plan.mesh.format_sizes()} devices)"
        assert not {"node", "network"}.intersection(name.rstrip("012") for name, _ in option.plan.mesh.axes)
        by_hand = sw.plan(module, batch, request.cluster, mesh=option.plan.mesh)
        assert by_hand.operators == option.plan.operators
        assert str(option.plan.mesh) in str(replace(answer, options=(option,)))


def test_what_does_not_fit_is_mended_and_the_mends_fit() -> None:
    module, batch = asked(64)
    plan = sw.plan(module, batch, sw.Cluster.load("h100-1x2"))
    needs = step_memory(module, batch, plan).peak.num_bytes
    limit = needs / 4
    answer = sw.fits(module, batch, "h100-1x2", memory_bytes=limit, micro_batch=64, seconds=600)
    assert not answer
    assert "no plan fits" in answer.asked.refused
    assert answer.options
    assert all(option.fits and option.peak_bytes <= limit for option in answer.options)
    assert "what would make it fit" in str(answer)
    assert "sw.fits plans such fixes" not in str(answer), "these are they"


def test_what_cannot_fit_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are too much for these devices, in passes of any size; for more of them they are not."""
    module, batch = asked(8)
    stored = sum(p.numel() for p in module.parameters()) * 4 * 3
    planned, divided = list[tuple[int, bool]](), list[tuple[int, bool]]()
    searched, before = list[Any](), [0]

    def recorded(request: PlanRequest, **options: Any) -> PlanningResult:
        try:
            return execute(request, **options)
        finally:
            case = request.cluster.num_devices, "on host" in request.training.optimizer
            (planned if len(searched) > before[-1] else divided).append(case)
            before.append(len(searched))

    def noted(*args: Any, **options: Any) -> Any:
        searched.append(args)
        return choose_stage(*args, **options)

    monkeypatch.setattr(options, "execute", recorded)
    monkeypatch.setattr(planning, "choose_stage", noted)
    answer = sw.fits(module, batch, "h100-1x2", memory_bytes=0.45 * stored, seconds=600)
    assert not answer
    assert "every division" in answer.asked.refused
    assert divided[0] == (2, False)
    assert {num_devices for num_devices, _ in planned} >= {2, 4, 8}
    assert all(on_host for num_devices, on_host in planned if num_devices == 2), "of these, two devices hold the rest"
    assert any("times the devices" in option.what for option in answer.options)


def test_other_errors_are_raised_as_by_plan() -> None:
    module, batch = asked()
    with raises(sw.ShardwiseError, "'fast'", "mode"):
        sw.fits(module, batch, "h100-1x2", mode="fast")


def refused(**settings: Any) -> str:
    module, batch = asked(64)
    with raises(sw.errors.NothingFits, section="nothing-fits") as caught:
        sw.plan(module, batch, sw.Cluster.load("h100-1x2"), **settings)
    return str(caught.value)


@pytest.mark.long
def test_a_refusal_names_the_cheapest_mends_and_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_REFUSED_SECONDS", inf)
    monkeypatch.setattr(options, "MAX_SUGGESTION_SECONDS", inf)
    module, batch = asked(64)
    plan = sw.plan(module, batch, sw.Cluster.load("h100-1x2"))
    limit = step_memory(module, batch, plan).peak.num_bytes * 0.4
    settings: dict[str, Any] = {"memory_bytes": limit, "recompute": "none", "micro_batch": 64}
    said = refused(**settings)
    lines = [line for line in said.splitlines() if line.startswith("  fix ")]
    assert 1 <= len(lines) <= 3
    answer = sw.fits(module, batch, "h100-1x2", seconds=600, **settings)
    known = {option.what: options.suggestion_line(option) for option in answer.options}
    assert any(line.partition(": ")[2].strip() in known.values() for line in lines)
    assert all(float(line.partition(", peak ")[2].split()[0]) * 2**20 <= limit for line in lines)
    assert "one of these" in said
    none = refused(memory_bytes=1000.0)
    assert "fixes:  none of " in none
    assert "fix:    use more devices" in none


def test_where_planning_takes_long_the_refusal_says_who_plans_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_REFUSED_SECONDS", -1.0)
    assert "s of CPU time: sw.fits plans them" in refused(memory_bytes=1000.0)


def test_a_comparison_plans_no_mends() -> None:
    module, batch = asked(64)
    found = sw.compare(module, batch, sw.Cluster.load("h100-1x2"), searches=("dynamic_programming",), memory_bytes=1e3)
    assert "fixes:" not in str(found.rows[0].error)
    assert "sw.fits plans such fixes" in str(found.rows[0].error)


def test_states_on_the_host_are_a_mend_where_there_is_a_host() -> None:
    module, batch = asked()
    for name, optimizer, offered in (
        ("h100-1x2", "adamw", True),
        ("h100-1x2", "sgd", False),
        ("local", "adamw", False),
    ):
        request = PlanRequest.of(module, batch, name, optimizer=optimizer)
        assert offered == any("states on the host" in what for what, _ in options.suggest_fixes(request))


def test_a_refusal_survives_pickle_and_copies() -> None:
    module, batch = asked(64)
    with raises(sw.errors.NothingFits, section="nothing-fits", facts=["needed", "largest", "least", "fixes"]) as caught:
        sw.plan(module, batch, sw.Cluster.load("h100-1x2"), memory_bytes=1000.0)
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.deepcopy(caught.value)):
        assert type(again) is type(caught.value)
        assert str(again) == str(caught.value)


def test_what_a_plan_announces_points_at_the_call() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    cases: list[dict[str, Any]] = [{"optimizer": "adamw on host"}, {"offload": "all"}]
    for settings in cases:
        with warnings.catch_warnings(record=True, action="always", category=sw.errors.PlanWarning) as caught:
            sw.plan(module, torch.ones(8, 64), sw.Cluster.load("local"), loss=lambda output: output.mean(), **settings)
        assert "gains nothing" in str(caught[0].message)
        assert {one.filename for one in caught} == {__file__}


def test_a_request_and_its_variants_are_checked_alike_and_keep_a_setting_of_none() -> None:
    module, batch = asked()
    request = PlanRequest.of(module, batch, "h100-1x4", recompute=None)
    assert request.parallel.recompute is None
    with raises(sw.PlanError, 2, "Mesh(dp=2)", 4, section="mesh-size"):
        request.varied(mesh=sw.Mesh(dp=2))
    with raises(sw.ShardwiseError, "'fast'", "mode"):
        request.varied(mode="fast")
    with raises(TypeError, "'stage'"):
        request.varied(stage=2)
    assert sw.fits(module, batch, "h100-1x4", recompute=None, seconds=0).asked.request.parallel.recompute is None


SIZES = {
    "GPT-2 large": 0.774,
    "GPT-2 XL": 1.558,
    "GPT-3 2.7B": 2.65,
    "GPT-3 6.7B": 6.66,
    "GPT-3 13B": 12.85,
    "30B": 30.0,
}


@pytest.mark.parametrize(
    ("card", "largest", "next_size"),
    [
        ("t4", "GPT-2 large", "GPT-2 XL"),
        ("rtx-3090", "GPT-2 large", "GPT-2 XL"),
        ("rtx-4090", "GPT-2 large", "GPT-2 XL"),
        ("v100", "GPT-2 XL", "GPT-3 2.7B"),
        ("rtx-5090", "GPT-2 XL", "GPT-3 2.7B"),
        ("rtx-a6000", "GPT-3 2.7B", "GPT-3 6.7B"),
        ("rtx-6000-ada", "GPT-3 2.7B", "GPT-3 6.7B"),
        ("l40s", "GPT-2 XL", "GPT-3 6.7B"),
        ("h20", "GPT-3 2.7B", "GPT-3 6.7B"),
        ("gb200", "GPT-3 6.7B", "GPT-3 13B"),
        ("gb300", "GPT-3 13B", "30B"),
    ],
)
def test_a_card_holds_sixteen_bytes_a_parameter(card: str, largest: str, next_size: str) -> None:
    """Parameters, gradients and two states in float32: 23 GiB for GPT-2 XL, which a card of 24 GiB with its reserve has
    not."""

    def fit(size: str) -> sw.Fits:
        width = round((SIZES[size] * 1e9 / 8) ** 0.5)
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(8)))
            inputs = torch.empty(1, width), torch.empty(1, width)
        loss = torch.nn.functional.mse_loss
        return sw.fits(model, inputs, f"{card}-1x1", loss=loss, optimizer="adamw fused", seconds=0)

    answer = fit(largest)
    assert answer.ok
    assert answer.step is not None
    assert answer.step.peak.num_bytes / (SIZES[largest] * 1e9) == pytest.approx(16, rel=0.02)
    assert not fit(next_size).ok
