"""Templates and tables against ops: what fits, what does not, and what the rules of well-known operators say."""

from __future__ import annotations

import pytest
import torch

from raising import raises
from rules.harness import make_case
from rules.samples import Sample, bits, call, ids, plain, unit, x
from shardwise.errors import LayoutError, NotationError
from shardwise.graph.ir import Graph, Op, Ref, Value
from shardwise.graph.schema import by_operator
from shardwise.rules import bind, rule_of, whole_rule
from shardwise.rules.binding import rule
from shardwise.rules.rule import LocalContext, Piece
from shardwise.rules.shapes import regroup

aten = torch.ops.aten
ATTEND = aten.scaled_dot_product_attention.default


def text(sample: Sample) -> str:
    case = make_case(sample)
    return str(rule_of(case.op, case.graph))


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (call(aten.linear.default, x(2, 3, 4), x(5, 4)), "b m k, n k -> b m n  k:sum"),
        (call(aten.matmul.default, x(2, 1, 3, 4), x(6, 4, 5)), "b0 1 m k, b1 k n -> b0 b1 m n  k:sum"),
        (call(aten.einsum.default, "bij,bjk->bik", [x(2, 3, 4), x(2, 4, 5)]), "b i j, b j k -> b i k  j:sum"),
        (call(aten.add.Tensor, x(2, 3, 4), x(3, 1)), "d0 d1 d2, d1 1 -> d0 d1 d2"),
        (call(aten.reshape.default, x(4, 6), [4, 3, 2]), "d0 (d1 d2) -> d0 d1 d2"),
        (call(aten.flatten.using_ints, x(2, 3, 4)), "d0 d1 d2 -> (d0 d1 d2)"),
        (
            call(aten.reshape.default, x(2, 6, 5), [3, 4, 5]),
            "d0 (d1 d4) d5 -> d2 (d3 d4) d5  d0:whole d1:whole d2:whole d3:whole",
        ),
        (call(aten.expand.default, x(3, 1), [2, 3, 4]), "d1 1 -> d0 d1 d2"),
        (call(aten.repeat_interleave.self_int, x(2, 3), 4, 1), "d0 d1 -> d0 (d1 r)"),
        (call(aten.split.Tensor, x(2, 6), 2, 1), "d0 (s c) -> d0 c, d0 c, d0 c  s:whole"),
        (
            call(aten.split_with_sizes.default, x(10), [4, 2, 4]),
            "(s c) -> (s0 c), c, (s2 c)  s:whole s0:whole s2:whole",
        ),
        (call(aten.cat.default, [x(2, 3), x(2, 3)], 1), "d0 (s0 c), d0 (s1 c) -> d0 (s c)  s0:window(s) s1:window(s)"),
        (call(aten.slice.Tensor, x(2, 6), 1, 3), "d0 (s c) -> d0 c  s:whole"),
        (call(aten.slice.Tensor, x(2, 6), 1, 0, -1), "d0 s -> d0 y  s:window(y)"),
        (call(aten.slice.Tensor, x(2, 6), 1), "d0 c -> d0 c"),
        (call(aten.embedding.default, x(5, 3), ids(5, 2, 4)), "v e, b0 b1 -> b0 b1 e  v:sum"),
        (call(aten.softmax.int, x(3, 5), -1), "d0 d1 -> d0 d1  d1:lowered"),
        (call(aten.layer_norm.default, x(2, 3, 4), [4], x(4)), "b0 b1 n, n -> b0 b1 n  n:lowered"),
        (call(aten.amax.default, plain(x(3, 4)), [1]), "d0 d1 -> d0  d1:max"),
        (call(aten.amax.default, x(3, 4), [1], True), "d0 d1 -> d0 1  d1:lowered"),
        (
            call(ATTEND, x(2, 6, 3, 4), x(2, 2, 5, 4), x(2, 2, 5, 4), enable_gqa=True),
            "b (g r) t d, b g s d, b g s e -> b (g r) t e  d:lowered s:lowered",
        ),
        (
            call(ATTEND, x(2, 2, 3, 4), x(2, 2, 3, 4), x(2, 2, 3, 4), None, 0.0, True),
            "b h t d, b h s d, b h s e -> b h t e  d:lowered s:lowered",
        ),
        (call(aten.cross_entropy_loss.default, x(4, 5), ids(5, 4), None, 2), "n c, n ->   n:sum c:lowered"),
        (call(aten.mse_loss.default, x(3, 4), x(3, 4), 0), "d0 d1, d0 d1 -> d0 d1"),
        (
            call(aten.conv2d.default, x(2, 4, 3, 3), x(6, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], 2),
            "n (g ci) y0 y1, (g co) ci k0 k1 -> n (g co) y0 y1  ci:sum k0:whole k1:whole",
        ),
    ],
    ids=lambda value: str(value.target) if isinstance(value, Sample) else "",
)
def test_well_known_operators_have_the_rules_one_expects(sample: Sample, expected: str) -> None:
    assert text(sample) == expected


