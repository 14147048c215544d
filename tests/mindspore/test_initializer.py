"""Initial values: the distributions, and that every rank draws the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raising import raises
from shardwise.mindspore.common import seed
from shardwise.mindspore.common.initializer import (
    Constant,
    HeNormal,
    HeUniform,
    Initializer,
    Normal,
    One,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
    Zero,
    initializer,
)
from shardwise.mindspore.common.seed import get_seed, set_seed

RunRanks = Callable[..., list[Any]]
SHAPE = [500, 400]


@pytest.fixture(autouse=True)
def fresh_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "_seeds", {})
    monkeypatch.setattr(seed, "_generator", torch.Generator().manual_seed(seed.DEFAULT_SEED))


def test_constants_are_what_they_say() -> None:
    for init, value in [("zeros", 0), ("ones", 1), (Zero(), 0), (One(), 1), (Constant(0.5), 0.5), (3, 3), ("ZERO", 0)]:
        assert torch.equal(initializer(init, [2, 3]), torch.full((2, 3), float(value)))


GAIN = 1 / math.sqrt(1 + 0.2**2)  # twice this squared is the gain of a leaky relu
# What is drawn for SHAPE: (standard deviation, mean, bound or None).
SPREADS: list[tuple[str | Initializer, float, float, float | None]] = [
    ("normal", 0.01, 0, None),
    ("Normal", 0.01, 0, None),
    (Normal(0.5, 2), 0.5, 2, None),
    ("uniform", 0.07 / math.sqrt(3), 0, 0.07),
    (Uniform(2), 2 / math.sqrt(3), 0, 2),
    ("xavier_uniform", math.sqrt(2 / 900), 0, math.sqrt(6 / 900)),
    (XavierUniform(3), 3 * math.sqrt(2 / 900), 0, 3 * math.sqrt(6 / 900)),
    (XavierNormal(3), 3 * math.sqrt(2 / 900), 0, None),
    ("he_uniform", math.sqrt(2 / 400), 0, math.sqrt(6 / 400)),
    ("HeNormal", math.sqrt(2 / 400), 0, None),
    (HeNormal(mode="fan_out"), math.sqrt(2 / 500), 0, None),
    (HeUniform(0.2), GAIN * math.sqrt(2 / 400), 0, GAIN * math.sqrt(6 / 400)),
    (HeNormal(nonlinearity="relu"), math.sqrt(2 / 400), 0, None),
    ("TruncatedNormal", 0.01 * 0.879626, 0, 0.02),  # the standard deviation of a normal cut at two
]


@pytest.mark.parametrize(
    ("init", "deviation", "mean", "bound"),
    SPREADS,
    ids=[init if isinstance(init, str) else f"{type(init).__name__} {i}" for i, (init, *_) in enumerate(SPREADS)],
)
def test_values_have_their_distribution(
    init: str | Initializer, deviation: float, mean: float, bound: float | None
) -> None:
    drawn = initializer(init, SHAPE, torch.float64)
    count = math.prod(SHAPE)
    assert abs(float(drawn.mean()) - mean) < 5 * deviation / math.sqrt(count)
    assert abs(float(drawn.std()) / deviation - 1) < 5 / math.sqrt(count)  # five or more of its own deviations
    largest = float((drawn - mean).abs().max())
    assert largest > 3.5 * deviation if bound is None else 0.999 * bound < largest <= bound


def test_a_truncated_normal_is_cut_where_it_says() -> None:
    drawn = initializer(TruncatedNormal(2.0, 1.0, a=-1, b=3), SHAPE)
    assert -1 <= float(drawn.min()) < -0.99
    assert 6.5 < float(drawn.max()) <= 7


def test_fans_of_a_kernel_count_its_places() -> None:
    drawn = initializer("xavier_uniform", [8, 4, 3, 3], torch.float64)
    bound = math.sqrt(6 / (9 * 12))
    assert 0.98 * bound < float(drawn.abs().max()) <= bound
    with raises(ValueError, "a scalar has no fan_in"):
        initializer("he_normal", [])


def test_shapes_and_dtypes() -> None:
    assert initializer("normal", 3).shape == (3,)
    assert initializer("normal", (2, 3)).dtype == torch.float32
    assert initializer("ones", []).shape == ()
    assert initializer(Constant(3), [2], torch.int32).tolist() == [3, 3]
    given = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(initializer(given, [2, 3]), given)
    assert initializer(given).data_ptr() != given.data_ptr()
    assert initializer(given, dtype=torch.float64).dtype == torch.float64
    assert not initializer("normal", [2]).requires_grad


def drawn() -> list[Any]:
    torch.manual_seed(torch.distributed.get_rank())  # ranks whose own random numbers differ
    torch.randn(3)
    first = initializer("normal", [4, 3])
    second = initializer("he_uniform", [4, 3])
    set_seed(11)
    return [tensor.tolist() for tensor in (first, second, initializer("normal", [4, 3]), torch.randn(2))]


def test_every_rank_draws_the_same_values_without_a_word(run_ranks: RunRanks) -> None:
    first, second = run_ranks(drawn, 2)
    assert first == second
    assert first[0] != first[1] != first[2]


def test_a_seed_starts_everything_anew() -> None:
    assert get_seed() is None
    found = []
    for _ in range(2):
        set_seed(3)
        found.append([initializer("normal", [3]).tolist(), torch.randn(2).tolist(), np.random.rand(2).tolist()])
    assert found[0] == found[1]
    assert get_seed() == 3
    state = torch.get_rng_state()
    initializer("normal", [3])
    assert torch.equal(torch.get_rng_state(), state)  # torch's own random numbers are left alone


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: initializer("norml", [2]), ValueError, 'did you mean "normal"'),
        (lambda: initializer("normal"), ValueError, ("initializer('normal')", "has no shape")),
        (lambda: initializer("normal", [0, 2]), ValueError, ("[0, 2]", "sizes from 1 on")),
        (lambda: initializer("normal", [2.0]), TypeError, ("[2.0]", "give integers")),
        (lambda: initializer("normal", "ab"), TypeError, ("'ab'", "give integers")),
        (lambda: initializer(None, [2]), TypeError, "of type NoneType"),
        (lambda: initializer(torch.ones(2), [3]), ValueError, "shape [2] and the shape [3]"),
        (lambda: HeNormal(mode="fan"), ValueError, "fan_in"),
        (lambda: set_seed(-1), ValueError, (-1, "from 0 to")),
        (lambda: set_seed("1"), TypeError, ("'1'", "of type str")),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], kind: type[Exception], message: object) -> None:
    with raises(kind, message):
        make()
