"""Rounding is told from error: models in which last bits become visible are equal, and mistakes in them are found."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from museum.faults import exchange
from proving import prove
from shardwise.programs import lower
from shardwise.proof import rounding, verify
from shardwise.rules.lowerings import reductions

DATA, TENSOR = sw.Mesh(dp=2), sw.Mesh(tp=2)


class ConvNorm(nn.Module):
    """Conv-BN-Linear-BN. Its loss does not depend on the biases ahead of the norms, nor, at first, on that of the last
    norm: their gradients are rounding, of which AdamW makes steps."""

    def __init__(self, scale: float = 1.0, *, returns_parameters: bool = False) -> None:
        super().__init__()
        self.scale, self.returns_parameters = scale, returns_parameters
        self.conv, self.first = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.linear, self.last = nn.Linear(64, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        h = torch.relu(self.first(self.conv(x))).flatten(1)
        loss = self.last(self.linear(h)).square().mean() * self.scale
        return (loss, self.last.bias, self.linear.weight.clone()) if self.returns_parameters else loss


class Deep(nn.Module):
    """Norms over two samples, which know little more than which is the larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.linear(1 + x * 1e-6))), labels)


def images() -> tuple[Tensor, ...]:
    return (torch.randn(8, 3, 4, 4),)


def checked(
    model: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], seed: int = 0
) -> sw.results.Report:
    torch.manual_seed(seed)
    module, batch = model(), inputs()
    return sw.verify(module, batch, sw.plan(module, batch, 2, mesh=DATA, mode="data_parallel"))


@pytest.mark.parametrize("seed", range(6))
def test_a_right_plan_is_equal_where_plain_comparison_sees_a_difference(seed: int) -> None:
    report = checked(ConvNorm, images, seed)
    assert report.max_error > report.tolerance  # otherwise this tests nothing
    assert report.ok, str(report)
    assert report.rounding is not None
    assert report.first_wrong == ""
    assert "rounding: " in str(report)


@pytest.mark.parametrize("seed", range(2))
def test_so_it_is_under_tensor_parallelism(seed: int) -> None:
    torch.manual_seed(seed)
    module, batch = ConvNorm(), images()
    report = prove(module, batch, sw.plan(module, batch, 2, mesh=TENSOR, strategies={"linear": "n@tp"}))
    assert report.forward


def test_parameters_that_rounding_moves_by_whole_steps_are_compared_by_their_gradients() -> None:
    report = checked(lambda: ConvNorm(1e9, returns_parameters=True), images)
    assert report.max_error > 0.1
    assert report.ok, str(report)
    assert report.rounding is not None
    assert "last.bias" in report.rounding.by_gradient
    assert "linear.weight" not in report.rounding.by_gradient
    assert "before the optimizer: " in str(report)


@pytest.mark.parametrize("model", [Deep, Flat])
def test_norms_of_what_hardly_varies_are_equal(model: Callable[[], nn.Module]) -> None:
    rows = 2 if model is Deep else 8
    report = checked(model, lambda: (torch.randn(rows, 8), torch.randint(3, (rows,))))
    assert report.max_error > report.tolerance
    assert report.ok, str(report)


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).square().mean(), self.linear.weight.clone()


def test_where_the_plain_comparison_is_enough_nothing_else_is_run() -> None:
    with mock.patch.object(verify, "explain", side_effect=AssertionError):
        report = checked(Copies, lambda: (torch.randn(8, 6),))
    assert report.ok
    assert report.rounding is None


def own(_: int, sent: Tensor, __: Tensor) -> Tensor:
    return sent


def twice(_: int, __: Tensor, got: Tensor) -> Tensor:
    return got * 2


def a_little_more(_: int, __: Tensor, got: Tensor) -> Tensor:
    return got * 1.001


MISTAKES = {
    "no sum of a gradient": ("conv.weight", "*", True, own),
    "no sum of a gradient that is zero": ("linear.bias", "*", True, own),
    "no sum of a gradient that is zero at first": ("last/reshape_1", "*", True, own),
    "a gradient that is doubled": ("linear.weight", "*", True, twice),
    "a gradient that is a little larger": ("linear.weight", "*", True, a_little_more),
    "a cotangent of statistics that is doubled": ("last/div", "*", True, twice),
    "statistics of a part": ("first/sum", "*", False, own),
    "statistics that are a little larger": ("last/sum", "*", False, a_little_more),
}


@pytest.mark.parametrize("scale", [1.0, 1e9])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_not_taken_for_rounding(mistake: str, scale: float) -> None:
    value, op, backward, receive = MISTAKES[mistake]
    torch.manual_seed(0)
    module, batch = ConvNorm(scale), images()
    plan = sw.plan(module, batch, 2, mesh=DATA, mode="data_parallel", bucket_bytes=0)
    with exchange(value, op, backward=backward, receive=receive):
        report = sw.verify(module, batch, plan)
    assert not report.ok, str(report)
    assert report.rounding is not None
    assert report.rounding.unexplained
    assert "not rounding: " in str(report)
    assert report.first_wrong


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return sw.shard(torch.cumprod, "d1@tp")(self.linear(x), 1).sum(0).square().mean()


def test_an_operator_whose_lowering_is_wrong_is_named() -> None:
    module, batch = Scores(), torch.randn(4, 6)
    before = reductions._before

    def planned() -> sw.Plan:
        for cached in (lower._capture_lowering, lower._divided, lower._lowered):
            cached.cache_clear()
        return sw.plan(module, batch, 2, mesh=TENSOR, strategies={"linear": "n@tp"})

    with mock.patch.object(reductions, "_before", lambda totals, dim, _: before(totals, dim, 2)):
        report = sw.verify(module, batch, planned())
    assert not report.ok
    assert report.first_wrong.startswith("the result of /cumprod (test_rounding.py:")
    assert sw.verify(module, batch, planned()).ok


def test_disturbed_numbers_differ_in_their_last_bits() -> None:
    numbers = torch.cat([torch.randn(1000, dtype=torch.float64), torch.tensor([0.0, torch.inf, torch.nan])])
    off = rounding._off(numbers, draw=torch.Generator().manual_seed(0))
    relative = (off[:1000] / numbers[:1000] - 1).abs()
    assert relative.min() > 2.0**-51
    assert relative.max() < 2.0**-49
    assert torch.equal(off[1000:1002], numbers[1000:1002])
    assert off[1002].isnan()
    whole = torch.arange(5)
    assert torch.equal(rounding._off(whole, draw=torch.Generator()), whole)
