"""Optimizers against numpy's formulas over five steps, learning rates over the steps, and groups of parameters; on
shards they give what they give on whole parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise.mindspore as ms
from raising import raises
from shardwise.mindspore.holding import holding_of
from shardwise.runtime.local_shards import shard

nn = ms.nn
RunRanks = Callable[..., list[Any]]
Formula = Callable[[Any, Any, dict[str, Any], int, float], Any]
STEPS, RATE = 5, 0.1


def start() -> Any:
    return np.random.RandomState(0).normal(size=(4, 6))


def gradients() -> list[Any]:
    return list(np.random.RandomState(1).normal(size=(STEPS, 4, 6)))


def momentum(decay: float = 0.0, nesterov: bool = False) -> Formula:
    def step(p: Any, g: Any, state: dict[str, Any], t: int, lr: float) -> Any:
        g = g + decay * p
        v = state["v"] = 0.9 * state.get("v", 0) + g
        return p - lr * (g + 0.9 * v if nesterov else v)

    return step


def dampened(p: Any, g: Any, state: dict[str, Any], t: int, lr: float) -> Any:
    v = state["v"] = g if t == 1 else 0.9 * state["v"] + (1 - 0.3) * g
    return p - lr * v


def moments(g: Any, state: dict[str, Any], b1: float = 0.9, b2: float = 0.999) -> tuple[Any, Any]:
    m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    v = state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    return m, v


def adam(decay: float = 0.0, nesterov: bool = False, eps: float = 1e-8) -> Formula:
    def step(p: Any, g: Any, state: dict[str, Any], t: int, lr: float) -> Any:
        g = g + decay * p
        m, v = moments(g, state)
        own = lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        return p - own * (0.9 * m + 0.1 * g if nesterov else m) / (np.sqrt(v) + eps)

    return step


def adam_weight_decay(p: Any, g: Any, state: dict[str, Any], t: int, lr: float) -> Any:
    m, v = moments(g, state, 0.8, 0.99)
    return p - lr * (m / (np.sqrt(v) + 1e-6) + 0.02 * p)


def lamb(p: Any, g: Any, state: dict[str, Any], t: int, lr: float) -> Any:
    m, v = moments(g, state)
    u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.02 * p
    return p - lr * np.linalg.norm(p) / np.linalg.norm(u) * u


# name -> optimizer of parameters, formula of a step
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Formula]] = {
    "Momentum": (lambda own: nn.Momentum(own, RATE, 0.9), momentum()),
    "Momentum, decay": (lambda own: nn.Momentum(own, RATE, 0.9, weight_decay=0.02), momentum(0.02)),
    "Momentum, nesterov": (lambda own: nn.Momentum(own, RATE, 0.9, use_nesterov=True), momentum(0, True)),
    "SGD": (lambda own: nn.SGD(own, RATE), lambda p, g, state, t, lr: p - lr * g),
    "SGD, dampening": (lambda own: nn.SGD(own, RATE, 0.9, 0.3), dampened),
    "SGD, nesterov": (lambda own: nn.SGD(own, RATE, 0.9, weight_decay=0.02, nesterov=True), momentum(0.02, True)),
    "Adam": (lambda own: nn.Adam(own, RATE), adam()),
    "Adam, a large eps": (lambda own: nn.Adam(own, RATE, eps=0.1), adam(eps=0.1)),
    "Adam, decay, nesterov": (
        lambda own: nn.Adam(own, RATE, use_nesterov=True, weight_decay=0.02), adam(0.02, True),
    ),
    "AdamWeightDecay": (
        lambda own: nn.AdamWeightDecay(own, RATE, 0.8, 0.99, weight_decay=0.02), adam_weight_decay,
    ),
    "Lamb": (lambda own: nn.Lamb(own, RATE, weight_decay=0.02), lamb),
}  # fmt: skip


def expected(formula: Formula, rates: list[float] | None = None) -> Any:
    p, state = start(), {}
    for t, g in enumerate(gradients(), 1):
        p = formula(p, g, state, t, RATE if rates is None else rates[t - 1])
    return p


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_five_steps_are_those_of_the_formula(name: str, scale: float) -> None:
    make, formula = OPTIMIZERS[name]
    weight = ms.Parameter(start(), "w")
    optimizer = make([weight])
    optimizer.loss_scale = scale
    for g in gradients():
        assert optimizer((torch.from_numpy(scale * g),))
    np.testing.assert_allclose(weight.asnumpy(), expected(formula), rtol=1e-12, atol=1e-14)
    assert optimizer.global_step == STEPS


RATES = [0.5, 0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    "rate", [RATES, np.array(RATES), torch.tensor(RATES, dtype=torch.float64), lambda step: RATES[step]]
)
def test_a_rate_per_step(rate: Any) -> None:
    weight = ms.Parameter(start(), "w")
    optimizer = nn.Adam([weight], rate)
    assert optimizer.get_lr() == 0.5
    for g in gradients():
        optimizer((torch.from_numpy(g),))
    np.testing.assert_allclose(weight.asnumpy(), expected(adam(), RATES), rtol=1e-12)


def test_groups_have_their_own_rate_and_decay_and_order() -> None:
    first, second = ms.Parameter(start(), "a"), ms.Parameter(start(), "b")
    groups = [
        {"params": [first], "lr": 0.01, "weight_decay": 0.02}, {"params": [second]}, {"order_params": [second, first]},
    ]  # fmt: skip
    optimizer = nn.Momentum(groups, RATE, 0.9)
    assert optimizer.parameters == (second, first)
    for g in gradients():
        optimizer((torch.from_numpy(g), torch.from_numpy(g)))
    np.testing.assert_allclose(first.asnumpy(), expected(momentum(0.02), [0.01] * 5), rtol=1e-12)
    np.testing.assert_allclose(second.asnumpy(), expected(momentum()), rtol=1e-12)


def test_without_groups_beta_and_gamma_do_not_decay() -> None:
    names = ("layer.gamma", "layer.weight", "beta")
    weights = [ms.Parameter(start(), name) for name in names]
    optimizer = nn.Momentum(weights, RATE, 0.9, weight_decay=0.02)
    assert [own.name for own in optimizer.parameters] == list(names)
    for g in gradients():
        optimizer([torch.from_numpy(g)] * 3)
    for own in weights:
        decay = 0.02 if own.name == "layer.weight" else 0.0
        np.testing.assert_allclose(own.asnumpy(), expected(momentum(decay)), rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda w: nn.Adam(), TypeError, ("Adam: missing", "'params'", "Adam(params, learning_rate=0.001")),
        (lambda w: nn.Adam([w], lr=0.1), TypeError, "Adam: got an unexpected keyword argument 'lr'"),
        (lambda w: nn.Lamb([w]), TypeError, "Lamb: missing a required argument: 'learning_rate'"),
        (
            lambda w: nn.warmup_lr(0.1, lr=1),
            TypeError,
            "warmup_lr(learning_rate, total_step, step_per_epoch, warmup_epoch)",
        ),
        (lambda w: nn.Adam([], 0.1), ValueError, "no parameters"),
        (lambda w: nn.Adam([torch.rand(2)], 0.1), TypeError, "trainable_params"),
        (lambda w: nn.Adam([w], -1.0), ValueError, "learning_rate is -1.0"),
        (lambda w: nn.Adam([w], 0.1, beta1=1.0), ValueError, "beta1 is 1.0"),
        (lambda w: nn.Lamb([w], 0.1, eps=0.0), ValueError, "eps is 0.0"),
        (lambda w: nn.SGD([w], 0.1, momentum=-1), ValueError, "momentum is -1"),
        (lambda w: nn.SGD([w], 0.1, nesterov=True), ValueError, "nesterov with momentum 0.0"),
        (lambda w: nn.Momentum([w], 0.1, -0.5), ValueError, "momentum is -0.5"),
        (lambda w: nn.Momentum([w], 0.1, 0.9)([]), ValueError, "0 gradients for 1"),
        (lambda w: nn.SGD([{"params": [w]}, {"order_params": [ms.Parameter(start())]}]), ValueError, "order_params"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, error: type[Exception], words: object) -> None:
    with raises(error, words):
        make(ms.Parameter(start(), "w"))


# ------------------------------------------------------------------------------------------------------ learning rates


def test_optimizers_say_their_arguments() -> None:
    class Own(nn.Lamb):
        def __init__(self, weights: Any, rate: float) -> None:
            super().__init__(weights, rate)

    said = "(params, learning_rate, beta1=0.9, beta2=0.999, eps=1e-06, weight_decay=0.0)"
    assert str(inspect.signature(nn.Lamb)) == said
    assert [*inspect.signature(nn.LazyAdam).parameters][:2] == ["params", "learning_rate"]
    assert [*inspect.signature(Own).parameters] == ["weights", "rate"]
    assert Own([ms.Parameter(start(), "w")], 0.5).get_lr() == 0.5


def test_rates_as_lists() -> None:
    """The examples of the reference's documentation, and formulas."""
    assert nn.piecewise_constant_lr([2, 5, 10], [0.1, 0.05, 0.01]) == [0.1] * 2 + [0.05] * 3 + [0.01] * 5
    assert nn.exponential_decay_lr(0.1, 0.9, 6, 2, 1) == pytest.approx([0.1, 0.1, 0.09, 0.09, 0.081, 0.081])
    assert nn.exponential_decay_lr(0.1, 0.9, 6, 1, 3, True) == pytest.approx([0.1] * 3 + [0.09] * 3)
    assert nn.natural_exp_decay_lr(0.1, 0.9, 6, 2, 2, True) == pytest.approx([0.1] * 4 + [0.1 * math.exp(-1.8)] * 2)
    assert nn.cosine_decay_lr(0.01, 0.1, 6, 2, 2) == pytest.approx([0.1, 0.1, 0.055, 0.055, 0.01, 0.01])
    assert nn.polynomial_decay_lr(0.1, 0.01, 6, 2, 2, 0.5) == pytest.approx(
        [0.1, 0.1, 0.0736396, 0.0736396, 0.01, 0.01]
    )
    longer = nn.polynomial_decay_lr(0.1, 0.0, 5, 1, 2, 1.0, update_decay_epoch=True)
    assert longer == pytest.approx([0.1, 0.05, 0.0, 0.025, 0.0])
    assert nn.warmup_lr(0.1, 6, 2, 2) == pytest.approx([0.0, 0.0, 0.05, 0.05, 0.1, 0.1])


