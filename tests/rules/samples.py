"""Sample calls for every operator that has a rule: small sizes, with 2s and 3s and sizes that do not divide evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.graph.grouped import grouped_mm
from shardwise.graph.operators import dropout, uniform
from shardwise.graph.stand_ins import ctc_loss
from shardwise.rules.elementwise import ELEMENTWISE
from shardwise.rules.kernels import SCATTERED_SUM
from shardwise.rules.label_terms import label_terms

aten = torch.ops.aten


@dataclass(frozen=True)
class Sample:
    """One call. ``unsplit``: no factor can be split. ``unspecified``: the values mean nothing."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unsplit: bool = False
    unspecified: bool = False

    def __str__(self) -> str:
        return f"{self.target}{[describe(a) for a in (*self.args, *self.kwargs.values())]}"


def describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return value


_GENERATOR = torch.Generator().manual_seed(20)


def x(*shape: int) -> Tensor:
    """Standard normal, differentiable."""
    return torch.randn(shape, generator=_GENERATOR, dtype=torch.float64, requires_grad=True)


def unit(*shape: int) -> Tensor:
    """In (0.1, 0.9), where most special functions are smooth; differentiable."""
    return (torch.rand(shape, generator=_GENERATOR, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_GENERATOR)


def bits(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_GENERATOR) < 0.5


def plain(tensor: Tensor) -> Tensor:
    """Without gradient."""
    return tensor.detach()


def leaf(values: Any) -> Tensor:
    """Chosen values, differentiable."""
    return torch.as_tensor(values).to(torch.float64).requires_grad_()


def call(target: OpOverload, *args: Any, **kwargs: Any) -> Sample:
    return Sample(target, args, kwargs)


def unsplit(target: OpOverload, *args: Any, **kwargs: Any) -> Sample:
    return Sample(target, args, kwargs, unsplit=True)


CONTRACTIONS = [
    call(aten.linear.default, x(2, 3, 4), x(5, 4)),
    call(aten.linear.default, x(3, 4), x(5, 4), x(5)),
    call(aten.linear.default, x(4), x(3, 4)),
    call(aten.linear.default, x(2, 3, 2, 4), x(4)),
    call(aten.matmul.default, x(3, 4), x(4, 5)),
    call(aten.matmul.default, x(4), x(4)),
    call(aten.matmul.default, x(4), x(2, 4, 3)),
    call(aten.matmul.default, x(2, 3, 4), x(4)),
    call(aten.matmul.default, x(2, 3, 4), x(4, 2)),
    call(aten.matmul.default, x(3, 1, 2, 4), x(2, 4, 3)),
    call(aten.matmul.default, x(1, 2, 4), x(3, 4, 2)),
    call(aten.mm.default, x(3, 4), x(4, 5)),
    call(aten.bmm.default, x(2, 3, 4), x(2, 4, 5)),
    call(aten.mv.default, x(3, 4), x(4)),
    call(aten.dot.default, x(5), x(5)),
    call(aten.outer.default, x(3), x(4)),
    call(aten.addmm.default, x(5), x(3, 4), x(4, 5)),
    call(aten.addmm.default, x(3, 1), x(3, 4), x(4, 5), beta=0.5, alpha=2.0),
    call(aten.baddbmm.default, x(2, 3, 5), x(2, 3, 4), x(2, 4, 5), beta=0.5),
    call(aten.baddbmm.default, x(1, 5), x(2, 3, 4), x(2, 4, 5), alpha=0.5),
    call(aten.addbmm.default, x(3, 5), x(2, 3, 4), x(2, 4, 5)),
    call(aten.addmv.default, x(3), x(3, 4), x(4), beta=2),
    call(aten.einsum.default, "bij,bjk->bik", [x(2, 3, 4), x(2, 4, 5)]),
    call(aten.einsum.default, "ij,jk", [x(3, 4), x(4, 5)]),
    call(aten.einsum.default, "...i, ij -> ...j", [x(2, 3, 4), x(4, 2)]),
    call(aten.einsum.default, "bhtd,bhsd,s->bht", [x(2, 2, 3, 4), x(2, 1, 3, 4), x(3)]),
    call(aten.einsum.default, "iA->A", [x(3, 4)]),
]

REDUCTIONS = [
    call(aten.sum.default, x(3, 4)),
    call(aten.sum.default, ids(5, 4)),
    call(aten.sum.dim_IntList, x(2, 3, 4), [-1, 0]),
    call(aten.sum.dim_IntList, x(2, 3), [1], True),
    call(aten.sum.dim_IntList, x(2, 3), None),
    call(aten.count_nonzero.default, ids(2, 3, 4)),
    call(aten.count_nonzero.dim_IntList, ids(2, 3, 4), [1]),
    call(aten.mean.default, x(3, 4)),
    call(aten.mean.dim, x(2, 3, 4), [1], True),
    call(aten.mean.dim, x(2, 3, 4), [0, 2]),
    call(aten.histc.default, plain(unit(3, 4)), 5, 0, 1),
    call(aten.histc.default, plain(x(5)), 4, -1, 1),
    call(aten.amax.default, plain(x(3, 4)), [1]),
    call(aten.amax.default, x(3, 4), [1], True),
    call(aten.amax.default, ids(9, 3, 4), [0]),
    call(aten.amax.default, torch.arange(12).reshape(3, 4) % 7 == 5, [1]),
    call(aten.amin.default, torch.arange(12).reshape(3, 4) % 7 != 5, [0], True),
    call(aten.max.default, torch.arange(6) == 4),
    call(aten.amin.default, plain(x(3, 4))),
    call(aten.amin.default, x(3, 4), [0]),
    call(aten.max.default, x(3, 4)),
    call(aten.max.default, plain(x(3, 4))),
    call(aten.min.default, x(5)),
    call(aten.min.default, ids(9, 5)),
    call(aten.any.default, torch.arange(5) == 3),
    call(aten.any.dim, torch.eye(3, 4).bool(), 1),
    call(aten.any.dims, torch.arange(24).reshape(3, 4, 2) % 7 == 5, [0, 2], True),
    call(aten.all.default, torch.arange(6).reshape(3, 2) != 4),
    call(aten.all.dim, ~torch.eye(3, 4).bool(), 0, True),
    call(aten.all.dims, torch.arange(24).reshape(3, 4, 2) % 7 != 5, [1]),
    call(aten.prod.default, x(3, 2)),
    call(aten.prod.default, ids(3, 4)),
    call(aten.prod.dim_int, x(3, 6), 1),
    call(aten.prod.dim_int, leaf([[0.0, 0, 2, 3], [1, 0, 2, 3]]), 1, True),
    call(aten.max.dim, x(3, 4), 1),
    call(aten.max.dim, leaf([[2.0, 5, 1, 5], [7, 7, 7, 7]]), 1),
    call(aten.max.dim, bits(3, 6), 1),
    call(aten.min.dim, x(3, 4), 0, True),
    call(aten.min.dim, ids(3, 2, 6), -1),
    call(aten.argmax.default, plain(x(3, 4)), 1),
    call(aten.argmax.default, ids(2, 3, 4)),
    call(aten.argmin.default, plain(x(3, 4))),
    call(aten.argmin.default, ids(2, 6), None, True),
    unsplit(aten.median.default, x(5)),
    call(aten.median.dim, x(3, 5), 1),
    unsplit(aten.nanmedian.default, x(5)),
    call(aten.nanmedian.dim, x(3, 5), 1),
    call(aten.kthvalue.default, x(3, 5), 2, 1),
    call(aten.mode.default, ids(3, 3, 5)),
    call(aten.nansum.default, leaf([[1.0, torch.nan, 2], [torch.nan, 4, 5]])),
    call(aten.nansum.default, x(3, 4), [1], True),
    call(aten.var.default, x(3, 4)),
    call(aten.var.default, x(3, 4), False),
    call(aten.var.dim, x(3, 4), [1], True, True),
    call(aten.var.correction, x(3, 4), [0], correction=0),
    call(aten.var.correction, x(3, 4)),
    call(aten.std.default, x(5)),
    call(aten.std.dim, x(3, 4), [1]),
    call(aten.std.correction, x(3, 4), [1], correction=2, keepdim=True),
    call(aten.var_mean.default, x(3, 4)),
    call(aten.var_mean.dim, x(3, 4), [1], False),
    call(aten.var_mean.correction, x(3, 4), [-1], correction=0, keepdim=True),
    call(aten.std_mean.default, x(3, 4)),
    call(aten.std_mean.dim, x(3, 4), [1], False),
    call(aten.std_mean.correction, x(3, 4), [0], correction=2, keepdim=True),
    call(aten.nanmean.default, leaf([[1, torch.nan, 2, 4], [torch.nan, 4, 5, 6]]), [1]),
    call(aten.aminmax.default, x(3, 4)),
    call(aten.aminmax.default, x(3, 4), dim=1, keepdim=True),
    call(aten.linalg_norm.default, x(3, 4)),
    call(aten.linalg_norm.default, x(3, 4), 3, [1]),
    call(aten.linalg_norm.default, x(2, 3, 4), 2, [1, 2]),
    call(aten.linalg_matrix_norm.str_ord, x(2, 3, 4)),
    call(aten.linalg_matrix_norm.str_ord, x(2, 3, 4), "nuc"),
    call(aten.quantile.scalar, x(3, 5), 0.3, 1),
    call(aten.nanquantile.scalar, x(3, 5), 0.3, 1, True),
    call(aten.msort.default, x(3, 4)),
    call(aten.searchsorted.Tensor, torch.arange(5.0), plain(x(3, 4)) * 3),
    call(aten.bucketize.Tensor, plain(x(3, 4)) * 3, torch.arange(5.0), right=True),
    call(aten.logsumexp.default, x(3, 4), [1]),
    call(aten.logsumexp.default, x(3, 4), [0, 1], True),
    call(aten.linalg_vector_norm.default, x(3, 4), 2, [1]),
    call(aten.linalg_vector_norm.default, x(3, 4), 1, [0], True),
    call(aten.linalg_vector_norm.default, x(3, 4), 3.0),
    call(aten.linalg_vector_norm.default, x(3, 4), torch.inf),
    call(aten.linalg_vector_norm.default, leaf(ids(5, 3, 4) - 2), torch.inf, [1], True),
    call(aten.linalg_vector_norm.default, x(3, 4), -torch.inf, [0]),
    call(aten.linalg_vector_norm.default, leaf(ids(2, 3, 4)), 0, [1]),
    call(aten.linalg_vector_norm.default, x(3, 4), -1.5, [1]),
    call(aten.linalg_vector_norm.default, x(3, 4), 0.5, [1]),
    call(aten.norm.Scalar, x(3, 4)),
    call(aten.norm.ScalarOpt_dim, x(3, 4), 2, [1], True),
    call(aten.norm.ScalarOpt_dim, x(3, 4), None, [0]),
    call(aten.frobenius_norm.dim, x(3, 4), [0, 1]),
    call(aten.cosine_similarity.default, x(3, 4), x(3, 4), 1),
    call(aten.softmax.int, x(3, 5), -1),
    call(aten.softmax.int, x(3, 5), 0, torch.float64),
    call(aten.log_softmax.int, x(3, 5), 1),
    call(aten._softmax.default, x(2, 3, 4), 1, False),
    call(aten._log_softmax.default, x(2, 3), 1, False),
    call(aten._safe_softmax.default, torch.tensor([[1.0, -torch.inf, 2.0], [-torch.inf] * 3]), -1),
    call(aten.cumsum.default, x(3, 4), 1),
    call(aten.cumsum.default, x(2, 6, 2), -2),
    call(aten.cumsum.default, bits(2, 6), 1),
    call(aten.cumsum.default, ids(5, 6), 0, dtype=torch.int32),
    call(aten.cumprod.default, x(3, 4), 0),
    call(aten.cumprod.default, leaf([2.0, 3, 0, 4, 0, 5]), 0),
    call(aten.cumprod.default, ids(5, 6), 0, dtype=torch.float64),
    call(aten.logcumsumexp.default, x(3, 4), 0),
    call(aten.logcumsumexp.default, torch.tensor([-torch.inf, -torch.inf, 1, 2, -torch.inf, 3]).double(), 0),
    call(aten.cummax.default, x(3, 4), 0),
    call(aten.cummax.default, torch.tensor([1.0, 3, 3, torch.nan, 5, torch.nan, 7, 8]), 0),
    call(aten.cummin.default, x(3, 4), 0),
    call(aten.cummin.default, ids(3, 2, 12), 1),
    call(aten.sort.default, x(3, 4)),
    call(aten.sort.stable, x(3, 4), stable=True, dim=0),
    call(aten.argsort.default, plain(x(3, 4))),
    call(aten.argsort.stable, plain(x(3, 4)), stable=True),
    call(aten.topk.default, x(3, 5), 2),
    call(aten.topk.default, x(3, 12), 2),
    call(aten.topk.default, x(12, 2), 3, 0, False),
    call(aten.diff.default, x(3, 4), 1, -1),
    call(aten.diff.default, x(7, 2), 2, 0),
    call(aten.diff.default, x(3, 4), 1, -1, x(3, 1)),
    call(aten.diff.default, ids(9, 3, 4), 2, 0, ids(9, 1, 4), ids(9, 2, 4)),
    call(aten.glu.default, x(3, 6)),
    call(aten.glu.default, x(8, 3), 0),
]

SHAPES = [
    call(aten.view.default, x(4, 6), [4, 3, 2]),
    call(aten.view.default, x(4, 6), [-1]),
    call(aten.view.default, x(2, 3, 1, 4), [6, 1, 2, 2]),
    call(aten.view.default, x(6, 4), [8, 3]),
    call(aten.view.default, x(2, 3, 5), [2, 5, 3]),
    call(aten.reshape.default, x(2, 12), [2, 3, 4]),
    call(aten.reshape.default, x(3, 4), [2, 6]),
    unsplit(aten.reshape.default, x(1), []),
    call(aten._unsafe_view.default, x(6, 4), [2, 3, 4]),
    call(aten.flatten.using_ints, x(2, 3, 4), 1),
    call(aten.unflatten.int, x(2, 6), 1, [3, -1]),
    call(aten.ravel.default, x(2, 3)),
    call(aten.view_as.default, x(2, 6), plain(x(4, 3))),
    call(aten.reshape_as.default, x(2, 6), plain(x(12))),
    call(aten.transpose.int, x(2, 3, 4), -1, 0),
    call(aten.swapaxes.default, x(2, 3), 0, 1),
    call(aten.swapdims.default, x(2, 3), 0, 1),
    call(aten.permute.default, x(2, 3, 4), [2, 0, -2]),
    call(aten.t.default, x(2, 3)),
    call(aten.t.default, x(3)),
    call(aten.mT.default, x(2, 3, 4)),
    call(aten.mH.default, x(2, 3)),
    call(aten.adjoint.default, x(2, 3, 4)),
    call(aten.numpy_T.default, x(2, 3)),
    call(aten.movedim.int, x(2, 3, 4), 0, 2),
    call(aten.movedim.intlist, x(2, 3, 4), [0, 1], [-1, 0]),
    call(aten.moveaxis.int, x(2, 3), 0, 1),
    call(aten.moveaxis.intlist, x(2, 3), [0], [1]),
    call(aten.squeeze.default, x(2, 1, 3, 1)),
    call(aten.squeeze.dim, x(2, 1, 3), 1),
    call(aten.squeeze.dim, x(2, 3), 1),
    call(aten.squeeze.dims, x(1, 2, 1), [0, 1]),
    call(aten.unsqueeze.default, x(2, 3), -1),
    call(aten.unsqueeze.default, x(2, 3), 1),
    call(aten.diagonal.default, x(2, 3, 4), 1, 1, 2),
    call(aten.view_as_complex.default, x(3, 4, 2)),
    call(aten.view_as_real.default, torch.complex(x(3, 4), x(3, 4)).detach().requires_grad_()),
    call(aten.expand.default, x(3, 1), [2, -1, 4]),
    call(aten.expand_as.default, x(3, 1), plain(x(3, 4))),
    call(aten.broadcast_to.default, x(4), [3, 4]),
    call(aten.repeat.default, x(2, 3), [2, 1, 3]),
    call(aten.repeat.default, x(1, 3), [4, 2]),
    call(aten.tile.default, x(2, 3), [2]),
    call(aten.repeat_interleave.self_int, x(2, 3), 2, 1),
    call(aten.repeat_interleave.self_int, x(2, 3), 2),
    call(aten.repeat_interleave.self_int, x(2, 3), 3, 0, output_size=6),
    call(aten.meshgrid.default, [x(2), x(3)]),
    call(aten.meshgrid.indexing, [x(2), x(3), x(2)], indexing="xy"),
    call(aten.roll.default, x(3, 4), [1], [1]),
    call(aten.roll.default, x(5, 7), [-2, 3], [0, 1]),
    call(aten.roll.default, x(9, 2), [4, 3], [0, 0]),
    call(aten.roll.default, x(2, 6), [6], [1]),
    unsplit(aten.roll.default, x(3, 4), [1]),
    call(aten.flip.default, x(3, 4), [0]),
    call(aten.flip.default, x(5, 7), [0, -1]),
    call(aten.fliplr.default, x(2, 7)),
    call(aten.flipud.default, x(7, 2)),
    call(aten.pad.default, x(3, 4), [1, 2]),
    call(aten.pad.default, x(3, 4), [1, 2], "constant", 3.0),
    call(aten.pad.default, x(2, 3, 4), [1, 1], "reflect"),
    call(aten.pad.default, x(1, 2, 6, 7), [2, 1, 0, 3], "reflect"),
    call(aten.pad.default, x(2, 3, 7), [-1, 3], "reflect"),
    call(aten.pad.default, x(1, 2, 5, 7), [2, 4, 1, 0], "replicate"),
    call(aten.pad.default, x(2, 3, 7), [3, -2], "replicate"),
    call(aten.pad.default, x(1, 2, 5, 7), [2, 4, 1, 5], "circular"),
    call(aten.constant_pad_nd.default, x(2, 3, 4), [0, 0, -1, 1]),
    call(aten.constant_pad_nd.default, x(2, 7), [-2, -3]),
    call(aten.constant_pad_nd.default, x(2, 3), [5, 4], 2.0),
    call(aten.constant_pad_nd.default, x(3, 5), [2, -1, -1, 3]),
    call(aten.constant_pad_nd.default, bits(2, 5), [2, 1], True),
    call(aten.unfold.default, x(7, 2), 0, 1, 3),
    call(aten.unfold.default, x(2, 9), 1, 4, 1),
    call(aten.unfold.default, x(8), 0, 2, 2),
    call(aten.unfold.default, x(2, 6), 1, 3, 2),
    call(aten.tril.default, x(2, 5, 6)),
    call(aten.tril.default, x(6, 4), -1),
    call(aten.tril.default, bits(6, 6)),
    call(aten.triu.default, x(4, 6), 1),
    call(aten.triu.default, bits(6, 6), 1),
]

JOINS = [
    call(aten.split.Tensor, x(2, 6), 2, 1),
    call(aten.split.Tensor, x(2, 10), 4, 1),
    call(aten.split.Tensor, x(2, 3), 1, 1),
    call(aten.split.sizes, x(12, 2), [6, 3, 3]),
    call(aten.split_with_sizes.default, x(2, 10), [4, 2, 4], 1),
    call(aten.split_with_sizes.default, x(2, 7), [4, 3], -1),
    call(aten.chunk.default, x(6, 3), 2, 0),
    call(aten.tensor_split.sections, x(2, 9), 3, 1),
    call(aten.tensor_split.indices, x(2, 6), [2, 4], 1),
    call(aten.unbind.int, x(2, 3), 0),
    call(aten.slice.Tensor, x(6, 4), 0),
    call(aten.slice.Tensor, x(2, 6), 1, 3),
    call(aten.slice.Tensor, x(2, 6), 1, 0, 3),
    call(aten.slice.Tensor, x(2, 9), 1, 3, 9),
    call(aten.slice.Tensor, x(2, 8), 1, 2, 6),
    call(aten.slice.Tensor, x(2, 4), 1, 1, 3),
    call(aten.slice.Tensor, x(2, 6), 1, 0, -1),
    call(aten.slice.Tensor, x(2, 6), 1, 1, 9223372036854775807, 2),
    call(aten.slice.Tensor, x(2, 5), 1, 0, 5, 2),
    call(aten.narrow.default, x(6, 2), 0, 2, 2),
    call(aten.slice.Tensor, x(2, 9), 1, 2, 7),
    call(aten.slice.Tensor, x(2, 11), 1, 1, 10, 3),
    call(aten.slice.Tensor, x(2, 12), 1, 4),
    call(aten.narrow.default, x(7, 2), 0, 1, 5),
    call(aten.slice_scatter.default, x(2, 9), x(2, 4), 1, 3, 7),
    call(aten.slice_scatter.default, x(2, 12), x(2, 4), 1, 4, 8),
    call(aten.slice_scatter.default, x(2, 12), x(2, 8), 1, 4, 12),
    call(aten.cat.default, [x(2, 1), x(2, 7), x(2, 3)], 1),
    call(aten.cat.default, [x(4, 2), x(6, 2), x(0, 2)]),
    call(aten.slice_scatter.default, x(2, 6), x(2, 3), 1, 3, 6),
    call(aten.slice_scatter.default, x(2, 6), x(2, 3), 1, 0, 6, 2),
    call(aten.slice_scatter.default, x(2, 5), x(2, 4), 1, 1),
    call(aten.select.int, x(2, 3, 4), 1, -1),
    call(aten.select_scatter.default, x(2, 3), x(2), 1, 1),
    call(aten.cat.default, [x(2, 3), x(2, 3)], -1),
    call(aten.cat.default, [x(2, 4), x(2, 2), x(2, 2)], 1),
    call(aten.cat.default, [x(1, 2), x(3, 2)]),
    call(aten.concat.default, [x(2, 3), x(2, 3)], 0),
    call(aten.concatenate.default, [x(2, 3), x(4, 3)], 0),
    call(aten.stack.default, [x(2, 3), x(2, 3)], -1),
]

INDEXING = [
    call(aten.embedding.default, x(5, 3), ids(5, 2, 4)),
    call(aten.embedding.default, x(6, 3), torch.tensor([0, 2, 2, 5]), 2),
    call(aten.embedding.default, x(5, 3), ids(5, 4), -1, True),
    call(aten.gather.default, x(3, 5), 1, ids(5, 3, 4)),
    call(aten.gather.default, x(4, 5, 2), 1, ids(5, 3, 2, 2)),
    unsplit(aten.gather.default, x(4), 0, ids(4)),
    call(aten.take_along_dim.default, x(3, 5), ids(5, 1, 2), 1),
    call(aten.take_along_dim.default, x(1, 5, 2), ids(5, 3, 4, 2), 1),
    call(aten.index_select.default, x(3, 5, 2), 1, ids(5, 4)),
    call(aten.index.Tensor, x(3, 5), [None, ids(5, 2, 3)]),
    call(aten.index.Tensor, x(5, 3), [ids(5, 4) - 5]),
    call(aten.index.Tensor, x(2, 4, 3), [None, ids(4, 3, 1), ids(3, 1, 2)]),
    call(aten.index.Tensor, x(4, 2, 3), [ids(4, 3), None, ids(3, 3)]),
    call(aten.index.Tensor, x(4, 2, 3, 5), [ids(4, 3, 1), None, ids(3, 2) - 3]),
    call(aten.one_hot.default, ids(5, 2, 3), 5),
    call(aten.scatter.src, x(3, 5), 1, torch.tensor([[0, 1], [4, 2], [3, 3]])[:, :1], x(3, 1)),
    call(aten.scatter.src, x(3, 5), 1, torch.tensor([[0, 1], [4, 2], [3, 2]]), plain(x(3, 3))),
    call(aten.scatter.value, x(3, 5), 1, ids(5, 3, 2), 0.0),
    call(aten.scatter.value, x(3, 5), 1, ids(5, 3, 2), 2.5),
    call(aten.scatter.reduce, plain(x(3, 5)), 1, ids(5, 3, 2), plain(x(3, 2)), reduce="add"),
    call(aten.scatter.value_reduce, plain(x(3, 5)), 1, ids(5, 3, 2), 2.0, reduce="multiply"),
    call(aten.scatter_add.default, x(3, 5), 1, ids(5, 3, 2), x(3, 2)),
    call(aten.scatter_add.default, x(2, 3, 4), 0, ids(2, 5, 3, 4), x(5, 3, 4)),
    call(aten.scatter_add.default, x(3, 5), 0, ids(3, 4, 2), plain(x(6, 2))),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "sum"),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "sum", include_self=False),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "prod"),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "mean"),
    call(aten.scatter_reduce.two, x(3, 5), 1, ids(5, 3, 4), x(3, 4), "amax", include_self=False),
    call(aten.scatter_reduce.two, ids(9, 3, 5), 1, ids(5, 3, 4), ids(9, 3, 4), "amin"),
    call(aten.index_add.default, x(3, 5), 1, ids(5, 4), x(3, 4)),
    call(aten.index_add.default, x(5, 2), 0, ids(5, 3), x(3, 2), alpha=0.5),
    call(aten.index_add.default, x(5), 0, ids(5, 7), x(7)),
    call(aten.index_copy.default, x(3, 5), 1, torch.tensor([4, 0]), x(3, 2)),
    call(aten.index_fill.int_Scalar, x(3, 5), 1, torch.tensor([4, 0]), 0.5),
    call(aten.index_fill.int_Tensor, x(3, 5), 1, torch.tensor([4, 0]), x()),
    call(aten.index_put.default, x(3, 5), [None, torch.tensor([4, 0])], x(3, 2)),
    call(aten.index_fill.int_Scalar, x(5), 0, torch.tensor([-1, 0]), 0.5),
    call(aten.index_put.default, x(5, 3), [ids(5, 4)], x(3), True),
    call(aten.index_put.default, x(5, 3, 4), [None, ids(3, 2, 3) - 3, ids(4, 2, 1)], x(5, 2, 3), True),
    call(aten.index_put.default, x(4, 3, 2), [ids(4, 3), None, ids(2, 3)], x(3, 3), True),
    call(aten.index_put.default, x(5), [torch.tensor(-2)], x()),
    call(aten.index_put.default, x(3, 4), [bits(3, 4)], x()),
    call(aten.index_put.default, x(3, 4, 2), [None, torch.arange(4) % 2 == 1], x(1, 2), True),
    call(aten.masked_scatter.default, x(3, 4), torch.arange(12).reshape(3, 4) % 3 == 1, x(5)),
    call(aten.masked_scatter.default, x(2, 3, 4), torch.arange(3).reshape(3, 1) > 0, x(4, 5)),
    call(aten.take.default, x(3, 4), ids(12, 2, 5) - 6),
    call(SCATTERED_SUM, x(3, 4), 1, ids(6, 4), [6], [0], [6]),
    call(SCATTERED_SUM, x(3, 4), 0, ids(5, 3, 4), [5], [0], [5]),
    call(aten.index_put.default, x(5, 3, 2), [torch.tensor([4, 0]), torch.tensor([1, 2])], x(2, 2)),
]

