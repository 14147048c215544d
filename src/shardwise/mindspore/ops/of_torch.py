"""Functions that torch has under the same names, with ``axis`` for ``dim`` and ``keep_dims`` for ``keepdim``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore.named import Function

_HOMES: dict[Any, str] = {
    torch: """
        adjoint aminmax argwhere bartlett_window bitwise_left_shift bitwise_not bitwise_right_shift
        blackman_window block_diag cartesian_prod cdist cholesky_inverse cholesky_solve combinations complex
        corrcoef cov cumulative_trapezoid diag_embed diagflat diagonal_scatter hamming_window hann_window histc
        igamma igammac is_complex is_floating_point is_nonzero isin isreal kaiser_window ldexp logcumsumexp lu_solve
        lu_unpack masked_scatter matrix_exp msort mvlgamma nanmean nanmedian nanquantile nextafter poisson polar
        polygamma positive quantile renorm row_stack scatter_reduce select_scatter sgn slice_scatter std_mean
        stft tensordot trapz tril_indices triu_indices unravel_index vander""",
    torch.linalg: "cholesky eig eigh eigvals lstsq matrix_power pinv qr slogdet solve_triangular vecdot",
    F: """
        adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool3d affine_grid avg_pool1d avg_pool3d
        conv_transpose2d fold gaussian_nll_loss lp_pool1d lp_pool2d max_pool3d max_unpool1d max_unpool2d
        max_unpool3d multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss normalize
        pairwise_distance pdist poisson_nll_loss upsample""",
    torch.fft: "fft fft2 fftn fftshift ifft ifft2 ifftn ifftshift irfft rfft",
    torch.special: "bessel_j0 bessel_j1 bessel_y0 bessel_y1 zeta",
}
_WORDS = {"axis": "dim", "keep_dims": "keepdim", "keepdims": "keepdim", "x": "input", "input_x": "input"}


def _with_words(function: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **{_WORDS.get(word, word): value for word, value in kwargs.items()})
        return tuple(result) if isinstance(result, tuple) else result  # not torch's named one

    return call


OF_TORCH: dict[str, Function] = {
    name: _with_words(getattr(home, name)) for home, names in _HOMES.items() for name in names.split()
}
