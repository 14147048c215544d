"""A precision is a part of the plan: of its file, digest, print and bytes; and what is wrong with one is said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from raising import raises
from runtime.mixed_models import BF16, FP16, FP32, FP64, MODELS, made, plan_of
from shardwise.api import step_memory
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.plans.file import plan_digest
from shardwise.programs import casts, differentiate, exchanges
from shardwise.programs.instructions import Compute, Convert, Depart, Instruction, sent_by
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.vjp import VjpCache

CAST = casts.cast
MIXED = sw.Precision(compute=BF16, parameter=FP32, reduce=FP32)


def program(plan: sw.Plan, name: str = "llama") -> RankProgram:
    graph = capture(made(name), MODELS[name][1](0), precision=plan.precision).graph
    return differentiate.differentiate(localize(program_of(plan, graph, training=True), 0), VjpCache())


def casts_of(instructions: tuple[Instruction, ...]) -> list[Compute]:
    return [i for i in instructions if isinstance(i, Compute) and i.origin.part == "cast"]


# ------------------------------------------------------------------------------------------------------------ the plan


def test_a_precision_is_in_the_file_the_print_and_the_digest() -> None:
    plain, mixed = (plan_of("llama", 2, precision, "zero") for precision in (sw.Precision(), MIXED))
    assert "precision" not in json.loads(plain.to_json())
    assert json.loads(mixed.to_json())["precision"] == {"compute": "bf16", "parameter": "f32", "reduce": "f32"}
    assert sw.Plan.from_json(mixed.to_json()) == mixed != plain
    assert sw.Plan.from_json(mixed.to_json()).precision == MIXED
    assert "  precision compute bf16, parameter f32, reduce f32\n" in str(mixed)
    assert "precision" not in str(plain)
    assert ("precision", "the model's", "compute bf16, parameter f32, reduce f32") in plain.diff(mixed).settings
    assert plan_of("llama", 2, sw.Precision(), "zero").digest == plain.digest


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("bf16", "precision is 'bf16'"),
        ({"compute": "bf16"}, "not an object of compute, parameter, reduce"),
        ({"compute": "i8", "parameter": "", "reduce": ""}, ("Precision(compute=torch.int8)", "carries no gradients")),
        ({"compute": 7, "parameter": "", "reduce": ""}, "precision: 7 is no dtype"),
        ({"compute": "bf17", "parameter": "", "reduce": ""}, "bf17"),
        ({"compute": "", "parameter": "", "reduce": ""}, "precision is empty"),
    ],
)
def test_a_file_with_a_wrong_precision_is_refused(entry: Any, said: str) -> None:
    data = json.loads(plan_of("llama", 2, MIXED, "dp").to_json()) | {"precision": entry}
    body = {key: value for key, value in data.items() if key not in ("format", "version", "digest")}
    with raises(sw.PlanError, said):
        sw.Plan.from_json(json.dumps({**data, "digest": plan_digest(body)}))


# --------------------------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize("way", ["dp", "zero", "tp", "searched"])
@pytest.mark.parametrize("name", ["gpt", "llama", "convolutions"])
@pytest.mark.sampled(3)
def test_every_parameter_is_cast_once_and_every_gradient_arrives_as_it_is_stored(name: str, way: str) -> None:
    step = program(plan_of(name, 2, MIXED, way), name)
    graph = step.spmd.graph
    cast = [one.operands[0] for one in casts_of(step.forward)]
    assert len(cast) == len(set(cast))
    sources = [s for s in graph.sources if s.kind in ("parameter", "input") and graph.by_name[s.value].stored]
    assert set(cast) == {s.value for s in sources if s.value in cast or graph.consumers[s.value]}
    assert {step.forms[name].dtype for name in step.gradients.values()} == {FP32}
    for instruction in (*step.forward, *step.backward):  # nothing computes with what is stored
        if isinstance(instruction, Compute) and instruction not in casts_of((instruction,)):
            assert not {s.value for s in sources}.intersection(instruction.operands)


def test_bytes_of_messages_are_those_of_the_dtypes_that_travel() -> None:
    for precision, gathered, reduced in (
        (sw.Precision(), 4, 4),
        (MIXED, 2, 4),
        (sw.Precision(BF16), 2, 2),
        (sw.Precision(parameter=FP64, reduce=FP64), 4, 8),
    ):
        plan = plan_of("llama", 2, precision, "zero")
        step = program(plan)
        for instruction in (*step.forward, *step.backward):
            if isinstance(instruction, (Convert, Depart)) and instruction.of_parameters:
                found = {step.forms[name].dtype.itemsize for name in instruction.operands}
                assert found == {reduced if instruction.backward else gathered}
                numel = sum(step.spmd.graph.by_name[conversion.origin].numel for conversion in instruction.conversions)
                assert sum(one.num_bytes for one in sent_by(instruction)) == numel * next(iter(found))
        listed = sum(one.num_bytes for one in plan.collectives() if one.kind == "all_gather")
        plain = plan_of("llama", 2, sw.Precision(), "zero")
        assert listed * 4 == gathered * sum(one.num_bytes for one in plain.collectives() if one.kind == "all_gather")


def test_memory_counts_what_is_stored_and_its_copy() -> None:
    model, batch = made("llama"), MODELS["llama"][1](0)
    numel = sum(p.numel() for p in model.parameters())
    parts = step_memory(model, batch, plan_of("llama", 1, MIXED, "dp")).peak_of["forward"].parts
    plain = step_memory(model, batch, plan_of("llama", 1, sw.Precision(), "dp")).peak_of["forward"].parts
    assert plain["parameters"] == 4 * numel
    assert 5 * numel < parts["parameters"] <= 6 * numel  # the last ones are cast after the peak


def test_traffic_is_priced_in_the_dtypes_that_travel() -> None:
    def traffic(precision: sw.Precision) -> float:
        with torch.device("meta"):
            model, x = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2))), torch.empty(65536, 4096)
        cluster, mesh = sw.Cluster.load("h100-1x8"), sw.Mesh(gpu=8)
        fixed = {"mesh": mesh, "strategies": {"*": "m@gpu"}, "search": "dynamic_programming", "precision": precision}
        plan = sw.plan(model, x, cluster, loss=lambda y: y.float().mean(), **fixed)
        return plan.prediction.traffic  # of the second layer, which hides behind the first

    narrow, wide, plain = (traffic(p) for p in (sw.Precision(BF16, FP32), MIXED, sw.Precision()))
    assert 0 < narrow < wide <= plain


# ----------------------------------------------------------------------------------------------------------- the proof


@pytest.mark.parametrize("way", ["dp", "zero", "tp"])
def test_verify_proves_the_casts(way: str) -> None:
    report = prove(made("llama"), MODELS["llama"][1](0), plan_of("llama", 2, MIXED, way))
    assert report.in_dtypes is not None
    assert report.in_dtypes.judged
    assert "in the plan's precision" in str(report)


class Scored(nn.Module):
    """Norms and a loss over features that are split, which computes in other operators then."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(16, 32), nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = F.rms_norm(self.up(x), (32,), self.weight)
        return F.cross_entropy(scores, labels) + F.softmax(scores * 2, -1).square().sum()