ATTENTION = [
    call(aten.scaled_dot_product_attention.default, x(2, 2, 3, 4), x(2, 2, 5, 4), x(2, 2, 5, 3)),
    call(aten.scaled_dot_product_attention.default, x(2, 2, 4, 2), x(2, 2, 4, 2), x(2, 2, 4, 2), None, 0.0, True),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 6, 3, 4),
        x(2, 2, 3, 4),
        x(2, 2, 3, 4),
        None,
        0.0,
        True,
        enable_gqa=True,
    ),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 4, 3, 4),
        x(2, 2, 3, 4),
        x(2, 2, 3, 4),
        x(4, 3, 3),
        enable_gqa=True,
    ),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 4, 3, 4),
        x(2, 2, 3, 4),
        x(2, 2, 3, 4),
        x(2, 1, 1, 3),
        enable_gqa=True,
    ),
    call(aten.scaled_dot_product_attention.default, x(3, 4, 2), x(3, 5, 2), x(3, 5, 2), x(4, 5)),
    call(aten.scaled_dot_product_attention.default, x(4, 2), x(5, 2), x(5, 2), bits(4, 5) | (ids(5, 5) == 0)),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 2, 3, 2),
        x(2, 2, 3, 2),
        x(2, 2, 3, 2),
        torch.tensor([True, True, False]).expand(2, 1, 1, 3).contiguous(),
        scale=0.3,
    ),
]

