"""Real models on real gloo ranks with parameters in parts and values that backward makes again: three optimizer steps
are those of plain PyTorch in one process, and the messages are those of the plan."""

from __future__ import annotations

from typing import Any

import pytest

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.test_models_on_ranks import check_training, plan_of

RANKS = 2
LEVERS: dict[str, dict[str, Any]] = {
    "zero 3, full": {"zero": 3, "recompute": "full"},
    "zero 3, cheap": {"zero": sw.Zero(3, whole_below=200), "recompute": "cheap"},
    "zero 1": {"zero": 1, "recompute": "none"},
    "full": {"recompute": "full"},
}
CASES = {
    "llama": ("zero 3, cheap",),
    "mixtral": ("zero 3, full",),
    "bert": ("full",),  # dropout is drawn a second time, as it was
    "dlrm": ("zero 1",),
    "resnet": ("zero 3, full",),  # running statistics are written once
}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("names", [("llama",), pytest.param(tuple(CASES)[1:], marks=pytest.mark.long)])
def test_models_train_with_every_policy_as_plain_pytorch_trains_them(
    names: tuple[str, ...], run_ranks: RunRanks
) -> None:
    plans = {
        (name, label): plan_of(name, label, cluster=RANKS, mode="data_parallel", **LEVERS[label])
        for name in names
        for label in CASES[name]
    }
    for (name, label), plan in plans.items():
        again = sum(entry.again for entry in plan.operators), sum(entry.again for entry in plan.parameters)
        assert bool(again[0]) == ("full" in label or "cheap" in label), f"{name}, {label}: {again}"
        assert bool(again[1]) == ("zero 3" in label), f"{name}, {label}: {again}"
    check_training(run_ranks, plans)
