"""Calls with other inputs than those of the plan, under micro-batches and stages; and norms of a part of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks

PLANS: dict[str, dict[str, Any]] = {
    "micro-batches": {"mode": "data_parallel", "micro_batch": 2},
    "as many classes as samples in a micro-batch": {"mode": "data_parallel", "micro_batch": 4},
    "tensor parallel": {"mesh": sw.Mesh(tp=2), "strategies": {"up": "n@tp"}, "micro_batch": 2},
    "stages": {"stages": 2, "micro_batch": 4},
}


class Weighted(nn.Module):
    """Classes have weights, if the call has some; so have samples, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        samples: Tensor | None = None,
        classes: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        hidden = torch.tanh(self.up(x))
        loss = F.cross_entropy(self.down(hidden if mask is None else hidden * mask), y, classes, reduction="none")
        return loss.mean() if samples is None else (loss * samples).sum() / samples.sum()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {"x": (8, 8), "samples": (8,), "classes": (4,), "mask": (8, 1)}
    made = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in drawn.items()}
    return made | {"y": torch.randint(4, (8,), generator=generator)}


def built() -> Weighted:
    torch.manual_seed(0)
    return Weighted().double()


def on_ranks() -> dict[tuple[str, str, str], float]:
    """The largest error of loss and gradients, by plan, inputs of the plan and inputs of the call."""
    of = tensors()
    x, y, samples, classes, mask = (of[name] for name in ("x", "y", "samples", "classes", "mask"))
    calls: dict[str, tuple[tuple[Tensor, ...], dict[str, Tensor]]] = {
        "by position": ((x, y, samples), {}),
        "by name": ((), {"x": x, "y": y, "samples": samples}),
        "both": ((x,), {"samples": samples, "y": y}),
        "fewer": ((x, y), {}),
        "more": ((x, y), {"mask": mask, "classes": classes, "samples": samples}),
    }
    errors: dict[tuple[str, str, str], float] = {}
    for plan_name, options in PLANS.items():
        for planned in ("by position", "by name", "fewer"):
            args, kwargs = calls[planned]
            net = built()
            par = sw.parallelize(net, sw.plan(net, args, 2, kwargs=kwargs, **options))
            for name, (given, named) in calls.items():
                alone = built()
                loss = alone(*given, **named)
                loss.backward()
                par.zero_grad()
                off = [par.step(*given, **named) - loss]
                held = dict(par.named_parameters())
                off += [
                    sw.full_tensor(held[n].grad) - p.grad
                    for n, p in alone.named_parameters()
                    if n in held and p.grad is not None
                ]
                errors[plan_name, planned, name] = max(float(error.detach().abs().max()) for error in off)
    return errors


def test_inputs_that_the_plan_does_not_name_are_split_as_others_are(run_ranks: RunRanks) -> None:
    for errors in run_ranks(on_ranks, 2):
        assert len(errors) == len(PLANS) * 3 * 5
        assert max(errors.values()) < 1e-13, {case: error for case, error in errors.items() if error >= 1e-13}


def clipped() -> dict[str, tuple[float, float]]:
    of, norms = tensors(), {}
    alone, net = built(), built()
    alone(of["x"], of["y"]).backward()
    par = sw.parallelize(net, sw.plan(net, (of["x"], of["y"]), 2, stages=2, micro_batch=4))
    for clip in (nn.utils.clip_grad_norm_, sw.clip_grad_norm):
        for prefix in ("up", "down", "none of the names", ""):
            par.zero_grad()
            par.step(of["x"], of["y"])
            own = clip([p for name, p in par.named_parameters() if name.startswith(prefix)], 1e3)
            whole = nn.utils.get_total_norm([p.grad for name, p in alone.named_parameters() if name.startswith(prefix)])
            norms[f"{clip.__name__} {prefix}"] = float(own), float(whole)
    return norms


def test_the_norm_of_a_part_of_the_model_is_the_same_on_ranks_that_hold_none_of_it(run_ranks: RunRanks) -> None:
    for norms in run_ranks(clipped, 2):
        assert len(norms) == 8
        assert all(abs(own - whole) < 1e-7 for own, whole in norms.values()), norms  # of no tensors torch's is float32


class Heads(nn.Module):
    """A flag of the call chooses one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor, task: str) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return F.cross_entropy(self.first(hidden) if task == "first" else self.second(hidden), y)


def other_heads() -> dict[tuple[str, str], float]:
    of, errors = tensors(), {}
    for planned in ("first", "second"):
        torch.manual_seed(0)
        net, alone = Heads().double(), Heads().double()
        alone.load_state_dict(net.state_dict())
        batch = {"x": of["x"], "y": of["y"]}
        par = sw.parallelize(net, sw.plan(net, {**batch, "task": planned}, 2, stages=2, micro_batch=4))
        for task in ("first", "second", "first"):
            for module in (alone, par):
                module.zero_grad()
            loss = alone(**batch, task=task)
            loss.backward()
            off = [par.step(**batch, task=task) - loss]
            for name, parameter in par.named_parameters():
                wanted = alone.get_parameter(name).grad
                assert (parameter.grad is None) == (wanted is None), (planned, task, name)
                off += [] if wanted is None else [parameter.grad - wanted]
            errors[planned, task] = max(float(error.detach().abs().max()) for error in off)
    return errors


def test_stages_run_the_head_that_the_call_chooses(run_ranks: RunRanks) -> None:
    for errors in run_ranks(other_heads, 2):
        assert len(errors) == 4
        assert max(errors.values()) < 1e-14, errors