def test_rates_as_functions_of_the_step() -> None:
    found = {
        nn.ExponentialDecayLR(0.1, 0.9, 4): [0.1, 0.1 * 0.9**0.5, 0.1 * 0.9**2],
        nn.ExponentialDecayLR(0.1, 0.9, 4, True): [0.1, 0.1, 0.1 * 0.9**2],
        nn.CosineDecayLR(0.01, 0.1, 4): [0.1, 0.055, 0.01],
        nn.PolynomialDecayLR(0.1, 0.01, 10, 0.5): [0.1, 0.09 * 0.8**0.5 + 0.01, 0.09 * 0.2**0.5 + 0.01],
        nn.WarmUpLR(0.1, 4): [0.0, 0.05, 0.1],
    }
    for schedule, values in found.items():
        assert [schedule(step) for step in (0, 2, 8)] == pytest.approx(values)
    assert nn.NaturalExpDecayLR(0.1, 0.9, 7).construct(3) == 0.1 * math.exp(-0.9 * 3)
    share = float(torch.tensor(3, dtype=torch.int32) / 7)  # of a step as a tensor: in float32, and no more than that
    assert nn.ExponentialDecayLR(0.1, 0.9, 7)(3) == 0.1 * 0.9**share

    class Own(nn.LearningRateSchedule):
        def construct(self, global_step: int) -> float:
            return RATES[global_step]

    assert nn.SGD([ms.Parameter(start())], Own()).get_lr() == 0.5
    with raises(NotImplementedError, "LearningRateSchedule", "does not define construct"):
        nn.LearningRateSchedule()(0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.piecewise_constant_lr([2], [0.1, 0.2]), "1 milestones for 2"),
        (lambda: nn.piecewise_constant_lr([4, 2], [0.1, 0.2]), "milestone 2 is not above 4"),
        (lambda: nn.cosine_decay_lr(0.2, 0.1, 4, 2, 2), "min_lr is 0.2"),
        (lambda: nn.warmup_lr(0.1, 0, 2, 2), "total_step is 0"),
        (lambda: nn.exponential_decay_lr(0.1, 0.9, 4, 2.0, 2), "step_per_epoch is 2.0"),
    ],
)
def test_wrong_rates_are_refused(make: Any, words: object) -> None:
    with raises(ValueError, words):
        make()


