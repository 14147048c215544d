"""Explanations of a plan agree with the search that chose it."""

from __future__ import annotations

import json
import pickle
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from search.small_models import Mlp
from shardwise.search.cost_graph import COMPONENTS, OperatorVariable
from shardwise.search.dynamic_programming import step_seconds
from shardwise.search.elimination import Interner, Problem, TooWide, k_best


def planned(batch: int = 16384, **options: object) -> sw.Plan:
    with torch.device("meta"):
        model, inputs = Mlp(64, 256, act=F.gelu), (torch.empty(batch, 64),)
    given = {"mesh": sw.Mesh(dp=2, tp=2), "search": "dynamic_programming"} | options
    return sw.plan(model, inputs, 4, **given)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return planned()


# -------------------------------------------------------------------------------------------------------------- explain


def test_the_chosen_strategy_is_the_one_in_the_plan(plan: sw.Plan) -> None:
    for name in ("up/linear", "/gelu", "down/linear"):
        assert plan.report.explain(name).chosen.choice == (plan.strategies[name] or "whole")


def test_the_storage_of_a_parameter_is_explained_too(plan: sw.Plan) -> None:
    own = plan.report.explain("up.weight")
    assert own.kind == "storage"
    assert own.chosen.choice == next(entry.layout for entry in plan.parameters if entry.name == "up.weight")


def test_no_alternative_promises_a_faster_step_than_the_plan(plan: sw.Plan) -> None:
    own = plan.report.explain("up/linear")
    assert own.chosen.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-6)
    assert all(other.step_seconds >= own.chosen.step_seconds * (1 - 1e-9) for other in own.alternatives)


def test_terms_add_up_to_the_components_of_the_plan(plan: sw.Plan) -> None:
    """Changing one choice changes the whole by the difference of the terms."""
    cost, assignment = plan.report.finished_search.cost, list(plan.report.finished_search.outcome.assignment)
    variable = cost.number["operator", "up/linear"]
    operator = cost.variables[variable]
    assert isinstance(operator, OperatorVariable)
    own = plan.report.explain("up/linear")
    texts = {other.choice: other for other in own.alternatives}
    before = cost.components(assignment)
    for value in range(operator.size):
        text = operator.choice(value).format(plan.mesh) or "whole"
        changed = cost.components([*assignment[:variable], value, *assignment[variable + 1 :]])
        expected = (changed - before)[:3].sum()
        assert texts[text].seconds - own.chosen.seconds == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert texts[text].num_bytes - own.chosen.num_bytes == pytest.approx((changed - before)[3])


def test_messages_of_a_term_last_as_long_as_the_term(plan: sw.Plan) -> None:
    seen = 0
    for name in ("up/linear", "down/linear", "up.weight"):
        for alternative in plan.report.explain(name).alternatives:
            for term in alternative.terms:
                if term.messages:
                    seen += 1
                    communicated = sum(message.seconds for message in term.messages)
                    assert communicated == pytest.approx(term.exposed + term.traffic, rel=1e-6)
                    assert all(message.levels and message.num_bytes > 0 for message in term.messages)
    assert seen


def test_the_deciding_neighbour_favours_the_choice(plan: sw.Plan) -> None:
    decided = [
        own for own in map(plan.report.explain, ("up/linear", "/gelu", "down/linear", "up.weight")) if own.decided_by
    ]
    for own in decided:
        (cheapest,) = (other for other in own.alternatives if other.choice == own.alone)
        assert cheapest.terms[0].seconds == min(other.terms[0].seconds for other in own.alternatives)

        def with_neighbour(other: object, name: str = own.decided_by) -> float:
            return sum(term.seconds for term in other.terms if term.neighbour == name)  # type: ignore[attr-defined]

        assert cheapest is not own.chosen
        assert with_neighbour(cheapest) - with_neighbour(own.chosen) == pytest.approx(own.favour)
    assert decided, "some neighbour decides something in this model"


def test_an_explanation_prints_its_terms(plan: sw.Plan) -> None:
    text = str(plan.report.explain("up/linear"))
    assert text.startswith("operator up/linear: ")
    assert "itself: compute" in text
    assert "step at least" in text


# ------------------------------------------------------------------------------------------------------ what-if and top


def test_what_if_reaches_the_bound_of_its_alternative(plan: sw.Plan) -> None:
    for alternative in plan.report.explain("up/linear").alternatives[:4]:
        found = plan.report.what_if("up/linear", alternative.choice)
        assert found.prediction.step_seconds >= alternative.step_seconds * (1 - 1e-9)
        if alternative.chosen:
            assert not found.changed
        else:
            assert (
                "operator",
                "up/linear",
                plan.strategies["up/linear"] or "whole",
                alternative.choice,
            ) in found.changed


def test_top_starts_with_the_plan_and_goes_on_by_seconds(plan: sw.Plan) -> None:
    ranking = plan.report.top(4)
    seconds = [prediction.step_seconds for prediction, _ in ranking.plans]
    assert seconds[0] == plan.prediction.additive_price
    assert seconds[1:] == sorted(seconds[1:])
    assert [bool(changed) for _, changed in ranking.plans] == [False, True, True, True]


def test_the_best_plans_print_as_a_table(plan: sw.Plan) -> None:
    ranking = plan.report.top(4)
    head, *rows, end = str(ranking).splitlines()
    assert head.split()[:2] == ["additive", "price"]
    assert [row.split()[0] for row in rows if row.strip()[0].isdigit()] == ["1", "2", "3", "4"]
    assert "the chosen plan" in str(ranking)
    second = ranking.plans[1]
    assert f"{second.changed[0].name}: " in " ".join(str(ranking).split())
    assert f"{second.prediction.additive_price / ranking.plans[0].prediction.additive_price - 1:+.2%}" in str(ranking)
    assert "the best of all plans" in end


