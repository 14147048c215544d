"""``sw.verify`` of models whose Python makes tensors: both sides have torch's default dtype float64.

Every construct meets a weight in a product, which takes no two dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from raising import raises

WIDTH, SAMPLES = 8, 4
OUTSIDE = torch.linspace(0.1, 0.9, WIDTH)
PARTS = 15  # four constructs in a model
NUMBERS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


def column(vector: Tensor) -> Tensor:
    return vector.reshape(WIDTH, 1)


def written() -> Tensor:
    table = torch.zeros(WIDTH, 1)
    table[:3] = 0.1
    table[3] += 0.7
    return table


# ``h``: the result of the layer, [samples, width]; ``ids``: integers of that shape.
CONSTRUCTS: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "zeros": lambda m, h, ids: (torch.zeros(WIDTH, WIDTH) + 0.5) @ m.layer.weight @ h.mT,
    "ones": lambda m, h, ids: h @ torch.ones(WIDTH, WIDTH),
    "full": lambda m, h, ids: h @ torch.full((WIDTH, 1), 0.1),
    "eye": lambda m, h, ids: h @ (torch.eye(WIDTH) * 0.3),
    "linspace": lambda m, h, ids: h @ column(torch.linspace(0, 0.7, WIDTH)),
    "logspace": lambda m, h, ids: h @ column(torch.logspace(0, 0.7, WIDTH)),
    "arange of floats": lambda m, h, ids: h @ column(torch.arange(0.0, WIDTH) / 10),
    "arange by a float": lambda m, h, ids: h @ column(torch.arange(0, 10, 0.1)[:WIDTH]),
    "tensor": lambda m, h, ids: h @ column(torch.tensor(NUMBERS)),
    "tensor of a dtype": lambda m, h, ids: h @ column(torch.tensor(NUMBERS, dtype=torch.float32)),
    "tensor of a number": lambda m, h, ids: h @ (torch.tensor(0.1) * m.layer.weight),
    "tensor of an integer": lambda m, h, ids: h @ (torch.tensor(WIDTH).sqrt() * m.layer.weight),
    "as_tensor": lambda m, h, ids: h @ column(torch.as_tensor(NUMBERS)),
    "asarray": lambda m, h, ids: h @ column(torch.asarray(NUMBERS)),
    "new_tensor": lambda m, h, ids: h @ column(h.new_tensor(NUMBERS)),
    "new_zeros": lambda m, h, ids: h @ (h.new_zeros(WIDTH, 1) + 0.1),
    "FloatTensor": lambda m, h, ids: h @ column(torch.FloatTensor(NUMBERS)),
    "Tensor of numbers": lambda m, h, ids: h @ column(torch.Tensor(NUMBERS)),
    "Tensor of an array": lambda m, h, ids: h @ column(torch.Tensor(np.array(NUMBERS))),
    "Tensor of sizes": lambda m, h, ids: h @ torch.Tensor(WIDTH, 1).fill_(0.3),
    "Tensor of a Size": lambda m, h, ids: h @ torch.Tensor(torch.Size((WIDTH, 1))).fill_(0.3),
    "new": lambda m, h, ids: h @ column(h.new(NUMBERS)) + h.new(1).fill_(0.1),
    "a parameter of a Tensor": lambda m, h, ids: h @ column(nn.Parameter(torch.Tensor(NUMBERS)).detach()),
    "from_numpy": lambda m, h, ids: h @ column(torch.from_numpy(np.linspace(0, 0.1, WIDTH, dtype=np.float32))),
    "scalar_tensor": lambda m, h, ids: h @ (torch.scalar_tensor(0.1) * m.layer.weight),
    "empty and fill": lambda m, h, ids: h @ torch.empty(WIDTH, 1).fill_(0.3),
    "empty and uniform": lambda m, h, ids: h @ torch.empty(WIDTH, 1).uniform_(),
    "written to": lambda m, h, ids: h @ written(),
    "rand": lambda m, h, ids: h @ torch.rand(WIDTH, 1),
    "randn": lambda m, h, ids: h @ torch.randn(WIDTH, 1),
    "normal": lambda m, h, ids: h @ torch.normal(0.0, 1.0, (WIDTH, 1)),
    "randperm": lambda m, h, ids: h @ column(torch.randperm(WIDTH) / WIDTH),
    "bytes divided": lambda m, h, ids: (ids.to(torch.uint8) / 255) @ m.layer.weight + h,
    "integers divided": lambda m, h, ids: (ids / 100) @ m.layer.weight + h,
    "integers times a float": lambda m, h, ids: (ids * 0.1) @ m.layer.weight + h,
    "booleans times a float": lambda m, h, ids: ((ids > 2) * 0.1) @ m.layer.weight + h,
    "mean of integers": lambda m, h, ids: ids.float().mean(0, keepdim=True) @ m.layer.weight + h,
    "root of integers": lambda m, h, ids: ids.sqrt() @ m.layer.weight + h,
    "where of two floats": lambda m, h, ids: torch.where(ids > 2, 1.0, 0.1) @ m.layer.weight + h,
    "one_hot": lambda m, h, ids: F.one_hot(ids, WIDTH).float().mean(1) @ m.layer.weight + h,
    "cast by name": lambda m, h, ids: ids.type("torch.FloatTensor") @ m.layer.weight + h,
    "cast to the default": lambda m, h, ids: ids.to(torch.get_default_dtype()) @ m.layer.weight + h,
    "hann_window": lambda m, h, ids: h @ column(torch.hann_window(WIDTH)),
    "fftfreq": lambda m, h, ids: h @ column(torch.fft.fftfreq(WIDTH)),
    "rotary frequencies": lambda m, h, ids: h @ column(1 / (10000 ** (torch.arange(0, WIDTH) / WIDTH))),
    "causal mask": lambda m, h, ids: torch.full((WIDTH, WIDTH), -torch.inf).triu(1).softmax(-1) @ h.mT,
    "tril of ones": lambda m, h, ids: torch.tril(torch.ones(WIDTH, WIDTH)) @ h.mT,
    "cumsum of ones": lambda m, h, ids: (torch.ones(WIDTH).cumsum(0) / WIDTH) @ m.layer.weight + h,
    "an attribute": lambda m, h, ids: h @ m.table,
    "a global": lambda m, h, ids: h @ column(OUTSIDE),
    "eps of a dtype": lambda m, h, ids: (h / (h.norm() + torch.finfo(h.dtype).eps)) @ m.layer.weight,
    "a branch by dtype": lambda m, h, ids: h @ (m.layer.weight * (0.1 if h.dtype == torch.float32 else 0.2)),
    "a complex parameter": lambda m, h, ids: (h * m.phases).abs(),
    "a spectrum": lambda m, h, ids: torch.fft.irfft(torch.fft.rfft(h) * m.phases[:5], n=WIDTH),
    "complex": lambda m, h, ids: (h.cfloat() @ torch.complex(torch.eye(WIDTH) * 0.3, torch.ones(WIDTH, WIDTH))).imag,
    "polar": lambda m, h, ids: (h.to(torch.complex64) @ torch.polar(torch.ones(WIDTH, 1), column(OUTSIDE))).real,
    "tensor of complex numbers": lambda m, h, ids: (h * torch.tensor([0.1 + 0.3j] * WIDTH)).imag @ m.layer.weight,
    "pairs as complex": lambda m, h, ids: torch.view_as_complex(h.reshape(-1, WIDTH // 2, 2)).abs(),
    "pairs by their bits": lambda m, h, ids: h.view(torch.complex64).abs() + h.mean(),
}


class Model(nn.Module):
    def __init__(self, construct: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.construct, self.layer = construct, nn.Linear(WIDTH, WIDTH)
        self.table = torch.linspace(-0.3, 0.9, WIDTH * WIDTH).reshape(WIDTH, WIDTH)  # no buffer
        self.phases = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.construct(self, self.layer(x), ids).square().mean()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) % WIDTH


@pytest.mark.filterwarnings("ignore::shardwise.errors.UnsplitWarning")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(6)
def test_tensors_that_a_model_makes_are_verified_in_float64(part: int) -> None:
    constructs = [*CONSTRUCTS.values()][part::PARTS]
    model = Model(lambda m, h, ids: torch.stack([one(m, h, ids).square().mean() for one in constructs]))
    batch = inputs()
    plan = sw.plan(model, batch, 2, mesh=sw.Mesh(dp=2), search="sharding_propagation", optimizer="sgd")
    report = prove(model, batch, plan, steps=2)
    assert report.rounding is None, report
    assert torch.get_default_dtype() is torch.float32
    assert "__new__" not in vars(torch.Tensor)


class Recurrent(nn.Module):
    """A recurrent layer whose first state is made in forward."""

    def __init__(self, kind: type[nn.RNNBase], states: int) -> None:
        super().__init__()
        self.states, self.layer, self.head = states, kind(WIDTH, 6, num_layers=2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = [torch.zeros(2, x.shape[0], 6) for _ in range(self.states)]
        return F.mse_loss(self.head(self.layer(x, first[0] if self.states == 1 else tuple(first))[0][:, -1]), y)


@pytest.mark.filterwarnings("ignore:a batch of 1 on 2 devices")
@pytest.mark.parametrize(
    ("kind", "states", "options"),
    [(nn.LSTM, 2, {}), (nn.GRU, 1, {"micro_batch": 1}), pytest.param(nn.RNN, 1, {}, marks=pytest.mark.long)],
)
def test_first_states_of_recurrent_layers_are_verified(kind: type[nn.RNNBase], states: int, options: dict) -> None:
    model, batch = Recurrent(kind, states), (torch.randn(4, 5, WIDTH), torch.randn(4, 2))
    prove(model, batch, sw.plan(model, batch, 2, mode="data_parallel", **options))


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = x + torch.tensor(NUMBERS)
        for block in self.blocks:
            h = block(h) @ (torch.eye(WIDTH) + torch.arange(WIDTH) / 100) + ids / 100
        return h.square().mean(-1).mean()


def test_stages_make_their_tensors_in_float64() -> None:
    model, batch = Staged(), inputs()
    prove(model, batch, sw.plan(model, batch, 2, stages=2, micro_batch=2))


def test_a_loss_that_holds_a_tensor_is_verified_in_float64() -> None:
    model, weights = nn.Sequential(nn.Linear(WIDTH, 3)), torch.tensor([0.1, 0.2, 0.7])
    batch = torch.randn(4, WIDTH), torch.tensor([0, 2, 1, 2])

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, weight=weights)

    plan = sw.plan(model, batch, 2, loss=loss, mode="data_parallel")
    assert sw.verify(model, batch, plan, loss=loss).max_error < 1e-12


def test_the_models_own_default_dtype_decides_how_numbers_are_rounded() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, batch = Model(CONSTRUCTS["tensor"]), (torch.randn(SAMPLES, WIDTH), inputs()[1])
        prove(model, batch, sw.plan(model, batch, 2, mode="data_parallel"))
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


class Cast(nn.Module):
    """What the model makes has torch's default dtype in both comparisons: float64, and that of the plan's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.layer(x)
        return (h @ (torch.linspace(0, 1, WIDTH) * (ids[0] / 7)).to(h.dtype)[:, None]).float().square().mean()


