"""``sw.verify`` does not call it a proof where the numbers of one device are nan, infinite, or zero everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

Function = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.layer(x))


def loss_of_nan(m: Model, h: Tensor) -> Tensor:
    return (h - 100).log().mean()


def infinite_loss(m: Model, h: Tensor) -> Tensor:
    return (h * 0).log().mean().neg()


def zero_by_zero(m: Model, h: Tensor) -> Tensor:
    return (h * 0 / (h * 0)).sum()


def masked_row(m: Model, h: Tensor) -> Tensor:
    return (h + torch.full((4, 4), -torch.inf)).softmax(-1).mean()


def gradient_of_nan(m: Model, h: Tensor) -> Tensor:
    return (h * 0).square().sum(-1).sqrt().mean()


def output_of_nan(m: Model, h: Tensor) -> tuple[Tensor, Tensor]:
    return h.square().mean(), (h - 100).log()


def zeros(m: Model, h: Tensor) -> Tensor:
    return (h - 100).relu().mean()


def constant(m: Model, h: Tensor) -> Tensor:
    return h.detach().square().mean()


def rounding(m: Model, h: Tensor) -> Tensor:
    return h.softmax(-1).sum() * 3.7  # its gradient is zero, and computed as 1e-17


PROVE_NOTHING = {
    loss_of_nan: "these inputs prove nothing: the loss is nan, from operator /log (LINE+1)",
    infinite_loss: "these inputs prove nothing: the loss is infinite, from operator /log (LINE+1)",
    zero_by_zero: "these inputs prove nothing: the loss is nan, from operator /div (LINE+1)",
    masked_row: "these inputs prove nothing: the loss is nan, from operator /softmax (LINE+1)",
    gradient_of_nan: "these inputs prove nothing: the gradient of layer.weight is nan, from backward of "
    "operator /sqrt (LINE+1)",
    output_of_nan: "these inputs prove nothing: output [1] is nan, from operator /log (LINE+1)",
    zeros: "these inputs do not prove backward: every gradient is zero",
    rounding: "these inputs do not prove backward: every gradient is zero",
    constant: "these inputs do not prove backward: the loss depends on no parameter",
}


def verified(function: Function, **options: Any) -> Any:
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(4, 4)
    return sw.verify(model, x, sw.plan(model, x, 2, **options))


@pytest.mark.parametrize("options", [{"mode": "data_parallel"}, {"micro_batch": 1}], ids=str)
@pytest.mark.parametrize("function", PROVE_NOTHING)
def test_numbers_that_prove_nothing_are_not_ok(function: Function, options: dict[str, Any]) -> None:
    if function is output_of_nan and "micro_batch" in options:
        pytest.skip("outputs beside a loss are not compared in passes")
    report = verified(function, **options)
    want = PROVE_NOTHING[function].replace("LINE+1", f"test_substance.py:{function.__code__.co_firstlineno + 1}")
    assert not report.ok
    assert report.not_proven == want
    assert str(report).startswith(f"NOT PROVEN: {want}")


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - 100).log().mean()


def test_a_pipeline_whose_loss_is_nan_proves_nothing() -> None:
    model, x = Staged(), torch.randn(4, 4)
    report = sw.verify(model, x, sw.plan(model, x, 2, stages=2, micro_batch=2))
    assert not report.ok
    assert "the loss is nan, from operator /log" in report.not_proven


def test_nan_in_an_input_is_named() -> None:
    model, x = Model(lambda m, h: h.square().mean()), torch.randn(4, 4)
    x[1, 2] = torch.nan
    report = sw.verify(model, x, sw.plan(model, x, 2, mode="data_parallel"))
    assert report.not_proven == "these inputs prove nothing: the loss is nan, from input args[0]"


def test_nan_of_a_later_step_is_named_with_the_step() -> None:
    class Runaway(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 0.02))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sqrt().sum() * 10

    model, x = Runaway(), torch.ones(2, 4)
    plan = sw.plan(model, x, 2, mode="data_parallel", optimizer="sgd")
    assert "the loss is nan in step 2, from operator /sqrt" in sw.verify(model, x, plan).not_proven
    assert sw.verify(model, x, plan, steps=1).ok


def masked(m: Model, h: Tensor) -> tuple[Tensor, Tensor]:
    scores = h + m.mask
    return scores.softmax(-1).square().mean(), scores


def test_elements_that_are_infinite_by_intent_are_compared_and_counted() -> None:
    report = verified(masked, mode="data_parallel")
    assert report.ok, report
    note = "elements that are infinite on both sides, with equal signs: 12 (output [1], buffer mask)"
    assert note in report.notes


def roots(m: Model, h: Tensor) -> tuple[Tensor, Tensor]:
    return h.square().mean(), h.sqrt()


def test_single_elements_of_nan_in_an_output_are_counted() -> None:
    report = verified(roots, mode="data_parallel")
    assert report.ok, report
    assert any(note.startswith("elements that are nan on both sides, in the same places: ") for note in report.notes)


def ordinary(m: Model, h: Tensor) -> Tensor:
    return h.square().mean()


def test_a_plan_that_splits_nothing_says_that() -> None:
    whole, split = verified(ordinary), verified(ordinary, mode="data_parallel")
    note = "nothing is split: each of 2 ranks computes the whole model"
    assert whole.ok
    assert note in whole.notes
    assert note in str(whole)
    assert split.ok
    assert note not in split.notes


def test_without_trainable_parameters_there_is_no_backward_to_prove() -> None:
    model, x = Model(ordinary).requires_grad_(False), torch.randn(4, 4)
    assert sw.verify(model, x, sw.plan(model, x, 2, mode="data_parallel")).ok


def test_overflow_in_the_precision_of_a_plan_proves_nothing_in_it() -> None:
    model, x = Model(lambda m, h: (h * 300).square().mean()), torch.randn(4, 4) * 10
    plan = sw.plan(model, x, 2, mode="data_parallel", precision=sw.Precision(torch.float16))
    report = sw.verify(model, x, plan)
    assert report.max_error < 1e-12
    assert not report.not_proven
    assert not report.ok
    assert "nothing is proven: loss [0] is not finite on one device" in str(report)