NORMALIZATION = [
    call(aten.layer_norm.default, x(2, 3, 4), [4], x(4), x(4)),
    call(aten.layer_norm.default, x(2, 3, 4), [3, 4], x(3, 4)),
    call(aten.layer_norm.default, x(3, 4), [4]),
    call(aten.rms_norm.default, x(2, 3, 4), [4], x(4)),
    call(aten.rms_norm.default, x(2, 3, 4), [4], None, 1e-5),
    call(aten.native_layer_norm.default, x(2, 3, 4), [4], x(4), x(4), 1e-5),
    call(aten._fused_rms_norm.default, x(3, 4), [4], x(4), 1e-5),
    call(aten.group_norm.default, x(2, 6, 3), 3, x(6), x(6)),
    call(aten.group_norm.default, x(2, 6, 2, 3), 2),
    call(aten.batch_norm.default, x(3, 4, 2), x(4), x(4), plain(x(4)), unit(4).detach(), False, 0.1, 1e-5, False),
    call(aten.batch_norm.default, x(3, 4, 2), x(4), x(4), None, None, True, 0.1, 1e-5, False),
    call(aten.batch_norm.default, x(3, 4), None, None, None, None, True, 0.1, 1e-5, False),
    call(aten.instance_norm.default, x(3, 4, 5), x(4), x(4), None, None, True, 0.1, 1e-5, False),
    call(
        aten._native_batch_norm_legit_no_training.default,
        x(3, 4, 2),
        x(4),
        x(4),
        plain(x(4)),
        unit(4).detach(),
        0.1,
        1e-5,
    ),
]

