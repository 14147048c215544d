"""Layers that PyTorch runs as one operator, written out, and random tensors: equal to the eager module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from graph.against_eager import check_against_eager, operators
from proving import prove

UNEVEN = torch.tensor([0, 2, 2, 5])


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **options: bool) -> None:
        super().__init__()
        self.layer = kind(5, 3, num_layers=2, dropout=0.3, **options)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.layer(x)
        ends = last if isinstance(last, tuple) else (last,)
        return states.square().sum() + sum(end.sin().sum() for end in ends)


@pytest.mark.parametrize(
    ("kind", "bidirectional", "batch_first"),
    [
        (nn.LSTM, False, True),
        (nn.LSTM, True, False),
        (nn.GRU, True, True),
        (nn.RNN, False, False),
        (partial(nn.RNN, nonlinearity="relu"), True, True),
    ],
)
@pytest.mark.sampled(1)
def test_recurrent_layers_with_dropout_between_them_are_split_by_batch(kind, bidirectional, batch_first):
    module = Recurrent(kind, bidirectional=bidirectional, batch_first=batch_first).train()
    x = torch.randn(6, 2, 5) if batch_first else torch.randn(2, 6, 5)
    for mode in ("auto", "stand_alone") if kind is nn.LSTM and not bidirectional else ("auto",):
        plan = sw.plan(module, x, 3, mesh=sw.Mesh(dp=3), mode=mode)
        prove(module, x, plan)


def test_an_lstm_with_projections_and_without_dropout_stays_one_operator():
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(5, 3, num_layers=2, proj_size=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].square().sum()

    captured = check_against_eager(Projected(), torch.randn(6, 4, 5, dtype=torch.float64))
    assert operators(captured).count("lstm.input") == 1


class Steps(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNCellBase], **options: bool) -> None:
        super().__init__()
        self.cell = kind(5, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for row in x.unbind(1):
            state = self.cell(row, state)
        return sum(part.square().sum() for part in (state if isinstance(state, tuple) else (state,)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")])
@pytest.mark.sampled(4)
def test_steps_of_recurrent_layers_are_products_and_gates_which_are_split(kind, bias):
    module, x = Steps(kind, bias=bias), torch.randn(6, 2, 5)
    captured = check_against_eager(Steps(kind, bias=bias), x.double())
    assert "cell" not in " ".join(operators(captured))
    prove(module, x, sw.plan(module, x, 3, mesh=sw.Mesh(dp=3)))


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_weight_norm_is_a_norm_a_division_and_a_product(dim):
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim)
    captured = check_against_eager(layer, torch.randn(2, 4, 5, dtype=torch.float64))
    assert "_weight_norm" not in " ".join(operators(captured))


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        options = dict(self.options)
        if options.pop("weighted", False):
            options["per_sample_weights"] = self.scale.reshape(ids.shape)
        return F.embedding_bag(ids, self.weight, offsets, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 2},
        {"mode": "mean"},
        {"mode": "mean", "padding_idx": -5},
        {"mode": "max"},
        {"mode": "max", "padding_idx": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("offsets", [None, UNEVEN])
def test_bags_of_embeddings_are_rows_that_are_combined(options, offsets):
    options = {"mode": "sum"} | options
    ids = torch.tensor([0, 2, 2, 5, 6, 1])
    given = (ids.reshape(2, 3),) if offsets is None else (ids, offsets)
    captured = check_against_eager(Bags(**options), *given)
    assert not any("bag" in name for name in operators(captured))


def test_bags_have_weights_and_a_last_offset():
    ids = torch.tensor([0, 2, 2, 5, 6, 1])
    check_against_eager(Bags(mode="sum", weighted=True), ids.reshape(3, 2))
    check_against_eager(Bags(mode="sum", weighted=True, include_last_offset=True), ids, torch.tensor([0, 1, 4, 6]))

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 3))

        def forward(self, ids: Tensor) -> Tensor:
            return torch.embedding_bag(self.weight, ids, UNEVEN)[0]

    check_against_eager(Called(), ids)


class Noisy(nn.Module):
    """Every way to draw; ``x`` is [6, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        x = x + torch.rand(6, 4) + torch.rand((6, 1), dtype=x.dtype) * torch.randn(4)
        x = x * torch.rand_like(x) + torch.randn_like(x)
        x = x * torch.bernoulli(torch.sigmoid(x.detach())) + x * torch.randint(3, (6, 4)) + torch.randint(-2, 5, (6, 4))
        x = x + torch.empty(6, 1).uniform_(-1, 2) + torch.empty_like(x).exponential_(2.0) * F.gumbel_softmax(x)
        x = x * torch.randint_like(x, 1, 5) + torch.randint_like(x, 3) + x[torch.randperm(6)]
        return (x * torch.floor(0.7 + torch.rand(6, 1))).square().mean()


def test_random_tensors_are_the_same_under_every_plan():
    module, x = Noisy(), torch.randn(6, 4)
    for mesh in (sw.Mesh(dp=3), sw.Mesh(dp=2, tp=2)):
        plan = sw.plan(module, x, mesh.num_devices, mesh=mesh, mode="auto")
        report = prove(module, x, plan)
        assert len({d.name for d in report.differences if d.kind == "gradient"}) == 1


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.layer, self.need_weights = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.need_weights)[0]


INSIDE = {
    "attention": lambda: Attention(need_weights=False),
    "attention with weights": lambda: Attention(need_weights=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True),
    "channels": lambda: nn.Dropout1d(0.4),
    "in place": lambda: nn.Dropout(0.4, inplace=True),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.sampled(3)
def test_a_verification_draws_the_same_dropout_inside_functions_of_pytorch(name):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.randn(4)), INSIDE[name]()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.weight).sin().square().mean()  # squares alone are constant behind a norm

    torch.manual_seed(0)
    module, x = Scaled().train(), torch.randn(6, 3, 4)
    prove(module, x, sw.plan(module, x, 3, search="sharding_propagation"))


def test_a_module_that_is_called_twice_gets_its_strategy_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.up(x) * self.up(y)).square().mean()

    inputs = (torch.randn(3, 4), torch.randn(3, 4))
    plan = sw.plan(Twice(), inputs, 2, mesh=sw.Mesh(tp=2), strategies={"up": "n@tp"})
    assert [s for name, s in plan.strategies.items() if "linear" in name] == ["n@tp", "n@tp"]
    assert sw.verify(Twice(), inputs, plan).ok


class Grouped(nn.Module):
    """A product by expert of sorted rows, in the form of PyTorch's function."""

    def __init__(self, dtype: torch.dtype, strategy: str) -> None:
        super().__init__()
        self.weight, self.strategy = nn.Parameter(torch.randn(4, 8, 16, dtype=dtype)), strategy

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return sw.shard(F.grouped_mm, self.strategy)(x.sin(), self.weight, offs=ends).square().sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", ["e", "s", "n"])
@pytest.mark.sampled(5)
def test_a_grouped_product_is_captured_in_every_type_and_split(dtype, factor):
    module = Grouped(dtype, f"{factor}@x")
    inputs = (torch.randn(6, 8, dtype=dtype), torch.tensor([2, 2, 5, 6], dtype=torch.int32))
    plan = sw.plan(module, inputs, 2, mesh=sw.Mesh(x=2), search="sharding_propagation")
    strategy = "K@x" if factor == "e" else f"{factor}@x"  # rows travel to experts that are split
    assert strategy in [plan.strategies[name] for name in plan.strategies if "grouped_mm" in name]
    prove(module, inputs, plan)
