"""A plan is complete in itself: a file gives the same program, whatever prices are by then; a program that is not the
one listed is refused."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from plans.test_plan import MESH, Mlp, X
from proving import prove
from raising import raises
from runtime.small_gpt import batch, make_gpt
from runtime.test_priced_ranks import described_cluster
from shardwise.costs.prices import Prices
from shardwise.costs.pricing import Router
from shardwise.graph.capture import capture
from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.routes import Axes
from shardwise.layouts.text import format_move, parse_layout, parse_move
from shardwise.plans.bind import program_of, resize_moves
from shardwise.plans.entries import ConversionEntry
from shardwise.plans.price_scope import prices_of
from shardwise.plans.result import PlanningResult
from shardwise.programs.buckets import Bucket
from shardwise.programs.spmd import SpmdProgram
from shardwise.report.search_reports import SearchReport


@pytest.fixture(scope="module")
def priced() -> sw.Plan:
    """Chosen by price; some of its conversions take several moves."""
    cluster, mesh = described_cluster(1e-2), sw.Mesh(dp=2, tp=2)
    plan = sw.plan(make_gpt(), batch(8, 0), cluster, mesh=mesh, search="dynamic_programming")
    assert sum(len(entry.path) > 1 for entry in plan.conversions) > 5
    return plan


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(Mlp(), X, 8, mesh=MESH, strategies={"up": "n@tp"})


def refusal(plan: sw.Plan, module: nn.Module | None = None, inputs: Any = X) -> str:
    with pytest.raises(sw.PlanError) as caught:
        sw.verify(Mlp() if module is None else module, inputs, plan)
    return str(caught.value)


def with_conversion(plan: sw.Plan, number: int, **changes: Any) -> sw.Plan:
    entries = list(plan.conversions)
    entries[number] = replace(entries[number], **changes)
    return plan.revised(conversions=tuple(entries))


# ------------------------------------------------------------------------------------- the same file, the same program


def emitted(spmd: SpmdProgram) -> tuple[Any, ...]:
    """Everything that is sent: by which moves, in which buckets, in which order."""
    moves = [(c.value, c.op, tuple(map(format_move, c.moves))) for c in spmd.conversions]
    buckets = [tuple(c.result for c in step.conversions) for step in spmd.steps if isinstance(step, Bucket)]
    return spmd.forward_collectives(), spmd.backward_collectives(), moves, buckets


def test_a_priced_plan_emits_what_its_file_says_after_a_formula_of_prices_has_changed(
    priced: sw.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = capture(make_gpt(), batch(8, 0)).graph
    before = program_of(priced, graph, training=True)
    formula = Prices.collective
    monkeypatch.setattr(
        Prices, "collective", lambda self, kind, *rest: formula(self, kind, *rest) * (100 if "gather" in kind else 1)
    )
    router = Router(Axes.of(priced.mesh), prices_of(priced))
    solved_anew = [router(before.graph.by_name[c.origin], c.source, c.target) for c in before.conversions]
    assert sum(moves != c.moves for moves, c in zip(solved_anew, before.conversions, strict=True)) > 10
    loaded = sw.Plan.from_json(priced.to_json())
    assert loaded.digest == priced.digest
    assert emitted(program_of(loaded, graph, training=True)) == emitted(before)
    prove(make_gpt(), batch(8, 0), loaded)


def test_binding_asks_no_price_and_no_way(priced: sw.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a plan is complete in itself")

    graph = capture(make_gpt(), batch(8, 0)).graph
    monkeypatch.setattr("shardwise.plans.bind.fewest_bytes", refuse)
    monkeypatch.setattr("shardwise.programs.spmd.fill_buckets", refuse)
    monkeypatch.setattr(Prices, "__init__", refuse)
    spmd = program_of(sw.Plan.from_json(priced.to_json()), graph, training=True)
    listed = [[(c.kind, c.axes, c.num_bytes) for c in priced.collectives(backward=back)] for back in (False, True)]
    sides = spmd.forward_collectives(), spmd.backward_collectives()
    sent = [[(c.kind, spmd.mesh.format_axes(c.axes), c.num_bytes) for c in side] for side in sides]
    # A plan lists conversions where they are needed; messages of parameters leave earlier, of gradients later.
    assert list(map(sorted, listed)) == list(map(sorted, sent))


def test_moves_print_and_parse_back_to_the_same_layouts(priced: sw.Plan, plan: sw.Plan) -> None:
    for chosen, module, inputs in ((priced, make_gpt(), batch(8, 0)), (plan, Mlp(), (X,))):
        spmd = program_of(chosen, capture(module, inputs).graph, training=True)
        assert spmd.conversions
        for conversion in spmd.conversions:
            for move in conversion.moves:
                assert parse_move(format_move(move), chosen.mesh) == move


# ------------------------------------------------------------------------------------------------------- other sizes


def axes_of_paths(spmd: SpmdProgram) -> dict[tuple[str, str], list[tuple[tuple[str, ...], tuple[str, str]]]]:
    return {(c.origin, c.op): [(move.axes, move.cell) for move in c.moves] for c in spmd.conversions}


@pytest.mark.parametrize("size", [4, 6, 3, 1])
@pytest.mark.sampled(1)
def test_a_priced_plan_keeps_its_ways_for_other_batch_sizes_and_equals_one_device(priced: sw.Plan, size: int) -> None:
    prove(make_gpt(), batch(size, 0), priced)
    planned = axes_of_paths(program_of(priced, capture(make_gpt(), batch(8, 0)).graph, training=True))
    other = axes_of_paths(program_of(priced, capture(make_gpt(), batch(size, 0)).graph, training=True))
    common = planned.keys() & other.keys()
    several = [key for key in common if len(planned[key]) > 1]
    assert len(several) > (5 if size > 1 else 0)
    if size == 4:  # every device has a share on every way
        assert all(planned[key] == other[key] for key in several)


def test_a_priced_plan_serves_evaluation(priced: sw.Plan) -> None:
    prove(make_gpt().eval(), batch(8, 0), priced)
    prove(make_gpt().eval(), batch(2, 0), priced)


def test_a_way_is_followed_by_tensors_of_other_sizes_as_long_as_every_device_has_a_share() -> None:
    mesh = sw.Mesh(a=2, b=2)

    def ends(size: int) -> tuple[Layout, Layout]:
        texts = f"[{size}, 8] partial(sum@a,b)", f"[{size}, 8]"
        return parse_layout(texts[0], mesh), parse_layout(texts[1], mesh)

    moves = redistribute(*ends(16))
    assert [move.cell for move in moves] == [("P", "I")]
    detour = tuple(
        parse_move(text, mesh)
        for text in (
            "(a,b): [16, 8] partial(sum@a,b) -> [16@(a,b), 8]",
            "(a,b): [16@(a,b), 8] -> [16, 8]",
        )
    )
    found = resize_moves(detour, *ends(4))
    assert found is not None
    assert [format_move(move) for move in found] == [
        "(a,b): [4, 8] partial(sum@a,b) -> [4@(a,b), 8]",
        "(a,b): [4@(a,b), 8] -> [4, 8]",
    ]
    assert resize_moves(detour, *ends(3)) is None  # three rows are no shares of four devices
    merged = (parse_move("(a,b): [(4@(a,b) 4), 8] -> [16, 8]", mesh),)
    assert resize_moves(merged, parse_layout("[12@(a,b), 8]", mesh), parse_layout("[12, 8]", mesh)) is None


# ------------------------------------------------------------------------------------------- another program is refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: {"forward": ()}, "conversions differ"),
        (lambda e: {"op": "up/add"}, "up/add"),
        (lambda e: {"target": e.source}, "no such conversion"),
        (lambda e: {"value": "/relu"}, "no such conversion"),
        (lambda e: {"bucket": 7}, "in bucket 7"),
    ],
)
def test_a_program_that_is_not_listed_is_refused(
    plan: sw.Plan, change: Callable[[ConversionEntry], dict[str, Any]], said: str
) -> None:
    number = next(i for i, entry in enumerate(plan.conversions) if entry.forward)
    text = refusal(with_conversion(plan, number, **change(plan.conversions[number])))
    assert "the program is not the one that the plan lists: " in text
    assert said in text
    assert re.search(r"\d+ of 6 conversions differ", text)
    assert "  plan:   " in text
    assert "  program: " in text
    assert "fix:    make the plan again with sw.plan" in text


def test_conversions_in_another_order_or_missing_are_refused(plan: sw.Plan) -> None:
    first, second, *rest = plan.conversions
    assert "up.weight is needed before up.bias" in refusal(plan.revised(conversions=(second, first, *rest)))
    last, before = len(plan.conversions) - 1, len(plan.conversions) - 2
    alone = replace(plan.conversions[last], bucket=0), replace(plan.conversions[before], bucket=0)
    text = refusal(plan.revised(conversions=(*plan.conversions[:before], *alone)))
    assert f"plan:   next {alone[0].value}" in text
    text = refusal(plan.revised(conversions=(first, second)))
    assert "4 of 2 conversions differ" in text
    assert "plan:   no such conversion" in text
    assert "more:   3 more differ" in text


def test_another_way_between_the_same_layouts_is_followed_if_it_is_listed_with_its_collectives(plan: sw.Plan) -> None:
    """A path is data: an all-reduce as reduce-scatter and all-gather, which no search would choose for a scalar."""
    number = next(i for i, e in enumerate(plan.conversions) if [c.kind for c in e.forward] == ["reduce_scatter"])
    entry = plan.conversions[number]
    (move,) = entry.path
    assert move == "tp: [16@dp, 8] partial(sum@tp) -> [16@dp, 8@tp]"
    detour = ("tp: [16@dp, 8] partial(sum@tp) -> [16@dp, 8]", "tp: [16@dp, 8] -> [16@dp, 8@tp]")
    assert "conversions differ" in refusal(with_conversion(plan, number, path=detour))
    all_reduce, all_gather = (replace(entry.forward[0], kind=kind) for kind in ("all_reduce", "all_gather"))
    honest = with_conversion(plan, number, path=detour, forward=(all_reduce,), backward=(all_gather,))
    report = prove(Mlp(), X, sw.Plan.from_json(honest.to_json()))
    assert "all_reduce" in {c.kind for c in report.forward if c.axes == MESH.expand("tp")}


def test_buckets_that_can_not_be_filled_are_refused(plan: sw.Plan) -> None:
    """A value that is computed later cannot share the message of a parameter."""
    entries = [replace(e, bucket=1, overlaps=True) for e in plan.conversions]
    text = refusal(plan.revised(conversions=tuple(entries)))
    assert "cannot share messages" in text
    assert "up.weight and 5 more" in text
    computed = next(i for i, entry in enumerate(plan.conversions) if entry.forward)
    assert "its collective cannot start early" in refusal(with_conversion(plan, computed, overlaps=True))


def test_a_parameter_that_the_plan_sends_late_is_sent_late(plan: sw.Plan) -> None:
    number = next(i for i, entry in enumerate(plan.conversions) if entry.overlaps and not entry.bucket)
    late = with_conversion(plan, number, overlaps=False)
    graph = capture(Mlp(), (X,)).graph
    buckets = [
        sum(isinstance(step, Bucket) for step in program_of(chosen, graph, training=True).steps)
        for chosen in (plan, late)
    ]
    assert buckets[0] - buckets[1] == 1
    assert sw.verify(Mlp(), X, late).ok


def test_a_strategy_that_was_changed_without_saying_so_is_refused(plan: sw.Plan) -> None:
    operators = tuple(replace(e, strategy="d0@dp") if e.name == "/relu" else e for e in plan.operators)
    text = refusal(plan.revised(operators=operators))
    assert "the program is not the one that the plan lists" in text
    assert "op:     /relu" in text or "/relu: " in text


def test_a_broken_path_is_refused_when_it_is_read(plan: sw.Plan) -> None:
    data = json.loads(plan.to_json())
    data["stages"][0]["conversions"][0]["path"] = ["dp: [16, 8@tp] -> [16, 8]"]
    with raises(sw.PlanError, "f32[16@tp, 8]", "up.weight", "up/linear"):
        sw.Plan.from_json(json.dumps(data), edited=True)


def rank_refuses(text: str) -> str:
    par = sw.parallelize(Mlp(), sw.Plan.from_json(text))
    try:
        par(X)
    except sw.PlanError as error:
        return str(error)
    return ""


def test_every_rank_compares_the_program_with_the_plan(run_ranks: RunRanks) -> None:
    plan = sw.plan(Mlp(), X, 2, strategies={"up": "n@dp"})
    number = next(i for i, entry in enumerate(plan.conversions) if entry.forward)
    texts = run_ranks(rank_refuses, 2, with_conversion(plan, number, forward=()).to_json())
    assert all("the program is not the one that the plan lists: 1 of" in text for text in texts), texts


# ------------------------------------------------------------------------------------------------------- older files


# ------------------------------------------------------------------------------------------------------------ stages


def in_two_stages(first: str, second: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        stage = data["stages"][0]
        data["stages"] = [{**stage, "ranks": first}, {**stage, "ranks": second}]

    return change


def changed(plan: sw.Plan, change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(plan.to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("0-7", "4-11", ["stages 0 and 1", "4, 5, 6, 7"]),
        ("0-7", "9-16", ["1 of 17 ranks are in no stage: 8"]),
        ("1-8", "9-16", ["1 of 17 ranks are in no stage: 0"]),
        ("0-6", "7-14", ["stages[0].ranks", "8 devices", "7 ranks"]),
        ("0-6,6", "7-14", ["stages[0].ranks", "rank 6 is named twice"]),
    ],
)
def test_stages_whose_ranks_overlap_or_are_missing_are_refused(
    plan: sw.Plan, first: str, second: str, said: list[Any]
) -> None:
    with raises(sw.PlanError, said):
        sw.Plan.from_json(changed(plan, in_two_stages(first, second)), edited=True)


def test_a_plan_of_two_stages_is_saved_printed_and_asked_stage_by_stage(plan: sw.Plan) -> None:
    two = sw.Plan.from_json(changed(plan, in_two_stages("0-7", "8-15")), edited=True)
    assert sw.Plan.from_json(two.to_json()) == two
    assert [stage.placement for stage in two.stages] == [
        Placement(MESH, tuple(range(8))),
        Placement(MESH, tuple(range(8, 16))),
    ]
    assert two.num_ranks == 16
    assert "stage 1: Mesh(dp=2, tp=4) on ranks 8-15" in str(two)
    for ask in (lambda: two.mesh, lambda: two.layouts, lambda: sw.verify(Mlp(), X, two)):
        with raises(sw.PlanError, 2, "0-7", "8-15", "plan.stages"):
            ask()


def test_ranks_in_another_order_are_refused(plan: sw.Plan) -> None:
    with raises(sw.PlanError, "stages[0].ranks", "rank 0", "rank 7", "ascending"):
        sw.Plan.from_json(changed(plan, lambda data: data["stages"][0].update(ranks="4-7,0-3")), edited=True)


# ----------------------------------------------------------------------------------------------------------- planned


def test_what_is_planned_by_price_is_a_plan_with_its_search(priced: PlanningResult, plan: PlanningResult) -> None:
    assert type(priced.plan) is type(plan.plan) is sw.Plan
    assert type(priced.report) is SearchReport
    copied = pickle.loads(pickle.dumps(priced))
    assert copied.search_report is None
    assert copied == priced == priced.plan == copied.plan
    assert copied != plan
    with raises(sw.PlanError, "another process", fix='search="dynamic_programming"'):
        copied.report.explain("up/linear")
    assert hash(copied) == hash(priced)
    assert str(copied) == str(priced)
    assert type(priced.revised(conversions=None)) is sw.Plan
    with raises(sw.PlanError, "by price", fix='search="dynamic_programming"'):
        plan.report.explain("up/linear")


class Rows(nn.Module):
    """Windows of rows and a factored dim: paths whose atoms do not merge."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.fused = nn.Linear(4, 18)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2).transpose(1, 2)
        q, k, v = self.fused(y).unflatten(2, (3, 6)).unbind(2)
        return (q * k + v).square().mean()


@pytest.mark.parametrize("strategies", [{"conv": "y0@tp"}, {"conv": "y0@tp", "fused": "n@tp"}, {"fused": "n@(dp,tp)"}])
@pytest.mark.sampled(1)
def test_paths_through_windows_and_factored_dims_are_listed_and_followed(strategies: dict[str, str]) -> None:
    x = torch.randn(4, 3, 6, 5)
    plan = sw.plan(Rows(), x, 4, mesh=sw.Mesh(dp=2, tp=2), strategies=strategies)
    loaded = sw.Plan.from_json(plan.to_json())
    spmd = program_of(loaded, capture(Rows(), (x,)).graph, training=True)
    texts = [format_move(move) for conversion in spmd.conversions for move in conversion.moves]
    assert any("{" in text or "(" in text.partition(": ")[2] for text in texts), "windows or atoms"
    for conversion in spmd.conversions:
        assert all(parse_move(format_move(move), plan.mesh) == move for move in conversion.moves)
    for size in (4, 2, 3):
        prove(Rows(), x[:size], loaded)