def test_the_best_plans_of_a_large_model_are_proven_too() -> None:
    """One elimination lists them, however many choices there are."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(layer for _ in range(60) for layer in (nn.Linear(64, 64), nn.GELU())), Mlp(64, 256, act=F.gelu)
        )
        plan = sw.plan(model, (torch.empty(4096, 64),), 4, mesh=sw.Mesh(dp=4), search="dynamic_programming")
    assert plan.report.finished_search is not None
    assert len(plan.report.finished_search.cost.variables) > 300
    assert plan.report.top(3).exact


@pytest.mark.parametrize("seed", range(20))
def test_the_k_best_are_those_of_all_assignments(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, size=5).tolist()
    interner = Interner()
    scopes = [(0,), (0, 1), (1, 2), (0, 3), (3, 4), (2, 4)]
    factors = [(scope, interner.add(random.random([sizes[v] for v in scope]))) for scope in scopes]
    problem = Problem(sizes, factors, interner)
    every = sorted(problem.value(list(own)) for own in product(*map(range, sizes)))
    found = k_best(problem, 7)
    assert [value for value, _ in found] == pytest.approx(every[:7])
    assert len({tuple(own) for _, own in found}) == len(found), f"seed {seed}"


def test_the_exact_top_is_no_worse_than_any_single_change(plan: sw.Plan) -> None:
    cost, assignment = plan.report.finished_search.cost, list(plan.report.finished_search.outcome.assignment)
    ranking = plan.report.top(3)
    assert ranking.exact
    single = sorted(
        step_seconds(cost.components([*assignment[:v], value, *assignment[v + 1 :]]))
        for v, variable in enumerate(cost.variables)
        for value in range(variable.size)
        if value != assignment[v]
    )
    assert ranking.plans[1][0].step_seconds <= single[0] * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------- the cost graph


def test_the_cost_graph_as_json_has_the_price_of_the_plan(plan: sw.Plan, tmp_path: Path) -> None:
    plan.report.cost_graph(tmp_path / "cost.json")
    data = json.loads((tmp_path / "cost.json").read_text())
    chosen = {entry["name"]: entry["chosen"] for entry in data["variables"]}
    total = dict.fromkeys(COMPONENTS, 0.0)
    for entry in data["variables"]:
        for number in entry["prices"]:
            for name, table in data["tables"][number].items():
                total[name] += table[entry["chosen"]]
    for edge in data["edges"]:
        for name, table in data["tables"][edge["prices"]].items():
            total[name] += table[chosen[edge["from"]]][chosen[edge["to"]]]
    expected = plan.prediction
    assert total["exposed"] == pytest.approx(expected.exposed)
    assert total["compute"] == pytest.approx(expected.compute)
    assert total["traffic"] == pytest.approx(expected.traffic)
    assert total["bytes"] == pytest.approx(expected.num_bytes)


def test_the_cost_graph_as_dot_has_a_node_for_every_choice(plan: sw.Plan, tmp_path: Path) -> None:
    plan.report.cost_graph(tmp_path / "cost.dot")
    lines = (tmp_path / "cost.dot").read_text().splitlines()
    assert lines[0] == "digraph cost {"
    assert sum("shape=" in line for line in lines) == len(plan.report.finished_search.cost.variables)
    assert sum(" -> " in line and "shape=" not in line for line in lines) == sum(
        len(scope) == 2 for scope, _ in plan.report.finished_search.cost.factors
    )


# ---------------------------------------------------------------------------------------------------------- diff, edges


def test_a_plan_does_not_differ_from_itself(plan: sw.Plan) -> None:
    again = sw.Plan.from_json(plan.to_json())
    assert not plan.diff(again)
    assert str(plan.diff(again)) == "the plans are the same"


def test_diff_names_what_another_plan_does_differently(plan: sw.Plan) -> None:
    other = planned(mesh=sw.Mesh(dp=4), mode="data_parallel")
    found = plan.diff(other)
    assert ("mode", "auto", "data_parallel") in found.settings
    assert all(plan.strategies[name] != other.strategies[name] for name, *_ in found.strategies)
    changed = {name for name in plan.strategies if plan.strategies[name] != other.strategies[name]}
    assert {name for name, *_ in found.strategies} == changed


def test_the_search_is_no_part_of_a_plan(plan: sw.Plan) -> None:
    again = sw.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_unknown_names_and_choices_are_refused_with_those_there_are(plan: sw.Plan) -> None:
    with raises(sw.PlanError, "'up/linea'", "up/linear"):
        plan.report.explain("up/linea")
    with raises(sw.PlanError, "'q@dp'", "up/linear"):
        plan.report.what_if("up/linear", "q@dp")
    with raises(sw.PlanError, "k is 0", fix="1 to 1,000"):
        plan.report.top(0)


def test_a_graph_that_is_too_wide_cannot_be_explained(plan: sw.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_wide(*_: object, **__: object) -> None:
        raise TooWide((0, 1), "too wide")

    monkeypatch.setattr("shardwise.report.explain.solve", too_wide)
    with raises(sw.PlanError, "densely connected", fix="sw.plan(..., strategies=...)"):
        plan.report.explain("up/linear")


def test_a_searched_plan_prints_its_prediction(plan: sw.Plan) -> None:
    text = str(plan)
    assert "priced step" in text
    assert "simulated" in text
    assert "peak memory" in text
    assert "additive price" not in str(planned(mode="data_parallel")), "nothing minimised it"
