"""Train small models of transformers on emulated GPUs, and on one CPU device, in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from models.tiny_models import MODELS, VOCABULARY, TinyModel, gpt2, llama, token_inputs
from models.zoo_transformers import TRANSFORMERS
from runtime.interpreted import interpret_section
from shardwise.graph.capture import Capture, capture
from shardwise.graph.to_float64 import Reference, reference_mode, to_float64
from shardwise.planning import execute
from shardwise.programs import activation_offload, state_groups
from shardwise.proof.runs import OPTIMIZERS
from shardwise.runtime import compiled, program_cache
from shardwise.runtime.local_shards import shard

BATCH, STEPS = 8, 4
COUNTED_STEPS = 2  # the last ones: the first capture, and compare what ranks call
TOLERANCE = 1e-9
NO_DROPOUT = " without dropout"  # behind the name of a model


class LossOf(nn.Module):
    """A model of transformers as a function of its tensors that returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


class Ring(nn.Module):
    """Causal attention over a ring of devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        query, key, value = (x.unflatten(-1, (4, 4)).transpose(1, 2) for x in self.qkv(hidden).chunk(3, -1))
        attend = sw.shard(F.scaled_dot_product_attention, "ring@cp")
        attended = attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(hidden + self.out(attended))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


OWN_MODELS = {  # beside those of all tests
    "ring": TinyModel(Ring, token_inputs, {}),
    "gpt2 of one layer": gpt2(layers=1),
    "llama of one layer": llama(layers=1),
}


@dataclass(frozen=True)
class Case:
    """How a model is trained. ``plan``, ``parallelize``: arguments of these functions; ``axes``: of the mesh;
    ``split``: whether the model's strategies are used; ``waits``: kind -> how often the host blocks in a step."""

    model: str
    axes: Mapping[str, int]
    plan: Mapping[str, Any] = field(default_factory=dict)
    parallelize: Mapping[str, Any] = field(default_factory=dict)
    split: bool = False
    waits: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = "adamw"
    host_inputs: bool = False
    clip: float | None = None

    @property
    def ranks(self) -> int:
        return sw.Mesh(**self.axes).num_devices


