"""Random numbers under plans: copies agree, shards differ, a seed gives the same again, the plan changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from launch.gloo_ranks import RunRanks
from proving import prove
from raising import raises
from shardwise.errors import PlanWarning
from shardwise.graph.capture import capture
from shardwise.graph.interpret import interpret
from shardwise.graph.written_out import SEED
from shardwise.runtime.local_shards import shard

X = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Dropped(nn.Module):
    """Returns what its dropout leaves of ones, and a loss through a dropped hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = F.dropout(torch.ones_like(self.up(x)), 0.4)
        hidden = F.dropout(self.up(x) * kept, 0.3)
        return self.down(hidden).square().mean(), kept


PLANS: dict[str, tuple[dict[str, int], str, dict[str, str]]] = {
    "stand alone": ({"dp": 4}, "stand_alone", {}),
    "data": ({"dp": 4}, "data_parallel", {}),
    "columns": ({"tp": 4}, "auto", {"up": "n@tp"}),
    "rows and columns": ({"dp": 2, "tp": 2}, "auto", {"up": "n@tp"}),
    "columns, then rows": ({"tp": 2, "dp": 2}, "auto", {"up": "n@tp", "down": "n@tp"}),
    "contraction": ({"dp": 2, "tp": 2}, "auto", {"up": "k@tp"}),
}


def drawn_under_plans() -> dict[str, Any]:
    """On a rank: per plan, (loss, mask) of two steps from seed 3, under some of a second run and of seed 4; and all
    gradients."""
    found: dict[str, Any] = {}
    for name, (axes, mode, strategies) in PLANS.items():
        mesh = sw.Mesh(axes)
        plan = sw.plan(Dropped(), X, mesh.num_devices, mesh=mesh, mode=mode, strategies=strategies)
        runs, held = [], {}
        ways = [(3, "same_as_one_device"), (3, "per_shard"), (4, "same_as_one_device")]
        for seed, randomness in ways if name in ("stand alone", "rows and columns") else ways[:1]:
            announced = randomness == "per_shard" and dist.get_rank() == 0
            with pytest.warns(PlanWarning, match="per_shard") if announced else nullcontext():
                par = sw.parallelize(Dropped(), plan, seed=seed, randomness=randomness)  # type: ignore[arg-type]
            steps = [par(X), par(X)]
            steps[0][0].backward()
            runs.append([(loss.detach(), kept.detach()) for loss, kept in steps])
            held = held or {n: p.grad for n, p in par.named_parameters()}
        layouts = {n: plan.layouts[n] for n in held}
        found[name] = runs, held, layouts, mesh.coordinates(dist.get_rank())
    return found


def test_masks_are_the_same_under_every_plan_on_every_rank_and_from_the_seed(run_ranks: RunRanks) -> None:
    ranks = run_ranks(drawn_under_plans, 4)
    alone = ranks[0]["stand alone"][0]
    (first, second), again, (other, _) = alone
    for found in ranks:
        for name, (runs, *_rest) in found.items():
            for steps, wanted in zip(runs, alone, strict=False):
                for (loss, kept), (want_loss, want_kept) in zip(steps, wanted, strict=True):
                    assert torch.equal(kept, want_kept), name  # bit by bit
                    assert torch.allclose(loss, want_loss, rtol=1e-12), name
    assert torch.equal(first[1], again[0][1])
    assert torch.equal(second[1], again[1][1])
    assert not torch.equal(first[1], second[1]), "two steps draw the same mask"
    assert not torch.equal(first[1], other[1]), "two seeds draw the same mask"
    for dim in (0, 1):
        low, high = first[1].chunk(2, dim)
        assert not torch.equal(low, high), "two shards draw the same mask"
    whole = ranks[0]["stand alone"][1]
    for found in ranks:
        for name, (_, held, layouts, coordinates) in found.items():
            for parameter, gradient in held.items():
                want = shard(whole[parameter], layouts[parameter], coordinates)
                assert torch.allclose(gradient, want, rtol=1e-12, atol=1e-14), (name, parameter)


