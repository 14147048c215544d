"""Models that take gradients inside forward, trained on two ranks as on one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from models.gradient_models import model_and_inputs
from runtime.training import Trained, check_ranks, train

STEPS = 3


def trained(name: str, settings: dict) -> Trained:
    """Some steps, on several ranks under a plan."""
    model, inputs = model_and_inputs(name)
    model = model.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    if dist.is_initialized() and dist.get_world_size() > 1:
        plan = sw.plan(model, inputs, 2, **settings) if dist.get_rank() == 0 else None
        model = sw.parallelize(model, plan)
    batches = [
        tuple(x.roll(step, 0) * (1 + step / 8) if x.is_floating_point() else x.clone() for x in inputs)
        for step in range(STEPS)
    ]
    return train(model, batches, torch.optim.Adam(model.parameters(), lr=1e-2))


BATCH_SPLIT = {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"}
MICRO = {**BATCH_SPLIT, "micro_batch": 4}
SPLITS = {"Critic": {"up": "n@tp", "head": "k@tp"}, "ForceField": {"net.up": "n@tp", "net.mid": "k@tp"}}
CASES = [("Critic", BATCH_SPLIT)]
MORE = [
    *((name, BATCH_SPLIT) for name in ("Heat", "HeatByTransforms", "ForceField", "Score", "Adapted", "AdaptedOnce")),
    *((name, {"mesh": sw.Mesh(tp=2), "strategies": split}) for name, split in SPLITS.items()),
    ("Critic", MICRO),
    ("ForceField", MICRO),
]


@pytest.mark.parametrize(
    ("name", "settings"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_losses_and_parameters_are_those_of_one_device(run_ranks, name, settings) -> None:
    check_ranks(run_ranks(trained, 2, name, settings), trained(name, {}), atol=1e-9, of_losses=1e-9)