CONVOLUTION = [
    call(aten.conv1d.default, x(2, 3, 6), x(4, 3, 2)),
    call(aten.conv1d.default, x(2, 3, 6), x(4, 3, 2), x(4), [2], [1]),
    call(aten.conv1d.padding, x(2, 3, 6), x(4, 3, 3), None, [1], "same"),
    call(aten.conv2d.default, x(2, 4, 5, 5), x(6, 2, 3, 3), x(6), [1, 1], [1, 1], [1, 1], 2),
    call(aten.conv2d.default, x(4, 5, 5), x(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4),
    call(aten.conv2d.padding, x(2, 2, 4, 4), x(3, 2, 3, 3), x(3), [1, 1], "valid"),
    call(aten.conv3d.default, x(2, 2, 3, 3, 3), x(3, 2, 2, 2, 2)),
    call(aten.conv2d.default, x(2, 3, 6, 4), x(4, 3, 2, 2), x(4), [2, 2]),
    call(aten.conv2d.default, x(2, 4, 6, 5), x(4, 2, 1, 2), None, [1, 2], [0, 0], [1, 1], 2),
    call(aten.conv1d.padding, x(2, 3, 12), x(4, 3, 3), x(4), [3], "valid"),
    # As long as two windows, yet the windows are shifted by the padding, or overlap: not to be split along.
    call(aten.conv1d.default, x(2, 3, 6), x(4, 3, 3), None, [3], [1]),
    call(aten.conv1d.default, x(2, 3, 6), x(4, 3, 3), None, [2]),
    call(aten.conv3d.padding, x(2, 2, 3, 3, 3), x(2, 2, 2, 2, 2), None, [1, 1, 1], "same"),
    call(aten.convolution.default, x(2, 3, 6), x(4, 3, 2), x(4), [1], [0], [1], False, [0], 1),
    call(aten.convolution.default, x(2, 4, 6), x(4, 3, 2), None, [1], [0], [1], True, [0], 2),
    call(aten.conv_transpose1d.default, x(2, 3, 4), x(3, 2, 2)),
    call(aten.conv_transpose2d.input, x(2, 3, 3, 3), x(3, 2, 2, 2), x(2)),
    call(aten.conv_transpose3d.input, x(1, 2, 2, 2, 2), x(2, 2, 2, 2, 2)),
    # Windows that overlap, leave gaps, are padded or larger than a part.
    call(aten.conv1d.default, x(2, 2, 9), x(2, 2, 5), x(2), [1], [2]),
    call(aten.conv1d.default, x(2, 2, 11), x(2, 2, 3), None, [3], [4], [2]),
    call(aten.conv1d.default, x(1, 2, 2), x(2, 2, 3), x(2), [1], [4]),
    call(aten.conv1d.default, x(1, 2, 7), x(2, 2, 1), None, [3]),
    call(aten.conv1d.padding, x(2, 3, 6), x(4, 3, 4), x(4), [1], "same", [2]),
    call(aten.conv2d.default, x(1, 2, 7, 6), x(2, 2, 3, 2), None, [2, 1], [1, 0], [1, 2]),
    call(aten.conv2d.default, x(1, 4, 6, 7), x(4, 2, 3, 3), x(4), [2, 2], [1, 1], [1, 1], 2),
    call(aten.conv2d.default, x(1, 2, 6, 4), x(2, 2, 3, 2), None, [1, 2], [1, 0]),
    call(aten.conv3d.default, x(1, 1, 4, 5, 3), x(2, 1, 3, 2, 1), x(2), [1, 2, 1], [1, 0, 1]),
    call(aten.convolution.default, x(1, 2, 7), x(2, 2, 3), None, [2], [1], [1], False, [0], 1),
    call(aten.conv_transpose1d.default, x(2, 3, 5), x(3, 2, 3), x(2), [2], [1], [1]),
    call(aten.conv_transpose1d.default, x(1, 2, 4), x(2, 2, 2), None, [3], [0], [2]),
    call(aten.conv_transpose1d.default, x(1, 2, 5), x(2, 2, 3), x(2), [1], [2], [0], 1, [2]),
    call(aten.conv_transpose2d.input, x(1, 4, 4, 3), x(4, 1, 4, 4), x(2), [2, 2], [1, 1], [0, 0], 2),
    call(aten.conv_transpose3d.input, x(1, 1, 3, 2, 2), x(1, 2, 2, 3, 2), None, [2, 1, 2], [0, 1, 0]),
    call(aten.convolution.default, x(2, 3, 5), x(3, 2, 4), x(2), [3], [1], [1], True, [1], 1),
    call(aten.conv_transpose1d.default, x(3, 5), x(3, 2, 3), x(2), [2], [1]),
    call(aten.im2col.default, x(2, 2, 5, 6), [3, 2], [1, 1], [1, 0], [1, 2]),
    call(aten.im2col.default, x(2, 7, 4), [2, 2], [2, 1], [1, 1], [2, 1]),
    call(aten.pixel_shuffle.default, x(2, 12, 3, 4), 2),
    call(aten.pixel_shuffle.default, x(18, 2, 3), 3),
    call(aten.pixel_unshuffle.default, x(2, 3, 6, 4), 2),
    call(aten.channel_shuffle.default, x(2, 6, 3, 2), 2),
    call(aten.rot90.default, x(3, 4), 0),
    call(aten.rot90.default, x(2, 5, 4), 1, [1, 2]),
    call(aten.rot90.default, x(5, 3), 2),
    call(aten.rot90.default, x(5, 3, 2), -1, [0, 1]),
    call(aten.col2im.default, x(2, 12, 18), [5, 7], [3, 2], [1, 1], [1, 0], [2, 1]),
    call(aten.col2im.default, x(8, 16), [5, 6], [2, 2], [1, 2], [0, 0], [1, 1]),
    call(aten.col2im.default, x(1, 4, 4), [7, 8], [2, 1], [1, 1], [0, 0], [4, 7]),
    call(aten.grid_sampler.default, x(2, 3, 4, 5), x(2, 3, 2, 2), 0, 0, False),
    call(aten.grid_sampler.default, x(2, 2, 3, 2, 4), x(2, 3, 2, 2, 3), 0, 1, True),
    call(aten.max_unpool2d.default, x(2, 3, 2, 2), ids(4, 2, 3, 2, 2) * 4 + torch.arange(4).view(2, 2), [4, 4]),
    call(aten._upsample_bilinear2d_aa.default, x(2, 3, 6, 4), [3, 2], False),
    call(aten._upsample_bilinear2d_aa.vec, x(2, 3, 6, 4), [3, 2], False, None),
    call(aten._upsample_bicubic2d_aa.default, x(2, 3, 6, 4), [3, 2], True),
    call(aten._upsample_bicubic2d_aa.vec, x(2, 3, 6, 4), [3, 2], True, None),
    call(aten.max_pool1d.default, x(2, 3, 9), [3], [2], [1]),
    call(aten.max_pool1d.default, x(2, 7), [4], [1], [2]),
    call(aten.max_pool2d.default, x(1, 2, 7, 6), [3, 2], [2, 1], [1, 1], [1, 2], True),
    call(aten.max_pool1d_with_indices.default, x(2, 2, 8), [3], [2], [1], [2]),
    call(aten.max_pool2d_with_indices.default, x(2, 2, 7, 5), [3, 3], [2, 1], [1, 1]),
    call(aten.max_pool2d_with_indices.default, x(2, 6, 7), [2, 3], [2, 2], [0, 1], [1, 1], True),
    call(aten.max_pool3d.default, x(1, 2, 5, 4, 3), [3, 2, 2], [1, 2, 1], [1, 0, 1]),
    call(aten.max_pool3d_with_indices.default, x(1, 1, 5, 4, 3), [3, 2, 2], [1, 2, 1], [1, 0, 1]),
    call(aten.avg_pool1d.default, x(2, 9), [4], [3], [2], True),
    call(aten.avg_pool1d.default, x(2, 9), [3], [1], [1], False, False),
    call(aten.avg_pool2d.default, x(1, 2, 7, 6), [3, 3], [2, 1], [1, 1], True),
    call(aten.avg_pool2d.default, x(1, 2, 7, 6), [3, 2], [2, 3], [1, 0], True, False),
    call(aten.avg_pool2d.default, x(1, 2, 6, 6), [3, 3], [1, 2], [1, 1], False, True, 5),
    call(aten.avg_pool3d.default, x(1, 2, 5, 4, 3), [3, 2, 2], [1, 2, 1], [1, 0, 1]),
    call(aten.adaptive_avg_pool1d.default, x(2, 3, 7), [3]),
    call(aten.adaptive_avg_pool2d.default, x(2, 2, 6, 7), [3, 4]),
    call(aten.adaptive_avg_pool2d.default, x(1, 2, 3, 4), [5, 8]),
    call(aten.adaptive_avg_pool2d.default, x(2, 2, 6, 4), [1, 3]),
    call(aten.adaptive_avg_pool3d.default, x(1, 1, 5, 4, 3), [3, 2, 3]),
    call(aten._adaptive_avg_pool3d.default, x(1, 1, 5, 4, 3), [3, 2, 3]),
    call(aten.adaptive_max_pool1d.default, x(2, 3, 7), [3]),
    call(aten.adaptive_max_pool2d.default, x(2, 2, 6, 7), [3, 4]),
    call(aten.adaptive_max_pool2d.default, x(2, 2, 5, 7), [1, 3]),
    call(aten.adaptive_max_pool3d.default, x(1, 2, 5, 4, 3), [2, 2, 3]),
    call(aten.adaptive_max_pool1d.default, x(2, 3, 6), [1]),
    call(aten.adaptive_max_pool2d.default, x(2, 2, 6, 3), [1, 1]),
    call(aten.adaptive_max_pool3d.default, x(2, 1, 4, 2, 3), [1, 1, 1]),
    call(aten.upsample_nearest1d.default, x(2, 2, 3), [7]),
    call(aten.upsample_nearest1d.vec, x(2, 2, 5), None, [1.7]),
    call(aten.upsample_nearest2d.default, x(1, 2, 5, 3), [3, 7]),
    call(aten.upsample_nearest2d.vec, x(1, 2, 4, 3), None, [2.5, 1.4]),
    call(aten.upsample_nearest3d.default, x(1, 1, 2, 3, 2), [5, 3, 4]),
    call(aten.upsample_nearest3d.vec, x(1, 1, 2, 3, 2), None, [2.0, 1.5, 2.0]),
    call(aten._upsample_nearest_exact1d.default, x(2, 2, 5), [7]),
    call(aten._upsample_nearest_exact1d.vec, x(2, 2, 5), None, [0.6]),
    call(aten._upsample_nearest_exact2d.default, x(1, 2, 5, 3), [7, 2]),
    call(aten._upsample_nearest_exact2d.vec, x(1, 2, 5, 3), None, [2.0, 1.7]),
    call(aten._upsample_nearest_exact3d.default, x(1, 1, 2, 3, 2), [5, 3, 4]),
    call(aten._upsample_nearest_exact3d.vec, x(1, 1, 2, 3, 2), [5, 3, 4], None),
    call(aten.upsample_linear1d.default, x(2, 2, 5), [8], False),
    call(aten.upsample_linear1d.vec, x(2, 2, 5), None, True, [0.7]),
    call(aten.upsample_bilinear2d.default, x(1, 2, 4, 5), [7, 3], True),
    call(aten.upsample_bilinear2d.vec, x(1, 2, 4, 5), None, False, [1.6, 2.0]),
    call(aten.upsample_bilinear2d.vec, x(1, 2, 4, 5), [3, 9], True, None),
    call(aten.upsample_trilinear3d.default, x(1, 1, 3, 2, 4), [5, 3, 4], False),
    call(aten.upsample_trilinear3d.vec, x(1, 1, 3, 2, 4), None, False, [1.5, 2.0, 0.5]),
    call(aten.upsample_bicubic2d.default, x(1, 2, 4, 5), [7, 3], False),
    call(aten.upsample_bicubic2d.default, x(1, 2, 4, 5), [7, 8], True),
    call(aten.upsample_bicubic2d.vec, x(1, 2, 4, 5), None, False, [1.6, 2.0]),
    call(aten.max_pool1d.default, x(2, 3, 6), [2]),
    call(aten.max_pool2d.default, x(2, 3, 4, 4), [2, 2]),
    call(aten.max_pool3d.default, x(2, 2, 2, 2, 2), [2, 2, 2]),
    call(aten.max_pool2d_with_indices.default, x(2, 3, 4, 4), [2, 2]),
    call(aten.avg_pool1d.default, x(3, 6), [2]),
    call(aten.avg_pool2d.default, x(2, 3, 4, 4), [2, 2]),
    call(aten.avg_pool3d.default, x(2, 2, 2, 2, 2), [2, 2, 2]),
    call(aten.adaptive_avg_pool1d.default, x(2, 3, 4), [2]),
    call(aten.adaptive_avg_pool2d.default, x(2, 3, 4, 4), [1, 1]),
    call(aten._adaptive_avg_pool2d.default, x(2, 3, 4, 4), [2, 2]),
    call(aten.adaptive_avg_pool3d.default, x(2, 2, 2, 2, 2), [1, 1, 1]),
    call(aten.adaptive_max_pool2d.default, x(2, 3, 4, 4), [2, 2]),
    call(aten.upsample_nearest2d.default, x(2, 3, 2, 2), [4, 4]),
    call(aten.upsample_nearest2d.vec, x(2, 3, 2, 2), [4, 4], None),
    call(aten.upsample_bilinear2d.default, x(2, 3, 2, 2), [4, 4], False),
    call(aten.upsample_bilinear2d.vec, x(2, 3, 2, 2), [4, 4], False, None),
]

_LABELS = torch.tensor([1, -100, 3, 0])


def _losses() -> list[Sample]:
    cross, nll = aten.cross_entropy_loss.default, aten.nll_loss.default
    grid = ids(3, 2, 5)
    found = [
        call(cross, x(4, 5), _LABELS, None, 2),
        call(cross, x(4, 5), _LABELS, unit(5).detach(), 1),
        call(cross, x(4, 5), _LABELS, unit(5).detach(), 0, -100, 0.1),
        call(cross, x(4, 5), _LABELS, unit(5).detach(), 1, -100, 0.2),
        call(cross, x(4, 5), _LABELS, None, 1, -100, 0.2),
        call(cross, x(2, 3, 5), grid, None, 0, 1),
        call(cross, x(2, 3, 5), grid, unit(3).detach(), 2, 1, 0.1),
        call(cross, x(5), torch.tensor(2), None, 1),
        call(cross, x(4, 5), unit(4, 5), unit(5).detach(), 1),
        call(cross, x(4, 5), unit(4, 5), None, 2, -100, 0.1),
        call(cross, x(2, 3, 5), unit(2, 3, 5), unit(3).detach(), 0, -100, 0.1),
        call(nll, x(4, 5), _LABELS, None, 2),
        call(nll, x(4, 5), _LABELS, unit(5).detach(), 1),
        call(nll, x(5), torch.tensor(2), None, 0),
        call(aten.nll_loss_nd.default, x(2, 3, 5), grid, None, 0),
        call(aten.nll_loss2d.default, x(2, 3, 2, 2), ids(3, 2, 2, 2), None, 1),
        call(cross, x(4, 5), torch.full((4,), -100), None, 1),
        call(cross, x(4, 5), torch.full((4,), -100), plain(unit(5)), 0, -100, 0.1),
        call(nll, x(4, 5), torch.full((4,), -100), None, 1),
        call(
            ctc_loss._opoverload,
            leaf(torch.randn(7, 3, 5, dtype=torch.float64, generator=_GENERATOR).log_softmax(2)),
            ids(4, 3, 3) + 1,
            torch.tensor([7, 5, 6]),
            torch.tensor([3, 2, 0]),
            0,
            False,
        ),
        call(aten.pairwise_distance.default, x(6, 4), x(6, 4)),
        call(aten.pairwise_distance.default, x(2, 3, 4), x(2, 3, 4), 1.0, 1e-6, True),
        call(aten.l1_loss.default, x(3, 4), x(4), 2),
        call(aten.poisson_nll_loss.default, x(3, 4), unit(3, 4), True, False, 1e-8, 2),
        call(aten.binary_cross_entropy_with_logits.default, x(3, 4), unit(3, 4), plain(unit(4)), plain(unit(4)), 2),
        call(aten.binary_cross_entropy.default, unit(3, 4), unit(3, 4), unit(4).detach(), 2),
        call(aten.kl_div.default, x(3, 4), unit(3, 4), 2, log_target=True),
    ]
    for reduction in (0, 1, 2):
        found += [
            call(target, x(3, 4), unit(3, 4), reduction)
            for target in (aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default)
        ]
        found += [
            call(target, x(3, 4), unit(3, 4), reduction) for target in (aten.huber_loss.default, aten.kl_div.default)
        ]
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0]).double()
        found += [
            call(aten.hinge_embedding_loss.default, x(4, 6), signs, 1.0, reduction),
            call(aten.margin_ranking_loss.default, x(6), x(6), signs, 3.0, reduction),
            call(aten.cosine_embedding_loss.default, x(6, 4), x(6, 4), signs, 0.1, reduction),
            call(aten.triplet_margin_loss.default, x(6, 4), x(6, 4), x(6, 4), reduction=reduction),
            call(aten.triplet_margin_loss.default, x(3, 4), x(3, 4), x(3, 4), 0.5, 1, 1e-6, True, reduction),
            call(aten.multi_margin_loss.default, x(4, 5), ids(5, 4), 1, 1.0, plain(unit(5)), reduction),
            call(aten.multilabel_margin_loss.default, x(4, 3), torch.tensor([[2, 0, -1]] * 4), reduction),
        ]
        found += [
            call(aten.soft_margin_loss.default, x(3, 4), plain(unit(3, 4)), reduction),
            call(aten.binary_cross_entropy.default, unit(3, 4), unit(3, 4), None, reduction),
            call(aten.binary_cross_entropy_with_logits.default, x(3, 4), unit(3, 4), None, None, reduction),
        ]
    return found


