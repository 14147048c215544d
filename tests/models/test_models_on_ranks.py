"""Real models on real gloo ranks: what four processes compute is what plain PyTorch computes in one.

``test_zoo.py`` and ``make zoo`` verify plans on the virtual cluster; here the emitted programs run, in training mode,
with the dropout that a model has. Casts to float32 inside a model are float64 on both sides, and both draw the same
masks (``graph.to_float64``), so that everything is compared to 1e-9. Every model has a plan with strategies or one that
is searched, some have both; in ResNet and the U-Net rows of the images are split too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models import tiny_models
from models.zoo import DESCRIBED, ZOO
from shardwise.graph.capture import Capture, capture
from shardwise.graph.to_float64 import Reference, reference_mode, to_float64
from shardwise.layouts.conversions import Collective
from shardwise.planning import execute
from shardwise.programs.lifetimes import backward_collectives
from shardwise.proof.runs import OPTIMIZERS
from shardwise.runtime import program_cache
from shardwise.runtime.local_shards import shard

Case = tuple[str, str, str]  # the model, which plan of it, the plan as JSON
Step = dict[str, dict[str, Tensor]]  # kind ("output", "gradient", "parameter", "buffer") -> name -> tensor
Messages = list[tuple[str, str, int]]  # kind, axes and bytes of collectives
Passes = list[Messages]  # forward and backward
RANKS, BATCH, STEPS = 4, 8, 3
TOLERANCE = 1e-9
# An error is relative to a tensor's largest magnitude, but not to less than this part of the largest of its kind: some
# gradients are zero by mathematics.
LEAST = {"output": 1e-3, "gradient": 1e-6, "parameter": 1e-3, "buffer": 1e-3}

MODELS = {name: ZOO[name] for name in ("llama", "bert", "mixtral", "unet", "dlrm")}
MODELS["resnet"] = tiny_models.resnet()
LABELS: dict[str, tuple[str, ...]] = {
    "llama": ("searched", "hybrid", "two gathers"),
    "dlrm": ("by hand", "searched"),
    **dict.fromkeys(("bert", "mixtral"), ("by hand",)),
    "unet": ("rows",),
    "resnet": ("rows",),
}
ROWS = {"resnet": {"*.embedder.convolution": "y0@tp"}, "unet": {"first.0": "y0@tp"}}
# AdamW makes a step of full size of the noise of a gradient that is zero by mathematics: a bias before a norm.
OPTIMIZER = dict.fromkeys(MODELS, "adamw") | {"bert": "sgd", "resnet": "sgd", "unet": "sgd"}

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build().train().double()


def batch(name: str, step: int) -> dict[str, Any]:
    torch.manual_seed(100 + step)
    inputs = MODELS[name].inputs(BATCH)
    return {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in inputs.items()}


@contextmanager
def widened(module: ModuleType) -> Iterator[None]:
    """Graphs captured by the module have float64 in place of every lower precision."""

    def captured(*args: Any, **kwargs: Any) -> Capture:
        found = capture(*args, **kwargs)
        return replace(found, graph=to_float64(found.graph))

    with mock.patch.object(module, "capture", captured):
        yield


# Conversions of parameters that take two messages: states that every node has, in parts on its GPUs; and as searched.
ON_TWO_AXES: dict[str, dict[str, Any]] = {
    "hybrid": {"cluster": RANKS, "mode": "data_parallel", "zero": sw.Zero(3, over=("gpu",)), "recompute": "full"},
    "two gathers": {"cluster": DESCRIBED.with_nodes(2, 2), "search": "dynamic_programming"},
}


def plan_of(name: str, label: str, **choices: Any) -> sw.Plan:
    """By strategies, as searched, with split rows, or on two axes; or by the caller's choices."""
    by_hand = ROWS[name] if label == "rows" else MODELS[name].strategies
    if label == "searched":
        choices = {"cluster": DESCRIBED.with_nodes(2, 2), "search": "dynamic_programming"}
    elif label in ON_TWO_AXES:
        choices = {**ON_TWO_AXES[label], "mesh": sw.Mesh(node=2, gpu=2), "bucket_bytes": 2**13}
    elif not choices:
        choices = {"cluster": RANKS, "mesh": sw.Mesh(dp=2, tp=2), "strategies": by_hand}
    with widened(execute):
        return sw.plan(build(name), (), kwargs=batch(name, 0), optimizer=OPTIMIZER[name], **choices)


def tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def trained(name: str, model: nn.Module, call: Callable[..., Any]) -> list[Step]:
    """Three steps: what the model returned, its gradients, and its parameters and buffers after the update."""
    optimizer = OPTIMIZERS[OPTIMIZER[name]](model.parameters())
    steps = []
    for number in range(STEPS):
        output = call(number, batch(name, number))
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        gradients = tensors((key, p.grad) for key, p in model.named_parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        after = {"parameter": tensors(model.named_parameters()), "buffer": tensors(model.named_buffers())}
        steps.append({"output": tensors((str(i), x) for i, x in enumerate(leaves)), "gradient": gradients, **after})
    return steps


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def train_alone(name: str) -> list[Step]:
    model = build(name)

    def call(number: int, inputs: Mapping[str, Any]) -> Any:
        with reference_mode(Reference(number)):
            output = model(**inputs)
        loss_of(output).backward()
        return output

    return trained(name, model, call)


def messages(mesh: sw.Mesh, collectives: Iterable[Collective]) -> Messages:
    return [(one.kind, mesh.format_axes(one.axes), one.num_bytes) for one in collectives]


def train_on_rank(cases: list[Case]) -> list[tuple[list[Step], Passes, Passes]]:
    """On a rank: every case, the collectives of its last step, and those of its program."""
    found = []
    for name, _, text in cases:
        plan = sw.Plan.from_json(text)
        passes: Passes = []
        with widened(program_cache):
            par = sw.parallelize(build(name), plan if dist.get_rank() == 0 else None)

            def noted(par: sw.Parallel = par, passes: Passes = passes) -> None:
                passes.append(messages(par.plan.mesh, par._ranks.record or []))
                par._ranks.record = []

            def call(
                number: int, inputs: Mapping[str, Any], par: sw.Parallel = par, noted: Callable[[], None] = noted
            ) -> Any:
                last = number == STEPS - 1
                par._ranks.record = [] if last else None
                output = par(**inputs)
                if last:
                    noted()
                loss_of(output).backward()
                if last:
                    noted()
                return output

            steps = trained(name, par, call)
            program = par.latest.step.emitted.program
            sides = program.spmd.forward_collectives(), backward_collectives(program)
            found.append((steps, passes, [messages(par.plan.mesh, side) for side in sides]))
    return found


def worst_errors(plan: sw.Plan, rank: int, found: list[Step], alone: list[Step]) -> dict[str, float]:
    worst = dict.fromkeys(LEAST, 0.0)
    for own, whole in zip(found, alone, strict=True):
        for kind, least in LEAST.items():
            assert own[kind].keys() == whole[kind].keys(), kind
            largest = max((float(x.abs().max()) for x in whole[kind].values()), default=0.0)
            for name, tensor in own[kind].items():
                want = whole[kind][name]
                scale = max(float(want.abs().max()), least * largest)
                layout = plan.layouts.get(name) if kind != "output" else None
                if layout is not None:
                    want = shard(want, layout, plan.mesh.coordinates(rank))
                assert tensor.shape == want.shape, name
                difference = (tensor.double() - want.double()).abs()
                if difference.numel() and scale:
                    worst[kind] = max(worst[kind], float(difference.max()) / scale)
                assert scale or not difference.any(), name
    return worst


def check_collectives(plan: sw.Plan, ranks: list[Passes], program: Passes) -> None:
    """Those of the program in its order, which are those of the plan; of shards of several sizes the largest counts."""
    for number, backward in enumerate((False, True)):
        performed = []
        for together in zip(*(passes[number] for passes in ranks), strict=True):
            (same,) = {(kind, axes) for kind, axes, _ in together}
            performed.append((*same, max(num_bytes for _, _, num_bytes in together)))
        assert performed == program[number]
        planned = [(c.kind, c.axes, c.num_bytes) for c in plan.collectives(backward=backward)]
        assert sorted(performed) == sorted(planned)


def check_training(
    run_ranks: RunRanks, plans: Mapping[tuple[str, str], sw.Plan], function: Callable[..., Any] = train_on_rank
) -> None:
    """Train under plans, by model and label, on ranks and beside it in one process, and compare both."""
    (num_ranks,) = {plan.mesh.num_devices for plan in plans.values()}
    results = run_ranks(function, num_ranks, [(*key, plan.to_json()) for key, plan in plans.items()])
    alone = {name: train_alone(name) for name in {name for name, _ in plans}}
    for i, ((name, label), plan) in enumerate(plans.items()):
        for rank, found in enumerate(results):
            errors = worst_errors(plan, rank, found[i][0], alone[name])
            assert max(errors.values()) < TOLERANCE, f"{name}, {label}, rank {rank}: {errors}"
        check_collectives(plan, [found[i][1] for found in results], results[0][i][2])


@pytest.mark.long
def test_models_train_on_four_ranks_as_plain_pytorch_trains_them(run_ranks: RunRanks) -> None:
    check_training(run_ranks, {(name, label): plan_of(name, label) for name in LABELS for label in LABELS[name]})
