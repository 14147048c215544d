"""Operators that are functions of others: traced as what they call, with the numbers and gradients of eager."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import shardwise as sw
from graph.against_eager import check_against_eager, operators
from rules.samples import bits, call, ids, leaf, plain, unit, x
from shardwise.graph.capture import capture
from shardwise.graph.composites import COMPOSITES
from shardwise.graph.normalize import NORMALIZATIONS
from shardwise.rules import RULES, rule_of

aten = torch.ops.aten


def complex_leaf(*shape):
    return torch.complex(plain(x(*shape)), plain(x(*shape))).requires_grad_()


SAMPLES = [
    *(
        call(getattr(aten, f"_cast_{name}").default, x(2, 3))
        for name in ["Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
    ),
    call(aten.alias_copy.default, x(2, 3)),
    call(aten.atleast_1d.Sequence, [x(), x(2)]),
    call(aten.atleast_2d.Sequence, [x(), x(2)]),
    call(aten.atleast_3d.Sequence, [x(2), x(2, 3)]),
    call(aten.bilinear.default, x(2, 4, 3), x(2, 4, 5), x(6, 3, 5)),
    call(aten.bilinear.default, x(3), x(5), x(6, 3, 5), x(6)),
    call(aten.block_diag.default, [x(2, 3), x(4), x(), x(1, 2)]),
    call(aten.cartesian_prod.default, [x(2), x(3)]),
    call(aten.cartesian_prod.default, [x(4)]),
    call(aten.chain_matmul.default, [x(2, 3), x(3, 4), x(4, 2)]),
    call(aten.column_stack.default, [x(3), x(3, 2)]),
    call(aten.channel_shuffle.default, x(2, 6, 3, 2), 2),
    call(aten.combinations.default, x(4), 2, True),
    call(aten.combinations.default, x(4), 3),
    call(aten.corrcoef.default, x(3, 5)),
    call(aten.corrcoef.default, x(5)),
    call(aten.corrcoef.default, complex_leaf(3, 5).detach()),
    call(aten.cov.default, complex_leaf(3, 5).detach(), aweights=plain(unit(5))),
    call(aten.cov.default, x(4), fweights=torch.tensor([1, 2, 1, 3])),
    call(aten.cov.default, x(3, 4), aweights=unit(4), correction=0),
    call(aten.cov.default, x(3, 5), correction=0),
    call(aten.cov.default, x(3, 4), fweights=torch.tensor([1, 2, 1, 3]), aweights=torch.tensor([0.5, 1.0, 2.0, 1.0])),
    call(aten.cross.default, x(2, 3), x(2, 3)),
    call(aten.cumulative_trapezoid.dx, x(2, 4), dx=0.5),
    call(aten.cumulative_trapezoid.x, x(2, 4), x(2, 4)),
    call(aten.diag.default, x(3), 1),
    call(aten.diag.default, x(3, 4), -1),
    call(aten.diagflat.default, x(2, 2)),
    call(aten.diagonal_copy.default, x(2, 3, 4), 1, 1, 2),
    call(aten.dist.default, x(2, 3), x(3)),
    call(aten.dist.default, x(2, 3), x(3), 1),
    call(aten.dist.default, plain(x(2, 3)), plain(x(2, 3)), 0),
    call(aten.dist.default, x(2, 3), x(2, 3), torch.inf),
    call(aten.dist.default, leaf([1.0, 2.0]), leaf([1.0, 2.0])),
    call(aten.dsplit.array, x(2, 2, 5), [1, 3]),
    call(aten.dsplit.int, x(2, 2, 4), 2),
    call(aten.dstack.default, [x(2), x(2)]),
    call(aten.expand_copy.default, x(3, 1), [3, 4]),
    call(aten.frobenius_norm.dim, x(3, 4), [0, 1]),
    call(aten.ger.default, x(3), x(4)),
    call(aten.gradient.array, x(4, 5), dim=[0, 1]),
    call(aten.gradient.scalararray, x(4, 5), spacing=2.0, dim=[0, 1]),
    call(aten.gradient.scalarint, x(5), edge_order=2),
    call(aten.gradient.scalarrayarray, x(4, 5), spacing=[0.5, 2.0], dim=[0, 1]),
    call(aten.gradient.scalarrayint, x(4, 5), spacing=[0.5], dim=1),
    call(aten.gradient.tensorarray, x(4, 5), spacing=[plain(x(4)), plain(x(5))], dim=[0, 1]),
    call(aten.gradient.tensorarrayint, x(4, 5), spacing=[plain(x(5))], dim=1),
    call(aten.hsplit.array, x(2, 5), [1, 3]),
    call(aten.hsplit.int, x(4), 2),
    call(aten.hstack.default, [x(2, 3), x(2, 1)]),
    call(aten.inner.default, x(2, 3), x(4, 3)),
    call(aten.inner.default, x(), x(4, 3)),
    call(aten.isreal.default, complex_leaf(3)),
    call(aten.kron.default, x(2, 3), x(3, 2)),
    call(aten.linalg_diagonal.default, x(2, 3, 4), offset=1),
    call(aten.linalg_matmul.default, x(2, 3), x(3, 4)),
    call(aten.linalg_matrix_norm.default, x(2, 3, 4), 2),
    call(aten.linalg_matrix_norm.default, x(2, 3, 4), -1, [0, 1], True),
    call(aten.linalg_matrix_norm.str_ord, x(2, 3, 4)),
    call(aten.linalg_matrix_norm.str_ord, x(2, 3, 4), "nuc"),
    call(aten.linalg_multi_dot.default, [x(3), x(3, 4), x(4, 2), x(2)]),
    call(aten.linalg_norm.default, x(3, 4)),
    call(aten.linalg_norm.default, x(3, 4), 3, [1]),
    call(aten.linalg_norm.default, x(2, 3, 4), 2, [1, 2]),
    call(aten.linalg_norm.ord_str, x(2, 3, 4), "nuc", [0, 2]),
    call(aten.linalg_norm.ord_str, x(3, 4), "fro"),
    call(aten.linalg_tensorinv.default, x(2, 3, 6)),
    call(aten.linalg_tensorsolve.default, x(2, 3, 6), x(2, 3)),
    call(aten.linalg_vander.default, x(2, 3), N=4),
    call(aten.linalg_vecdot.default, x(2, 3), x(1, 3)),
    call(aten.linalg_vecdot.default, complex_leaf(2, 3).detach(), complex_leaf(2, 3).detach()),
    call(aten.matrix_H.default, complex_leaf(2, 3).detach()),
    call(aten.native_group_norm.default, x(2, 6, 5), x(6), x(6), 2, 6, 5, 3, 1e-5),
    call(aten.native_group_norm.default, x(2, 4, 2, 2), None, None, 2, 4, 4, 2, 1e-3),
    call(aten.msort.default, x(3, 4)),
    call(aten.nanmean.default, leaf([[1, torch.nan, 2, 4], [torch.nan, 4, 5, 6]]), [1]),
    call(aten.norm_except_dim.default, x(3, 4), 2, 1),
    call(aten.nuclear_norm.default, x(3, 4), True),
    call(aten.nuclear_norm.dim, x(2, 3, 4), [0, 2]),
    call(aten.permute_copy.default, x(2, 3, 4), [2, 0, 1]),
    call(aten.rot90.default, x(3, 4), 0),
    call(aten.rot90.default, x(2, 5, 4), 1, [1, 2]),
    call(aten.rot90.default, x(5, 3), 2),
    call(aten.rot90.default, x(5, 3, 2), -1, [0, 1]),
    call(aten.row_stack.default, [x(3), x(2, 3)]),
    call(aten.narrow_copy.default, x(2, 5), 1, 1, 3),
    call(aten.select_copy.int, x(2, 3), 1, -1),
    call(aten.slice_copy.Tensor, x(5, 3), 0, 1, 4, 2),
    call(aten.special_log_softmax.default, x(2, 3), -1),
    call(aten.special_logsumexp.default, x(2, 3), [1]),
    call(aten.special_softmax.default, x(2, 3), 0),
    call(aten.split_copy.Tensor, x(5, 3), 2),
    call(aten.split_with_sizes_copy.default, x(5, 3), [2, 3]),
    call(aten.squeeze_copy.default, x(1, 3, 1)),
    call(aten.squeeze_copy.dim, x(1, 3, 1), 0),
    call(aten.squeeze_copy.dims, x(1, 3, 1), [0, 2]),
    *(call(op.default, x(3, 4), False) for op in (aten.std, aten.std_mean, aten.var, aten.var_mean)),
    *(call(op.dim, x(3, 4), [1], True, True) for op in (aten.std, aten.std_mean, aten.var, aten.var_mean)),
    call(aten.sum_to_size.default, x(2, 3, 4), [3, 1]),
    call(aten.t_copy.default, x(2, 3)),
    call(aten.take.default, x(3, 4), ids(12, 2, 5) - 6),
    call(aten.take_along_dim.default, x(3, 5), ids(5, 1, 2), 1),
    call(aten.take_along_dim.default, x(3, 5), ids(5, 3, 4) - torch.tensor([5, 0, 5, 0]), 1),
    call(aten.take_along_dim.default, x(1, 5, 2), ids(5, 3, 4, 2), 1),
    call(aten.take_along_dim.default, x(3, 5), ids(15, 4)),
    call(aten.tensordot.default, x(2, 3, 4), x(4, 3, 5), [1, 2], [1, 0]),
    call(aten.trace.default, x(3, 4)),
    call(aten.trace.default, ids(5, 3, 4)),
    call(aten.transpose_copy.int, x(2, 3, 4), 0, -1),
    *(call(op, x(2, 4), dx=0.5) for op in (aten.trapezoid.dx, aten.trapz.dx)),
    *(call(op, x(2, 4), x(4)) for op in (aten.trapezoid.x,)),
    call(aten.trapz.x, x(2, 4), x(2, 4)),
    call(aten.unbind_copy.int, x(2, 3), 1),
    call(aten.unfold_copy.default, x(7, 2), 0, 3, 2),
    call(aten.unsafe_chunk.default, x(5, 3), 2),
    call(aten.unsafe_split.Tensor, x(5, 3), 2, 0),
    call(aten.unsafe_split_with_sizes.default, x(3, 5), [2, 3], 1),
    call(aten.unsqueeze_copy.default, x(2, 3), 1),
    call(aten.put.default, x(3, 4), torch.tensor([[7, -1], [0, 2]]), x(4)),
    call(aten.put.default, x(3, 4), ids(12, 2, 9) - 6, x(9, 2), True),
    call(aten.put.default, x(), torch.tensor(0), x()),
    call(aten.vander.default, plain(x(3)), 4, True),
    call(aten.vander.default, ids(4, 3)),
    call(aten.view_as_real_copy.default, complex_leaf(3)),
    call(aten.view_copy.default, x(2, 6), [3, 4]),
    call(aten.view_copy.dtype, plain(x(2, 3)), torch.int64),
    call(aten.vsplit.array, x(5, 2), [1, 3]),
    call(aten.vsplit.int, x(4, 2), 2),
    call(aten.vstack.default, [x(3), x(2, 3)]),
    call(aten.vstack.default, [bits(3), bits(2, 3)]),
    call(aten.chalf.default, plain(x(3))),
]


@dataclass(frozen=True)
class Slot:
    is_weight: bool
    index: int


class Called(nn.Module):
    """A sample, with a parameter for every tensor that requires a gradient, and an input for every other."""

    def __init__(self, sample):
        super().__init__()
        self.target, self.weights, self.inputs = sample.target, nn.ParameterList(), []
        self.call = pytree.tree_map(self.slot, (sample.args, sample.kwargs))

    def slot(self, entry):
        if not isinstance(entry, torch.Tensor):
            return entry
        tensors = self.weights if entry.requires_grad else self.inputs
        tensors.append(nn.Parameter(entry.detach()) if entry.requires_grad else entry)
        return Slot(entry.requires_grad, len(tensors) - 1)

    def forward(self, *inputs):
        def filled(entry):
            if not isinstance(entry, Slot):
                return entry
            return (self.weights if entry.is_weight else inputs)[entry.index]

        args, kwargs = pytree.tree_map(filled, self.call)
        return self.target(*args, **kwargs)


def test_every_composite_has_a_sample_and_no_rule():
    assert COMPOSITES.keys() == {sample.target for sample in SAMPLES}
    assert not COMPOSITES.keys() & (RULES.keys() | NORMALIZATIONS.keys())


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{i}-{sample.target}" for i, sample in enumerate(SAMPLES)])
def test_composites_are_traced_as_operators_that_have_rules(sample):
    module = Called(sample)
    captured = check_against_eager(module, *module.inputs)
    graph = captured.graph
    assert sample.target not in {op.target for op in graph.ops}
    assert [str(op.target) for op in graph.ops if rule_of(op, graph) is None] == []


class Stacked(nn.Module):
    """Composites between layers: what is split before them is split behind them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        h = self.up(x)
        left, right = torch.hsplit(h, 2)
        h = torch.column_stack([right, left]) + torch.tensordot(x, self.down.weight, ([1], [0]))
        spread = torch.linalg.svdvals(h.unflatten(1, (4, 2)))
        return (self.down(h) * torch.trapezoid(spread).unsqueeze(1)).square().mean()


def test_composites_and_linear_algebra_stay_split():
    torch.manual_seed(0)
    model, batch = Stacked().double(), torch.randn(8, 6, dtype=torch.float64)
    plan = sw.plan(model, batch, 2, mesh=sw.Mesh(dp=2), mode="data_parallel")
    report = sw.verify(model, batch, plan)
    assert report.ok
    assert {conversion.kind for conversion in report.forward} <= {"all_reduce"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_autocast_casts_otherwise_stays_one_operator(dtype):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.form = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 3, 3))

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return torch.linalg.vecdot(x @ self.weight.T, torch.ones(4, dtype=dtype)), torch.hstack([x, x])

    captured = capture(Distances(), (torch.randn(5, 3),))
    assert "linalg_vecdot.default" in operators(captured)
    assert "hstack.default" not in operators(captured)
