"""Plans of stages on real gloo ranks: every schedule of torch trains as one device does, with gradients clipped by the
norm over all stages, batches that do not divide, and outputs brought to all ranks."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models import zoo_transformers
from models.tiny_models import gpt2, llama, resnet, vit, without_dropout
from raising import raises
from runtime.interpreted import interpret_section
from runtime.staged_model import Staged, staged_batch
from shardwise.plans.schedule import SCHEDULES, schedule_of
from shardwise.runtime import compiled
from shardwise.runtime.compiled import CompiledKernels
from shardwise.runtime.local_shards import shard

# Sums of some hundred terms in another order, in float64, through three steps of AdamW.
TOLERANCE = 1e-11
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def trained(
    module: torch.nn.Module, batches: list[Batch], *, in_float32: bool = False, in_passes: bool = False, **options: Any
) -> tuple[sw.Parallel, torch.nn.Module, float]:
    """This rank's part and one device after some steps, and how far apart they are: losses, norms, parameters.
    ``in_float32``: the model computes norms in it, whatever its parameters are; Adam would divide by its rounding;
    ``in_passes``: one device takes the same micro-batches, each of which has statistics of its own."""
    args, kwargs = batches[0]
    reference = copy.deepcopy(module)
    plan = sw.plan(module, args or kwargs, dist.get_world_size(), **options) if dist.get_rank() == 0 else None
    par = sw.parallelize(module, plan)
    make: Any = torch.optim.SGD if in_float32 else torch.optim.AdamW
    optimizer, alone = make(par.parameters(), lr=1e-2), make(reference.parameters(), lr=1e-2)
    worst = 0.0
    for args, kwargs in batches:
        loss = par.step(*args, **kwargs)
        assert loss is not None
        norm = torch.nn.utils.clip_grad_norm_(par.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        wanted = differentiated(reference, (args, kwargs), 8 // options["micro_batch"] if in_passes else 1)
        wanted_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        alone.step()
        alone.zero_grad()
        assert wanted_norm > 0.1, "nothing is clipped"
        # transformers casts logits to float32 before its losses.
        is_rounded = in_float32 or loss.dtype == torch.float32
        assert float((loss - wanted.detach()).abs()) < (1e-6 if is_rounded else TOLERANCE)
        worst = max(worst, float((norm - wanted_norm).abs()))
    whole = dict(reference.named_parameters())
    names = 0
    for name, parameter in par.named_parameters():
        layouts = [stage.layouts[name] for stage in own_stages(par) if name in stage.layouts]
        stage = next(stage for stage in own_stages(par) if name in stage.layouts)
        coordinates = stage.placement.coordinates(dist.get_rank())
        want = shard(whole[name].detach(), layouts[0], coordinates)
        worst = max(worst, float((parameter.detach() - want).abs().max()))
        names += 1
    assert 0 < names < len(whole), "a rank holds its stages alone"
    return par, reference, worst


def differentiated(module: torch.nn.Module, batch: Batch, passes: int) -> Tensor:
    """The loss of one device, as the mean over equal passes; adds to its gradients."""
    (args, kwargs), losses = batch, []
    for number in range(passes):
        own = {name: x.chunk(passes)[number] for name, x in kwargs.items()}
        output = module(*(x.chunk(passes)[number] for x in args), **own)
        loss = (output["loss"] if isinstance(output, dict) else output[0]) / passes
        loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def own_stages(par: sw.Parallel) -> list[Any]:
    return [stage for stage in par.plan.stages if dist.get_rank() in stage.placement.ranks]


def with_schedules(names: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    options: dict[str, Any] = {"micro_batch": 2, "search": "sharding_propagation"}
    for name in names:
        schedule = schedule_of(name)
        torch.manual_seed(0)
        batches: list[Batch] = [(staged_batch(8, seed), {}) for seed in range(3)]
        stages = 2 * schedule.stages_per_place
        par, reference, found[name] = trained(Staged().double(), batches, stages=stages, schedule=name, **options)
        kept = [worker.most_kept for ready in par._ready.values() for worker in ready.workers]
        if name in ("GPipe", "1F1B"):
            first = dist.get_rank() == 0
            assert kept == ([4] if name == "GPipe" else [2 if first else 1]), (name, kept)
        if name == "1F1B":
            check_calls(par, reference)
            check_accumulated(par, reference)
            check_predicted()
            check_scaled(par, reference)
            check_compiled(par.plan, reference)
        if name == "Solved":
            check_solved(par, reference)
        if name in NAMES[:2]:
            check_dropout(name, stages)
        if name == "ZBVZeroBubble":
            check_outputs(par, reference)
            with raises(sw.PlanError, "GPipe, 1F1B"):
                sw.parallelize(copy.deepcopy(reference), par.plan, compile=True)
    return found


def check_step(
    par: sw.Parallel, reference: torch.nn.Module, batch: tuple[Tensor, Tensor], scale: float = 1.0, **how: Any
) -> Tensor | None:
    """A step from no gradients: its loss and, times ``scale``, its gradients are those of one device."""
    par.zero_grad()
    reference.zero_grad()
    loss = par.step(*batch, **how)
    wanted, _ = reference(*batch)
    wanted.backward()
    assert loss is None or abs(float(loss - wanted)) < TOLERANCE
    check_gradients(par, reference, scale)
    return loss


def check_gradients(par: sw.Parallel, reference: torch.nn.Module, scale: float = 1.0) -> None:
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in par.named_parameters():
        want, have = gradients[name], parameter.grad
        assert want is not None
        assert have is not None
        assert float((have / scale - want).abs().max()) < TOLERANCE, name


def check_calls(par: sw.Parallel, reference: torch.nn.Module) -> None:
    """Another batch, one that does not divide, the loss where it is made, and states by name."""
    ids, labels = staged_batch(9, seed=7)
    loss = check_step(par, reference, (ids, labels), loss="last")
    assert (loss is not None) == (dist.get_rank() == 1)
    with (
        pytest.warns(sw.errors.PlanWarning, match="2 stages needs 2 micro-batches")
        if dist.get_rank() == 0
        else nullcontext()
    ):
        par.step(*staged_batch(2))
    par.zero_grad()
    check_outputs(par, reference)
    assert set(par.state_dict()) < set(reference.state_dict())
    with raises(sw.ShardwiseError, "= par.step"):
        par(ids, labels)
    with raises(sw.ShardwiseError, '"all"'):
        par.step(ids, labels, loss="first")  # type: ignore[arg-type]
    thawed = copy.deepcopy(reference).requires_grad_(False)
    thawed.tokens.requires_grad_(True)
    split = sw.parallelize(thawed, par.plan if dist.get_rank() == 0 else None)
    split.requires_grad_(True)
    with raises(sw.ShardwiseError, "sw.parallelize", "frozen"):
        split.step(*staged_batch(8))


def check_accumulated(par: sw.Parallel, reference: torch.nn.Module) -> None:
    par.zero_grad()
    reference.zero_grad()
    for batch in (staged_batch(8, seed=1), staged_batch(5, seed=2)):
        par.step(*batch)
        loss, _ = reference(*batch)
        loss.backward()
    check_gradients(par, reference)
    par.zero_grad()


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"scores": x, "first": first > 0, "classes": 6}


def squared(output: dict[str, Any], wanted: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(output["scores"], wanted)


def check_predicted() -> None:
    """What the module returns, without its loss: tensors of several stages, and what is no tensor."""
    module, x = Scores().double(), torch.randn(8, 6).double()
    plan = sw.plan(module, (x, x), 2, loss=squared, stages=2, micro_batch=2) if dist.get_rank() == 0 else None
    par = sw.parallelize(copy.deepcopy(module), plan, loss=squared)
    par = copy.deepcopy(par)  # with process groups that are shared
    with raises(sw.errors.LaunchError, "cannot be", "be pickled"):
        pickle.dumps(par)
    for size in (8, 3):
        found, want = par.predict(x[:size]), module(x[:size])
        assert float((found["scores"] - want["scores"]).abs().max()) < TOLERANCE
        assert torch.equal(found["first"], want["first"])
        assert found["classes"] == 6
    loss = par.step(x, x)
    assert abs(float(loss) - float(squared(module(x), x))) < TOLERANCE


def check_dropout(schedule: str, stages: int) -> None:
    """Random numbers are those of one device with the whole batch, call after call."""
    model, batch = Staged(dropout=0.3).double(), staged_batch(8, seed=4)
    asked: dict[str, Any] = {"stages": stages, "schedule": schedule, "micro_batch": 2, "search": "sharding_propagation"}
    pars = [sw.parallelize(copy.deepcopy(model), sw.plan(model, batch, 2, **how), seed=3) for how in (asked, ALONE)]
    losses = []
    for _ in range(2):
        own, alone = (par.step(*batch) for par in pars)
        assert abs(float(own) - float(alone)) < TOLERANCE
        losses.append(float(own))
    assert losses[0] != losses[1], "other numbers in every call"
    check_gradients(*pars)


ALONE = {"mode": "stand_alone"}


def check_compiled(plan: sw.Plan, reference: torch.nn.Module) -> None:
    par = sw.parallelize(copy.deepcopy(reference), plan, compile=True)
    with mock.patch.object(compiled, "compile_with_inductor", interpret_section):
        for _ in range(2):
            assert check_step(par, reference, staged_batch(8, seed=6)) is not None
    owns = [own for ready in par._ready.values() for w in ready.workers for own in w.programs.values()]
    made = [own.compiled.in_passes.compiling.variant for own in owns if own.compiled.in_passes.compiling is not None]
    programs = [one.program for one in made if one is not None]
    assert len(programs) == len(owns) > 0
    for program in programs:
        assert any(
            isinstance(getattr(i, "target", None), CompiledKernels) for i in (*program.forward, *program.backward)
        )


def check_scaled(par: sw.Parallel, reference: torch.nn.Module) -> None:
    """A scaled loss: gradients are those of one device times a power of two; an infinity of one stage is one of all."""
    optimizer = torch.optim.SGD(par.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert check_step(par, reference, staged_batch(7, seed=5), scale=2.0**10, scaler=scaler) is not None
    before = [p.detach().clone() for p in par.parameters()]
    if dist.get_rank() == 0:
        (gradient, *_) = (p.grad for p in par.parameters() if p.grad is not None)
        gradient.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, b) for a, b in zip(before, par.parameters(), strict=True)), "all stages skip the step"
    par.zero_grad()


def check_solved(par: sw.Parallel, reference: torch.nn.Module) -> None:
    """A place did what the plan's order says; a batch of another size runs in an order for any."""
    (ready,) = par._ready.values()
    run = ready.runs._schedule.pipeline_order
    assert [" ".join(map(str, run[place])) for place in range(2)] == list(par.plan.order)
    says = pytest.warns(
        sw.errors.PlanWarning, match="of 4 micro-batches, and there are 3: such a step runs as ZBVZeroBubble"
    )
    with says if dist.get_rank() == 0 else nullcontext():
        assert check_step(par, reference, staged_batch(6, seed=3)) is not None


