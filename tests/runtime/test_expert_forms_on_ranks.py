"""Experts looked up per row, in loops and in transformers' eager form, on two and four real ranks in float64.

Beside one process through three steps of AdamW, under ZeRO, recomputed and in stages; checkpoints go from four owners
of experts to two, to one process, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.breadth import tiny_of
from models.expert_models import WIDTH, Assigned, Batched, Einsum, Loop, Mixture, Modules
from runtime.training import check_close, state_of, train

STEPS = 3
# Sums in another order, through three steps of AdamW, which divides gradients by their size.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class Stack(nn.Module):
    """Two layers of experts of a form behind each other."""

    def __init__(self, kind: type[Mixture]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Layer(nn.Module):
    """A router, and experts as a module of their own."""

    def __init__(self, kind: type[Mixture]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts: Mixture = type(kind.__name__, (kind,), {"forward": kind.mix})()
        del self.experts.router

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        mixed: Tensor = self.experts(tokens, weights, chosen)
        return x + mixed.view_as(x)


def eager(name: str = "qwen3_moe") -> nn.Module:
    module: Any = tiny_of(name).build()
    module.set_experts_implementation("eager")
    return module


def with_sinks() -> nn.Module:
    """GPT-OSS: every second layer's attention sees a window."""
    module: Any = eager("gpt_oss")
    module.config.sliding_window = 3
    for layer in module.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return module


OF_TRANSFORMERS = (eager, with_sinks)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    strategies: dict[str, str] = field(default_factory=lambda: {"": "e@ep"})

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().double()

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        if self.make in OF_TRANSFORMERS:
            ids = torch.randint(3, 30, (8, 6), generator=generator)
            return {"input_ids": ids, "labels": ids}
        return {"x": torch.randn(8, 6, WIDTH, dtype=torch.float64, generator=generator)}

    def planned(self, module: nn.Module) -> Any:
        devices, settings = dist.get_world_size(), {"search": "sharding_propagation", **self.options}
        plan = sw.plan(
            module, self.batch(0), devices, mesh=sw.Mesh(**self.mesh), strategies=self.strategies, **settings
        )
        assert any(c.kind == "row_exchange" for c in plan.collectives()), plan
        return plan


EXPERTS = {"model.layers.*.mlp.experts": "e@ep"}
LAYERS = {"layers.*.experts": "e@ep"}
STAGED = {"stages": 2, "micro_batch": 4}
ON_TWO = {
    "looked up, ZeRO 1": Case(Batched, {"ep": 2}, {"zero": 1}),
    "einsum, ZeRO 3": Case(Einsum, {"ep": 2}, {"zero": 3}),
    "loop, recomputed": Case(partial(Stack, Loop), {"ep": 2}, {"recompute": "full"}, LAYERS),
    "modules": Case(Modules, {"ep": 2}),
    "masks": Case(partial(Stack, Assigned), {"ep": 2}, {"zero": 1, "recompute": "full"}, LAYERS),
    "transformers, ZeRO 3": Case(eager, {"ep": 2}, {"zero": 3}, EXPERTS),
    "sinks, ZeRO 1": Case(with_sinks, {"ep": 2}, {"zero": 1}, EXPERTS),
    "sinks, queries split": Case(
        with_sinks, {"ep": 2}, {"recompute": "full"}, EXPERTS | {"model.layers.*.self_attn": "t@ep"}
    ),
}
ON_FOUR = {
    "looked up, four owners": Case(Batched, {"ep": 4}),
    "einsum, dp x ep, ZeRO 3": Case(Einsum, {"dp": 2, "ep": 2}, {"zero": 3}),
    "loop, ep x tp": Case(Loop, {"ep": 2, "tp": 2}, strategies={"": "e@ep n@tp"}),
    "looked up, in stages": Case(partial(Stack, Batched), {"ep": 2}, STAGED, LAYERS),
    "loop, in stages, ZeRO 1": Case(partial(Stack, Loop), {"ep": 2}, {**STAGED, "zero": 1}, LAYERS),
    "modules, in stages, recomputed": Case(partial(Stack, Modules), {"ep": 2}, {**STAGED, "recompute": "full"}, LAYERS),
    "transformers, in stages": Case(eager, {"ep": 2}, STAGED, EXPERTS),
}


def trained(case: Case, module: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> list[float]:
    return train(module, map(case.batch, steps), optimizer).losses


def made(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def train_on_rank(cases: dict[str, Case], folder: Path) -> dict[str, list[float]]:
    found = {}
    for name, case in cases.items():
        module = case.module()
        par = sw.parallelize(module, case.planned(module))
        optimizer = made(par)
        found[name] = trained(case, par, optimizer, range(STEPS))
        sw.save_checkpoint(folder / name.replace(", ", "-"), par, optimizer, step=STEPS)
    return found


def check_equals_one_device(case: Case, name: str, losses: Sequence[Sequence[float]], path: Path, steps: int) -> None:
    module, loaded = case.module(), case.module()
    wanted = trained(case, module, made(module), range(steps))
    # transformers takes a language model's loss of logits in float32
    bound = 1e-6 if case.make in OF_TRANSFORMERS else 1e-11
    assert all(found == pytest.approx(wanted[-len(found) :], rel=bound) for found in losses), name
    sw.load_checkpoint(path, loaded)
    close = {"rtol": 1e-4, "atol": 1e-6} if case.make in OF_TRANSFORMERS else CLOSE
    check_close(state_of(loaded), state_of(module), what=name, **close)


def check_ranks(run_ranks: RunRanks, cases: dict[str, Case], ranks: int, folder: Path) -> None:
    found = run_ranks(train_on_rank, ranks, cases, folder)
    for name, case in cases.items():
        losses = [each[name] for each in found]
        check_equals_one_device(case, name, losses, folder / name.replace(", ", "-"), STEPS)


@pytest.mark.long
def test_every_form_trains_on_two_ranks_as_on_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_ranks(run_ranks, ON_TWO, 2, tmp_path)


@pytest.mark.long
def test_forms_train_on_four_ranks_and_in_stages_as_on_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_ranks(run_ranks, ON_FOUR, 4, tmp_path)


def go_on(case: Case, source: Path, target: Path) -> list[float]:
    """On a rank: two more steps from a checkpoint, and one of their own."""
    module = case.module()
    par = sw.parallelize(module, case.planned(module))
    optimizer = made(par)
    begun = sw.load_checkpoint(source, par, optimizer).step
    losses = trained(case, par, optimizer, range(begun, begun + 2))
    sw.save_checkpoint(target, par, optimizer, step=begun + 2)
    return losses


@pytest.mark.long
def test_checkpoints_go_from_four_owners_to_two_and_to_one_process_and_back(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    name = "looked up, four owners"
    four = ON_FOUR[name]
    two = Case(Batched, {"ep": 2}, {"zero": 1})
    run_ranks(train_on_rank, 4, {name: four}, tmp_path)
    losses = run_ranks(go_on, 2, two, tmp_path / name.replace(", ", "-"), tmp_path / "two")
    check_equals_one_device(two, "two owners", losses, tmp_path / "two", STEPS + 2)
    module = two.module()
    optimizer = made(module)
    sw.load_checkpoint(tmp_path / "two", module, optimizer)
    trained(two, module, optimizer, range(STEPS + 2, STEPS + 3))
    sw.save_checkpoint(tmp_path / "one", module, optimizer, step=STEPS + 3)
    losses = run_ranks(go_on, 4, four, tmp_path / "one", tmp_path / "four")
    check_equals_one_device(four, "four owners again", losses, tmp_path / "four", STEPS + 5)