LOSSES = _losses()

CONSTRUCTORS = [
    call(aten.zeros.default, [3, 4]),
    call(aten.ones.default, [3, 4], dtype=torch.bool),
    call(aten.full.default, [5], 2.5),
    Sample(aten.empty.memory_format, ([3, 4],), {}, unspecified=True),
    unsplit(aten.scalar_tensor.default, 2.0),
    call(aten.new_zeros.default, x(2), [3, 4]),
    call(aten.new_ones.default, x(2), [3]),
    call(aten.new_full.default, x(2, 2), [5], 3.0),
    Sample(aten.new_empty.default, (x(2), [3]), {}, unspecified=True),
    call(aten.arange.default, 6),
    call(aten.arange.start, 2, 8),
    call(aten.arange.start_step, 9, -3, -2),
    call(aten.arange.start_step, 0.0, 1.2, 0.2, dtype=torch.float64),
    call(aten.linspace.default, 0.0, 1.0, 6, dtype=torch.float64),
    call(aten.eye.default, 6),
    call(aten.eye.m, 4, 6, dtype=torch.float64),
]

_SEED = torch.tensor(7)

DROPOUT = [
    call(dropout._opoverload, x(4, 6), _SEED, 0.4, 3, [4, 6], [0, 0]),
    call(uniform._opoverload, _SEED, 3, [4, 6], [0, 0], [4, 6], [4, 6], torch.float64),
    unsplit(uniform._opoverload, _SEED, 0, [], [], [], [], torch.float32),
]

