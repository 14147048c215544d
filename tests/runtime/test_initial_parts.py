"""Initial values that each rank draws for its own shards: the same under every plan, of the right distributions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.errors import PlanWarning, ShardwiseError
from shardwise.layouts.boxes import boxes
from shardwise.layouts.text import parse_layout
from shardwise.runtime import holding
from shardwise.runtime.initial import draws
from shardwise.runtime.initial.materialize import PartialTensor, full_tensors, initial_values
from shardwise.runtime.initial.partial_values import NotByParts
from shardwise.runtime.local_shards import shard


class Initialised(nn.Module):
    def __init__(self, fill: Callable[[torch.Tensor], object], *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        fill(self.weight)


def _gates(weight: torch.Tensor) -> None:
    """Constants in rows, and numbers made of constants in place."""
    with torch.no_grad():
        nn.init.normal_(weight)
        weight[100:200].fill_(1.0)
        weight[200:250].fill_(3.0).mul_(torch.rand(40))


class Fused(nn.Module):
    """A projection made of three that are drawn by themselves, and one that is a product of draws."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(40, 300) for _ in range(3)]
        self.fused = nn.Linear(40, 900)
        with torch.no_grad():
            self.fused.weight.copy_(torch.cat([part.weight for part in parts]))
            for i, part in enumerate(parts):
                self.fused.weight[300 * i : 300 * (i + 1)].copy_(part.weight)
            self.fused.bias[:300].zero_()
        self.joined = nn.Parameter(torch.cat([part.weight for part in parts], -1) + 1)
        self.scaled = nn.Parameter(torch.randn(300, 260) * 0.02 + torch.rand(260))
        self.table = nn.Embedding(400, 270, padding_idx=7)
        self.table.weight.data.mul_(0.5).clamp_(-0.7, 0.7)
        self.turned = nn.Parameter(torch.empty(130, 280))
        nn.init.trunc_normal_(self.turned.t(), std=0.02)