def recomputed() -> list[list[torch.Tensor]]:
    """On a rank, for no checkpoint and both kinds of it: gradients of three accumulated calls, whose forwards all come
    first, so that the seed has moved on when backward recomputes."""
    plan = sw.plan(Dropped(), X, 2, mesh=sw.Mesh(tp=2), strategies={"up": "n@tp"}, search="sharding_propagation")
    found = []
    for reentrant in (None, False, True):
        par = sw.parallelize(Dropped(), plan, seed=5)
        torch.manual_seed(7 + dist.get_rank())  # ranks need not agree on torch's own generator
        x = X.clone().requires_grad_(reentrant is True)  # the re-entrant kind wants an input that requires grad
        losses = [
            par(X)[0] if reentrant is None else checkpoint(_loss, par, x, use_reentrant=reentrant) for _ in range(3)
        ]
        for loss in losses:
            loss.backward()
        after = par(X)[1]
        found.append([*(p.grad for p in par.parameters()), after.detach()])
    return found


def _loss(par: sw.Parallel, x: torch.Tensor) -> torch.Tensor:
    return par(x.detach())[0]


def test_a_checkpoint_draws_the_same_mask_again(run_ranks: RunRanks) -> None:
    for plain, *checkpointed in run_ranks(recomputed, 2):
        for own in checkpointed:
            assert all(torch.equal(a, b) for a, b in zip(own, plain, strict=True))


# -------------------------------------------------------------------------------------------------------- statistics

N = 40_000


