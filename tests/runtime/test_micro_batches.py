"""``par.step`` over micro-batches on real gloo ranks: three optimizer steps are those of one device on whole batches.

Everything is float64 on both sides, casts inside of models too, and both draw the same dropout masks
(``graph.to_float64``).
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models import tiny_models
from models.test_models_on_ranks import messages, widened
from models.tiny_models import TinyModel
from models.zoo_own import DLRM, dlrm_inputs
from raising import raises
from runtime.interpreted import interpret_section
from runtime.training import Differentiate, Trained, check_ranks, loss_of, step_or_differentiate, train
from shardwise.errors import CaptureError, PlanWarning, ShardwiseError
from shardwise.graph.to_float64 import Reference, reference_mode
from shardwise.planning import execute
from shardwise.plans import micro_batch_search
from shardwise.runtime import compiled, program_cache

BATCH, STEPS = 8, 3

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 8, 3), nn.Linear(8, 12)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.norm(self.first(pixel_values))), 0.2)
        return F.cross_entropy(self.head(self.second(x).mean((2, 3))), labels)


MODELS = {
    "gpt2": tiny_models.gpt2(),
    "llama": tiny_models.llama(),
    "vit": tiny_models.vit(),
    "dlrm": TinyModel(DLRM, dlrm_inputs, {"bottom.0": "n@tp", "top.0": "n@tp"}),
    "norms": TinyModel(Norms, tiny_models.image_inputs, {"second": "co@tp"}),
}
MESHES = {
    "dp": (sw.Mesh(dp=2), False, None),
    "dp, zero 1": (sw.Mesh(dp=2), False, 1),
    "tp": (sw.Mesh(tp=2), True, None),
    "dp x tp": (sw.Mesh(dp=2, tp=2), True, None),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build().train().double()


def batch(name: str, step: int) -> dict[str, Any]:
    """Of the last step one sample fewer: a smaller last pass."""
    torch.manual_seed(100 + step)
    inputs = MODELS[name].inputs(BATCH)
    whole = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    return {key: x[: BATCH - 1] for key, x in whole.items()} if step == STEPS - 1 else whole


def plan_of(name: str, mesh: str, micro_batch: int) -> sw.Plan:
    axes, has_strategies, zero = MESHES[mesh]
    with ExitStack() as stack, warnings.catch_warnings(action="ignore"):
        for module in (execute, micro_batch_search):
            stack.enter_context(widened(module))
        return sw.plan(
            build(name),
            (),
            axes.num_devices,
            kwargs=batch(name, 0),
            mesh=axes,
            strategies=MODELS[name].strategies if has_strategies else None,
            mode="auto" if has_strategies else "data_parallel",
            global_batch=BATCH,
            micro_batch=micro_batch,
            zero=zero,
        )


def train_on_rank(cases: list[tuple[str, str]]) -> list[tuple[Trained, int]]:
    """Every case, and how many programs there are then."""
    found = []
    for name, text in cases:
        with widened(program_cache):
            par = sw.parallelize(build(name), sw.Plan.from_json(text) if dist.get_rank() == 0 else None)
            found.append((train_model(par, name), len(par.compiled)))
    return found


def train_alone(name: str, micro_batch: int) -> Trained:
    """One device on whole batches; batch norm sees micro-batches, as it does where they are accumulated."""
    steps = count()

    def differentiate(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        samples = len(next(iter(inputs.values())))
        sizes = [micro_batch] * (samples // micro_batch) + [samples % micro_batch] * (samples % micro_batch > 0)
        with reference_mode(Reference(next(steps), sizes)):
            loss = loss_of(model(**inputs))
        loss.backward()
        for key, counter in model.named_buffers():
            if key.endswith("num_batches_tracked"):
                counter += len(sizes) - 1
        return loss.detach()

    return train_model(build(name), name, differentiate)


def train_model(model: nn.Module, name: str, differentiate: Differentiate = step_or_differentiate) -> Trained:
    batches = [batch(name, step) for step in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return train(model, batches, optimizer, differentiate=differentiate)


@pytest.mark.parametrize("mesh", ["dp", "dp, zero 1", "tp", pytest.param("dp x tp", marks=pytest.mark.long)])
@pytest.mark.sampled(1)
def test_steps_in_passes_are_those_of_one_device_on_whole_batches(mesh: str, run_ranks: RunRanks) -> None:
    wanted = {
        "dp": [("llama", 4), ("dlrm", 4), ("norms", 4)],
        "dp, zero 1": [("llama", 2)],
        "tp": [("gpt2", 2), ("vit", 2)],
        "dp x tp": [("gpt2", 2)],
    }[mesh]
    plans = [plan_of(name, mesh, size) for name, size in wanted]
    size = plans[0].mesh.num_devices
    cases = [(name, plan.to_json()) for (name, _), plan in zip(wanted, plans, strict=True)]
    ranks = run_ranks(train_on_rank, size, cases)
    for i, ((name, micro_batch), plan) in enumerate(zip(wanted, plans, strict=True)):
        assert plan.micro_batches == BATCH // micro_batch
        check_ranks([found[i][0] for found in ranks], train_alone(name, micro_batch), name)
        for found in ranks:
            assert found[i][1] == 2 + 1, "a pass of the plan, again for batches of seven, and their last one"


# -------------------------------------------------------------------------------------- inputs, hooks, calls of others


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)


def labelled() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.tensor([0, -100, -100, 1, 4, 2, -100, 3])
    return Labelled().double(), torch.randn(BATCH, 4, dtype=torch.float64), y


def calls_of_all_kinds() -> dict[str, Any]:
    """On a rank: gradients of every way to give a batch, and what does not fit."""
    module, x, y = labelled()
    plan = sw.plan(module, (x, y), 2, mesh=sw.Mesh(dp=2), mode="data_parallel", micro_batch=4)
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    def gradients(par: sw.Parallel) -> list[torch.Tensor]:
        return [p.grad.clone() for p in par.parameters() if p.grad is not None]

    par = sw.parallelize(module, plan)
    seen: list[torch.Tensor] = []
    hook = par.head.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    par._ranks.record = []
    found["loss"] = par.step(x, y).item()
    found["messages"] = messages(plan.mesh, par._ranks.record or [])
    found["step"], found["hooked"] = gradients(par), len(seen)
    par._ranks.record = None
    par.step(x, y)
    found["twice"] = gradients(par)
    hook.remove()
    par.zero_grad()
    with warnings.catch_warnings(record=True, action="always") as caught:
        par(x, y).backward()
        par(x, y)
    found["whole"] = gradients(par)
    found["said"] = [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
    par.eval()
    with torch.no_grad():
        found["evaluated"] = [par(x[:n], y[:n]).item() for n in (8, 4, 3)]
    with raises(CaptureError, 8, 7, source="test_micro_batches.py"):
        par.step(x, y[:7])
    local = sw.parallelize(module, plan, inputs="local")
    half = slice(4 * rank, 4 * rank + 4)
    found["local loss"] = local.step(x[half], y[half]).item()
    found["local"] = gradients(local)
    local.zero_grad()
    uneven = slice(0, 3) if rank == 0 else slice(3, 8)
    with warnings.catch_warnings(record=True, action="always") as caught:
        found["uneven loss"] = local.step(x[uneven], y[uneven]).item()
    found["gathered"] = [str(w.message) for w in caught]
    found["uneven"] = gradients(local)
    checked = sw.parallelize(module, plan, check_replicas=1)
    checked.step(x, y)
    found["checked"] = gradients(checked)
    with mock.patch.object(
        compiled, "compile_with_inductor", interpret_section
    ):  # no code is generated, which takes long
        made = sw.parallelize(module, plan, compile=True)
        made.step(x, y)
    found["compiled"] = gradients(made)
    par.train().zero_grad()
    with torch.autograd.graph.save_on_cpu():
        par.step(x, y)
    found["saved"] = gradients(par)
    par.zero_grad()
    found["scaled loss"] = par.step(x, y, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8)).item()
    found["scaled"] = [gradient / 2**8 for gradient in gradients(par)]
    par.zero_grad()
    with torch.no_grad(), raises(ShardwiseError, "par.step", "disabled"):
        par.step(x, y)
    return found


def test_every_way_to_pass_a_batch_gives_the_gradients_of_the_whole(run_ranks: RunRanks) -> None:
    ranks = run_ranks(calls_of_all_kinds, 2)
    module, x, y = labelled()
    loss = module(x, y)
    loss.backward()
    want = [p.grad for p in module.parameters()]
    for rank, found in enumerate(ranks):
        assert [found[key] for key in ("loss", "local loss", "uneven loss", "scaled loss")] == pytest.approx(
            [loss.item()] * 4, rel=1e-12
        )
        for key in ("step", "whole", "local", "uneven", "checked", "compiled", "saved", "scaled"):
            for own, expected in zip(found[key], want, strict=True):
                torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-13, msg=key)
        for own, expected in zip(found["twice"], want, strict=True):
            torch.testing.assert_close(own, 2 * expected, rtol=1e-10, atol=1e-13)
        assert found["hooked"] == 1, "a hook sees the gradient of the step, once"
        assert found["evaluated"] == pytest.approx([module(x[:n], y[:n]).item() for n in (8, 4, 3)], rel=1e-12)
        assert len(found["said"]) == (rank == 0)
        assert any("do not divide into micro-batches of 4" in text for text in found["gathered"]) == (rank == 0)
    # The count of labels ahead of two passes, the sum of losses in each, the gradients behind them, together.
    kinds = [kind for kind, _, _ in ranks[0]["messages"]]
    assert kinds == ["all_reduce"] * (1 + 2 + 1)


def keeps_of_steps() -> list[tuple[bool, bool]]:
    """Whether the stages of a call keep its batch, and its saved tensors: after a step, and after one that fails."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), torch.randn(8, 8)
    plan = None
    if dist.get_rank() == 0:
        plan = sw.plan(model, x, 2, loss=lambda y: y.square().mean(), mode="data_parallel", micro_batch=2)
    par = sw.parallelize(model, plan, loss=lambda y: y.square().mean())
    kept = []
    par.step(x)
    for worker in par._latest.workers:
        kept.append((worker.step is not None, bool(worker._saved or worker._running)))
    failing = mock.patch.object(type(par._latest.workers[0]), "backward", side_effect=RuntimeError("no memory"))
    with failing, pytest.raises(RuntimeError, match="memory"):
        par.step(x)
    for worker in par._latest.workers:
        kept.append((worker.step is not None, bool(worker._saved or worker._running)))
    return kept


def test_a_step_keeps_nothing_of_its_batch(run_ranks: RunRanks) -> None:
    assert run_ranks(keeps_of_steps, 2) == [[(False, False)] * 2] * 2