class Curved(nn.Module):
    """Functions that torch's kernels compute with other last bits by vectors than one by one; tables of positions."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.rand(131, 277)
        self.weight = nn.Parameter(torch.sigmoid(drawn) + nn.functional.softplus(drawn.t()).t() ** 2.5)
        self.turned = nn.Parameter(torch.empty(277, 131))
        with torch.no_grad():
            self.turned.t().uniform_().pow_(1.7).exp2_()
            self.turned[:50].sigmoid_()
        self.low = nn.Parameter(torch.rand(301, 43).bfloat16())
        self.low.data.add_(torch.rand(43).bfloat16(), alpha=0.37)
        steps = torch.log(torch.arange(1, 42, dtype=torch.float32))  # as in Mamba
        self.rows = nn.Parameter(steps[None].expand(300, -1).contiguous())
        self.frequencies = nn.Parameter(torch.outer(torch.arange(70.0), 10_000.0 ** (-torch.arange(0, 64, 2) / 64)))


BUILT: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(300, 270, padding_idx=2),
    "recurrent": lambda: nn.LSTM(200, 64, 2),
    "attention": lambda: nn.MultiheadAttention(160, 4),
    "convolution": lambda: nn.Conv2d(30, 80, 3),
    "channels_last": lambda: nn.Conv2d(16, 200, 3).to(memory_format=torch.channels_last),
    "encoder": lambda: nn.TransformerEncoderLayer(64, 4),
    "fused": Fused,
    "kaiming": lambda: Initialised(nn.init.kaiming_normal_, 300, 500),
    "xavier": lambda: Initialised(nn.init.xavier_uniform_, 300, 500),
    "bfloat16": lambda: Initialised(nn.init.normal_, 300, 500, dtype=torch.bfloat16),
    "float64": lambda: Initialised(nn.init.trunc_normal_, 300, 500, dtype=torch.float64),
    "experts": lambda: Initialised(nn.init.normal_, 3, 200, 300),
    "curved": Curved,
    "gates": lambda: Initialised(_gates, 300, 40),
    "integers": lambda: Initialised(lambda x: x.data.random_(-5, 5), 300, 40),
}


def parts_of(build: Callable[[], nn.Module], seed: int = 3) -> dict[str, PartialTensor]:
    with sw.deferred(seed=seed):
        module = build()
    return {name: value for name, value in initial_values(module) if isinstance(value, PartialTensor)}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    tiles = draws._tiles

    def counting(*args: Any) -> Any:
        for tile in tiles(*args):
            sizes.append(math.prod(tile[2]))
            yield tile

    monkeypatch.setattr(draws, "_tiles", counting)
    return sizes


@pytest.mark.parametrize("build", BUILT.values(), ids=BUILT.keys())
def test_any_part_is_that_of_the_whole(build: Callable[[], nn.Module]) -> None:
    values = parts_of(build)
    assert values
    for name, value in values.items():
        shape = value.ref.shape
        full = value.box((0,) * len(shape), shape)
        ((_, replayed),) = value.regions.tape.replay({"": value.ref}, 3, value.regions)
        assert torch.equal(full, replayed), name
        for part in (3, 5):
            starts, sizes = [n // part for n in shape], [n // 2 for n in shape]
            rows = tuple(slice(at, at + n) for at, n in zip(starts, sizes, strict=True))
            assert torch.equal(value.box(starts, sizes), full[rows]), name
        if full.dim() > 1 and "bias" not in name:
            assert full.unique().numel() > 5


@pytest.mark.parametrize("axes", ["dp", "tp", "both"])
def test_what_a_rank_draws_falls_with_the_number_of_ranks(axes: str, drawn: list[int]) -> None:
    """Of a matrix of 1,024 x 2,048, which is 64 tiles."""
    (whole,) = (value.whole() for value in parts_of(lambda: Initialised(nn.init.normal_, 1024, 2048)).values())
    for num_ranks in (1, 2, 4, 8):
        mesh = sw.Mesh(dp=num_ranks // 2, tp=2) if axes == "both" and num_ranks > 1 else sw.Mesh(dp=num_ranks)
        text = "[1024@dp, 2048@tp]" if axes == "both" and num_ranks > 1 else "[1024@dp, 2048]"
        text = "[1024, 2048@dp]" if axes == "tp" else text
        layout = parse_layout(text, mesh)
        for rank in range(num_ranks):
            (value,) = parts_of(lambda: Initialised(nn.init.normal_, 1024, 2048)).values()
            coordinates = mesh.coordinates(rank)
            (box,) = boxes(layout, coordinates)
            drawn.clear()
            assert torch.equal(value.box(box.offsets, box.sizes), shard(whole, layout, coordinates))
            assert sum(drawn) == 1024 * 2048 // num_ranks


@pytest.mark.parametrize(
    ("fill", "distribution"),
    [
        (lambda x: nn.init.normal_(x, 1.0, 0.5), stats.norm(1.0, 0.5)),
        (lambda x: nn.init.uniform_(x, -2.0, 3.0), stats.uniform(-2.0, 5.0)),
        (lambda x: nn.init.trunc_normal_(x, 0.0, 0.5, -1.0, 1.0), stats.truncnorm(-2, 2, 0.0, 0.5)),
        (lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)), stats.uniform(-1 / 32, 2 / 32)),
        (lambda x: x.data.exponential_(2.0), stats.expon(0, 0.5)),
    ],
    ids=["normal", "uniform", "trunc_normal", "kaiming_uniform", "exponential"],
)
def test_numbers_have_the_distribution_of_the_initialiser(fill: Callable[[Any], object], distribution: Any) -> None:
    """256 x 1,024 elements in 8 tiles. The distance of Kolmogorov and Smirnov is below 1.63 / sqrt(n) with odds of 99
    in 100 (the seed is fixed: it either is or is not); mean and variance within four of their standard errors."""
    (value,) = parts_of(lambda: Initialised(fill, 256, 1024, dtype=torch.float64)).values()
    drawn = value.whole()
    sample, count = drawn.flatten().numpy(), drawn.numel()
    assert stats.kstest(sample, distribution.cdf).statistic < 1.63 / math.sqrt(count)
    variance, kurtosis = distribution.stats("v"), distribution.stats("k")
    assert abs(sample.mean() - distribution.mean()) < 4 * math.sqrt(variance / count)
    assert abs(sample.var() / variance - 1) < 4 * math.sqrt((kurtosis + 2) / count)
    tiles = drawn.unflatten(0, (2, 128)).unflatten(2, (4, 256)).transpose(1, 2).reshape(8, -1)
    correlations = torch.corrcoef(tiles) - torch.eye(8)
    assert correlations.abs().max() < 5 / math.sqrt(tiles.shape[1])


def test_seeds_inside_a_constructor_repeat_what_they_repeat_in_torch() -> None:
    def build() -> nn.Module:
        layers = [nn.Linear(8, 8)]
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            layers.append(nn.Linear(8, 8))
        with torch.random.fork_rng(devices=[]):
            layers.append(nn.Linear(8, 8))
        layers.append(nn.Linear(8, 8))
        return nn.Sequential(*layers)

    first, other = ({name: v.whole() for name, v in parts_of(build, seed).items()} for seed in (0, 1))
    assert torch.equal(first["1.weight"], first["2.weight"])
    assert not torch.equal(first["1.weight"], first["3.weight"])
    assert torch.equal(first["4.weight"], first["5.weight"])  # the state was put back
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert torch.equal(first["1.weight"], other["1.weight"])


def test_an_element_that_the_constructor_looked_at_is_the_one_that_ranks_get() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(300, 300))
            self.seen = self.weight[299, 1].item()

    with sw.deferred(seed=1):
        module = Looking()
    (value,) = (value for _, value in full_tensors(module))
    assert module.seen == value[299, 1].item()
    with raises(ShardwiseError, "random values"):
        list(full_tensors(module, seed=2))


def test_what_is_not_made_by_parts_is_made_whole_and_the_same() -> None:
    (value,) = parts_of(lambda: Initialised(nn.init.orthogonal_, 40, 30)).values()
    with raises(NotByParts, "aten.linalg_qr.default"):
        value.box((0, 0), (20, 30))
    drawn = value.whole().double()
    assert torch.allclose(drawn.T @ drawn, torch.eye(30, dtype=torch.float64), atol=1e-5)
    (again,) = parts_of(lambda: Initialised(nn.init.orthogonal_, 40, 30)).values()
    assert torch.equal(again.whole().double(), drawn)
    with raises(ShardwiseError, '"parallel"', '"cpu"'), sw.deferred(values=cast(Any, "gpu")):
        pass


def test_initialisers_of_a_model_on_meta_run_by_parts(drawn: list[int]) -> None:
    for way in (sw.deferred(seed=3), torch.device("meta")):
        with way:
            model = nn.Sequential(nn.Linear(260, 512), nn.Embedding(40, 8, padding_idx=1), nn.Conv2d(4, 8, 3))
        for name, value in initial_values(model):
            assert isinstance(value, PartialTensor)
            shape = value.ref.shape
            drawn.clear()
            half = value.box((0,) * len(shape), (shape[0] // 2, *shape[1:]))
            if name == "0.weight":
                assert sum(drawn) == math.prod(shape) // 2
            assert torch.equal(half, value.whole()[: shape[0] // 2])
            assert half.unique().numel() > 3


def test_what_several_operators_read_is_drawn_once(drawn: list[int]) -> None:
    """torch draws again until no element is out of bounds, and looks at each draw three times (torch 2.11: once, by
    the inverse of the distribution)."""
    (value,) = parts_of(lambda: Initialised(lambda x: nn.init.trunc_normal_(x, 0.0, 1.0, -1.0, 1.0), 256, 512)).values()
    num_rounds = sum(entry.draw is not None for entry in value.regions.tape.entries)
    draws_once = "erfinv_" in inspect.getsource(nn.init._no_grad_trunc_normal_)
    assert num_rounds == 1 if draws_once else num_rounds > 3
    drawn.clear()  # of the recording
    assert value.box((0, 0), (128, 512)).abs().max() <= 1
    assert sum(drawn) == num_rounds * 128 * 512


def _bent(weight: torch.Tensor, times: int) -> torch.Tensor:
    x = weight.data.uniform_(-1, 1)
    for _ in range(times):
        x = x + 0.01 * x * x
    return weight.data.copy_(x)


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: _bent(x, 120),
        lambda x: [x.data.uniform_() if i == 0 else x.data.mul_(1.01) for i in range(150)],
        lambda x: _numbered(x),
    ],
    ids=["120 steps", "150 steps", "1,200 rows"],
)
def test_what_would_take_long_by_parts_is_made_whole(fill: Callable[[torch.Tensor], object]) -> None:
    (value,) = parts_of(lambda: Initialised(fill, 1200, 3)).values()
    with pytest.raises(NotByParts, match=r"operators|1,20\d times"):
        value.box((0, 0), (600, 3))
    ((_, replayed),) = value.regions.tape.replay({"": value.ref}, 3, value.regions)
    assert torch.equal(value.whole(), replayed)
    assert value.whole().unique().numel() > 600


def _numbered(weight: torch.Tensor) -> None:
    with torch.no_grad():
        for number, row in enumerate(weight):
            row.fill_(number)


# ----------------------------------------------------------------------------------------------------------- ranks


class Rows(nn.Module):
    """Rows that are written one by one, and a table of which the second half is not made by parts."""

    def __init__(self) -> None:
        super().__init__()
        self.numbered, self.mixed = nn.Parameter(torch.empty(1200, 4)), nn.Parameter(torch.empty(600, 64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _numbered(self.numbered)
        nn.init.normal_(self.mixed)
        nn.init.orthogonal_(self.mixed[300:])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mixed[ids] * self.numbered[ids].mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(600, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 260, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 600, bias=False)
        nn.init.orthogonal_(self.head.weight)
        self.rows = Rows()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.rows(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def values_under_every_plan() -> list[str]:
    ids = torch.zeros(4, 8, dtype=torch.int64)
    differ, size = [], dist.get_world_size()
    plans: dict[str, dict[str, Any]] = {
        "dp": {"mesh": sw.Mesh(dp=size), "mode": "data_parallel"},
        "zero": {"mesh": sw.Mesh(dp=size), "mode": "data_parallel", "zero": 3},
        "tp": {"mesh": sw.Mesh(tp=size), "strategies": {"layers.*.linear1": "n@tp", "tokens": "v@tp", "head": "n@tp"}},
        "stages": {"stages": 2, "global_batch": 4, "micro_batch": 2},
        "meta": {"mesh": sw.Mesh(dp=size), "mode": "data_parallel", "zero": 3},
    }
    for name, settings in plans.items():
        with torch.device("meta") if name == "meta" else sw.deferred(seed=4):
            model = Model().eval()
        expected = dict(full_tensors(model))
        par = sw.parallelize(model, sw.plan(model, ids, size, **settings))
        held = dict(par.named_parameters())
        for key, parameter in held.items():
            full = expected[key]
            if parameter.shape == full.shape:
                own = full
            else:
                layout = par.plan.layouts[key]
                own = shard(full, layout, par.plan.mesh.coordinates(dist.get_rank()))
            if not torch.equal(parameter.detach(), own):
                differ.append(f"{name}: {key}")
        if name in ("zero", "tp") and all(p.shape == expected[key].shape for key, p in held.items()):
            differ.append(f"{name} splits nothing")
        numbers = expected["rows.numbered"][:, 0].tolist()
        if numbers != list(range(1200)):
            differ.append(f"{name}: rows are {numbers[:3]}, ...")
        if name in ("zero", "stages") and not math.isfinite(par.step(ids)):
            differ.append(f"{name}: no finite loss")
    return differ


def test_ranks_have_the_same_values_under_every_plan(run_ranks: RunRanks) -> None:
    assert run_ranks(values_under_every_plan, 2) == [[], []]


def test_a_large_tensor_that_every_rank_makes_whole_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "_LARGE", 1000)
    sw.init_ranks("gloo")
    try:
        x = torch.zeros(2, 30)
        with sw.deferred():
            model = nn.Sequential(nn.Linear(30, 40))
            nn.init.orthogonal_(model[0].weight)
        plan = sw.plan(model, x, 1, loss=lambda y: y.sum(), mode="stand_alone")
        with pytest.warns(PlanWarning, match=r"every rank computes these whole initial values.*: 0.weight"):
            sw.parallelize(model, plan, loss=lambda y: y.sum())
    finally:
        torch.distributed.destroy_process_group()
