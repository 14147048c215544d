"""The eager side of a verification and the graph call the same functions of random numbers; here these are compared
with other formulas of the same numbers, so that an error that both sides share is found."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.graph import normalize_random
from shardwise.graph.normalize_random import FILLS, alpha_dropout, attention, feature_dropout, integers, multinomial
from shardwise.graph.to_float64 import Reference

SHAPE, D = (6, 5, 4), torch.distributions


def draws() -> Reference:
    """The same numbers again and again."""
    return Reference(7)


def numbers(*calls: tuple[int, ...]) -> list[Tensor]:
    source = draws()
    return [source.uniform(shape) for shape in calls]


def noise(shape: tuple[int, ...], p: float) -> Tensor:
    return draws().drop(torch.ones(shape, dtype=torch.float64), p)


def polar(first: Tensor, second: Tensor) -> Tensor:
    """Box and Muller's numbers, as real parts of points of the plane."""
    return torch.polar((-2 * (1 - first).log()).sqrt(), 2 * torch.pi * second).real


def trials(u: float, p: float) -> int:
    """The first k with P(X <= k) = 1 - (1 - p)^k above u."""
    k = max(1, ceil(log(1 - u) / log(1 - p)) - 1)
    while 1 - (1 - p) ** k <= u:
        k += 1
    return k


FILLED: dict[str, tuple[tuple[Any, ...], Callable[..., Tensor]]] = {
    "uniform": ((-1.0, 3.0), lambda u, _: D.Uniform(-1.0, 3.0).icdf(u)),
    "exponential": ((2.0,), lambda u, _: D.Exponential(torch.tensor(2.0, dtype=torch.float64)).icdf(u)),
    "cauchy": ((1.0, 2.0), lambda u, _: D.Cauchy(torch.tensor(1.0, dtype=torch.float64), 2.0).icdf(u)),
    "normal": ((1.0, 2.0), lambda u, v: 1.0 + 2.0 * polar(u, v)),
    "log_normal": ((0.5, 0.25), lambda u, v: torch.e ** (0.5 + 0.25 * polar(u, v))),
    "geometric": ((0.3,), lambda u, _: u.clone().apply_(lambda one: trials(one, 0.3))),
    "random": ((9,), lambda u, _: torch.from_numpy(np.trunc(u.numpy() * 9))),
}


@pytest.mark.parametrize("name", FILLS)
def test_numbers_of_a_shape(name: str) -> None:
    args, expected = FILLED[name]
    found = FILLS[name](draws(), SHAPE, *args)
    torch.testing.assert_close(found, expected(*numbers(SHAPE, SHAPE)), rtol=1e-12, atol=1e-12)


def test_integers_and_multinomials() -> None:
    (u,) = numbers(SHAPE)
    assert torch.equal(
        integers(draws(), SHAPE, -2, 5, torch.int64), torch.bucketize(u, torch.arange(1, 7) / 7.0, right=True) - 2
    )
    weights = torch.rand(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (race,) = numbers((6, 5))
    arrivals = D.Exponential(weights).icdf(race)  # the first to arrive are taken
    assert torch.equal(multinomial(draws(), weights, 3), arrivals.argsort(-1)[:, :3])
    (drawn,) = numbers((6, 8))
    shares = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)
    assert torch.equal(multinomial(draws(), weights, 8, True), torch.searchsorted(shares, drawn, right=True))


@pytest.mark.parametrize("features", [False, True])
def test_dropouts(features: bool) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p, least = 0.3, float(nn.functional.selu(torch.tensor(-1e9, dtype=torch.float64)))  # -lambda alpha
    shape = (6, 5, 1) if features else SHAPE
    (u,) = numbers(shape)
    mixed = torch.where(u >= p, x, least)
    mean, variance = p * least, (1 - p) * (1 + p * least**2)  # of elements of mean 0 and variance 1
    expected = (mixed - mean) / variance**0.5
    torch.testing.assert_close(alpha_dropout(draws(), x, p, True, features=features), expected, rtol=1e-12, atol=1e-12)
    channels = noise((6, 5, 1), p)
    assert torch.equal(feature_dropout(draws(), x, p, True), torch.einsum("ncl,ncx->ncl", x, channels))
    (u,) = numbers(SHAPE)
    slopes = torch.lerp(torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64), u)
    expected = x.relu() - slopes * (-x).relu()
    torch.testing.assert_close(normalize_random.rrelu(draws(), x, 0.1, 0.4, True), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["none", "causal", "choice", "added"])
def test_attention(mask: str) -> None:
    generator, p = torch.Generator().manual_seed(1), 0.4
    q, k, v = (torch.randn(2, heads, 5, 3, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    allowed = torch.rand(5, 5, generator=generator) < 0.7
    allowed.fill_diagonal_(True)
    added = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    given = {"choice": allowed, "added": added}.get(mask)
    found = attention(draws(), q, k, v, given, p, mask == "causal", scale=0.7, enable_gqa=True)
    pairs = torch.einsum("bgrsd,bgtd->bgrst", q.unflatten(1, (2, 2)), k).flatten(1, 2).mul(0.7).exp()
    pairs *= {"none": torch.ones(5, 5), "causal": torch.ones(5, 5).tril(), "choice": allowed, "added": added.exp()}[
        mask
    ]
    shares = pairs / pairs.sum(-1, keepdim=True) * noise((2, 4, 5, 5), p)
    expected = torch.einsum("bgrst,bgtd->bgrsd", shares.unflatten(1, (2, 2)), v).flatten(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    """Each layer as a module of its own, with dropout between them."""
    torch.manual_seed(0)
    whole = kind(4, 4, 3, batch_first=True, dropout=0.3, bidirectional=True).double()
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    zeros = torch.zeros(6, 2, 4, dtype=torch.float64)
    states = (zeros, zeros) if kind is nn.LSTM else zeros
    function = {nn.LSTM: torch.lstm, nn.GRU: torch.gru, nn.RNN: torch.rnn_tanh}[kind]
    rest = (whole._flat_weights, True, 3, 0.3, True, True, True)
    found = normalize_random.recurrent(function, draws(), x, states, *rest)
    source, finals = draws(), list[Tensor]()
    for number in range(3):
        layer: Any = kind(x.shape[-1], 4, batch_first=True, bidirectional=True).double()
        own = whole._flat_weights[8 * number : 8 * (number + 1)]
        for parameter, value in zip(layer.parameters(), own, strict=True):
            parameter.data.copy_(value)
        x, last = layer(x)
        finals.append(last[0] if kind is nn.LSTM else last)
        if number < 2:
            x = x * source.drop(torch.ones_like(x), 0.3)
    torch.testing.assert_close(found[0], x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], torch.cat(finals), rtol=1e-12, atol=1e-12)
