"""Arguments of the wrong kind are refused in a sentence that names the argument and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from raising import raises

X = torch.randn(4, 4)
WRONG: dict[str, list[Any]] = {
    "optimizer": [torch.optim.AdamW, torch.optim.lr_scheduler.StepLR, None, 3, ["adamw"], "AdamW", ""],
    "mesh": ["dp=2", {"dp": 2}, (2, 1), 2],
    "precision": ["bf16", torch.bfloat16, {"compute": torch.bfloat16}],
    "mode": [None, 1, ["auto"]],
    "search": [1, ["greedy"], "Dynamic_Programming"],
    "max_mesh_axes": [0, "2", 2.5, None],
    "global_batch": ["8", 4.0, -1, True, [4]],
    "micro_batch": ["2", 2.0, 0, [2]],
    "memory_bytes": ["8GB", -1, float("nan"), [1], True],
    "strategies": ["n@tp", [("0", "n@dp")], {"nope": "n@dp"}, {1: "n@dp"}, {"": 3}],
    "layouts": ["x", {"weight": 3}, [1], {1: "[4, 4]"}],
    "bucket_bytes": ["25MB", 1.5, -1],
    "recompute": ["all", True, 1, ["full"]],
    "offload": [True, None, 1, ["all"]],
    "zero": ["3", 4, 0, True, 1.0, [3]],
    "stages": ["two", 0, -1, 2.0, True, [2]],
    "schedule": ["foo", 1, ["1F1B"]],
    "loss": ["mse", 3],
    "kwargs": ["x", [1], 3],
}


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_of_the_wrong_kind_is_refused(name: str) -> None:
    for value in WRONG[name]:
        for ask in (sw.plan, *([] if value is None else [sw.fits])):  # where None is the default
            with raises(sw.ShardwiseError, "\n  fix:"):
                ask(nn.Linear(4, 4), (X,), 2, **{"loss": mean, name: value})


@pytest.mark.parametrize(
    ("optimizer", "suggested"),
    [
        (torch.optim.AdamW, "adamw"),
        (torch.optim.Adam([torch.zeros(1)]), "adam"),
        (torch.optim.SGD([torch.zeros(1)]), "sgd"),
        (torch.optim.SGD([torch.zeros(1)], momentum=0.9), "momentum"),
    ],
)
def test_an_optimizer_in_place_of_its_name_is_answered_with_the_name(optimizer: Any, suggested: str) -> None:
    with raises(sw.ShardwiseError, "the name", "an optimizer", f"optimizer='{suggested}'"):
        sw.plan(nn.Linear(4, 4), (X,), 2, loss=mean, optimizer=optimizer)
    sw.plan(nn.Linear(4, 4), (X,), 2, loss=mean, optimizer=suggested)


@pytest.mark.parametrize("plan", [{"a": 1}, nn.Linear(4, 4), sw.Mesh(dp=2)])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    for ask in (
        lambda: sw.verify(nn.Linear(4, 4), (X,), plan, loss=mean),
        lambda: sw.parallelize(nn.Linear(4, 4), plan),
    ):
        with raises(sw.ShardwiseError, f"of type {type(plan).__name__}", fix="sw.plan"):
            ask()


def test_numbers_of_other_questions_are_refused() -> None:
    plan = sw.plan(nn.Linear(4, 4), (X,), 2, loss=mean)
    for name, values in {
        "steps": ["2", 0, 1.5, None, True],
        "tolerance": ["x", -1, None],
        "seed": ["x", 1.5, True],
    }.items():
        for value in values:
            with raises(sw.ShardwiseError, f"{name} is {value!r}"):
                sw.verify(nn.Linear(4, 4), (X,), plan, loss=mean, **{name: value})
    for name, values in {"seconds": ["x", -1, float("nan")], "price_per_hour": ["x", -1, [1]]}.items():
        for value in values:
            with pytest.raises(sw.ShardwiseError, match=r"seconds|price"):
                sw.fits(nn.Linear(4, 4), (X,), 2, loss=mean, **{name: value})
    for searches in (3, "dynamic_programming", [3]):
        with pytest.raises(sw.ShardwiseError, match="search"):
            sw.compare(nn.Linear(4, 4), (X,), 2, loss=mean, searches=searches)