def draw(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What the captured function computes on one device, of a seed."""

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    graph = capture(Module(), (x,)).graph
    inputs = {s.value: torch.tensor(11) if s.names[0] == SEED else x for s in graph.sources}
    return interpret(graph, inputs)[graph.outputs[0].name].double()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


# function of a tensor of N numbers -> mean and standard deviation of one element
DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, float, float]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), ones(N), 1.0, (0.3 / 0.7) ** 0.5),
    "channels": (lambda x: F.dropout2d(x, 0.3)[:, :, 0, 0], ones(N // 4, 4, 2, 2), 1.0, (0.3 / 0.7) ** 0.5),
    "alpha dropout": (lambda x: F.alpha_dropout(x, 0.3, True), torch.randn(N, dtype=torch.float64), 0.0, 1.0),
    "rand": (lambda x: torch.rand(N), ones(1), 0.5, 12**-0.5),
    "randn_like": (torch.randn_like, ones(N), 0.0, 1.0),
    "normal_": (lambda x: torch.empty(N).normal_(2.0, 3.0), ones(1), 2.0, 3.0),
    "normal": (lambda x: torch.normal(x, 0.5), ones(N), 1.0, 0.5),
    "log_normal_": (lambda x: torch.empty(N).log_normal_(0.0, 0.5).log(), ones(1), 0.0, 0.5),
    "cauchy_": (lambda x: (torch.empty(N).cauchy_(1.0, 2.0) < 3.0).double(), ones(1), 0.75, 0.1875**0.5),
    "geometric_": (lambda x: torch.empty(N).geometric_(0.4), ones(1), 2.5, 0.6**0.5 / 0.4),
    "exponential_": (lambda x: torch.empty(N).exponential_(2.0), ones(1), 0.5, 0.5),
    "random_": (lambda x: torch.empty(N).random_(5), ones(1), 2.0, 2**0.5),
    "randint": (lambda x: torch.randint(1, 4, (N,)), ones(1), 2.0, (2 / 3) ** 0.5),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.2), ones(N), 0.2, 0.4),
    "bernoulli_": (lambda x: torch.empty(N).bernoulli_(0.2), ones(1), 0.2, 0.4),
    "bernoulli_ as it is": (lambda x: torch.empty(N).bernoulli_(), ones(1), 0.5, 0.5),
    "rrelu": (lambda x: F.rrelu(-x, 0.1, 0.3, True), ones(N), -0.2, 0.2 / 12**0.5),
    "multinomial": (
        lambda x: torch.multinomial(x, 1),
        torch.tensor([[1.0, 2.0, 1.0]]).double().expand(N, 3).contiguous(),
        1.0,
        0.5**0.5,
    ),
    "multinomial with replacement": (
        lambda x: torch.multinomial(x, 4, replacement=True),
        torch.tensor([[1.0, 2.0, 1.0]]).double().expand(N // 4, 3).contiguous(),
        1.0,
        0.5**0.5,
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_mean_and_the_spread_of_their_distribution(name: str) -> None:
    """Within five standard errors: that of the mean is s / sqrt(N), that of s^2 about s^2 sqrt((kurtosis - 1) / N)."""
    function, x, mean, deviation = DRAWS[name]
    drawn = draw(function, x).flatten()
    assert drawn.numel() == N
    assert abs(drawn.mean() - mean) < 5 * deviation / N**0.5
    kurtosis = ((drawn - mean) ** 4).mean() / deviation**4
    assert abs(drawn.var() / deviation**2 - 1) < 5 * ((kurtosis - 1) / N) ** 0.5 + 1e-3


def test_without_replacement_nothing_is_drawn_twice_and_zero_weights_never() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0, 2.0]], dtype=torch.float64).expand(500, 5).contiguous()
    drawn = draw(lambda x: torch.multinomial(x, 3), weights).sort(-1).values
    assert torch.equal(drawn, torch.tensor([1.0, 2.0, 4.0]).double().expand(500, 3))


# ------------------------------------------------------------------------------------------- every kind, under plans


class Noise(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(8, 12), nn.Linear(12, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self.up(x))).square().mean()


def heads(h: torch.Tensor) -> torch.Tensor:
    """12 x 12 as (2, 2, 6, 6)."""
    return h.reshape(2, 6, 2, 6).transpose(1, 2)


D = torch.distributions
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h.unflatten(1, (3, 4)), 0.3, training=True).flatten(1),
    "dropout1d": lambda h: F.dropout1d(h.unflatten(1, (3, 4)), 0.3).flatten(1),
    "dropout2d": lambda h: F.dropout2d(h.unflatten(1, (3, 2, 2)), 0.3).flatten(1),
    "dropout3d": lambda h: F.dropout3d(h.unflatten(1, (3, 2, 2, 1)), 0.3).flatten(1),
    "droppath": lambda h: h * torch.empty(len(h), 1).bernoulli_(0.7) / 0.7,
    "attention": lambda h: (
        F.scaled_dot_product_attention(heads(h), heads(h), heads(h), dropout_p=0.2).transpose(1, 2).reshape(12, 12)
    ),
    "normal_": lambda h: h + torch.empty(12, 12).normal_(1.0, 2.0),
    "normal of numbers": lambda h: h + torch.normal(0.5, 2.0, (12, 12)),
    "normal of tensors": lambda h: h + torch.normal(h, h.abs()),
    "randn_like": lambda h: h * torch.rand_like(h) + torch.randn_like(h),
    "others": lambda h: (
        h
        + torch.empty(12, 12).log_normal_(0.0, 0.1)
        + torch.empty(12, 12).cauchy_()
        + torch.empty(12, 12).geometric_(0.4)
        + torch.empty(12, 12).random_(5)
        + torch.empty(12, 12).bernoulli_(h.detach().sigmoid())
    ),
    "multinomial": lambda h: (
        h
        + torch.multinomial(h.detach().softmax(-1), 1)
        + torch.multinomial(h.detach().softmax(-1), 12)
        + torch.multinomial(h.detach().softmax(-1), 12, replacement=True)
    ),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h) + F.gumbel_softmax(h, hard=True),
    "distributions": lambda h: (
        D.Normal(h, 1.0, validate_args=False).rsample()
        + D.Categorical(logits=h.detach(), validate_args=False).sample().unsqueeze(-1)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_every_kind_of_random_number_is_that_of_one_device(kind: str) -> None:
    """On one of two meshes, in turn."""
    module, is_even = Noise(KINDS[kind]), [*KINDS].index(kind) % 2 == 0
    mesh, strategies = (sw.Mesh(dp=3), {}) if is_even else (sw.Mesh(dp=2, tp=2), {"up": "n@tp"})
    plan = sw.plan(module, X.float(), mesh.num_devices, mesh=mesh, strategies=strategies, search="sharding_propagation")
    prove(module, X.float(), plan)


def test_a_distribution_that_checks_its_parameters_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # torch.compile turns it off for good
    module = Noise(lambda h: D.Normal(h, 1.0).rsample())
    with raises(sw.errors.CaptureError, "validate_args=False", section="tensor-values", source="test_randomness.py"):
        sw.plan(module, X.float(), 2, search="sharding_propagation")


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.fc(x), 0.5)
        F.dropout(torch.exp(hidden), 0.5)
        return F.dropout(hidden, 0.5).square().mean()


def test_random_numbers_that_nobody_reads_are_drawn_on_one_device_too() -> None:
    module = Unused()
    plan = sw.plan(module, (torch.randn(8, 6),), 2, mesh=sw.Mesh(dp=2), search="sharding_propagation")
    assert sw.verify(module, (torch.randn(8, 6),), plan).ok
    graph = capture(module, (torch.randn(8, 6),)).graph
    assert sum("dropout" in str(op.target) for op in graph.ops) == 2
