"""Terms of the loss that are taken per micro-batch, on real gloo ranks: parameters after three optimizer steps are
those of gradient accumulation on one device, written by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.test_models_on_ranks import widened
from programs.test_per_micro_batch import COEF, made
from runtime.interpreted import interpret_section
from runtime.training import Trained, check_close, state_of, train
from shardwise.planning import execute
from shardwise.plans import micro_batch_search
from shardwise.runtime import compiled, program_cache

SIZES = ((2, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 1))
ALONE = {"mode": "data_parallel"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "masked": ("masked", ALONE, {}),
    "ZeRO 3, compiled": ("layers by module", {**ALONE, "zero": 3}, {"compile": True}),
    "stages": ("layers by module", {"stages": 2}, {}),
}
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data parallel": ("an output", ALONE, {}),
    "ZeRO 1, recompute": ("layers together", {**ALONE, "zero": 1, "recompute": "full"}, {}),
    "shared sums": ("shared sums", ALONE, {}),
    "GPipe": ("layers together", {"stages": 2, "schedule": "GPipe"}, {}),
    "zero bubble": ("layers by module", {"stages": 4, "schedule": "ZBVZeroBubble"}, {}),
    "tensor parallel": ("layers by module", {"mesh": sw.Mesh(tp=2), "strategies": {"layers.*.router": "n@tp"}}, {}),
}
FOUR: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "stages of two": ("layers by module", {"stages": 2, "mesh": sw.Mesh(dp=2), "schedule": "1F1B"}, {}),
    "dp x tp": ("masked", {"mesh": sw.Mesh(dp=2, tp=2), "strategies": {"router": "n@tp"}}, {}),
}


def sizes_of(case: str) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of every step; no smaller batch where each of its programs is compiled again."""
    return SIZES[:2] if "compiled" in case else SIZES


def batches(case: str, model: str) -> list[tuple[Tensor, ...]]:
    """The samples of a model in another order in every step, of the third step one fewer."""
    inputs, found = made(model)[1], []
    for step, sizes in enumerate(sizes_of(case)):
        rows = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(step))[: sum(sizes)]
        found.append(tuple(x[rows].double() if x.is_floating_point() else x[rows] for x in inputs))
    return found


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def by_hand(case: str, model: str) -> Trained:
    """Accumulate gradients on one device."""
    sizes = iter(sizes_of(case))

    def differentiate(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        loss = module(*inputs)["main"]
        for parts in zip(*(x.split(own) for own in [next(sizes)] for x in inputs), strict=True):
            loss = loss + COEF * module(*parts)["balance"] * (len(parts[0]) / len(inputs[0]))
        loss.backward()
        return loss.detach()

    module = made(model)[0].double()
    return train(module, batches(case, model), optimizer_of(module), differentiate=differentiate)


def folder_of(case: str) -> str:
    return case.replace(", ", "-").replace(" ", "-")


def train_on_rank(folder: Path, cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, list[float]]:
    compiled.compile_with_inductor = interpret_section
    warnings.simplefilter("ignore")
    found = {}
    for case, (model, settings, options) in cases.items():
        module, _, terms = made(model)
        module = module.double()
        with widened(execute), widened(micro_batch_search), widened(program_cache):
            plan = sw.plan(
                module, batches(case, model)[0], dist.get_world_size(), micro_batch=2, per_micro_batch=terms, **settings
            ).plan
            par = sw.parallelize(module, sw.Plan.from_json(plan.to_json()), **options)
            optimizer = optimizer_of(par)
            found[case] = train(par, batches(case, model), optimizer).losses
            sw.save_checkpoint(folder / folder_of(case), par, optimizer, step=1)
    return found


@pytest.mark.parametrize(
    ("count", "cases"),
    [(2, CASES), pytest.param(2, MORE, marks=pytest.mark.long), pytest.param(4, FOUR, marks=pytest.mark.long)],
)
def test_ranks_train_as_gradient_accumulation_by_hand(
    run_ranks: RunRanks, tmp_path: Path, count: int, cases: Any
) -> None:
    ranks = run_ranks(train_on_rank, count, tmp_path, cases)
    for case, (model, *_) in cases.items():
        alone = by_hand(case, model)
        for rank, found in enumerate(ranks):
            assert found[case] == pytest.approx(alone.losses, rel=1e-10), (case, rank)
        module = made(model)[0].double()
        sw.load_checkpoint(tmp_path / folder_of(case), module)
        check_close(state_of(module), alone.state, rtol=1e-9, atol=1e-11, what=case)