@pytest.mark.filterwarnings("ignore::shardwise.errors.PlanWarning")
@pytest.mark.parametrize("precision", [sw.Precision(BF16), MIXED, sw.Precision(parameter=BF16)])
def test_verify_proves_what_replaces_operators_in_lower_precision(precision: sw.Precision) -> None:
    batch = torch.randn(8, 16), torch.randint(32, (8,))
    module = Scored()
    plan = sw.plan(module, batch, 2, mesh=sw.Mesh(tp=2), strategies={"up": "n@tp"}, precision=precision)
    report = prove(module, batch, plan)
    assert report.ok, str(report)
    assert [message.kind for message in report.forward].count("all_reduce") > 3, "features are split"


def cast_to(dtype: torch.dtype) -> Any:
    """Casts to another dtype than the one that is asked for."""

    def wrong(*args: Any) -> Compute:
        made = CAST(*args)
        return replace(made, kwargs=(("dtype", dtype), *made.kwargs[1:]))

    return wrong


def zeros_for(*args: Any) -> Compute:
    return replace(CAST(*args), target=torch.ops.aten.zeros_like.default)


def test_verify_finds_a_cast_that_is_missing_or_wrong() -> None:
    model, batch, plan = made("llama"), MODELS["llama"][1](0), plan_of("llama", 2, MIXED, "zero")
    with (
        mock.patch.object(differentiate, "cast", cast_to(FP32)),  # parameters as they are stored
        pytest.raises(RuntimeError, match="dtype"),
    ):
        sw.verify(model, batch, plan, steps=1)
    with mock.patch.object(exchanges, "cast", cast_to(BF16)):  # gradients as they are computed
        report = sw.verify(model, batch, plan, steps=1).in_dtypes
    assert report is not None
    assert not report.ok
    assert "num_bytes=1024) planned" in report.wrong_messages
    assert "num_bytes=512) sent" in report.wrong_messages
    with mock.patch.object(casts, "cast", cast_to(BF16)):  # what is accumulated
        report = sw.verify(model, batch, plan_of("llama", 2, sw.Precision(BF16, FP32), "dp"), steps=1).in_dtypes
    assert report is not None
    assert "is bf16 on rank 0, f32 alone" in report.wrong_dtypes[0]
    with mock.patch.object(casts, "cast", zeros_for):  # a gradient that is lost on the way
        report = sw.verify(model, batch, plan_of("llama", 2, sw.Precision(BF16, FP32), "dp"), steps=1).in_dtypes
    assert report is not None
    assert report.beyond


