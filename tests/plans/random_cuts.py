"""Random modules cut at random operators into pipelines, and models of the zoo: all are proven by ``sw.verify``."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from models.tiny_models import TinyModel, resnet, vit
from models.zoo import ZOO
from shardwise.graph.cut import free_values
from shardwise.plans.schedule import SCHEDULES
from shardwise.search.stage_partition import StageCut, StagePartition

WIDTH, CLASSES = 8, 12
# Behind an argmax and a norm gradients may vanish by mathematics: what is left, 1e-15, is rounding, and differs by 1e-9
# of the unit that errors are relative to, with stages as without. Mistakes are of 1e-3 and more.
TOLERANCE = 1e-8
MODELS: dict[str, TinyModel] = {**ZOO, "vit": vit(), "resnet": resnet()}


class RandomModule(nn.Module):
    """A few random layers. What one makes may be read by any later one, so values of all kinds cross and skip stages:
    activations, masks, indices, buffers, several at once; a layer may be used twice, so weights are tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.kinds = [rng.choice(sorted(LAYERS)) for _ in range(rng.randint(4, 10))]
        self.reads = [(rng.random(), rng.random()) for _ in self.kinds]
        self.tied = rng.random() < 0.3
        self.loss = rng.choice(["mean of labels that count", "sum", "mean"])
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(made_layer(kind) for kind in self.kinds)
        repeated = [i for i, kind in enumerate(self.kinds) if kind == "linear"]
        if len(repeated) > 1 and rng.random() < 0.4:
            self.layers[repeated[-1]] = self.layers[repeated[0]]
        self.head = nn.Linear(WIDTH, CLASSES)
        if self.tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = ids > 2
        pool = [self.tokens(ids)]
        for kind, layer, (first, second) in zip(self.kinds, self.layers, self.reads, strict=True):
            near = pool[int(len(pool) * (1 - first * first))] if first else pool[-1]
            pool.append(LAYERS[kind](layer, near, pool[int(second * len(pool))], mask, self))
        logits = self.head(pool[-1] + pool[0])
        if self.loss == "mean of labels that count":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.loss == "sum":
            return (logits.tanh() * mask[..., None]).sum()
        return F.mse_loss(logits.softmax(-1), F.one_hot(labels.clamp(min=0), CLASSES).to(logits.dtype))


def made_layer(kind: str) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "gate": lambda: nn.Linear(WIDTH, 2 * WIDTH),
        "attention": lambda: nn.Linear(WIDTH, 3 * WIDTH, bias=False),
        "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    }.get(kind, nn.Identity)()


def attended(layer: nn.Module, x: Tensor, other: Tensor, mask: Tensor, module: RandomModule) -> Tensor:
    query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer(x).chunk(3, -1))
    return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def gated(layer: nn.Module, x: Tensor, other: Tensor, mask: Tensor, module: RandomModule) -> Tensor:
    gate, value = layer(x).chunk(2, -1)
    return other + torch.sigmoid(gate) * value


def chosen(layer: nn.Module, x: Tensor, other: Tensor, mask: Tensor, module: RandomModule) -> Tensor:
    best = x.argmax(-1, keepdim=True)
    return other * module.get_buffer("scale") + x.gather(-1, best) * mask[..., None]


LAYERS: dict[str, Any] = {
    "linear": lambda layer, x, other, mask, module: torch.tanh(layer(x)) + other,
    "norm": lambda layer, x, other, mask, module: layer(x),
    "gate": gated,
    "attention": attended,
    "convolution": lambda layer, x, other, mask, module: layer(x.transpose(1, 2)).transpose(1, 2) + other,
    "frozen": lambda layer, x, other, mask, module: layer(x) * 0.5 + other,
    "dropout": lambda layer, x, other, mask, module: F.dropout(x, 0.3, module.training) + other,
    "masked": lambda layer, x, other, mask, module: x.masked_fill(~mask[..., None], 0.25) + other,
    "chosen": chosen,
    "buffer": lambda layer, x, other, mask, module: x * module.get_buffer("scale") + other.mean(1, keepdim=True),
}


def random_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CLASSES, (size, 6), generator=generator)
    labels = torch.randint(0, CLASSES, (size, 6), generator=generator)
    for i in range(size):
        labels[i, : i % 4] = -100
    return ids, labels


