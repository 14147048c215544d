"""A deadline and Ctrl-C end planning with the best plan so far; what is done is said in lines where no terminal is."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from raising import raises
from shardwise import progress
from shardwise.planning.execute import Planning, execute
from shardwise.planning.suggestions import plan_variants, suggest_fixes
from shardwise.plans.price_scope import figures
from shardwise.plans.request import PlanRequest
from shardwise.plans.result import PlanningResult
from shardwise.search.planner import Planner


class Ticks:
    """A clock that is read once for every report of progress; it may press Ctrl-C at one of them."""

    def __init__(self, interrupt: float = inf) -> None:
        self.read, self.interrupt = 0, interrupt

    def __call__(self) -> float:
        self.read += 1
        if self.read == self.interrupt:
            raise KeyboardInterrupt
        return self.read


def request_of(**settings: Any) -> PlanRequest:
    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())]
    with torch.device("meta"):
        loss = lambda y: y.square().mean()  # noqa: E731
        return PlanRequest.of(nn.Sequential(*layers), torch.empty(16, 64), "h100-1x2", loss=loss, **settings)


def planned(request: PlanRequest, seconds: float, clock: Callable[[], float]) -> tuple[PlanningResult, str]:
    """Return the plan, and what was announced."""
    with warnings.catch_warnings(record=True, action="always", category=sw.errors.PlanWarning) as caught:
        found = execute(request, seconds=seconds, clock=clock)
    return found, "; ".join(str(warning.message) for warning in caught)


def peak_of(request: PlanRequest) -> float:
    found = execute(request).plan
    assert found.predicted is not None
    return found.predicted.peak_bytes


AUTO: dict[str, Any] = {"stages": "auto", "schedule": "1F1B"}
CASES: list[dict[str, Any]] = [AUTO, {"global_batch": 16}, {"recompute": "auto"}, {"recompute": "none"}]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_planning_ends_in_time_with_the_best_plan_so_far(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any time; before the first plan it says that there is none. No other messages are tried after it."""

    def varied(*args: Any, **settings: Any) -> Any:
        assert not progress.has_stopped()
        return vary(*args, **settings)

    vary = Planner._varied
    monkeypatch.setattr(Planner, "_varied", varied)
    request = request_of(**settings)
    if settings == {"recompute": "auto"}:  # a limit under which several policies are searched
        request = request.varied(memory_bytes=0.8 * peak_of(request))
    whole = Ticks()
    best, nothing_said = planned(request, inf, whole)
    assert not nothing_said
    step = best.report  # every plan of these is explained
    assert step is not None
    outcomes = []
    for seconds in range(1, whole.read, max(1, whole.read // 4)):
        try:
            found, said = planned(request, seconds, Ticks())
        except sw.PlanError as error:
            outcomes.append("none" if "before any plan was found" in str(error) else str(error))
            continue
        assert f"planning ended after {seconds} s" in said
        assert "the best plan so far; its " in said
        if request.search.memory_bytes is not None and found.plan.predicted is not None:
            assert found.plan.predicted.peak_bytes <= request.search.memory_bytes
        outcomes.append("plan")
    assert outcomes[0] == "none"
    assert outcomes == sorted(outcomes), "once there is a plan, there is one at every later time"


def test_a_search_that_was_ended_lists_the_settings_that_were_left_out() -> None:
    request, whole = request_of(**AUTO), Ticks()
    complete = execute(request, clock=whole).report.explain("stages")
    found, _ = planned(request, whole.read - 2, Ticks())
    ended = found.report.explain("stages")
    assert {trial.setting for trial in ended.considered} == {trial.setting for trial in complete.considered}
    assert ended.bound == complete.bound


def test_ctrl_c_ends_planning_with_the_best_plan_or_with_none() -> None:
    request, whole = request_of(**AUTO), Ticks()
    execute(request, clock=whole)
    found, said = planned(request, inf, Ticks(interrupt=whole.read - 2))
    assert "planning ended by Ctrl-C" in said
    assert found.plan.predicted is not None or found.plan.is_pipeline
    with pytest.raises(KeyboardInterrupt):
        planned(request, inf, Ticks(interrupt=3))


def test_suggestions_that_a_deadline_or_ctrl_c_ends_are_not_tried() -> None:
    """What was planned before stays, and nothing is begun after it."""
    request = request_of()
    for clock, why in ((Ticks(), ""), (Ticks(interrupt=12), "by Ctrl-C")):
        with progress.until_deadline(inf if why else 12, clock) as deadline:
            options, left = plan_variants(suggest_fixes(request), inf, lambda options: False)
        assert left, "there was no time for these"
        assert why in deadline.why
        assert {option.what for option in options}.isdisjoint(left)
        assert [*left] == [what for what, _ in suggest_fixes(request)][-len(left) :]


def test_seconds_are_checked() -> None:
    module, x = nn.Linear(8, 8), torch.ones(4, 8)
    for seconds in (0, -1, "5"):
        with raises(sw.ShardwiseError, seconds):
            sw.plan(module, x, 2, seconds=seconds)  # type: ignore[arg-type]
    assert sw.plan(module, x, 2, seconds=1e9).plan == sw.plan(module, x, 2).plan


def test_lines_say_the_best_plan_and_the_bound_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text, ticks = io.StringIO(), Ticks()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=text))
    monkeypatch.setattr(progress, "clock", ticks)
    monkeypatch.setattr(progress, "LINE_SECONDS", 3.0)
    with progress.show_progress("planning", lines=True):
        for number in range(10):
            progress.report_progress(f"setting {number}")
            progress.report_best(2.0 - 0.1 * number, 1.0)
    assert text.getvalue().splitlines() == [
        "planning: setting 2 (best so far: step 1.9 s, 90% above the bound)",
        "planning: setting 5 (best so far: step 1.6 s, 60% above the bound)",
        "planning: setting 8 (best so far: step 1.3 s, 30% above the bound)",
    ]


def test_the_api_logs_them(monkeypatch: pytest.MonkeyPatch, heard: list[str]) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    execute(request_of(stages="auto"))
    assert heard[0] == "planning: capturing the model"
    assert any("planning 1 stage, micro-batch 16" in line for line in heard)
    assert any("best so far: step " in line and " above the bound" in line for line in heard)


def test_a_search_that_ends_with_a_slower_plan_than_the_first_verdict_has_returns_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_of(global_batch=16)
    slow = execute(request.varied(micro_batch=2))

    def ends_late(_: Planning) -> PlanningResult:
        try:
            while True:
                progress.report_progress("search")
        except progress.STOPPED:
            progress.stop_with(True)
        return slow

    monkeypatch.setattr(Planning, "one_setting", ends_late)
    found, said = planned(request, 100, Ticks())
    assert "planning ended after 100 s" in said
    assert 2 * seconds_of(found) < seconds_of(slow)


def seconds_of(found: PlanningResult) -> float:
    known = figures(found.plan)
    assert known is not None
    return known[0]
