"""``sw.rule`` and ``sw.check_rule``: users' operators get what our tables have; our own tables are checked alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from proving import prove
from raising import raises
from rules.checking import REMAINING, check, faults
from rules.samples import SAMPLES
from shardwise.rules.binding import build, single
from shardwise.rules.tables import RULES

aten = torch.ops.aten


class Scale(torch.autograd.Function):
    """``x * w[:, None]`` with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w.unsqueeze(-1), (gradient * x).sum(-1)


@torch.library.custom_op("shardwise_test::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return Scale.apply(x, w)


@scale.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


scale.register_autograd(
    lambda ctx, gradient: Scale.backward(ctx, gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("shardwise_test::total", mutates_args=())
def total(x: Tensor, power: int) -> Tensor:
    return x.pow(power).sum(-1)


@total.register_fake
def _(x: Tensor, power: int) -> Tensor:
    return x.new_empty(x.shape[:-1])


def _total_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.power = inputs[1]


total.register_autograd(
    lambda ctx, g: (g.unsqueeze(-1) * ctx.power * ctx.saved_tensors[0].pow(ctx.power - 1), None),
    setup_context=_total_setup,
)

SCALED = (torch.randn(4, 5, requires_grad=True), torch.randn(4, requires_grad=True))
SCALE_RULE = ("m n, m -> m n", {"linear": ((0,), (1,))})


# ------------------------------------------------------------------------------------------------------------ reports


def test_an_operator_without_a_rule_misses_what_slicing_shows() -> None:
    report = sw.check_rule(scale, SCALED)
    assert report.ok
    assert report.num_splits == 0
    assert [(m.operands, m.becomes) for m in report.missing] == [
        ((("x", 0), ("w", 0)), "slices of dim 0"),
        ((("x", 1),), "slices of dim 1"),
    ]
    report = sw.check_rule(total, (torch.randn(4, 5, requires_grad=True), 2))
    assert [(m.operands, m.becomes) for m in report.missing] == [
        ((("x", 0),), "slices of dim 0"),
        ((("x", 1),), "sum of the parts"),
    ]


def test_a_right_rule_has_nothing_wrong_and_nothing_missing() -> None:
    text, keywords = SCALE_RULE
    with sw.rule(scale, text, **keywords):
        report = sw.check_rule("shardwise_test::scale", [SCALED, {"x": SCALED[0], "w": SCALED[1]}])
    assert (report.ok, report.wrong, report.missing) == (True, (), ())
    assert report.num_splits == 2 * 9  # two factors on three meshes, both at once, and two linear groups
    assert report.max_error < 1e-14
    assert "18 splits, 0 wrong, 0 missing" in str(report)


@pytest.mark.parametrize(
    ("text", "keywords", "strategy", "where"),
    [
        ("m n, m -> m n", {"linear": ((0, 1),)}, "P@a", "on rank"),
        ("m n, k -> m n", {"reduction": {"k": "sum"}}, "k@a", ""),
        ("n m, m -> n m", {}, "n@a", ""),
    ],
    ids=["not jointly linear", "not a reduction", "the wrong dim"],
)
def test_a_wrong_rule_is_told_by_split_error_and_place(text: str, keywords: Any, strategy: str, where: str) -> None:
    square = (torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True))
    with sw.rule(scale, text, **keywords):
        report = sw.check_rule(scale, square if text.startswith("n m") else SCALED)
    assert not report.ok
    assert any(w.strategy.startswith(strategy) and w.error > 0.01 and where in w.where for w in report.wrong)
    assert "WRONG" in str(report)


def test_a_wrong_backward_is_found() -> None:
    """A split of ``w`` whose gradient the operator makes from the part of ``x`` alone is right; one that forgets it is
    not."""

    @torch.library.custom_op("shardwise_test::broken", mutates_args=())
    def broken(x: Tensor) -> Tensor:
        return x.exp()

    broken.register_fake(torch.empty_like)
    broken.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0].exp() / g.shape[0],  # depends on the local size
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    with sw.rule(broken, "m -> m"):
        report = sw.check_rule(broken, (torch.randn(6, requires_grad=True),))
    assert {w.where.partition(" on ")[0] for w in report.wrong} == {"gradient of x"}
    assert not sw.check_rule(broken, (torch.randn(6, requires_grad=True),)).missing


def test_a_sample_that_the_operator_refuses_is_an_error() -> None:
    with raises(sw.ShardwiseError, "shardwise_test.scale", "[[4, 5], [3]]"):
        sw.check_rule(scale, (torch.randn(4, 5), torch.randn(3)))
    with raises(sw.ShardwiseError, "3 arguments", "shardwise_test::scale(Tensor x, Tensor w)"):
        sw.check_rule(scale, (*SCALED, 1))


# --------------------------------------------------------------------------------------------------------- in a model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gain = nn.Linear(6, 10), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return total(scale(self.up(x), self.gain), 3).square().mean()


def test_a_custom_operator_with_a_rule_is_split_like_any_other() -> None:
    x, mesh = torch.randn(8, 6), sw.Mesh(dp=2, tp=2)
    with pytest.warns(sw.errors.UnsplitWarning, match=r"sw\.rule"):
        plan = sw.plan(Model(), x, 4, mesh=mesh, strategies={"up": "n@tp"})
    assert plan.strategies["/scale"] == ""
    text, keywords = SCALE_RULE
    with sw.rule(scale, text, **keywords), sw.rule(total, "m n -> m", reduction={"n": "sum"}):
        plan = sw.plan(Model(), x, 4, mesh=mesh, strategies={"up": "n@tp"})
        assert (plan.strategies["/scale"], plan.strategies["/total"]) == ("m@dp n@tp", "m@dp n@tp")
        prove(Model(), x, plan)


def test_a_rule_may_be_a_function_with_a_lowering() -> None:
    def lowered(x: Tensor, power: int) -> Tensor:
        return x.pow(power).sum(-1)

    def of(op: Any, graph: Any) -> Any:
        names = ["m", "n"] if len(graph.by_name[op.operands[0]].shape) == 2 else ["n"]
        return build(op, graph, [single(names)], [single(names[:-1])], kinds={"n": "lowered"}, lowering=lowered)

    with sw.rule(total, of):
        report = sw.check_rule(total, [(torch.randn(4, 5, requires_grad=True), 3), (torch.randn(5), 2)])
        assert (report.wrong, report.missing) == ((), ())
        assert [str(rule) for rule in report.rules] == ["m n -> m  n:lowered", "n ->   n:lowered"]


@torch.library.custom_op("shardwise_test::shifted_total", mutates_args=(), schema="(Tensor x, Scalar by) -> Tensor")
def shifted_total(x: Tensor, by: float) -> Tensor:
    return (x + by).sum(0)


@shifted_total.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return x.new_empty(x.shape[1:], dtype=torch.result_type(x, by))


class Totals(nn.Module):
    """Of integers and 1 a total is an integer, of integers and 1.0 it is not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.shardwise_test.shifted_total(x, 1), torch.ops.shardwise_test.shifted_total(x, 1.0)


def test_numbers_that_are_equal_but_of_other_types_are_lowered_apart() -> None:
    def lowered(x: Tensor, by: float) -> Tensor:
        return (x + by).sum(0)

    x = torch.arange(32).reshape(8, 4)
    with sw.rule(shifted_total, "m n -> n", lowered=("m",), lowering=lowered):
        plan = sw.plan(Totals(), x, 2, mode="data_parallel")
        assert set(plan.strategies.values()) == {"m@dp"}
        prove(Totals(), x, plan)


def test_a_lowering_is_split_by_the_rules_that_there_are_when_it_is_used() -> None:
    def lowered(x: Tensor, by: float) -> Tensor:
        return scale(x, x.sum(-1)).sum(0)

    def kinds() -> set[str]:
        plan = sw.plan(Totals(), torch.randn(8, 4), 2, mode="data_parallel")
        return {own.kind for entry in plan.conversions for own in entry.forward}

    text, keywords = SCALE_RULE
    with sw.rule(shifted_total, "m n -> n", lowered=("m",), lowering=lowered):
        unsplit = kinds()
        with sw.rule(scale, text, **keywords):
            assert kinds() == {"all_reduce"}
        assert kinds() == unsplit
    assert "all_gather" in unsplit


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("operator", "how", "keywords", "error", "words"),
    [
        (scale, "m n -> m n", {}, sw.errors.LayoutError, "1 operands, the operator has 2"),
        (scale, "m n, m -> m n, m", {}, sw.errors.LayoutError, "2 results, the operator has 1"),
        (scale, "m n, m -> m", {}, sw.errors.LayoutError, ("'m n, m -> m'", "n is parallel but not in all results")),
        (
            scale,
            "m n, m -> m n",
            {"reduction": {"n": "sum"}},
            sw.errors.LayoutError,
            "n is reduced (sum) but in a result",
        ),
        (scale, "m n, m -> m n", {"lowered": ["n"]}, sw.errors.LayoutError, "no lowering"),
        (scale, "m n, m -> m n", {"linear": ((2,),)}, sw.errors.LayoutError, "linear names operands"),
        (scale, "m n, m -> m n", {"whole": ["q"]}, sw.errors.NotationError, "no factor q"),
        (scale, "m n, m > m n", {}, sw.errors.NotationError, ("shardwise_test.scale.default", "does not parse", "^")),
        (scale, 3, {}, sw.errors.NotationError, "is 3"),
        (scale, build, {"whole": ["n"]}, sw.ShardwiseError, "with keywords"),
        (
            aten.mm.default,
            "m k, k n -> m n",
            {"reduction": {"k": "sum"}},
            sw.ShardwiseError,
            "already has a rule of shardwise",
        ),
        (aten.mm, "m k, k n -> m n", {}, sw.ShardwiseError, ("aten.mm.default", "overloads")),
        (aten.add_.Tensor, "m, m -> m", {}, sw.errors.LayoutError, ("aten.add_.Tensor", "writes to self")),
        ("shardwise_test::nothing", "m -> m", {}, sw.ShardwiseError, "there is no operator 'shardwise_test::nothing'"),
        (Scale, "m n, m -> m n", {}, sw.ShardwiseError, "custom_op"),
    ],
)
def test_what_contradicts_itself_or_the_schema_is_refused(
    operator: Any, how: Any, keywords: Any, error: type[Exception], words: object
) -> None:
    with raises(error, words):
        sw.rule(operator, how, **keywords)
    assert not sw.check_rule(scale, SCALED).num_splits, "a refused rule is registered"


def test_a_rule_is_given_once_and_removed_once() -> None:
    registered = sw.rule(scale, "m n, m -> m n")
    with raises(sw.ShardwiseError, "already has", "sw.rule"):
        sw.rule(scale, "m n, m -> m n")
    registered.remove()
    with raises(sw.ShardwiseError, "shardwise_test.scale.default", "sw.rule"):
        registered.remove()


def test_a_rule_that_does_not_fit_a_call_names_the_line() -> None:
    fits = raises(sw.errors.LayoutError, 3, op="/scale", source="test_check_rule.py")
    with sw.rule(scale, "b m n, b m -> b m n"), fits:
        sw.plan(Model(), torch.randn(8, 6), 2, search="sharding_propagation")


# --------------------------------------------------------------------------------------------------------- our tables

FAST = [sample for sample in SAMPLES if not sample.unspecified][::15]  # all of them: make sweep


@pytest.mark.parametrize("sample", FAST, ids=[f"{i}-{sample.target}" for i, sample in enumerate(FAST)])
@pytest.mark.sampled(30)
def test_our_own_rules_pass_the_check(sample: Any) -> None:
    assert not faults(sample, check(sample))


def test_reasons_are_about_operators_that_have_rules() -> None:
    assert REMAINING.keys() <= {str(target) for target in RULES} | set(map(str, SAMPLES))


@torch.library.custom_op("shardwise_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_without_a_derivative_is_named() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    registered = sw.rule(doubled, "a b -> a b", linear=((0,),))
    with raises(sw.ShardwiseError, "no derivative", fix="register_autograd"):
        sw.check_rule(doubled, {"x": x})
    assert sw.check_rule(doubled, {"x": x.detach()}).ok
    registered.remove()
