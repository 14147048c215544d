"""Decompositions of composite operators: they are traced as the operators that they call, which have rules.

PyTorch computes most of them like this itself (CompositeImplicitAutograd): their derivatives are those of eager. The
inverse short-time Fourier transform is written out when the graph is emitted (``EMITTED``).
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
from shardwise.graph.written_out import Noise, written_out

aten = torch.ops.aten

# Packets whose overloads PyTorch computes by other operators.
_COMPOSITE = """
    _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short
    cartesian_prod chain_matmul chalf column_stack cross cumulative_trapezoid diag diagflat dsplit dstack
    frobenius_norm ger gradient hsplit hstack inner isreal kron linalg_diagonal linalg_matmul linalg_matrix_norm
    linalg_multi_dot linalg_norm linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot matrix_H msort nanmean
    norm_except_dim nuclear_norm row_stack special_log_softmax special_logsumexp special_softmax sum_to_size
    take_along_dim tensordot trapezoid trapz unsafe_chunk vsplit vstack
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


def _rot90(self: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    turned = self.flip({0: (), 1: (second,), 2: (first, second), 3: (first,)}[k % 4])
    return turned.transpose(first, second) if k % 2 else turned


def _channel_shuffle(self: Tensor, groups: int) -> Tensor:
    return torch.unflatten(self, 1, (groups, self.shape[1] // groups)).transpose(1, 2).flatten(1, 2)


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
    **{
        target: target.decompose
        for target in aten_operators("var var.dim std std.dim var_mean var_mean.dim std_mean std_mean.dim")
    },
    aten.bilinear.default: _bilinear,
    aten.block_diag.default: _block_diag,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.combinations.default: _combinations,
    aten.corrcoef.default: _corrcoef,
    aten.cov.default: _cov,
    aten.dist.default: lambda self, other, p=2: torch.norm(self - other, p),
    aten.native_group_norm.default: _native_group_norm,
    aten.put.default: _put,
    aten.rot90.default: _rot90,
    aten.take.default: lambda self, index: self.reshape(-1)[index],
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


def _istft(
    _: Noise,
    spectrum: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    *options: Any,
) -> Tensor:
    """Overlap and add the inverse transforms of the frames, over the sum of the squared windows (Griffin and Lim 1984,
    equation 6). PyTorch's operator inspects the window's data and raises if that sum is 0; here the result is not
    finite there."""
    center, normalized, onesided, length, return_complex = options
    *batch, bins, frames = spectrum.shape
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    if window is None:
        double = spectrum.dtype == torch.complex128
        window = torch.full((width,), 1.0, dtype=torch.float64 if double else torch.float32)
    if width != n_fft:
        left = (n_fft - width) // 2
        window = torch.constant_pad_nd(window, (left, n_fft - width - left))
    norm = "ortho" if normalized else "backward"
    if return_complex:
        pieces = torch.fft.ifft(spectrum, None, -2, norm)
    else:
        if bins == n_fft and not onesided:
            spectrum = aten.slice.Tensor(spectrum, -2, 0, n_fft // 2 + 1)
        pieces = torch.fft.irfft(spectrum, n_fft, -2, norm)
    whole = n_fft + hop * (frames - 1)
    start = n_fft // 2 if center else 0
    stop = whole - start if length is None else start + length

    def added(parts: Tensor, *leading: int) -> Tensor:
        """Return the sum, from ``start`` to ``stop``, of frames ``[..., n_fft, t]`` that lie ``hop`` apart."""
        parts = parts.reshape(-1, n_fft, frames)
        signal = aten.col2im.default(parts, (1, whole), (1, n_fft), (1, 1), (0, 0), (1, hop))
        summed: Tensor = aten.slice.Tensor(signal.reshape(*leading, whole), -1, start, stop)
        return summed

    column = window.unsqueeze(1)
    pieces = pieces * column
    envelope = added((column * column).expand(n_fft, frames))
    if pieces.is_complex():
        pairs = torch.view_as_real(pieces)
        signal = torch.complex(*(added(pairs.select(-1, i), *batch) for i in range(2)))
    else:
        signal = added(pieces, *batch)
    result = signal / envelope
    return torch.constant_pad_nd(result, (0, stop - whole)) if stop > whole else result


EMITTED = {aten.istft.default: written_out(_istft)}