LABEL_TERMS = [
    call(label_terms._opoverload, x(3, 5), plain(x(3, 1)), ids(5, 3), 1, [5], [0], [5]),
    call(label_terms._opoverload, x(3, 6, 2), plain(x(3, 1, 2)), ids(6, 3, 2), 1, [6], [0], [6]),
]

EXPERTS = [
    call(grouped_mm._opoverload, x(6, 4), x(3, 4, 2), torch.tensor([2, 3, 6]), [6], [0], [6], [3], [0], [3]),
    call(  # an expert without rows, and rows without an expert
        grouped_mm._opoverload, x(6, 4), x(4, 4, 3), torch.tensor([3, 3, 4, 5]), [6], [0], [6], [4], [0], [4]
    ),
]


def _weights(gates: int, inputs: int, hidden: int, directions: int = 1) -> list[Tensor]:
    """Of one recurrent layer."""
    own = [(gates * hidden, inputs), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)]
    return [x(*shape) for shape in own * directions]


RECURRENT = [
    call(aten.lstm.input, x(2, 3, 4), [x(1, 3, 2), x(1, 3, 2)], _weights(4, 4, 2), True, 1, 0.0, True, False, False),
    call(
        aten.lstm.input,
        x(3, 2, 4),
        [x(2, 3, 2), x(2, 3, 2)],
        _weights(4, 4, 2, directions=2),
        True,
        1,
        0.0,
        True,
        True,
        True,
    ),
    call(
        aten.lstm.input,
        x(2, 3, 4),
        [x(1, 3, 2), x(1, 3, 5)],
        [x(20, 4), x(20, 2), x(2, 5)],
        False,
        1,
        0.0,
        True,
        False,
        False,
    ),
    call(aten.gru.input, x(2, 3, 4), x(1, 3, 2), _weights(3, 4, 2), True, 1, 0.0, True, False, False),
    call(aten.gru.input, x(2, 2, 4), x(1, 2, 2), _weights(3, 4, 2), True, 1, 0.0, True, False, True),
    call(aten.rnn_tanh.input, x(2, 3, 4), x(1, 3, 2), _weights(1, 4, 2), True, 1, 0.0, True, False, False),
    call(aten.rnn_relu.input, x(3, 2, 4), x(1, 3, 2), _weights(1, 4, 2), True, 1, 0.0, True, False, True),
]