# --------------------------------------------------------------------------------------------------------------- shards


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.RandomState(0)
        self.w = ms.Parameter(numbers.normal(size=(8, 6)), "w")
        self.gamma = ms.Parameter(numbers.normal(size=6), "gamma")
        self.matmul = ms.ops.MatMul().shard(((1, 2), (2, 1)))

    def construct(self, x: Tensor, label: Tensor) -> Tensor:
        return (self.matmul(x, self.w) * self.gamma - label).square().mean()


SHARDED = ("Momentum, decay", "SGD, nesterov", "Adam, decay, nesterov", "AdamWeightDecay", "Lamb")


def trained(name: str) -> tuple[Net, list[float]]:
    net, numbers = Net(), np.random.RandomState(2)
    step = nn.TrainOneStepCell(net, OPTIMIZERS[name][0](net.trainable_params()))
    batches = [(torch.from_numpy(numbers.normal(size=(4, 8))), torch.from_numpy(numbers.normal(size=(4, 6))))] * 3
    return net, [step(*batch).item() for batch in batches]


def on_rank() -> dict[str, Any]:
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True)
    found = {}
    for name in SHARDED:
        net, losses = trained(name)
        held = {own: holding_of(p) for own, p in net.named_parameters()}
        found[name] = losses, {own: p.detach().clone() for own, p in net.named_parameters()}, held
    return found


def test_shards_are_updated_like_whole_parameters(run_ranks: RunRanks) -> None:
    ranks = run_ranks(on_rank, 2)
    for name in SHARDED:
        net, losses = trained(name)
        for rank, (own_losses, parameters, held) in enumerate(own[name] for own in ranks):
            assert own_losses == pytest.approx(losses, rel=1e-10)
            assert parameters["w"].shape == (4, 6)
            for path, whole in net.named_parameters():
                layout = held[path].layout
                part = shard(whole.detach(), layout, layout.mesh.coordinates(rank)).as_subclass(Tensor)
                torch.testing.assert_close(parameters[path].as_subclass(Tensor), part, rtol=1e-9, atol=1e-11)
    assert not dist.is_initialized()
