"""Discrete Fourier transforms: the transformed dims are whole, all others are split; summands pass through."""

from __future__ import annotations

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import arguments, by_operator
from shardwise.rules.arguments import normal_dim
from shardwise.rules.binding import RuleTable, build, dim_names, single
from shardwise.rules.empty import zeros_if_empty
from shardwise.rules.rule import FactorKind, OpRule


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


TRANSFORMS: RuleTable = by_operator(
    {
        "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_hfft fft_ihfft fft_hfft2 "
        "fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn "
        "fft_fftshift fft_ifftshift": zeros_if_empty(_transform),
        "stft stft.center": zeros_if_empty(_short_time),
    }
)
