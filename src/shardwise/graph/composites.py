"""Decompositions of composite operators: they are traced as the operators that they call, which have rules.

PyTorch computes most of them like this itself (CompositeImplicitAutograd): their derivatives are those of eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from shardwise.graph.schema import aten_operators, operator_name

aten = torch.ops.aten

# Packets whose overloads PyTorch computes by other operators.
_COMPOSITE = """
    _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short
    cartesian_prod chain_matmul chalf column_stack cross cumulative_trapezoid diag diagflat dsplit dstack ger gradient
    hsplit hstack inner isreal kron linalg_diagonal linalg_matmul linalg_multi_dot linalg_tensorinv linalg_tensorsolve
    linalg_vander linalg_vecdot matrix_H norm_except_dim nuclear_norm row_stack special_log_softmax special_logsumexp
    special_softmax sum_to_size tensordot trapezoid trapz unsafe_chunk vsplit vstack
"""


def _overloads(packet: OpOverloadPacket) -> Iterator[OpOverload]:
    """Iterate over the functional overloads of a packet. Some have a schema but no operator."""
    for target in (getattr(packet, name) for name in packet.overloads()):
        if not target._schema.is_mutable and torch._C._dispatch_has_kernel(target.name()):
            yield target


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return product if bias is None else product + bias


def _block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """Pad every block with zeros on its left and right."""
    blocks = [torch.atleast_2d(tensor) for tensor in tensors]
    width, offset, rows = sum(block.shape[1] for block in blocks), 0, []
    for block in blocks:
        rows.append(torch.nn.functional.pad(block, (offset, width - offset - block.shape[1])))
        offset += block.shape[1]
    return torch.cat(rows)


def _native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, area: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    variance, mean = torch.var_mean(x.reshape(n, groups, -1), -1, correction=0)
    return torch.group_norm(x, groups, weight, bias, eps), mean, torch.rsqrt(variance + eps)


def _combinations(self: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Replace PyTorch's own, which selects by a mask."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(self.shape[0]), r))
    return self[torch.tensor(rows, dtype=torch.int64).reshape(len(rows), r)]


def _cov(
    self: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Replace PyTorch's own, which inspects the weights' data."""
    x = self if self.dim() == 2 else self.reshape(1, -1)
    if fweights is None and aweights is None:
        centred = x - x.mean(1, keepdim=True)
        return (centred @ centred.mH / max(x.shape[1] - correction, 0)).squeeze()
    weights = torch.ones_like(x[0].real) if fweights is None else fweights
    weights = weights if aweights is None else weights * aweights
    total = weights.sum()
    centred = x - (x * weights).sum(1, keepdim=True) / total
    norm = total - correction
    if aweights is not None and correction:
        norm = total - correction * (weights * aweights).sum() / total
    return (centred @ (weights * centred).mH / norm.clamp_min(0)).squeeze()


def _corrcoef(self: Tensor) -> Tensor:
    covariance = torch.cov(self)
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = covariance.diagonal().real.sqrt()
    result = covariance / deviations.unsqueeze(1) / deviations
    if result.is_complex():
        return torch.complex(result.real.clip(-1, 1), result.imag.clip(-1, 1))
    return result.clip(-1, 1)


def _put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = self.reshape(-1).index_put((index.reshape(-1),), source.reshape(-1), accumulate)
    return flat.reshape(self.shape)


def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    powers: Tensor = torch.linalg.vander(x, N=N)
    return powers if increasing else powers.flip(-1)


def _copied(view: OpOverload) -> Callable[..., Any]:
    return lambda *args, **kwargs: pytree.tree_map(torch.clone, view(*args, **kwargs))


COMPOSITES: Mapping[OpOverload, Callable[..., Any]] = {
    **{target: target.decompose for name in _COMPOSITE.split() for target in _overloads(getattr(aten, name))},
    aten.atleast_1d.Sequence: aten.atleast_1d.Sequence.decompose,
    aten.atleast_2d.Sequence: aten.atleast_2d.Sequence.decompose,
    aten.atleast_3d.Sequence: aten.atleast_3d.Sequence.decompose,
    aten.bilinear.default: _bilinear,
    aten.block_diag.default: _block_diag,
    aten.combinations.default: _combinations,
    aten.corrcoef.default: _corrcoef,
    aten.cov.default: _cov,
    aten.dist.default: lambda self, other, p=2: torch.norm(self - other, p),
    aten.native_group_norm.default: _native_group_norm,
    aten.put.default: _put,
    aten.trace.default: lambda self: self.diagonal().sum(),
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.vander.default: _vander,
    **{
        getattr(getattr(aten, f"{operator_name(view)}_copy"), view._overloadname): _copied(view)
        for view in aten_operators(
            "alias diagonal expand permute t unfold unsqueeze squeeze squeeze.dim squeeze.dims view view.dtype narrow "
            "select.int slice.Tensor split.Tensor split_with_sizes transpose.int unbind.int view_as_real"
        )
    },
}


def _unless_cast(target: OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an operator whole under autocast if the operators that it calls are cast differently than itself."""
    is_cast = target.has_kernel_for_dispatch_key(torch.DispatchKey.AutocastCPU)
    stays = is_cast or function != target.decompose
    return lambda *args, **kwargs: (
        NotImplemented if stays and torch.is_autocast_enabled("cpu") else function(*args, **kwargs)
    )


_TRACED = {target: _unless_cast(target, function) for target, function in COMPOSITES.items()}


@contextmanager
def composites_written_out() -> Iterator[None]:
    """Decompose composites while a model is traced."""
    if proxy_tensor.get_proxy_mode() is None:
        yield
        return
    with proxy_tensor.decompose(_TRACED):
        yield
