"""Plans chosen by price decide what they did (``priced_plans.py``)."""

from __future__ import annotations

import difflib

import pytest

from plans.priced_plans import FOLDER, MODELS, TARGETS, Target, decisions, file_of


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(4)
def test_a_plan_chosen_by_price_decides_what_it_did(model: str, target: Target) -> None:
    path = file_of(model, target)
    told = difflib.unified_diff(
        path.read_text().splitlines(), decisions(model, target).splitlines(), path.name, "decided now", lineterm="", n=1
    )
    difference = "\n".join(told)
    assert not difference, f"{difference}\nWhere that is meant: make golden, and read the difference in git."


def test_every_file_is_that_of_a_plan() -> None:
    assert set(FOLDER.iterdir()) == {file_of(model, target) for model in MODELS for target in TARGETS}