@dataclass
class Trained:
    """What a rank has after each step (its shards), and what its GPU saw. ``waits``: of each counted step."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]
    waits: list[Counter[str]] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    launches: Counter[str] = field(default_factory=Counter)
    layouts: Mapping[str, Any] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)


def tiny(name: str) -> TinyModel:
    name = name.removesuffix(NO_DROPOUT)
    return OWN_MODELS.get(name) or MODELS.get(name) or TRANSFORMERS[name]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = LossOf(tiny(name).build()).train().double()
    for module in model.modules() if name.endswith(NO_DROPOUT) else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch(name: str, step: int) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    inputs = tiny(name).inputs(BATCH)
    return {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}


@contextmanager
def small_models(module: ModuleType) -> Iterator[None]:
    """Graphs captured by ``module`` have float64 in place of every lower precision, and small tensors are offloaded
    as large ones are."""

    def widened(*args: Any, **kwargs: Any) -> Capture:
        found = capture(*args, **kwargs)
        return replace(found, graph=to_float64(found.graph))

    with (
        mock.patch.object(module, "capture", widened),
        mock.patch.object(activation_offload, "SMALLEST_BYTES", 1 << 8),
        mock.patch.object(state_groups, "SMALLEST_BYTES", 1 << 8),
    ):
        yield


def make_plan(case: Case) -> sw.Plan:
    mesh = sw.Mesh(**case.axes)
    choices = dict(case.plan)
    if "stages" not in choices:
        choices.setdefault("mesh", mesh)
    if case.split:
        strategies = {f"model.{path}": text for path, text in dict(tiny(case.model).strategies).items()}
        choices["strategies"] = {**strategies, **choices.get("strategies", {})}
    elif choices.keys().isdisjoint({"mode", "strategies", "stages", "search"}):
        choices["mode"] = "data_parallel"
    with small_models(execute):
        module, inputs = build(case.model), batch(case.model, 0)
        return sw.plan(module, (), mesh.num_devices, kwargs=inputs, **{"optimizer": case.optimizer, **choices})


def _copied(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}


def _train(
    case: Case, model: nn.Module, step: Callable[[dict[str, Tensor]], Tensor], noted: Callable[[], None]
) -> Trained:
    """Take the steps. ``noted`` is called around what counts as a step."""
    optimizer = OPTIMIZERS[case.optimizer.split()[0]](model.parameters())
    trained = Trained([], [], [])
    for number in range(STEPS):
        inputs = batch(case.model, number)
        if isinstance(model, sw.Parallel) and not case.host_inputs:
            inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        if case.parallelize.get("inputs") == "local":
            part, parts = model.coordinates["dp"], case.axes["dp"]
            inputs = {name: tensor.chunk(parts)[part] for name, tensor in inputs.items()}
        noted()
        loss = step(inputs)
        if case.clip is not None:
            norm = nn.utils.clip_grad_norm_ if not isinstance(model, sw.Parallel) else sw.clip_grad_norm
            norm(model.parameters() if not isinstance(model, sw.Parallel) else model, case.clip)
        gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        kept = [(name, gradient.clone()) for name, gradient in gradients]
        optimizer.step()
        optimizer.zero_grad()
        noted()
        trained.losses.append(float(loss))
        trained.gradients.append(_copied(kept))
        trained.parameters.append(_copied(model.named_parameters()))
    return trained


@cache
def train_alone(model: str, optimizer: str, clip: float | None) -> Trained:
    """Train on one CPU device."""
    alone = build(model)
    number = 0

    def step(inputs: dict[str, Tensor]) -> Tensor:
        nonlocal number
        with reference_mode(Reference(number)):
            loss: Tensor = alone(**inputs)
        loss.backward()
        number += 1
        return loss.detach()

    return _train(Case(model, {"dp": 1}, optimizer=optimizer, clip=clip), alone, step, lambda: None)


def train_all(cases: Mapping[str, tuple[Case, str]]) -> dict[str, Trained]:
    """On a rank with an emulated GPU: train every case under its plan, in JSON."""
    results = {}
    for name, (case, plan) in cases.items():
        try:
            results[name] = _train_on_gpu(case, plan)
        except Exception as error:
            error.add_note(f"in the case {name}")
            raise
    return results


def _train_on_gpu(case: Case, plan: str) -> Trained:
    from emulated_gpu.device import gpu, record

    record.clear()
    settings = {"compile": False, **case.parallelize}
    # Without Triton no code is generated: the sections of compiled programs run kernel by kernel.
    with small_models(program_cache), mock.patch.object(compiled, "compile_with_inductor", interpret_section):
        model = sw.parallelize(build(case.model), sw.Plan.from_json(plan) if dist.get_rank() == 0 else None, **settings)
        assert model.device == torch.device("cuda", dist.get_rank())
        seen: list[Counter[str]] = []
        launched: list[Counter[str]] = []

        def noted() -> None:
            seen.append(record.waits.copy())
            launched.append(Counter(gpu.launches()))

        trained = _train(case, model, lambda inputs: model.step(**inputs), noted)
    steps = list(zip(seen[::2], seen[1::2], strict=True))[-COUNTED_STEPS:]
    trained.waits = [after - before for before, after in steps]
    trained.launches = launched[-1] - launched[-2]
    torch.cuda.synchronize()
    trained.races = list(record.races)
    trained.devices = {p.device.type for p in model.parameters()}
    trained.layouts = {name: model.layouts[name] for name, _ in model.named_parameters()}
    trained.coordinates = dict(model.coordinates)
    return trained


def worst_error(found: Trained, alone: Trained) -> float:
    """Return the largest error of gradients and parameters, relative to the largest number of its kind."""
    worst = 0.0
    for kind in ("gradients", "parameters"):
        for own, whole in zip(getattr(found, kind), getattr(alone, kind), strict=True):
            largest = max(float(tensor.abs().max()) for tensor in whole.values())
            assert own.keys() <= whole.keys()
            for name, tensor in own.items():
                want = shard(whole[name], found.layouts[name], found.coordinates)
                assert tensor.shape == want.shape, name
                if tensor.numel():
                    error = float((tensor - want).abs().max()) / largest
                    worst = max(worst, error if error == error else float("inf"))  # NaN is the largest error
    return worst


def waits_of(trained: Trained) -> list[dict[str, int]]:
    """Return the waits of each counted step by kind, without their places."""
    steps = []
    for step in trained.waits:
        kinds: Counter[str] = Counter()
        for text, count in step.items():
            kinds[text.partition(" [")[0]] += count
        steps.append(dict(kinds))
    return steps
