"""Real gloo ranks, operators that the other tests of ranks do not have: ring attention, experts that are split,
dropout, heads that are fused with their losses, rows that a mask selects, and gradients inside forward. Losses,
gradients and parameters are those of plain PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from graph import test_selected
from launch.gloo_ranks import RunRanks
from models.expert_models import (
    WIDTH,
    Assigned,
    Batched,
    Einsum,
    Loop,
    Modules,
    Stack,
    by_two_experts,
    eager_experts,
    experts_with_sinks,
)  # fmt: skip
from models.gradient_models import model_and_inputs
from programs import test_head_loss
from runtime.training import Inputs, Trained, call_and_differentiate, check_ranks, step_or_differentiate, train
from shardwise.graph import head_loss

Told = tuple[Tensor, ...]
STEPS = 3


class RingAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.keys, self.values = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.queries, self.keys, self.values))
        return ((self.out(self.attended(q, k, v).transpose(1, 2).flatten(2)) - x).square().mean(),)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sw.shard(F.scaled_dot_product_attention, "ring@cp")(q, k, v, is_causal=True, enable_gqa=True)


class ZigzagAttention(RingAttention):
    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sw.shard(F.scaled_dot_product_attention, "zigzag@cp")(q, k, v, is_causal=True, enable_gqa=True)


class WindowAttention(RingAttention):
    """Within three positions, both ways: keys come from both neighbours."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[-2])
        mask = (positions[:, None] - positions[None]).abs() < 3
        return sw.shard(F.scaled_dot_product_attention, "ring@cp")(q, k, v, attn_mask=mask, enable_gqa=True)


class Experts(nn.Module):
    """Four experts; every row is computed by the two that it prefers, as a grouped product of sorted rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(-1).topk(2)
        mixed = by_two_experts(rows, chosen, self.up, self.down, "e@ep")
        return (((mixed * gates.unsqueeze(-1)).sum(1) - rows).square().mean(),)


class Dropped(nn.Module):
    """Tells the masks that it drew. ``given``: takes these instead."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.given: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = F.gelu(self.up(x))
        first, second = self.given or (F.dropout(torch.ones_like(hidden), 0.4), F.dropout(torch.ones_like(x), 0.2))
        return (self.down(hidden * first) * second - x).square().mean(), first, second


@dataclass(frozen=True)
class Case:
    """``batch``: the inputs of a step; ``settings``: of the plan; ``kind``: a collective that it must have; ``draws``:
    the model tells the masks that it drew; ``close``: the relative and absolute tolerance of gradients and parameters,
    and the relative one of losses."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Inputs]
    settings: dict[str, Any]
    kind: str = "all_reduce"
    draws: bool = False
    close: tuple[float, float, float] = (1e-9, 1e-12, 1e-11)

    @property
    def ranks(self) -> int:
        return self.settings["mesh"].num_devices * self.settings.get("stages", 1)


def activations(step: int) -> tuple[Tensor]:
    return (torch.randn(4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step)),)


def language() -> nn.Module:
    return test_head_loss.Language(tied=True, shifts=True, label_smoothing=0.1)


def selecting(name: str) -> nn.Module:
    return test_selected.Model(test_selected.CASES[name])


def selected(step: int) -> tuple[Tensor, ...]:
    """Ranks have different numbers of rows: the first samples have none."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 5, 4, generator=generator, dtype=torch.float64)
    return x, torch.arange(8)[:, None] + torch.arange(5) > 6, torch.randint(0, 6, (8, 5), generator=generator)


def gradient_inputs(name: str, step: int) -> tuple[Tensor, ...]:
    inputs = (x.double() if x.is_floating_point() else x for x in model_and_inputs(name)[1])
    return tuple(x.roll(step, 0) * (1 + step / 8) if x.is_floating_point() else x.clone() for x in inputs)


def inner(name: str, **settings: Any) -> Case:
    """A model that takes gradients inside of forward."""
    batch = partial(gradient_inputs, name)
    return Case(lambda: model_and_inputs(name)[0], batch, settings or SAMPLES, close=(1e-9, 1e-9, 1e-9))