STAGED: dict[str, tuple[str, dict[str, Any]]] = {
    "1F1B, gpt with ZeRO 1": ("gpt", {"stages": 2, "schedule": "1F1B", "micro_batch": 2, "zero": 1}),
    "halves of backward, tied tables": ("gpt", {"stages": 4, "schedule": "ZBVZeroBubble", "micro_batch": 2}),
    "uneven micro-batches": ("llama", {"stages": 2, "schedule": "GPipe", "micro_batch": 4}),
    "one micro-batch of several": ("llama", {"stages": 2, "schedule": "GPipe", "micro_batch": 8, "global_batch": 16}),
    "passes with ZeRO 2": ("llama", {"micro_batch": 2, "zero": 2}),
    "uneven passes": ("gpt", {"micro_batch": 4, "zero": 3}),
}


def in_stages(case: str, precision: sw.Precision) -> tuple[nn.Module, Any, sw.Plan]:
    name, options = STAGED[case]
    mesh = {"mesh": sw.Mesh(dp=2)} if "stages" in options else {}
    settings: dict[str, Any] = {"mode": "data_parallel", "optimizer": "sgd", "precision": precision, **mesh, **options}
    model, batch = made(name), MODELS[name][1](0)
    plan = sw.plan(model, batch, 4 if "stages" in options else 2, **settings)
    return model, tuple(x[:6] for x in batch) if "uneven" in case else batch, plan


@pytest.mark.parametrize("compute", [BF16, FP16])
@pytest.mark.parametrize("case", STAGED)
@pytest.mark.sampled(2)
def test_verify_proves_the_casts_of_stages_and_passes(case: str, compute: torch.dtype) -> None:
    report = prove(*in_stages(case, sw.Precision(compute, FP32, FP32)))
    assert report.in_dtypes is not None
    found = {(difference.kind, difference.name) for difference, _ in report.in_dtypes.judged}
    trained = [name for name, parameter in made(STAGED[case][0]).named_parameters() if parameter.requires_grad]
    assert found >= {("gradient", name) for name in trained}
    assert any(kind == "loss" for kind, _ in found)
    assert max(bound for _, bound in report.in_dtypes.judged) < 1, "what is lost or doubled is seen"


@pytest.mark.parametrize("case", ["1F1B, gpt with ZeRO 1", "passes with ZeRO 2"])
def test_verify_finds_a_wrong_cast_of_stages_and_passes(case: str) -> None:
    model, batch, plan = in_stages(case, MIXED)
    if (
        "stages" in STAGED[case][1]
    ):  # where all is reduced once: sums of passes as they are kept, not as they are reduced
        _, _, other = in_stages(case, sw.Precision(BF16, FP32, BF16))
        with mock.patch.object(exchanges, "cast", cast_to(FP32)):
            report = sw.verify(model, batch, other, steps=1).in_dtypes
        assert report is not None
        assert "num_bytes" in report.wrong_messages
    _, _, other = in_stages(case, sw.Precision(BF16, FP32))
    with mock.patch.object(casts, "cast", zeros_for):  # gradients that are lost on the way
        report = sw.verify(model, batch, other, steps=1).in_dtypes
    assert report is not None
    assert report.beyond
    with (
        mock.patch.object(differentiate, "cast", cast_to(FP32)),  # parameters as they are stored
        pytest.raises(RuntimeError, match=r"dtype|scalar type"),
    ):
        sw.verify(model, batch, plan, steps=1)