def random_parts(rng: random.Random) -> Any:
    """In the place of ``StagePartition.parts``: cuts before any operators, so that every stage reads parameters."""

    def parts(partition: StagePartition, cut: StageCut) -> list[list[str]]:
        graph, num_stages = partition.graph, len(cut.starts) - 1
        free, parameters = free_values(graph), {s.value for s in graph.sources if s.kind == "parameter"}
        reads = [i for i, op in enumerate(graph.ops) if parameters.intersection(op.operands)]
        counted = [i for i in reads if not free.issuperset(graph.ops[i].results)]
        # Of each stage one operator that reads parameters, and a cut somewhere between two of these.
        kept = sorted(rng.sample(counted, num_stages))
        cuts = [rng.randint(a + 1, b) for a, b in pairwise(kept)]
        bounds = [0, *cuts, len(graph.ops)]
        return [[op.name for op in graph.ops[a:b]] for a, b in pairwise(bounds)]

    return parts


def random_options(rng: random.Random) -> dict[str, Any]:
    """Stages, schedule, micro-batches and what is inside of a stage."""
    schedule = SCHEDULES[rng.choice(sorted(SCHEDULES))]
    stages = rng.choice([4] if schedule.stages_per_place == 2 else [2, 3, 4])
    size = rng.choice([1, 2])
    by_price = rng.random() < 0.2
    return {
        "cluster": stages // schedule.stages_per_place * size,
        "stages": stages,
        "schedule": schedule.name,
        "global_batch": 8,
        "micro_batch": rng.choice([1, 2]),
        "mesh": sw.Mesh(dp=size),
        "search": "dynamic_programming" if by_price else "sharding_propagation",
        "zero": rng.choice([None, None, 1, 2, 3]),
    }


def prove_cut(seed: int) -> str:
    """Why a random cut of a random module is not proven, or nothing. ``FEATURES`` counts what was met."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    module, options = RandomModule(seed).double(), random_options(rng)
    batch = random_batch(seed, 8)
    if rng.random() < 0.3:
        sw.recompute(module.layers[0], "cheap")
        FEATURES["made again"] += 1
    with mock.patch.object(StagePartition, "parts", random_parts(rng)), warnings.catch_warnings(action="ignore"):
        try:
            plan = sw.plan(module, batch, options.pop("cluster"), **options)
        except sw.PlanError as error:
            if "read some" in str(error):
                FEATURES["no cut"] += 1
                return ""
            raise
    note(plan)
    report = sw.verify(module, batch, plan, steps=2, tolerance=TOLERANCE)
    return "" if report.ok else str(report)


FEATURES: Counter[str] = Counter()


def note(plan: sw.Plan) -> None:
    FEATURES[plan.schedule] += 1
    FEATURES[f"{len(plan.stages)} stages"] += 1
    for stage in plan.stages:
        FEATURES["several values cross"] += len(stage.sends) > 1
        FEATURES["no floating point"] += any(not entry.dtype.startswith(("f", "bf")) for entry in stage.sends)
        FEATURES["values are carried"] += bool({e.name for e in stage.receives} & {e.name for e in stage.sends})
    names = [entry.name for stage in plan.stages for entry in stage.parameters]
    FEATURES["tied"] += len(set(names)) < len(names)


def prove_model(name: str, stages: int) -> str:
    """Why a model of the zoo in so many stages, of two devices each, is not proven, or nothing. What is no sum over
    micro-batches takes its batch in one."""
    torch.manual_seed(0)
    module, inputs = MODELS[name].build().train(), MODELS[name].inputs(8)
    schedule = "GPipe" if stages == 3 else "ZBVZeroBubble" if stages == 4 else "1F1B"
    places = stages // SCHEDULES[schedule].stages_per_place
    with warnings.catch_warnings(action="ignore"):
        asked: dict[str, Any] = {"stages": stages, "global_batch": 8, "mode": "data_parallel", "optimizer": "sgd"}
        try:
            plan = sw.plan(module, inputs, 2 * places, schedule=schedule, micro_batch=2, **asked)
        except sw.PlanError as error:
            if "not a sum over micro-batches" not in str(error):
                raise
            FEATURES["in one micro-batch"] += 1
            schedule = SCHEDULES[schedule].instead
            plan = sw.plan(module, inputs, 2 * places, schedule=schedule, micro_batch=8, **asked)
        report = sw.verify(module, (), plan, kwargs=inputs, steps=1)
    FEATURES[f"{name} at {stages}"] += report.ok
    return "" if report.ok else str(report)