def heads(kind: str = "all_reduce", **settings: Any) -> Case:
    return Case(language, lambda step: test_head_loss.batch(), settings, kind, close=(1e-9, 1e-9, 1e-10))


def form(make: Callable[[], nn.Module], strategies: dict[str, str] | None = None, **settings: Any) -> Case:
    """Experts in one of the forms that people write; those of transformers take the loss of logits in float32."""
    settings = {"mesh": sw.Mesh(ep=2), **settings, "strategies": strategies or {"": "e@ep"}}
    if make not in (eager_experts, experts_with_sinks):
        return Case(make, tokens, settings, "row_exchange", close=(1e-9, 1e-11, 1e-11))
    return Case(make, words, settings, "row_exchange", close=(1e-4, 1e-6, 1e-6))


def tokens(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))}


def words(step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 30, (8, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


SAMPLES = {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"}
EXPERTS, LAYERS = {"model.layers.*.mlp.experts": "e@ep"}, {"layers.*.experts": "e@ep"}
STAGED: dict[str, Any] = {"stages": 2, "micro_batch": 4}
MICRO = {**SAMPLES, "micro_batch": 4}
CASES: dict[str, Case] = {
    "ring": Case(RingAttention, activations, {"mesh": sw.Mesh(cp=4)}, "halo_exchange"),
    "zigzag of two": Case(ZigzagAttention, activations, {"mesh": sw.Mesh(dp=2, cp=2)}, "halo_exchange"),
    "window": Case(WindowAttention, activations, {"mesh": sw.Mesh(cp=4)}, "halo_exchange"),
    "experts and data": Case(Experts, activations, {"mesh": sw.Mesh(dp=2, ep=2)}, "row_exchange"),
    "dropout": Case(Dropped, activations, {"mesh": sw.Mesh(dp=2, tp=2), "strategies": {"up": "n@tp"}}, draws=True),
    "head, classes, micro-batches": heads(mesh=sw.Mesh(tp=2), strategies={"head": "n@tp"}, micro_batch=2),
    "head, ZeRO 3, recomputed": heads(mesh=sw.Mesh(dp=2), zero=3, recompute="all"),
    "head, stages": heads("", mesh=sw.Mesh(dp=1), stages=2, micro_batch=4),
    **{f"selected, {name}": Case(partial(selecting, name), selected, SAMPLES) for name in ("cross entropy", "experts")},
    "Critic": inner("Critic"),
}
MORE: dict[str, Case] = {
    "experts": Case(Experts, activations, {"mesh": sw.Mesh(ep=4)}, "row_exchange"),
    **{f"selected, {name}": Case(partial(selecting, name), selected, SAMPLES) for name in ("quotient", "put back")},
    "ring of two": Case(RingAttention, activations, {"mesh": sw.Mesh(dp=2, cp=2)}, "halo_exchange"),
    "zigzag": Case(ZigzagAttention, activations, {"mesh": sw.Mesh(cp=4)}, "halo_exchange"),
    **{name: inner(name) for name in ("Heat", "HeatByTransforms", "ForceField", "Score", "Adapted", "AdaptedOnce")},
    "Critic, tp": inner("Critic", mesh=sw.Mesh(tp=2), strategies={"up": "n@tp", "head": "k@tp"}),
    "ForceField, tp": inner("ForceField", mesh=sw.Mesh(tp=2), strategies={"net.up": "n@tp", "net.mid": "k@tp"}),
    "Critic, micro-batches": inner("Critic", **MICRO),
    "ForceField, micro-batches": inner("ForceField", **MICRO),
}
FORMS: dict[str, Case] = {
    "looked up, ZeRO 1": form(Batched, zero=1),
    "einsum, ZeRO 3": form(Einsum, zero=3),
    "loop, recomputed": form(partial(Stack, Loop), LAYERS, recompute="full"),
    "modules": form(Modules),
    "masks": form(partial(Stack, Assigned), LAYERS, zero=1, recompute="full"),
    "transformers, ZeRO 3": form(eager_experts, EXPERTS, zero=3),
    "sinks, ZeRO 1": form(experts_with_sinks, EXPERTS, zero=1),
    "sinks, queries split": form(experts_with_sinks, EXPERTS | {"model.layers.*.self_attn": "t@ep"}, recompute="full"),
    "looked up, four owners": form(Batched, mesh=sw.Mesh(ep=4)),
    "einsum, dp x ep, ZeRO 3": form(Einsum, mesh=sw.Mesh(dp=2, ep=2), zero=3),
    "loop, ep x tp": form(Loop, {"": "e@ep n@tp"}, mesh=sw.Mesh(ep=2, tp=2)),
    "looked up, in stages": form(partial(Stack, Batched), LAYERS, **STAGED),
    "loop, in stages, ZeRO 1": form(partial(Stack, Loop), LAYERS, **STAGED, zero=1),
    "modules, in stages, recomputed": form(partial(Stack, Modules), LAYERS, **STAGED, recompute="full"),
    "transformers, in stages": form(eager_experts, EXPERTS, **STAGED),
}
ALL = CASES | MORE | FORMS


def planned(name: str) -> sw.Plan:
    case = ALL[name]
    settings = case.settings if "mode" in case.settings else {"search": "sharding_propagation", **case.settings}
    return sw.plan(made(name), case.batch(0), case.ranks, **settings)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ALL[name].make().double()


def train_model(name: str, model: nn.Module, masks: Sequence[Told] | None = None) -> tuple[Trained, list[Told]]:
    """Train, and return what else the model tells in every step. ``masks``: what it takes instead of drawing."""
    told: list[Told] = []

    def differentiate(model: Any, x: tuple[Tensor]) -> Tensor:
        if masks is not None:
            model.given = masks[len(told)]
        loss, *others = model(*x)
        loss.backward()
        told.append(tuple(tensor.detach() for tensor in others))
        return loss.detach()

    takes_steps = {"stages", "micro_batch"} & ALL[name].settings.keys()
    how = differentiate if ALL[name].draws else step_or_differentiate if takes_steps else call_and_differentiate
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(model, map(ALL[name].batch, range(STEPS)), optimizer, differentiate=how), told


def train_on_rank(*names: str) -> dict[str, tuple[Trained, list[Told]]]:
    found = {}
    usual = head_loss.FEWEST_LOGITS, head_loss.BLOCK
    for name in names:
        head_loss.FEWEST_LOGITS, head_loss.BLOCK = (1, 7) if name.startswith("head") else usual
        plan = planned(name) if dist.get_rank() == 0 else None
        if plan is not None:
            check_divided(name, plan)
        found[name] = train_model(name, sw.parallelize(made(name), plan, seed=5))
    dist.barrier()
    return found


@pytest.mark.parametrize(
    "cases",
    [CASES, *(pytest.param(cases, marks=pytest.mark.long) for cases in (MORE, FORMS))],
    ids=["first", "more", "forms"],
)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_train_as_one_process(num_ranks: int, cases: dict[str, Case], run_ranks: RunRanks) -> None:
    names = [name for name, case in cases.items() if case.ranks == num_ranks]
    ranks = run_ranks(train_on_rank, num_ranks, *names)
    for name in names:
        masks, (rtol, atol, of_losses) = ranks[0][name][1], ALL[name].close
        alone, _ = train_model(name, made(name), masks if ALL[name].draws else None)
        check_ranks([found[name][0] for found in ranks], alone, name, rtol=rtol, atol=atol, of_losses=of_losses)
        for rank, found in enumerate(ranks):
            for own, want in zip(found[name][1], masks, strict=True):
                assert all(map(torch.equal, own, want)), f"{name}, rank {rank} has other masks"


def check_divided(name: str, plan: sw.Plan) -> None:
    """A plan divides what its case is for."""
    case = ALL[name]
    assert case.kind in {c.kind for part in (False, True) for c in plan.collectives(backward=part)} or not case.kind
    if case.make is Experts:
        assert all(plan.layouts[weight].dims[0][0].axes for weight in ("up", "down")), plan
    elif case.batch is activations:
        strategies = plan.strategies.values()
        assert any(word in own for own in strategies for word in ("ring@cp", "zigzag@cp", "n@tp")), plan