def test_a_plan_with_a_precision_is_compared_in_float64_and_in_its_own_dtypes() -> None:
    model, batch = Cast(), inputs()
    report = prove(model, batch, sw.plan(model, batch, 2, precision=sw.Precision(torch.bfloat16)))
    assert report.in_dtypes is not None
    assert report.in_dtypes.judged
    assert report.max_error < 1e-12


@functools.lru_cache
def frequencies(size: int, dtype: torch.dtype | None = None) -> Tensor:
    return 1 / (10000 ** (torch.arange(0, size, dtype=dtype) / size))


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("is_cached", [True, False])
def test_tables_in_caches_are_float64_while_a_model_is_verified_only(dtype: torch.dtype, is_cached: bool) -> None:
    frequencies.cache_clear()
    model, batch = Model(lambda m, h, ids: h @ column(frequencies(WIDTH, dtype))), inputs()
    expected = model(*batch) if is_cached else None
    report = sw.verify(model, batch, sw.plan(model, batch, 2, mode="data_parallel"))
    assert report.max_error < 1e-12, report
    assert frequencies(WIDTH, dtype).dtype is torch.float32
    if expected is not None:
        torch.testing.assert_close(model(*batch), expected)


class Branching(nn.Module):
    """Returns one tensor more where a condition holds for what it draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor], condition: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.draw, self.condition = nn.Linear(WIDTH, WIDTH), draw, condition

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.layer(x)
        drawn = self.draw(h)
        loss = (h + drawn).square().mean()
        return (loss, h + 1) if self.condition(drawn) else loss


DRAWS = {
    "rand": lambda h: torch.rand(h.shape, requires_grad=True),
    "randn": lambda h: torch.randn(*h.shape, requires_grad=True),
    "randn_like": lambda h: torch.randn_like(h, requires_grad=True),
    "normal": lambda h: torch.normal(0.0, 1.0, tuple(h.shape), requires_grad=True),
    "rand without": lambda h: torch.rand(h.shape),
    "bernoulli": lambda h: torch.bernoulli(h.sigmoid()),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.sampled(3)
def test_draws_require_gradients_as_in_the_model(name: str) -> None:
    model, x = Branching(DRAWS[name], lambda drawn: drawn.requires_grad), torch.randn(SAMPLES, WIDTH)
    prove(model, x, sw.plan(model, x, 2, mode="data_parallel"), steps=1)


def test_another_branch_than_when_captured_is_an_error_that_says_so() -> None:
    model, x = Branching(torch.rand_like, lambda drawn: type(drawn) is Tensor), torch.randn(SAMPLES, WIDTH)
    plan = sw.plan(model, x, 2, mode="data_parallel")
    with raises(sw.ShardwiseError, 2, "(2 tensors)", 1, "requires_grad", op="Branching"):
        sw.verify(model, x, plan)