def check_outputs(par: sw.Parallel, reference: torch.nn.Module) -> None:
    """Evaluation through the stages: outputs are whole on every rank."""
    ids, labels = staged_batch(3, seed=9)
    par.eval()
    loss, logits = par(ids, labels)
    wanted, wanted_logits = reference.eval()(ids, labels)
    assert abs(float(loss - wanted)) < TOLERANCE
    assert float((logits - wanted_logits).abs().max()) < TOLERANCE
    assert float((par(ids) - wanted_logits).abs().max()) < TOLERANCE
    par.train()
    reference.train()


NAMES = ["1F1B", "ZBVZeroBubble", "Solved"]


@pytest.mark.parametrize(
    "names",
    [
        NAMES,
        pytest.param([name for name in SCHEDULES if name not in NAMES], marks=pytest.mark.long),
        pytest.param(["Interleaved1F1B:3", "LoopedBFS:3"], marks=pytest.mark.long),
    ],
)
def test_every_schedule_trains_as_one_device_does(names: list[str], run_ranks: RunRanks) -> None:
    for found in run_ranks(with_schedules, 2, names):
        assert list(found) == names
        assert max(found.values()) < TOLERANCE, found


TINY = {"gpt2": gpt2(), "llama": llama(), "t5": zoo_transformers.t5(), "vit": vit(), "resnet": resnet()}


