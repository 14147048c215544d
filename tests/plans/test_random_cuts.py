"""Random modules cut at random operators, and models of the zoo in 2, 3 and 4 stages, are proven equal to one device;
``make sweep-pipelines`` runs all of them."""

from __future__ import annotations

import pytest

from plans.random_cuts import FEATURES, MODELS, prove_cut, prove_model

FEW = (2, 4, 13, 17)  # seeds: what crosses, is carried, is tied, looped and folded schedules, ZeRO


def test_random_cuts_are_proven() -> None:
    FEATURES.clear()
    for seed in FEW:
        assert prove_cut(seed) == "", f"prove_cut({seed})"
    for feature in ("several values cross", "values are carried", "no floating point", "tied"):
        assert FEATURES[feature], (feature, FEATURES)


@pytest.mark.parametrize(("name", "stages"), [("vit", 2), ("resnet", 2)])
@pytest.mark.sampled(1)
def test_models_in_stages_are_proven(name: str, stages: int) -> None:
    """A residual network has batch norm: every micro-batch has statistics of its own, as on one device."""
    assert prove_model(name, stages) == ""


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_more_random_cuts_are_proven(block: int) -> None:
    failed = {seed: said for seed in range(block * 50, block * 50 + 50) if (said := prove_cut(seed))}
    assert not failed, failed


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_zoo_in_stages_is_proven(name: str, stages: int) -> None:
    assert prove_model(name, stages) == ""
