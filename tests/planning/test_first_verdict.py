"""The first verdict is never contradicted: by a plan that fits, by a refusal, or by the figures of the plan."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from plans.priced_plans import MODELS, TARGETS, Llama
from raising import raises
from shardwise.graph.step_precision import Precision
from shardwise.planning.execute import Planning, execute
from shardwise.planning.first_verdict import FirstVerdict
from shardwise.plans.price_scope import figures
from shardwise.plans.request import PlanRequest
from shardwise.search import fit_memory, quick_plan

# A search may end with a plan whose step is this much longer than one that it has not simulated.
LONGER = 1.001


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.up(x))


class Deep(nn.Module):
    """Equal blocks between a table and a head."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.tokens(ids))).flatten(0, 1), labels.flatten())


def deep(devices: str = "h100-1x4", layers: int = 8, samples: int = 16, **settings: Any) -> PlanRequest:
    with torch.device("meta"):
        ids = torch.zeros(samples, 32, dtype=torch.int64)
        return PlanRequest.of(Deep(layers), (ids, ids), devices, search="dynamic_programming", **settings)


def llama(layers: int = 6, **settings: Any) -> PlanRequest:
    with torch.device("meta"):
        ids = torch.zeros(16, 64, dtype=torch.int64)
        return PlanRequest.of(Llama(layers, 128, 4, 2, 512), (ids, ids), "h100-1x8", **settings)


def verdict_of(request: PlanRequest) -> FirstVerdict | None:
    """The verdict; None: a division refuses."""
    planning = Planning.of(request, (request.training.precision or Precision()).at_hand, True, [])
    try:
        planning.refuse_division()
    except sw.errors.NothingFits:
        return None
    verdict = planning.first_verdict()
    assert verdict is not None, "there are prices"
    return verdict


def answer_of(request: PlanRequest, *, is_variant: bool = True) -> tuple[float, float] | None:
    """Seconds of a step and bytes of a device; None: nothing fits. Variants are refused faster."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return figures(execute(request, exact_refusal=not is_variant).plan)
        except sw.errors.NothingFits:
            return None


def check(request: PlanRequest, *, is_variant: bool = True) -> str:
    """Compare the verdict with the answer. Return what it was."""
    verdict, answer = verdict_of(request), answer_of(request, is_variant=is_variant)
    if verdict is None:
        assert answer is None, "a division refuses what fits"
        return "refused"
    if answer is None:
        assert not verdict.fits, f"{verdict}, and nothing does"
        return "open"
    seconds, num_bytes = answer
    assert verdict.least_bytes <= num_bytes <= request.limit
    assert verdict.least_seconds <= seconds <= LONGER * verdict.most_seconds, str(verdict)
    return "fits" if verdict.fits else "open"


def limits(request: PlanRequest, shares: Sequence[float] = (0.1, 0.4, 0.8)) -> Iterator[float]:
    """Limits of all kinds: what division refuses, ``shares`` of what a plan without a limit takes beyond that (too
    little, or what needs a policy), and enough."""
    free = answer_of(request.varied(memory_bytes=inf))
    assert free is not None, "without a limit all fits"
    verdict = verdict_of(request.varied(memory_bytes=inf))
    assert verdict is not None, "no division refuses that"
    yield 0.9 * verdict.least_bytes
    for share in shares:
        yield verdict.least_bytes + share * (free[1] - verdict.least_bytes)
    yield 1.1 * max(free[1], verdict.most_bytes)


CASES: dict[str, dict[str, Any]] = {
    "": {},
    "two axes": {"mesh": sw.Mesh(dp=2, tp=2)},
    "fixed policy": {"recompute": "full"},
    "zero": {"zero": 3},
    "micro-batch": {"micro_batch": 4},
    "global batch": {"global_batch": 32},
    "more devices than samples": {"samples": 2},
    "stages": {"stages": 2, "global_batch": 16},
    "stages auto": {"stages": "auto", "schedule": "1F1B"},
    "layouts": {"layouts": {"head.weight": "[256, 64]"}},
    "states on the host": {"optimizer": "adamw on host"},
    "precision": {"precision": sw.Precision(compute=torch.bfloat16, parameter=torch.float32)},
}


def never_contradicted(case: str, shares: Sequence[float]) -> None:
    request = deep(layers=5, **CASES[case])
    told = [check(request.varied(memory_bytes=limit)) for limit in limits(request, shares)]
    assert told[0] == "refused"
    if CASES[case].get("stages") != 2:  # of given stages no plan is known so soon
        assert told[-1] == "fits"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(1)
def test_it_is_never_contradicted(case: str) -> None:
    never_contradicted(case, (0.6,))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_it_is_never_contradicted_under_any_limit(case: str) -> None:
    never_contradicted(case, (0.05, 0.2, 0.4, 0.8))


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"stages": "auto"}, {"zero": 2}, {"mesh": sw.Mesh(dp=4, tp=2)}], ids=str)
def test_it_is_never_contradicted_on_a_transformer(settings: dict[str, Any]) -> None:
    request = llama(**settings)
    told = [check(request.varied(memory_bytes=limit)) for limit in limits(request)]
    assert (told[0], told[-1]) == ("refused", "fits")


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("model", MODELS)
def test_it_is_never_contradicted_on_golden_models(model: str, target: Any) -> None:
    case = MODELS[model]
    with torch.device("meta"):
        module, inputs = case.build(), case.inputs()
    request = PlanRequest.of(module, inputs, target.cluster, mesh=target.mesh)
    told = [check(request.varied(memory_bytes=limit)) for limit in limits(request)]
    assert (told[0], told[-1]) == ("refused", "fits")


@pytest.mark.parametrize("limit", [0.4e6, 0.8e6, 2e6])
def test_programs_that_clearly_hold_too_much_are_not_built(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 1,024 samples, or 256 micro-batches of 4; with all programs the verdict is the same."""
    built: list[object] = []
    simulated = quick_plan._simulated
    monkeypatch.setattr(quick_plan, "_simulated", lambda *plan: built.append(plan) or simulated(*plan))
    request = deep(samples=1024, memory_bytes=limit)
    soon = verdict_of(request)
    assert len(built) == 1
    monkeypatch.setattr(quick_plan, "CLEARLY_OVER_LIMIT", inf)
    assert str(verdict_of(request)) == str(soon)
    assert len(built) > 4


