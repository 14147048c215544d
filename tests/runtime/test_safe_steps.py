"""Loss scaling and optimizers of shards are exact, or refused; on real gloo ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_  # before shardwise changes what they do
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from launch.gloo_ranks import run_on_ranks
from raising import raises, refusal
from runtime.edges import Net, Ranks, batch, make, split
from shardwise.runtime.guards.elementwise_optimizers import ELEMENTWISE, is_elementwise
from shardwise.runtime.local_shards import shard


def on_three_ranks() -> dict[str, Any]:
    return {"scaled": scaled_on_ranks(), "optimizers": steps_on_ranks()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """``ranks(name)``: what each rank found. Starting ranks takes most of the time, so they are started once only."""

    @cache
    def run() -> list[Any]:
        return run_on_ranks(on_three_ranks, 3, (), tmp_path_factory.mktemp("ranks"), 240)

    return lambda name: [result[name] for result in run()]


# --------------------------------------------------------------------------------------------------------- loss scaling


def train_scaled(module: nn.Module, poison: Callable[[int], None], *, fused: bool, unscale: bool) -> list[Any]:
    """Six steps with loss scaling: per step the scale, and the parameters."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    seen = []
    for step in range(6):
        loss = module(*batch(step))
        scaler.scale(loss).backward()
        poison(step)
        if unscale:
            scaler.unscale_(optimizer)
            clip_grad_norm_(module.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), {name: p.detach().clone() for name, p in module.named_parameters()}))
    return seen


WAYS = [{"fused": fused, "unscale": unscale} for fused in (False, True) for unscale in (False, True)]


def scaled_on_ranks() -> tuple[list[Any], sw.Plan]:
    """On a rank: an infinity, then a nan, in the shard of one rank only; every way of scaling."""
    results = []
    par = split("tp, uneven", torch.float32)
    initial = {name: p.detach().clone() for name, p in par.named_parameters()}

    def poison(step: int) -> None:
        if step in (2, 3) and dist.get_rank() == step - 1:
            par.up.weight.grad[0, 0] = math.inf if step == 2 else math.nan

    for way in WAYS:
        for name, p in par.named_parameters():
            p.data.copy_(initial[name])
        results.append(train_scaled(par, poison, **way))
    disabled = GradScaler("cpu", enabled=False)
    disabled.unscale_(torch.optim.SGD(par.parameters(), lr=0.1))
    return results, par.plan


def test_an_infinity_in_one_shard_makes_every_rank_skip_the_step(ranks: Ranks) -> None:
    for number, way in enumerate(WAYS):
        model = make(torch.float32)

        def poison(step: int, model: Net = model) -> None:
            if step in (2, 3):
                model.up.weight.grad[5, 0] = math.inf if step == 2 else math.nan

        alone = train_scaled(model, poison, **way)
        assert [scale for scale, _ in alone] == [2.0**10, 2.0**11, 2.0**10, 2.0**9, 2.0**9, 2.0**10]
        for rank, (results, plan) in enumerate(ranks("scaled")):
            coordinates = plan.mesh.coordinates(rank)
            for step, ((scale, own), (want_scale, want)) in enumerate(zip(results[number], alone, strict=True)):
                assert scale == want_scale, f"{way} on rank {rank}, step {step}"
                if step in (2, 3):
                    assert all(torch.equal(own[name], results[number][step - 1][1][name]) for name in own)
                for name, value in own.items():
                    part = shard(want[name], plan.layouts[name], coordinates)
                    torch.testing.assert_close(value, part, rtol=1e-4, atol=1e-5, msg=f"{way} {step} {name}")


# ----------------------------------------------------------------------------------------------------------- optimizers


class Renamed(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)


