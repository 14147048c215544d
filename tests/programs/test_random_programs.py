"""Random programs under random strategies, storage and detours on the virtual cluster equal the whole program: outputs,
every gradient, and the list of collectives in order. ``make sweep`` runs many more (``sweep.py``)."""

from __future__ import annotations

from collections import Counter

import pytest

from programs.building import STEPS, WINDOWED, program_of_sample, random_program
from programs.running import Outcome, run
from rules.samples import SAMPLES

PROGRAMS = 12
WINDOWED_PROGRAMS, SPLIT_BY_HAND = 10, 6
EVERY = 20  # of the samples; the sweep takes all
TESTED = [i for i, sample in enumerate(SAMPLES) if not sample.unspecified]


def check(outcome: Outcome, told: str) -> None:
    assert outcome.error <= 1e-10, f"{told}: relative error {outcome.error:.3g} at {outcome.where}"
    assert outcome.collectives_match, f"{told}: the recorded collectives are not those of the program"


def test_random_programs_equal_one_device() -> None:
    cells: Counter[tuple[str, str]] = Counter()
    features: Counter[str] = Counter()
    for seed in range(PROGRAMS):
        outcome = run(random_program(seed), seed)
        check(outcome, f"random_program({seed}), run seed {seed}")
        cells, features = cells + outcome.cells, features + outcome.features
    exercised = {(a, b) for a in "SIRP" for b in "SIRP"} - {("I", "I"), ("R", "R"), ("P", "P")}
    assert exercised <= set(cells), f"nobody uses {sorted(exercised - set(cells))}"
    for feature in ("nested", "factored", "uneven", "lowered"):
        assert features[feature] > 10, f"{feature} {features[feature]}"


@pytest.mark.parametrize("priced", [False, True], ids=["", "priced"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["", "by hand"])
@pytest.mark.sampled(1)
def test_random_programs_with_windows_equal_one_device(by_hand: bool, priced: bool) -> None:
    """Convolutions, pooling, rolls, pads and slices among the others, also where factors are split by hand and where
    routes are chosen by price."""
    features: Counter[str] = Counter()
    for seed in range(SPLIT_BY_HAND if by_hand else WINDOWED_PROGRAMS):
        outcome = run(random_program(seed, WINDOWED * 2 + STEPS), seed, by_hand=by_hand, priced=priced)
        check(outcome, f"random_program({seed}, WINDOWED * 2 + STEPS), run seed {seed}, {by_hand=}, {priced=}")
        features += outcome.features
    assert features["halos"] > (50 if by_hand else 2), features
    if by_hand:
        assert features["closings"] > 50, features
    if priced:
        assert features["other routes"] > 15, features
    else:
        assert not features["other routes"], features


def test_every_operator_on_its_own_equals_one_device() -> None:
    for index in TESTED[::EVERY]:
        outcome = run(program_of_sample(SAMPLES[index]), index)
        check(outcome, f"program_of_sample(SAMPLES[{index}]) {SAMPLES[index]}, run seed {index}")


def test_random_programs_that_make_values_again_equal_one_device() -> None:
    """Operators and conversions whose results are not kept, chosen at random."""
    features: Counter[str] = Counter()
    for seed in range(100, 103):
        for kept in (0.0, 0.5):
            outcome = run(random_program(seed), seed, kept=kept)
            check(outcome, f"random_program({seed}), run seed {seed}, {kept=}")
            features += outcome.features
    assert features["made again"] > 250, features
    assert features["dropped"] > features["made again"], features


@pytest.mark.parametrize(("seed", "by_hand"), [(36, False), (16, True), (36, True), (81, True)])
def test_ranks_repeat_the_same_messages_whatever_their_parts_are(seed: int, by_hand: bool) -> None:
    """Parts are empty, or whole, or run other kernels on some of the ranks, whose backward reads other values."""
    outcome = run(random_program(seed), seed, by_hand=by_hand, kept=0.5)
    check(outcome, f"random_program({seed}), run seed {seed}, {by_hand=}")
    assert outcome.features["made again"]
