"""Functions that torch has under the same names, with ``axis`` for ``dim`` and ``keep_dims`` for ``keepdim``, or with
the reference's argument names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore.named import Function, in_order, parameters_of

_HOMES: dict[Any, str] = {
    torch: """
        adjoint argwhere bartlett_window bitwise_left_shift bitwise_not bitwise_right_shift
        blackman_window block_diag cartesian_prod cdist cholesky_inverse cholesky_solve combinations complex
        corrcoef cov cumulative_trapezoid diag_embed diagflat diagonal_scatter hamming_window hann_window histc
        igamma igammac is_complex is_floating_point is_nonzero isin isreal kaiser_window ldexp logcumsumexp lu_solve
        lu_unpack masked_scatter matrix_exp msort mvlgamma nanmean nanquantile nextafter poisson polar
        polygamma positive quantile renorm row_stack scatter_reduce select_scatter sgn slice_scatter
        stft tensordot trapz tril_indices triu_indices unravel_index vander""",
    torch.linalg: "cholesky eig eigh eigvals lstsq matrix_power pinv qr slogdet solve_triangular vecdot",
    F: """
        adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool3d affine_grid
        conv_transpose2d fold gaussian_nll_loss lp_pool1d lp_pool2d max_pool3d max_unpool1d max_unpool2d
        max_unpool3d multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss normalize
        pairwise_distance pdist poisson_nll_loss upsample""",
    torch.fft: "fft fft2 fftn fftshift ifft ifft2 ifftn ifftshift irfft rfft",
    torch.special: "zeta",
}
_WORDS = {"axis": "dim", "keep_dims": "keepdim", "keepdims": "keepdim", "x": "input", "input_x": "input"}


def _with_words(function: Function) -> Function:
    function = in_order(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return _plain(function(*args, **{_WORDS.get(word, word): value for word, value in kwargs.items()}))

    return call


def _plain(result: Any) -> Any:
    return tuple(result) if isinstance(result, tuple) else result  # a plain tuple instead of torch's named one


# The reference's name ("=" precedes another name in torch), and its arguments, in torch's order.
_ROWS: dict[Any, str] = {
    torch: """
        addbmm input batch1 batch2 * beta=1 alpha=1; addmm input mat1 mat2 * beta=1 alpha=1; addmv input mat vec *
        beta=1 alpha=1; addr x vec1 vec2 * beta=1 alpha=1; argmax input dim=None keepdim=False;
        baddbmm input batch1 batch2 * beta=1 alpha=1; bincount
        input weights=None minlength=0; bmm=matmul input_x mat2; chunk input chunks axis=0; clamp input min=None
        max=None; cummax input axis; diag input; diagonal input offset=0 dim1=0 dim2=1; diff x n=1
        axis=-1; dist input other p=2; div input other * rounding_mode=None; dsplit input indices_or_sections;
        expand_dims=unsqueeze input_x axis; hsplit input indices_or_sections; index_select input axis index;
        invert=bitwise_not x; isclose input other rtol=1e-5 atol=1e-8 equal_nan=False; lerp input end weight;
        log_softmax logits axis=-1; logit input eps=None; logsumexp input axis keep_dims=False; masked_select input
        mask; matrix_diag=diag_embed x; median input axis=-1 keepdims=False; mm input mat2; moveaxis=movedim x source
        destination; mv mat vec; nan_to_num input nan=0.0 posinf=None neginf=None; nanmedian input axis=-1
        keepdims=False; narrow input axis start length; pow input exponent; ravel input;
        repeat_elements=repeat_interleave x rep axis=0; repeat_interleave input repeats axis=None; roll input shifts
        dims=None; rot90 input k dims; scalar_to_array=tensor input_x; searchsorted sorted_sequence values *
        right=False; select=where condition input other; swapaxes input axis0
        axis1; tensor_dot=tensordot x1 x2 axes; tensor_split input indices_or_sections axis=0; tril input diagonal=0;
        triu input diagonal=0; truncate_mod=fmod x y; tuple_to_array=tensor input_x; unique_consecutive input
        return_idx=False return_counts=False axis=None; unsqueeze input dim; unstack=unbind input_x axis=0; vsplit
        input indices_or_sections; where condition input other""",
    torch.linalg: "log_matrix_determinant=slogdet input",
    F: """
        adaptive_avg_pool1d input output_size; adaptive_avg_pool2d input output_size; adaptive_max_pool2d input
        output_size return_indices=False; avg_pool1d input_x kernel_size=1 stride=1 padding=0 ceil_mode=False
        count_include_pad=True; avg_pool2d x kernel_size=1 stride=1 padding=0; avg_pool3d input_x kernel_size=1
        stride=1 padding=0 ceil_mode=False count_include_pad=True divisor_override=None; batch_norm input_x
        running_mean running_var weight bias training=False momentum=0.1 eps=1e-5; binary_cross_entropy logits labels
        weight=None reduction='mean'; celu x alpha=1.0; channel_shuffle x groups; cosine_embedding_loss input1 input2
        target margin=0.0 reduction='mean'; cosine_similarity x1 x2 dim=1 eps=1e-8; dense=linear input weight
        bias=None; dropout1d input p=0.5 training=True; dropout2d input p=0.5 training=True; dropout3d input p=0.5
        training=True; elu input_x alpha=1.0; embedding input weight padding_idx=None; glu x axis=-1; grid_sample
        input grid mode='bilinear' padding_mode='zeros' align_corners=False; group_norm input num_groups weight=None
        bias=None eps=1e-5; hardshrink x lambd=0.5; hardsigmoid input; hardswish x; hardtanh input min_val=-1.0
        max_val=1.0; hinge_embedding_loss inputs targets margin=1.0 reduction='mean'; huber_loss input target
        reduction='mean' delta=1.0; l1_loss input target reduction='mean'; leaky_relu input alpha=0.2; logsigmoid x;
        margin_ranking_loss input1 input2 target margin=0.0 reduction='mean'; mish x; mse_loss input target
        reduction='mean'; pixel_shuffle input upscale_factor; pixel_unshuffle input downscale_factor; prelu x weight;
        relu6 x; rrelu input lower=0.125 upper=0.3333333333333333; scaled_dot_product_attention query key value
        attn_mask=None dropout_p=0.0 is_causal=False; selu input_x; silu x; soft_margin_loss input target
        reduction='mean'; soft_shrink=softshrink input lambd=0.5; softplus input beta=1 threshold=20; softshrink x
        lambd=0.5; softsign x; tanhshrink input; threshold input thr value; triplet_margin_loss anchor positive
        negative margin=1.0 p=2 eps=1e-6 swap=False reduction='mean'; unfold input kernel_size dilation=1 padding=0
        stride=1""",
}


class _Row:
    """A torch function with the reference's argument names."""

    def __init__(self, function: Function, words: Sequence[str]) -> None:
        self.function, self.__signature__ = function, Signature(parameters_of(words))
        parameters = self.__signature__.parameters.values()
        self.named = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self.defaults = tuple(p.default for p in parameters if p.kind is not p.KEYWORD_ONLY)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rest = self.defaults[len(args) :]
        if not kwargs and len(args) <= len(self.defaults) and Parameter.empty not in rest:  # fast path without keywords
            return _plain(self.function(*args, *rest, **self.named))
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        return _plain(self.function(*bound.args, **bound.kwargs))


def _rows(home: Any, text: str) -> Iterator[tuple[str, Function]]:
    for names, *words in (row.split() for row in text.split(";")):
        name, _, torchs = names.partition("=")
        yield name, _Row(in_order(getattr(home, torchs or name)), words)


OF_TORCH: dict[str, Function] = {
    **{name: _with_words(getattr(home, name)) for home, names in _HOMES.items() for name in names.split()},
    **{name: row for home, text in _ROWS.items() for name, row in _rows(home, text)},
}
