"""Where values that are not finite begin: ``par.check_finite``, ``parallelize(check_finite=n)``, anomaly detection."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message, raises
from runtime.training import train
from shardwise.costs.memory import busiest_program
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.vjp import VjpCache
from shardwise.runtime import agree
from shardwise.runtime.finite import all_finite
from shardwise.runtime.replicas import checked_interval

HEIGHT, WIDTH = 8, 16


class Net(nn.Module):
    """Layers with masked scores (infinities on purpose) and one operator that ``how`` makes wrong."""

    def __init__(self, how: str = "right") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.register_buffer("mask", torch.arange(WIDTH) > 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        scores = self.down(hidden).masked_fill(self.mask, float("-inf")).softmax(-1)
        if self.how == "forward":
            hidden = hidden + (y[:, :1] - 100).log()
        if self.how == "backward":
            hidden = hidden + (y[:, :1] * hidden).square().sum(-1, keepdim=True).sqrt()
        return (self.norm(self.drop(x)) * scores).square().mean() + hidden.square().mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(HEIGHT, WIDTH, generator=generator), 101 + torch.rand(HEIGHT, 1, generator=generator)


def faulty(how: str) -> tuple[Net, Tensor, Tensor]:
    net, (x, y) = Net(how), batch()
    if how == "forward":
        y[6] = -1.0  # the logarithm of a negative number, of one sample
    if how == "backward":
        y[6] = 0.0  # the root of a sum of squares that is 0: its gradient is 0 times infinity
    if how == "input":
        x[6, 3] = float("nan")
    if how == "parameter":
        with torch.no_grad():
            net.down.weight[7, 2] = float("inf")
    return net, x, y


PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {"mode": "data_parallel"},
    "tensor parallel": {"mesh": sw.Mesh(tp=2), "strategies": {"up": "n@tp", "down": "k@tp"}},
    "micro-batches, ZeRO 3": {"mode": "data_parallel", "micro_batch": 4, "zero": 3},
}


def test_programs_are_made_under_anomaly_detection_as_without_it() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    batch = torch.randn(8, 8), torch.randint(4, (8,))
    options: dict[str, Any] = {"mesh": sw.Mesh(tp=2), "strategies": {"0": "n@tp", "3": "n@tp"}}
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("error")
        plan = sw.plan(net, batch, 2, loss=F.cross_entropy, cache=False, **options)
        spmd = program_of(plan, capture(net, batch, loss=F.cross_entropy).graph, training=True)
        assert not busiest_program(spmd, VjpCache()).untraceable


def found_on_ranks(how: str) -> dict[str, tuple[Any, ...]]:
    net, x, y = faulty(how)
    found = {}
    for name, options in PLANS.items():
        par = sw.parallelize(net, sw.plan(net, (x, y), 2, **options), check_finite=2)
        before = [p.detach().clone() for p in par.parameters()], par.state_dict()
        first = par.check_finite(x, y)
        after = [p.detach() for p in par.parameters()]
        assert all(p.grad is None for p in par.parameters())
        assert all(torch.equal(a, b) or not a.isfinite().all() for a, b in zip(before[0], after, strict=True))
        assert torch.equal(before[1]["norm.running_mean"], par.state_dict()["norm.running_mean"])
        text = message(lambda par=par: par.step(x, y), sw.errors.NotFiniteError)
        par.step(x, y)  # the second call is not checked
        with torch.autograd.set_detect_anomaly(True):
            own = message(lambda par=par: par(x, y).backward(), sw.errors.NotFiniteError)
        found[name] = first, text, own
    return found


@pytest.mark.parametrize(
    ("how", "kind", "name", "part"),
    [
        ("right", None, "", ""),
        ("forward", "operator", "log", "forward"),
        ("backward", "operator", "sqrt", "backward"),
        ("input", "input", "args[0]", ""),
        ("parameter", "parameter", "down.weight", ""),
    ],
)
@pytest.mark.sampled(2)
def test_the_first_value_is_named_on_all_ranks(
    how: str, kind: str | None, name: str, part: str, run_ranks: RunRanks
) -> None:
    results = run_ranks(found_on_ranks, 2, how)
    for plan in PLANS:
        (first, text, own), *others = [found[plan] for found in results]
        assert all(other == (first, text, own) for other in others), "the same on all ranks"
        if kind is None:
            assert (first, text, own) == (None, "", ""), "masks hold infinities on purpose"
            continue
        assert (first.kind, str(first)) == (kind, text)
        assert name in first.name
        assert own.splitlines()[0].partition(" of micro")[0] == text.splitlines()[0].partition(" of micro")[0]
        if kind == "operator":
            assert part in first.part
            assert ("of micro-batch 2" in first.part) == ("micro" in plan)
            assert first.source.startswith("test_finite_on_ranks.py:")
            assert "in [" in first.operands[0]
        if plan == "data parallel" and kind in ("operator", "input"):
            assert first.ranks == (1,), "the rank that has the sample"
        if plan == "tensor parallel" and (name == "log" or kind == "input"):
            assert first.ranks == (0, 1), "both have all samples, and only one adds a bias to its partial sum"


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 1:
                x = x + (y - 100).log() + y.abs().sqrt() * 0
        return x.square().mean()


def found_in_stages(schedule: str, stages: int) -> list[Any]:
    x, y = batch()
    y[6] = -1.0
    by_kind = [(x, y.clone()), (x, batch()[1] * 0)]
    by_kind[1][1][:] = 101.0
    net = Tower()
    options: dict[str, Any] = {"stages": stages, "micro_batch": 2, "schedule": schedule}
    par = sw.parallelize(net, sw.plan(net, (x, y), 2, **options))
    assert par.plan.is_pipeline
    return [par.check_finite(*args) for args in by_kind]


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1F1B", 2), pytest.param("ZBVZeroBubble", 4, marks=pytest.mark.long)]
)
def test_the_first_value_in_stages_is_named_with_its_micro_batch(
    schedule: str, stages: int, run_ranks: RunRanks
) -> None:
    for first, none in run_ranks(found_in_stages, 2, schedule, stages):
        assert none is None
        assert "log" in first.name
        assert first.part == "forward of micro-batch 4"
        assert first.ranks == (0 if stages == 2 else 1,)


class Halves(nn.Module):
    """A product in float16 whose summands fit, and whose sum does not."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4, bias=False, dtype=torch.float16)
        nn.init.constant_(self.product.weight, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x).relu().float().mean()


