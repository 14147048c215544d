"""Values that backward makes again or fetches from the host, on real gloo ranks, wherever programs are used in another
way than once forward and once backward: every number is that of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from launch.gloo_ranks import RunRanks
from proving import prove
from runtime.interpreted import interpret_section
from shardwise.runtime import compiled
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.local_shards import shard

RANKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two losses, a tied weight, a frozen one, a number, a buffer that is written, and a size that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.odd, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.frozen(x)) * self.scale
        scores = F.linear(x, self.table.weight)
        return F.cross_entropy(scores, ids), self.odd(x).square().mean()


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def ids(number: int, rows: int = 8) -> torch.Tensor:
    return torch.randint(7, (rows,), generator=torch.Generator().manual_seed(number))


def plan(**choices: Any) -> sw.Plan:
    return sw.plan(build(), ids(0), RANKS, mode="data_parallel", **{"zero": 3, "recompute": "full", **choices})


def steps(
    model: nn.Module, weights: list[tuple[float, float]], *, twice: bool = False, rows: int = 8
) -> dict[str, torch.Tensor]:
    """Parameters and buffers after steps from both losses, or from one (weight 0: it gets no cotangent). ``rows``: of
    the batches after the second."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for number, own in enumerate(weights):
        losses = model(ids(number, 8 if number < 2 else rows))
        loss = sum(weight * one for weight, one in zip(own, losses, strict=True) if weight)
        assert isinstance(loss, torch.Tensor)
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


WEIGHTS = [(1.0, 0.5), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]


class Dropping(nn.Module):
    """A block whose masks come from a generator, if the ranks draw each for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.4), nn.Tanh(), nn.Linear(7, 7))])

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks[0](F.one_hot(ids, 7).float())
        return x.square().mean(), x.mean()


def dropping(how: Any) -> sw.Plan:
    return sw.plan(Dropping(), ids(0), RANKS, mode="data_parallel", recompute=how)


class Checkpointed(nn.Module):
    """A call of the whole model is made again in backward, from outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: torch.Tensor) -> Any:
        return checkpoint(self.model, given, use_reentrant=False)


def planned(make: Callable[..., sw.Plan], *args: Any, **choices: Any) -> sw.Plan:
    """Rank 0's plan, on all ranks."""
    return from_rank_zero(lambda: make(*args, **choices))


def on_rank() -> dict[str, Any]:
    compiled.compile_with_inductor = interpret_section  # no code is generated, which takes long
    found: dict[str, Any] = {}
    rank = dist.get_rank()

    def held(par: sw.Parallel, whole: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> float:
        worst = 0.0
        for name, want in whole.items():
            layout = par.plan.layouts.get(name)
            mine = want if layout is None else shard(want, layout, par.plan.mesh.coordinates(rank))
            worst = max(worst, float((own[name].double() - mine.double()).abs().max()) if mine.numel() else 0.0)
        return worst

    alone, of_two_sizes = steps(build(), WEIGHTS), steps(build(), WEIGHTS, rows=4)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "small buckets": ({"bucket_bytes": 200}, {}),
        "checked copies": ({"zero": 1, "recompute": "cheap"}, {"check_replicas": 1}),
        "compiled": ({}, {"compile": True}),
    }
    for name, (choices, settings) in cases.items():
        par = sw.parallelize(build(), planned(plan, **choices), **{"compile": False, **settings})
        if name != "plain":
            found[name] = held(par, alone, steps(par, WEIGHTS))
        else:
            found[name] = held(par, of_two_sizes, steps(par, WEIGHTS, rows=4))
            par.eval()
            reference = build().eval()
            reference.load_state_dict(of_two_sizes)
            found["evaluation"] = float((par(ids(9))[0] - reference(ids(9))[0]).abs())
    twice = steps(build(), WEIGHTS[:2], twice=True)
    par = sw.parallelize(build(), planned(plan), compile=False)
    found["twice"] = held(par, twice, steps(par, WEIGHTS[:2], twice=True))
    par = sw.parallelize(build(), planned(plan), compile=False)
    own = steps(Checkpointed(par), WEIGHTS[:1])
    found["outer checkpoint"] = held(
        par, steps(build(), WEIGHTS[:1]), {n.removeprefix("model."): t for n, t in own.items()}
    )
    drawn = [
        steps(sw.parallelize(Dropping(), planned(dropping, how), compile=False, seed=3), WEIGHTS[:2])
        for how in ("none", "full")
    ]
    found["dropout"] = max(float((drawn[0][n] - drawn[1][n]).abs().max()) for n in drawn[0])
    with (
        mock.patch("shardwise.programs.activation_offload.SMALLEST_BYTES", 1),
        warnings.catch_warnings(action="ignore", category=sw.errors.PlanWarning),
    ):  # of ranks whose host is their device
        for name, choices, compiles in (
            ("on the host", {"recompute": "none"}, False),
            ("on the host, compiled", {"recompute": "none"}, True),
            ("on the host and made again", {"zero": 1, "recompute": "cheap"}, False),
        ):
            waiting = planned(plan, offload="all", **choices)
            assert any(entry.offloaded for entry in waiting.operators)
            par = sw.parallelize(build(), waiting, compile=compiles)
            found[name] = held(par, alone, steps(par, WEIGHTS))
        par = sw.parallelize(build(), planned(plan, offload="all", recompute="none"), compile=False)
        found["on the host, twice"] = held(par, twice, steps(par, WEIGHTS[:2], twice=True))
    edited = sw.Plan.from_json(planned(plan).to_json(), edited=True)
    par = sw.parallelize(build(), edited, compile=False)
    found["edited"] = held(par, alone, steps(par, WEIGHTS))
    found["edited makes again"] = any(entry.again for entry in edited.operators)
    return found


def test_what_is_made_again_is_right_however_a_program_is_used(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(on_rank, RANKS)):
        assert found.pop("edited makes again")
        assert len(found) >= 8
        for name, error in found.items():
            assert error < 1e-9, f"rank {rank}, {name}: {error}"


def test_every_kind_of_parameter_is_stored_in_parts() -> None:
    layouts = {entry.name: entry.layout for entry in plan().parameters}
    assert layouts["table.weight"] == "f64[7, 6@dp]"
    assert layouts["odd.bias"] == "f64[3@dp]", "sizes that do not divide are split unevenly"
    assert layouts["frozen.weight"] == "f64[6@dp, 6]"
    assert layouts["scale"] == "f64[]"
    whole = {entry.name: entry.layout for entry in plan(zero=sw.Zero(3, whole_below=40)).parameters}
    assert whole["odd.bias"] == "f64[3]"
    assert whole["table.weight"] == "f64[7, 6@dp]"


def test_hybrid_sharding_splits_over_some_axes_only() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    mesh = sw.Mesh(node=2, gpu=2)
    choices = {"mesh": mesh, "mode": "data_parallel", "loss": lambda y: y.square().mean()}
    hybrid = sw.plan(net, torch.randn(8, 8), 4, zero=sw.Zero(3, over=("gpu",)), **choices)
    assert {entry.layout for entry in hybrid.parameters} == {
        "f32[8@gpu, 8]",
        "f32[8@gpu]",
        "f32[4@gpu, 8]",
        "f32[4@gpu]",
    }
    assert {c.axes for c in hybrid.collectives() if c.kind == "all_gather"} == {"gpu"}
    prove(net, torch.randn(8, 8), hybrid, loss=choices["loss"])