def model_of(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of transformers without dropout, whose eager masks are others, and its batch of 8."""
    torch.manual_seed(0)
    module = TINY[name].build().double()
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in TINY[name].inputs(8).items()}
    if name == "t5":  # shifting labels looks at all of them
        inputs = {**inputs, "decoder_input_ids": inputs["labels"].clamp(min=0)}
    return without_dropout(module), inputs


def in_float32(name: str) -> bool:
    """Whether a model computes norms in it, whatever its parameters are."""
    return name == "t5"


def trains(name: str, options: dict[str, Any]) -> float:
    module, inputs = model_of(name)
    options = {"in_float32": in_float32(name), "in_passes": name == "resnet", **options}
    par, _, worst = trained(module, [((), inputs)] * 3, **options)
    meshes = [stage.mesh for stage in par.plan.stages]
    for stage, mesh in zip(par.plan.stages, meshes, strict=True):
        cut = {axis for layout in stage.layouts.values() for dim in layout.dims for atom in dim for axis in atom.axes}
        assert cut == set(mesh.sub_axes), "every axis splits something in every stage"
    return worst


@pytest.mark.long
@pytest.mark.parametrize(("name", "zero"), [("gpt2", 1), ("gpt2", 2), ("llama", 1), ("t5", 2)])
def test_pipeline_by_data_parallel_with_zero(name: str, zero: int, run_ranks: RunRanks) -> None:
    """Two stages, each on two ranks that store parameters in parts: gathered once a step, or in every micro-batch."""
    options = {"stages": 2, "micro_batch": 2, "mode": "data_parallel", "mesh": sw.Mesh(dp=2), "zero": zero}
    found = max(run_ranks(trains, 4, name, options))
    assert found < (1e-6 if name == "t5" else 1e-9)


CASES = [*TINY, "gpt2 and its head", "llama and its head"]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_pipeline_by_data_by_tensor_parallel(case: str, run_ranks: RunRanks) -> None:
    """Two stages of 2 x 2 ranks. The statistics of a residual network are those of a micro-batch in both runs. Heads
    that are split sum the losses of transformers, which are in float32, in another order."""
    name, _, with_head = case.partition(" and ")
    strategies = dict(TINY[name].strategies) or {"*.convolution": "co@tp", "classifier.1": "n@tp"}
    if name in ("gpt2", "llama") and not with_head:
        strategies = {key: text for key, text in strategies.items() if "layers" in key or ".h." in key}
    options: dict[str, Any] = {
        "stages": 2,
        "micro_batch": 2 if name != "resnet" else 4,
        "mesh": sw.Mesh(dp=2, tp=2),
        "strategies": strategies,
        "zero": 1,
        "in_float32": in_float32(name) or bool(with_head),
    }
    bound = 1e-6 if options["in_float32"] else 1e-9
    assert max(run_ranks(trains, 8, name, options)) < bound