def test_what_one_device_can_not_run_is_said() -> None:
    report = sw.verify(made("convolutions"), MODELS["convolutions"][1](0), plan_of("convolutions", 2, MIXED, "dp"))
    assert report.in_dtypes is not None
    assert report.in_dtypes.not_run
    assert "one device cannot run it" in str(report)


def test_a_backward_that_one_device_can_not_run_is_said() -> None:
    backward = torch.Tensor.backward

    def lacking(loss: torch.Tensor) -> None:
        if loss.dtype != FP64:
            raise RuntimeError("there is no kernel for these dtypes")
        backward(loss)

    with mock.patch.object(torch.Tensor, "backward", lacking):
        report = sw.verify(made("llama"), MODELS["llama"][1](0), plan_of("llama", 2, MIXED, "dp"), steps=1)
    assert report.is_equal
    assert report.in_dtypes is not None
    assert "there is no kernel" in report.in_dtypes.not_run


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["compute", "parameter", "reduce"])
def test_a_dtype_without_gradients_is_refused(name: str, dtype: torch.dtype) -> None:
    with raises(sw.ShardwiseError, f"Precision({name}={dtype})", "gradients"):
        sw.Precision(**{name: dtype})


def test_the_name_of_a_dtype_is_not_a_dtype() -> None:
    with raises(sw.ShardwiseError, "compute='bfloat16'", "not a dtype", fix="torch."):
        sw.Precision(compute="bfloat16")  # type: ignore[arg-type]
    with raises(sw.ShardwiseError, "autocast=torch.bfloat16", "torch.autocast", fix="inside of torch.autocast"):
        sw.Precision(autocast=BF16)  # type: ignore[arg-type]


def test_storage_that_loses_updates_is_announced() -> None:
    with pytest.warns(sw.errors.PlanWarning, match=r"stored as torch\.bfloat16 and used as torch\.float32"):
        plan_of("llama", 2, sw.Precision(compute=FP32, parameter=BF16), "dp")


def test_complex_parameters_have_no_precision() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.turn).abs().sum()

    with raises(sw.errors.CaptureError, "parameter turn", "is complex", fix="torch.view_as_real"):
        sw.plan(Rotated(), torch.ones(4, 4), 2, precision=MIXED, search="sharding_propagation")
    assert sw.plan(Rotated(), torch.ones(4, 4), 2, search="sharding_propagation")


def test_weights_in_integers_stay_what_they_are() -> None:
    class Quantised(nn.Module):
        """Eight-bit weights with a scale per row, as weight-only quantisation keeps them."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-128, 128, (8, 4), dtype=torch.int8), requires_grad=False)
            self.register_buffer("scale", torch.rand(8, 1))
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).T).float().mean()

    plan = sw.plan(Quantised(), torch.rand(4, 4), 2, precision=MIXED, search="sharding_propagation")
    dtypes = {entry.name: entry.dtype for entry in (*plan.parameters, *plan.buffers)}
    assert dtypes == {"weight": "i8", "head.weight": "f32", "head.bias": "f32", "scale": "f32"}
    assert sw.verify(Quantised(), torch.rand(4, 4), plan).ok


def test_inputs_of_the_module_are_cast_and_targets_are_not() -> None:
    graph = capture(
        nn.Linear(4, 4),
        (torch.ones(2, 4),),
        {"target": torch.ones(2, 4)},
        loss=lambda y, target: (y - target).square().mean(),
        precision=sw.Precision(compute=FP16),
    ).graph
    assert (graph.by_name["args[0]"].dtype, graph.by_name["args[0]"].stored) == (FP16, FP32)
    assert (graph.by_name["kwargs['target']"].dtype, graph.by_name["kwargs['target']"].stored) == (FP32, None)


LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "binary cross entropy": lambda y, target: F.binary_cross_entropy_with_logits(y, target.sigmoid()),
    "cross entropy with probabilities": lambda y, target: F.cross_entropy(y, target.softmax(-1)),
    "soft margin": lambda y, target: F.soft_margin_loss(y, target.sign()),
    "of low targets": lambda y, target: F.mse_loss(y, target.to(BF16)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_loss_has_the_dtype_that_it_has_alone(name: str) -> None:
    module, batch = nn.Linear(8, 4), (torch.randn(8, 8), torch.randn(8, 4))
    for options in ({}, {"micro_batch": 2}):
        plan = sw.plan(
            module, batch, 2, loss=LOSSES[name], mode="data_parallel", precision=sw.Precision(compute=BF16), **options
        )
        prove(module, batch, plan, loss=LOSSES[name])