# -- point-wise operators ----------------------------------------------------------------------------------------------


def _complex(*shape: int) -> torch.Tensor:
    return torch.complex(x(*shape), x(*shape)).detach().requires_grad_()


TRANSFORMS = [
    *(call(op, _complex(3, 6, 4)) for op in (aten.fft_fft.default, aten.fft_ifft.default, aten.fft_hfft.default)),
    *(call(op, x(3, 6, 4)) for op in (aten.fft_fft.default, aten.fft_rfft.default, aten.fft_ihfft.default)),
    call(aten.fft_fft.default, _complex(3, 6, 4), 5, 1, "ortho"),
    call(aten.fft_irfft.default, _complex(3, 6, 4), 6, 0),
    *(call(op, _complex(3, 6, 4)) for op in (aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_irfft2.default)),
    *(call(op, x(3, 6, 4), [4, 3], [0, 2]) for op in (aten.fft_rfft2.default, aten.fft_ihfft2.default)),
    call(aten.fft_hfft2.default, _complex(3, 6, 4), None, [-3, -2]),
    call(aten.fft_fftn.default, _complex(3, 6, 4), None, [1, 2]),
    unsplit(aten.fft_fftn.default, _complex(3, 6, 4)),
    call(aten.fft_ifftn.default, _complex(3, 6, 4), [4]),
    *(call(op, x(3, 6, 4), [5, 4]) for op in (aten.fft_rfftn.default, aten.fft_ihfftn.default)),
    *(call(op, _complex(3, 6, 4), None, [1]) for op in (aten.fft_irfftn.default, aten.fft_hfftn.default)),
    call(aten.fft_fftshift.default, x(3, 6, 4), [1]),
    call(aten.fft_ifftshift.default, x(3, 5, 4), [1, -1]),
]