def sum_over_ranks() -> Any:
    net, x = Halves(), torch.full((2, 4), 200.0, dtype=torch.float16)  # 2 x 20,000 on each of two ranks
    par = sw.parallelize(net, sw.plan(net, (x,), 2, mesh=sw.Mesh(tp=2), strategies={"product": "k@tp"}))
    return par.check_finite(x)


def test_a_sum_over_ranks_that_is_too_large_is_named(run_ranks: RunRanks) -> None:
    for first in run_ranks(sum_over_ranks, 2):
        assert (first.kind, first.ranks) == ("conversion", (0, 1)), first
        assert "float32" in str(first)


class Masked(nn.Module):
    """A mask by a logarithm of 0, whose infinities travel to other ranks and do no harm; and the gradient of a root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = (self.down(self.up(x).relu()) + y.log()).softmax(-1)
        return weights.square().mean() + (weights * y).square().sum(-1).sqrt().mean()


class Summed(nn.Module):
    """Gradients in float16 that are finite in every micro-batch, and their sum is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return 4 * (x * self.scale).float().mean(0).sum()


def beside_masks_and_sums() -> list[Any]:
    y = torch.ones(HEIGHT, WIDTH)
    y[:, 3] = 0.0
    masked = sw.plan(Masked(), (batch()[0], y), 2, **PLANS["tensor parallel"])
    par = sw.parallelize(Masked(), masked)
    found: list[Any] = [par.check_finite(batch()[0], y)]
    y[2] = 0.0
    y[2, 0] = 1e-30  # its square is 0
    found.append(par.check_finite(batch()[0], y))
    x = torch.full((8, 4), 6e4, dtype=torch.float16)
    summed = sw.parallelize(Summed(), sw.plan(Summed(), (x,), 2, mode="data_parallel", micro_batch=2))
    found.append(summed.check_finite(x))
    with mock.patch.object(agree, "_MEETING_SECONDS", 1.0), torch.autograd.set_detect_anomaly(dist.get_rank() == 0):
        if dist.get_rank() == 0:
            found.append(message(lambda: par.step(batch()[0], y), sw.errors.LaunchError))
    return found


def test_harmless_infinities_sums_of_micro_batches_and_modes_of_one_rank(run_ranks: RunRanks) -> None:
    one, other = run_ranks(beside_masks_and_sums, 2)
    for masked, root, summed, *_ in (one, other):
        assert masked is None
        assert ("sqrt" in root.name, root.part) == (True, "backward"), root
        assert (summed.kind, summed.name) == ("sum", "scale"), summed
    assert "not at rank 1" in one[3]


def own_loss() -> list[str]:
    """A loss outside of the module: its gradient is NaN; a masked output holds minus infinity."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, WIDTH)
    x, _ = batch()
    par = sw.parallelize(net, sw.plan(net, (x,), 2, mode="data_parallel"), check_finite=1)
    return [
        message(lambda factor=factor: (par(x).square().mean() * factor).backward(), sw.errors.NotFiniteError)
        for factor in (1.0, float("nan"))
    ]


def test_a_gradient_from_outside_is_told_from_those_of_the_module(run_ranks: RunRanks) -> None:
    for right, wrong in run_ranks(own_loss, 2):
        assert right == ""
        assert "outside of the module" in wrong


def sees_large_and_bad_gradients() -> list[bool]:
    """Gradients whose squares overflow are finite; one NaN or infinity among them, on one rank, is not."""
    parameter = nn.Parameter(torch.zeros(3))
    found = []
    for bad in (1e30, float("nan"), float("inf"), -float("inf")):
        parameter.grad = torch.tensor([1e30, -1e30, bad if dist.get_rank() else 1.0])
        found.append(all_finite(None, [parameter], torch.device("cpu")))
    return found


def test_finite_gradients_whose_squares_overflow_are_told_from_bad_ones(run_ranks: RunRanks) -> None:
    assert run_ranks(sees_large_and_bad_gradients, 2) == [[True, False, False, False]] * 2


def trained(every: int | None) -> dict[str, Tensor]:
    net, inputs = Net(), batch()
    plan = sw.plan(net, inputs, 2, **PLANS["micro-batches, ZeRO 3"])
    return train(sw.parallelize(net, plan, check_finite=every), [inputs] * 3).state


def trained_both_ways() -> bool:
    checked, others = trained(1), trained(None)
    return all(torch.equal(checked[name], others[name]) for name in checked | others)


def test_checked_steps_train_as_others(run_ranks: RunRanks) -> None:
    assert run_ranks(trained_both_ways, 2) == [True, True]


@pytest.mark.parametrize("every", [-1, 0.5, True, "1"])
def test_an_interval_that_is_no_number_of_calls_is_refused(every: Any) -> None:
    with raises(sw.ShardwiseError, "check_finite", repr(every), fix="0 or None"):
        checked_interval("check_finite", every)
