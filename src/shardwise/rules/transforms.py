"""Discrete Fourier transforms: the transformed dims are whole, all others are split; summands pass through."""

from __future__ import annotations

import torch

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments
from shardwise.rules.arguments import normal_dim
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.rule import FactorKind, OpRule

aten = torch.ops.aten


def _transform(op: Op, graph: Graph) -> OpRule:
    """``a f -> a g`` where the last dim is transformed, and may change its size."""
    args, rank = arguments(op), len(graph.by_name[op.operands[0]].shape)
    dims, sizes = args["dim"], args.get("s")
    if dims is None:  # of the n-dimensional ones: the last as many as sizes are given, or all
        dims = range(rank - len(sizes) if sizes is not None else 0, rank)
    changed = {normal_dim(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)}
    names = dim_names(rank)
    before, after = (
        single(tuple(f"{letter}{i}" if i in changed else name for i, name in enumerate(names))) for letter in "fg"
    )
    whole = [name for (name,) in (*before, *after) if name not in names]
    return build(op, graph, [before], [after], kinds=dict.fromkeys(whole, "whole"), linear=((0,),))


def _short_time(op: Op, graph: Graph) -> OpRule:
    """``b n, w -> b f t``: frames overlap, and every frequency is a sum over a frame."""
    batch = ["b"][: len(graph.by_name[op.operands[0]].shape) - 1]
    operands = [single([*batch, "n"]), single(["w"])][: len(op.operands)]
    kinds: dict[str, FactorKind] = dict.fromkeys(("n", "w", "f", "t"), "whole")
    return build(op, graph, operands, [single([*batch, "f", "t"])], kinds=kinds, linear=((0,),))


TRANSFORMS: RuleTable = dict.fromkeys(
    (
        *(aten.fft_fft.default, aten.fft_ifft.default, aten.fft_fft2.default, aten.fft_ifft2.default),
        *(aten.fft_rfft.default, aten.fft_irfft.default, aten.fft_rfft2.default, aten.fft_irfft2.default),
        *(aten.fft_hfft.default, aten.fft_ihfft.default, aten.fft_hfft2.default, aten.fft_ihfft2.default),
        *(aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default, aten.fft_irfftn.default),
        *(aten.fft_hfftn.default, aten.fft_ihfftn.default, aten.fft_fftshift.default, aten.fft_ifftshift.default),
    ),
    zeros_if_empty(_transform),
) | dict.fromkeys((aten.stft.default, aten.stft.center), zeros_if_empty(_short_time))