POINTWISE = [
    call(aten.add.Tensor, x(2, 3, 5), x(3, 1), alpha=2),
    call(aten.add.Tensor, x(3), 1.5),
    call(aten.sub.Tensor, x(1, 3), x(2, 1)),
    call(aten.mul.Tensor, x(2, 3), x(3)),
    call(aten.mul.Tensor, x(2, 3), 2.0),
    call(aten.div.Tensor, x(2, 3), unit(3)),
    call(aten.div.Tensor_mode, x(2, 3), unit(3), rounding_mode=None),
    call(aten.div.Tensor_mode, x(2, 3), unit(3), rounding_mode="floor"),
    call(aten.div.Scalar_mode, x(2, 3), 2.0, rounding_mode=None),
    call(aten.divide.Tensor_mode, x(2, 3), unit(3), rounding_mode="trunc"),
    call(aten.divide.Scalar_mode, x(2, 3), 2.0, rounding_mode="trunc"),
    call(aten.where.self, bits(3, 1), x(2, 3, 4), x(4)),
    call(aten.__and__.Tensor, bits(), bits(2, 1, 3)),
    call(aten.where.ScalarOther, bits(3, 4), x(4), 0.0),
    call(aten.where.ScalarSelf, bits(3, 4), 0.0, x(4)),
    call(aten.where.Scalar, bits(3, 4), 1.0, 0.0),
    call(aten.masked_fill.Scalar, x(3, 4), bits(4), 0.0),
    call(aten.masked_fill.Scalar, x(3, 4), bits(4), -1.0),
    call(aten.masked_fill.Tensor, x(3, 4), bits(4), x()),
    call(aten.fill.Scalar, x(3, 4), 2.0),
    call(aten.fill.Tensor, x(3, 4), x()),
    call(aten.copy.default, plain(x(3, 4)), plain(x(4))),
    call(aten.round.decimals, x(3, 4), decimals=1),
    call(aten.clamp.default, x(3, 4), -0.5, 0.5),
    call(aten.clip.default, x(3, 4), -0.5),
    call(aten.clamp.Tensor, x(3, 4), x(4) - 1, x(3, 1) + 1),
    call(aten.clip.Tensor, x(3, 4), x(4)),
    call(aten.complex.default, x(3, 4), x(4)),
    call(aten.polar.default, unit(3, 4), unit(3, 4)),
    call(aten.imag.default, torch.complex(x(3), x(3)).detach().requires_grad_()),
    call(aten.real.default, torch.complex(x(3), x(3)).detach().requires_grad_()),
    call(aten.to.dtype, x(3, 4), torch.float32),
    call(aten.to.dtype, ids(4, 3, 4), torch.float64),
    call(aten.to.dtype, x(3, 4), torch.int64),
    call(aten.to.dtype, x(3, 4), torch.bool),
    call(aten.to.dtype_layout, x(3, 4), dtype=torch.float32),
    call(aten.to.device, x(3, 4), torch.device("cpu"), torch.float64),
    call(aten.to.prim_Device, x(3, 4), torch.device("cpu")),
    call(aten.to.prim_dtype, x(3, 4), torch.float32),
    call(aten.to.prim_other, x(3, 4)),
    call(aten.to.other, x(3, 4), plain(x(2)).float()),
    call(aten._to_copy.default, x(3, 4), dtype=torch.float64),
    call(aten.type_as.default, x(3, 4), plain(x(3, 4))),
    call(aten.view.dtype, plain(x(3, 4)), torch.int64),
    call(aten.dropout.default, x(3, 4), 0.5, False),
    call(aten.prelu.default, x(2, 3, 4), x(3)),
    call(aten.prelu.default, x(2, 3), x(1)),
    call(aten.lerp.Scalar, x(3, 4), x(4), 0.3),
    call(aten.lerp.Tensor, x(3, 4), x(4), unit(3, 1)),
    call(aten.clone.default, x(3, 4)),
    call(aten.acosh.default, unit(3, 4) + 1),
    call(aten.arccosh.default, unit(3, 4) + 1),
    call(aten.mvlgamma.default, unit(3, 4) + 3, 2),
    call(aten.polygamma.default, 1, unit(3, 4)),
    call(aten.nan_to_num.default, x(3, 4)),
    call(aten.isclose.default, plain(x(3, 4)), plain(x(4))),
    call(aten.addcmul.default, x(3, 4), x(4), x(3, 1), value=0.5),
    call(aten.addcdiv.default, x(3, 4), x(4), unit(3, 1)),
    call(aten.gelu.default, x(3, 4), approximate="tanh"),
    call(aten.fmod.Tensor, x(3, 4), plain(unit(4))),
    call(aten.remainder.Tensor, x(3, 4), plain(unit(4))),
    Sample(aten.empty_like.default, (x(3, 4),), {}, unspecified=True),
]

_INTEGER_ONLY = ("bitwise", "gcd", "lcm", "__")
_NO_GRADIENT = [
    "floor_divide",
    "heaviside",
    "nextafter",
    "igamma",
    "igammac",
    "special_zeta",
    "remainder",
    "fmod",
    "isclose",
    "special_round",
    "special_bessel_j0",
    "special_bessel_j1",
    "special_log_ndtr",
    "silu_backward",
]
_SHAPES = ((2, 3, 5), (3, 1), (5,))


def _from_schema(target: OpOverload) -> Sample:
    """A call with broadcasting operands, for a point-wise operator that needs nothing special."""
    name = target._schema.name.partition("::")[2]
    make: Callable[..., Tensor] = unit
    if name.startswith(_INTEGER_ONLY):
        make = lambda *shape: ids(4, *shape) + 1  # noqa: E731
    elif name in _NO_GRADIENT:
        make = lambda *shape: plain(unit(*shape))  # noqa: E731
    constants = {"number": 2 if make is not unit else 0.6, "float": 0.5, "int": 2, "bool": False}
    shapes = iter(_SHAPES)
    required = [a for a in target._schema.arguments if not a.has_default_value()]
    args = [make(*next(shapes)) if str(a.type) == "Tensor" else constants[str(a.type)] for a in required]
    return Sample(target, tuple(args), {})


def _point_wise() -> list[Sample]:
    explicit = {sample.target for sample in POINTWISE}
    return POINTWISE + [_from_schema(target) for target in ELEMENTWISE if target not in explicit]


SAMPLES: tuple[Sample, ...] = (
    *CONTRACTIONS,
    *REDUCTIONS,
    *SHAPES,
    *JOINS,
    *INDEXING,
    *ATTENTION,
    *NORMALIZATION,
    *CONVOLUTION,
    *LOSSES,
    *CONSTRUCTORS,
    *DROPOUT,
    *LABEL_TERMS,
    *RECURRENT,
    *EXPERTS,
    *TRANSFORMS,
    *_point_wise(),
)