@pytest.mark.parametrize(
    "sample",
    [
        call(aten.einsum.default, "ii->i", [x(3, 3)]),
        call(aten.dropout.default, x(3), 0.5, True),
        call(ATTEND, x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4), None, 0.5),
        call(aten.index.Tensor, x(3, 4), [bits(3)]),
        call(aten.one_hot.default, ids(3, 4)),
        call(aten.cat.default, [x(0), x(2, 3)]),
        call(aten.reshape.default, x(0, 3), [3, 0]),
        call(aten.nonzero.default, ids(2, 4)),
        call(aten.batch_norm.default, x(3, 4), None, None, x(4).detach(), unit(4).detach(), True, 0.1, 1e-5, False),
    ],
    ids=lambda sample: str(sample.target),
)
def test_what_no_rule_describes_has_none_and_runs_whole(sample: Sample) -> None:
    case = make_case(sample)
    assert rule_of(case.op, case.graph) is None
    fallback = whole_rule(case.op, case.graph)
    assert {factor.kind for factor in fallback.factors} <= {"whole"}
    assert [len(dims) for dims in fallback.operands] == [t.dim() for t in case.operands]


def _op(*shapes: tuple[int, ...], result: tuple[int, ...]) -> tuple[Op, Graph]:
    names = [f"x{i}" for i in range(len(shapes))]
    op = Op("fc/mm", aten.mm.default, tuple(map(Ref, names)), (), ("y",), "model.py:7")
    values = [Value(n, s, torch.float32) for n, s in (*zip(names, shapes, strict=True), ("y", result))]
    return op, Graph(tuple(values), (), (op,), ())


def test_a_misfit_names_the_tensor_the_sizes_and_the_line() -> None:
    op, graph = _op((3, 4), (5, 6), result=(3, 6))
    with raises(LayoutError, "x1 [5, 6]", 5, "k=4", op="fc/mm", source="model.py:7"):
        bind(rule("m k, k n -> m n"), op, graph)


def test_a_wrong_number_of_dims_or_operands_is_an_error() -> None:
    op, graph = _op((3, 4), (4, 6), result=(3, 6))
    with raises(LayoutError, "rule", 2, 3, op="fc/mm", source="model.py"):
        bind(rule("b m k, k n -> m n", whole=["b"]), op, graph)
    with raises(LayoutError, 2, 1, op="fc/mm", source="model.py"):
        bind(rule("m k -> m k"), op, graph)


def test_a_product_dim_is_solved_from_the_other_tensors() -> None:
    op, graph = _op((3, 8), (2, 5), result=(3, 5))
    bound = bind(rule("m (h d), h n -> m n", whole=["h", "d"]), op, graph)
    assert [(f.name, f.size) for f in bound.factors] == [("m", 3), ("h", 2), ("d", 4), ("n", 5)]


def test_leading_dims_are_named_by_their_number() -> None:
    op = Op("/exp", aten.exp.default, (Ref("x"),), (), ("y",))
    for shape, names in (((4,), []), ((3, 4), ["b"]), ((2, 3, 4), ["b0", "b1"])):
        graph = Graph((Value("x", shape, torch.float32), Value("y", shape, torch.float32)), (), (op,), ())
        assert [f.name for f in bind(rule("... d -> ... d"), op, graph).factors] == [*names, "d"]


def test_a_kind_that_contradicts_the_dims_is_an_error() -> None:
    op, graph = _op((3, 4), (4, 6), result=(3, 6))
    with raises(LayoutError, "k", "aten.mm.default", op="fc/mm", source="model.py"):
        bind(rule("m k, k n -> m n"), op, graph)
    with raises(LayoutError, "m", "sum", op="fc/mm", source="model.py"):
        bind(rule("m k, k n -> m n", reduction={"k": "sum", "m": "sum"}), op, graph)
    with raises(NotationError, "'m k, k n -> m n'"):
        rule("m k, k n -> m n", reduction={"q": "sum"})


def test_an_operator_in_two_tables_is_our_mistake() -> None:
    line = {aten.mm.default: rule("m k, k n -> m n", reduction={"k": "sum"})}
    with raises(AssertionError, "aten.mm.default"):
        by_operator({}, line, line)


def test_booleans_are_never_summed() -> None:
    assert "v:whole" in text(call(aten.index_select.default, bits(3, 4), 0, ids(3, 2)))
    case = make_case(call(aten.add.Tensor, bits(3), bits(3)))
    found = rule_of(case.op, case.graph)
    assert found is not None
    assert found.linear == ()


@pytest.mark.parametrize(
    ("before", "after", "dims"),
    [
        ((2, 3), (6,), (((("d0",)), (("d1",))), ((("d0", "d1")),))),
        ((1, 4), (4, 1), (((), ("d0",)), (("d0",), ()))),
        ((6, 4), (8, 3), ((("d0", "d1"), ("d2",)), (("d0", "d3"), ("d4",)))),
        ((), (1,), ((), ((),))),
    ],
)
def test_reshapes_share_the_factors_that_nest(before: tuple, after: tuple, dims: tuple) -> None:
    assert regroup(before, after)[:2] == dims


def test_a_local_slice_counts_in_what_the_rank_holds() -> None:
    case = make_case(call(aten.slice.Tensor, x(2, 12), 1, 4, 8))
    found = rule_of(case.op, case.graph)
    assert found is not None
    assert found.localize is not None
    pieces = {"d0": (Piece(2, 0, 2),), "s": (Piece(3, 0, 3),), "c": (Piece(4, 1, 2),)}
    local = found.localize(case.op, LocalContext(((2, 6),), ((2, 2),), pieces))
    assert local.args[1:] == (1, 2, 4, 1)
