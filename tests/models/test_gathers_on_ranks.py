"""GPT-2 and Llama with sequences that tensor parallelism gathers, in forward and again in backward, on real gloo ranks:
three optimizer steps are those of plain PyTorch in one process, and the messages are those of the plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models import tiny_models
from models.test_models_on_ranks import MODELS, OPTIMIZER, check_training, plan_of, train_on_rank

ROWS = {
    "gpt2": {"transformer.h.*.attn.c_proj": "k@tp", "transformer.h.*.mlp.c_proj": "k@tp"},
    "llama": {"model.layers.*.self_attn.o_proj": "k@tp", "model.layers.*.mlp.down_proj": "k@tp"},
}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt2", 2, {"recompute": "gathers"}),
    ("llama", 2, {"recompute": "cheap+gathers", "zero": 3}),
    ("gpt2", 4, {"recompute": "cheap+gathers"}),  # dropout is drawn a second time, as it was
    ("llama", 4, {"recompute": "gathers", "zero": 3}),
]

pytestmark = pytest.mark.filterwarnings("ignore")


def planned(name: str, ranks: int, choices: dict[str, Any]) -> sw.Plan:
    mesh = sw.Mesh(tp=2) if ranks == 2 else sw.Mesh(dp=2, tp=2)
    strategies = {**MODELS[name].strategies, **ROWS[name]}
    return plan_of(name, "", cluster=ranks, mesh=mesh, strategies=strategies, **choices)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_sequences_are_gathered_again_as_plain_pytorch_trains(
    ranks: int, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "gpt2", tiny_models.gpt2())
    monkeypatch.setitem(OPTIMIZER, "gpt2", "adamw")
    plans = {(name, ""): planned(name, number, choices) for name, number, choices in CASES if number == ranks}
    for (name, _), plan in plans.items():
        again = [own for own in plan.conversions if own.again and own.value not in plan.layouts]
        gathers = Counter(own.kind for conversion in again for own in conversion.forward)
        assert gathers["all_gather"] >= 3, f"{name}: {gathers}"
    check_training(run_ranks, plans, on_rank)


def on_rank(cases: Any) -> Any:
    MODELS["gpt2"] = tiny_models.gpt2()
    OPTIMIZER["gpt2"] = "adamw"
    return train_on_rank(cases)