class Normalised(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad /= p.grad.norm()
        return super().step(closure)


class Mixin:
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Mixed(Mixin, torch.optim.Adam):
    pass


class Sign(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= 0.1 * p.grad.sign()


class Signed(Sign):
    pass


def steps_on_ranks() -> dict[str, Any]:
    """On a rank: which optimizers step on shards, and what they leave."""
    found: dict[str, Any] = {}

    par = split("tp, uneven")
    initial = {n: p.detach().clone() for n, p in par.named_parameters()}

    def attempt(name: str, make_optimizer: Callable[[sw.Parallel], torch.optim.Optimizer]) -> None:
        for n, p in par.named_parameters():
            p.data.copy_(initial[n])
        optimizer = make_optimizer(par)
        for step in range(2):
            optimizer.zero_grad()
            par.step(*batch(step))
            before = {n: p.detach().clone() for n, p in par.named_parameters()}
            message = refusal(lambda: optimizer.step(lambda: torch.zeros(())))
            if message != "accepted":
                unchanged = all(torch.equal(p, before[n]) for n, p in par.named_parameters())
                found[name] = (message, unchanged)
                return
        found[name] = ("accepted", {n: p.detach().clone() for n, p in par.named_parameters()})

    for kind in ELEMENTWISE:
        attempt(kind.__name__, lambda par, kind=kind: kind(par.parameters(), lr=1e-2))
    attempt("fused AdamW", lambda par: torch.optim.AdamW(par.parameters(), lr=1e-2, fused=True))
    attempt("no foreach", lambda par: torch.optim.AdamW(par.parameters(), lr=1e-2, foreach=False))
    attempt("SparseAdam", lambda par: torch.optim.SparseAdam(par.parameters()))
    for kind in (Renamed, Normalised, Mixed, Sign, Signed):
        attempt(
            kind.__name__,
            lambda par, kind=kind: kind(par.parameters(), **({"lr": 0.1} if kind in (Normalised, Mixed) else {})),
        )
    sw.elementwise_optimizer(Sign)
    for kind in (Sign, Signed):
        attempt(f"declared {kind.__name__}", lambda par, kind=kind: kind(par.parameters()))
    attempt("LBFGS of invariant", lambda par: torch.optim.LBFGS([par.norm.weight, par.down.bias]))
    attempt("Muon of invariant", lambda par: torch.optim.Muon([par.wide.weight]))

    def grows(par: sw.Parallel) -> torch.optim.Optimizer:
        optimizer = Normalised([par.norm.weight], lr=0.1)
        par.step(*batch())
        optimizer.step()
        optimizer.add_param_group({"params": [par.up.weight]})
        return optimizer

    attempt("grown", grows)
    par = split("tp, uneven")  # not compiled yet: process groups cannot be copied
    averaged = AveragedModel(par)
    optimizer = torch.optim.SGD(par.parameters(), lr=0.1)
    for step in range(2):
        par.step(*batch(step))
        optimizer.step()
        averaged.update_parameters(par)
    found["averaged"] = {n: p.detach() for n, p in averaged.module.named_parameters()}
    found["plan"] = par.plan
    return found


def test_optimizers_update_shards_as_one_device_or_refuse(ranks: Ranks) -> None:
    results = ranks("optimizers")
    updates: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        **{kind.__name__: lambda ps, kind=kind: kind(ps, lr=1e-2) for kind in ELEMENTWISE},
        "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        "no foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        "Renamed": Renamed,
        "declared Sign": Sign,
        "declared Signed": Sign,
    }
    for name, update in updates.items():
        model = make()
        optimizer = update(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
        for rank, found in enumerate(results):
            accepted, own = found[name]
            assert accepted == "accepted", name
            for key, value in model.named_parameters():
                part = shard(value.detach(), found["plan"].layouts[key], found["plan"].mesh.coordinates(rank))
                torch.testing.assert_close(own[key], part, rtol=1e-6, atol=1e-8, msg=f"{name}: {key} on rank {rank}")
    for found in results:
        assert found["LBFGS of invariant"][0] == found["Muon of invariant"][0] == "accepted"
        for name in ("SparseAdam", "Normalised", "Mixed", "Sign", "Signed", "grown"):
            message, unchanged = found[name]
            assert message.startswith("ShardwiseError"), name
            assert unchanged
        assert found["Normalised"][0].splitlines()[:2] == [
            "ShardwiseError: Normalised is not known to update every element independently, and this rank holds a "
            "shard of tokens.weight and of 4 more of its parameters",
            "  op:     tokens.weight: f64[14@tp, 6]",
        ]
        assert "sw.matrix_optimizer(Normalised)" in found["Normalised"][0]
        assert "sw.elementwise_optimizer(Sign)" in found["Sign"][0]
        assert "up.weight: f64[10@tp, 6]" in found["grown"][0]


def test_averaged_copies_of_a_module_are_those_of_one_device(ranks: Ranks) -> None:
    model = make()
    averaged, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(*batch(step)).backward()
        optimizer.step()
        averaged.update_parameters(model)
    for rank, found in enumerate(ranks("optimizers")):
        for name, value in averaged.module.named_parameters():
            part = shard(value.detach(), found["plan"].layouts[name], found["plan"].mesh.coordinates(rank))
            torch.testing.assert_close(found["averaged"][name], part, rtol=1e-10, atol=1e-12)


def test_what_counts_as_elementwise() -> None:
    assert is_elementwise(Renamed)
    Renamed([nn.Parameter(torch.ones(1))])  # torch now wraps its step
    assert is_elementwise(Renamed)
    assert not is_elementwise(Normalised)
    assert not is_elementwise(Mixed)
    assert not is_elementwise(torch.optim.LBFGS)
    with raises(sw.ShardwiseError, "subclass of", "torch.optim.Optimizer"):
        sw.elementwise_optimizer(Sign([nn.Parameter(torch.ones(1))]))