@pytest.mark.parametrize("layers", [4, 7])
def test_what_is_repeated_from_three_blocks_is_the_whole(layers: int) -> None:
    """To the byte, and to a billionth of its seconds."""
    request = deep(layers=layers, recompute="none", memory_bytes=inf)
    short = verdict_of(request)
    assert short is not None
    assert short.plan is not None
    config, plan = short.plan.config, short.plan.plan
    shortened = len(plan.search.cost.domains.graph.ops) < len(short.plan.passes.graphs[16].ops)
    assert shortened == (layers > 4)
    whole = short.plan.searched(short.least_seconds)
    assert whole.ranking is not None
    assert whole.ranking.best.step is not None
    assert config.meshes == (whole.mesh,)
    assert plan.num_bytes == whole.ranking.best.num_bytes
    additive = quick_plan.ShortModel.of(short.plan.whole).additive_bytes(plan.search)
    assert additive == pytest.approx(whole.ranking.best.candidate.num_bytes, rel=1e-12)
    assert plan.seconds == pytest.approx(whole.ranking.best.step.seconds, rel=1e-9)


def test_it_is_said_before_the_search_with_its_interval(heard: list[str]) -> None:
    execute(deep(layers=2))
    assert len(heard) == 1
    pattern = r"planning: fits: .* device is (\S+ \S+) to (\S+ \S+), .* least (\S+ \S+) and at most (\S+ \S+) \(.*\)"
    assert re.fullmatch(pattern, heard[0]), heard[0]


def test_a_division_is_said_at_once(heard: list[str]) -> None:
    with pytest.raises(sw.errors.NothingFits):
        execute(deep(memory_bytes=1e4))
    assert len(heard) == 1
    assert heard[0].startswith("planning: does not fit: ")


def test_its_plan_is_taken_if_the_search_ends_without_another() -> None:
    request = deep(layers=2, memory_bytes=inf)
    kinds = set()
    for seconds in (1, 16, 32, 100):
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                found = execute(request, seconds=seconds, clock=partial(next, iter(range(10_000))))
            except sw.PlanError:
                kinds.add("none")
                continue
        kinds.add("plan")
        if caught:
            assert "the best plan so far; its " in str(caught[-1].message)
        predicted = found.plan.predicted
        assert predicted is not None
        assert 0 < predicted.bound <= predicted.additive_price
    assert kinds == {"none", "plan"}


def test_what_is_asked_to_move_to_the_host_has_a_verdict() -> None:
    assert verdict_of(deep(layers=2, offload="all")) is not None


def test_a_plan_that_moves_values_to_the_host_is_compared_with_smaller_micro_batches() -> None:
    with torch.device("meta"):
        ids = torch.zeros(8, 4096, dtype=torch.int64)
        request = PlanRequest.of(Deep(4, 1024), (ids, ids), "h100-1x4", memory_bytes=2.4e8)
    assert check(request, is_variant=False) == "fits"  # of a variant the first size that fits is taken


class Pairs(nn.Module):
    """Multiplies every second sample by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.down(F.gelu(self.up(x))).unflatten(0, (-1, 2))
        return (pairs[:, 0] * pairs[:, 1]).square().mean()


class Normed(Pairs):
    """Cannot run on one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))).square().mean()


@pytest.mark.parametrize(("kind", "limit"), [(Pairs, 1.6e7), (Normed, 2.4e7)])
def test_the_least_size_that_can_run_tells_whether_any_fits(kind: type[nn.Module], limit: float) -> None:
    with torch.device("meta"):
        request = PlanRequest.of(kind(), torch.empty(4096, 64), "h100-1x2", memory_bytes=limit)
    with warnings.catch_warnings(action="ignore"):  # running statistics of micro-batches
        assert check(request) == "fits"


class Compared(nn.Module):
    """Compares all samples with each other: its loss is no sum over micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        x = x / x.norm(dim=0, keepdim=True)
        return (x @ x.t()).logsumexp(-1).mean()


def test_a_size_that_cannot_run_does_not_take_the_upper_bound() -> None:
    with torch.device("meta"):
        request = PlanRequest.of(Compared(), torch.zeros(1024, 64), "h100-1x8", memory_bytes=3e5, global_batch=1024)
    verdict = verdict_of(request)
    assert verdict is not None
    assert verdict.fits is None
    assert verdict.least_bytes < verdict.most_bytes < inf


def test_a_refusal_names_the_least_of_policies_of_as_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        ids = torch.zeros(8, 256, dtype=torch.int64)
        request = PlanRequest.of(
            Deep(4, 512), (ids, ids), "h100-1x4", memory_bytes=6.35e6, optimizer="sgd", micro_batch=8, offload="none"
        )
    told = []
    for within in (fit_memory.CLEARLY_OVER_LIMIT, inf):  # all programs are built within the second
        monkeypatch.setattr(fit_memory, "CLEARLY_OVER_LIMIT", within)
        with raises(sw.errors.NothingFits, section="nothing-fits") as caught:
            execute(request, exact_refusal=False)
        told.append(caught.value.what)
    assert told[0] == told[1]
