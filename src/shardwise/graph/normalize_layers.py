"""Decompositions of layers that PyTorch runs as one operator: recurrent ones, embedding bags, weight norm, experts; and
of mean losses, into a sum over the global count.

The mean of the shards' means is not the mean: a shard may have more ignored labels than another. The sum of the shards'
sums over the global count is exact. Half-precision losses are summed in float32, because the sum may overflow where the
mean does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Arg, Op
from shardwise.graph.schema import arguments, aten_operators, by_operator
from shardwise.graph.written_out import Noise, written_out

aten = torch.ops.aten
GROUPED_MM: OpOverload = grouped_mm._opoverload
Results = tuple[Arg, ...] | None


def _batch_norm_with_statistics(
    _: Noise, x: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a training-mode ``aten.batch_norm`` with sums: exact under every split, because they become global sums.

        mean = sum(x) / n        var = sum((x - mean)^2) / n        y = (x - mean) * rsqrt(var + eps) * weight + bias

    Return the result, and the batch's mean and unbiased variance (``sum((x - mean)^2) / (n - 1)``, for the running one:
    Ioffe and Szegedy 2015, algorithm 2), detached, of shape (channels,).
    """
    dtype, channels, eps = x.dtype, x.shape[1], settings[-2]
    dims = [d for d in range(x.dim()) if d != 1]
    per_channel = (1, channels, *[1] * (x.dim() - 2))
    if dtype in _LOW_PRECISION:
        x = x.to(torch.float32)
    count = x.numel() // channels
    mean = x.sum(dims, True) / count
    centered = x - mean
    squares = (centered * centered).sum(dims, True)
    result = centered * (squares / count + eps).rsqrt()
    if weight is not None:
        result = result * weight.reshape(per_channel)
    if bias is not None:
        result = result + bias.reshape(per_channel)
    if dtype in _LOW_PRECISION:
        result = result.to(dtype)
    unbiased = squares / max(count - 1, 1)
    return result, mean.reshape(channels).detach(), unbiased.reshape(channels).detach()


batch_norm_with_statistics = written_out(_batch_norm_with_statistics)


def _gates(input: Tensor, state: Tensor, weights: Sequence[Any], count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of the input, and of the state, in the gates of a recurrent cell. ``weights``: as a cell takes
    them: of the input and of the state, then their biases."""
    parts = []
    for x, weight, bias in zip((input, state), weights[:2], weights[2:], strict=True):
        whole = torch.nn.functional.linear(x, weight, bias)
        size = whole.shape[-1] // count
        parts.append([aten.slice.Tensor(whole, -1, n * size, (n + 1) * size) for n in range(count)])
    return parts[0], parts[1]


def _lstm_cell(_: Noise, input: Tensor, hx: Sequence[Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    """Compute i, f, g, o = parts of W x + V h; c' = f c + i g; h' = o tanh(c') (Hochreiter and Schmidhuber 1997)."""
    parts = [x + h for x, h in zip(*_gates(input, hx[0], weights, 4), strict=True)]
    i, f, o = (parts[n].sigmoid() for n in (0, 1, 3))
    update = i * parts[2].tanh()
    state = f * hx[1] + update
    return o * state.tanh(), state


def _gru_cell(_: Noise, input: Tensor, hx: Tensor, *weights: Any) -> Tensor:
    """Compute h' = n + z (h - n), n = tanh(W x + r V h), for the gates r and z (Cho et al. 2014)."""
    ours, theirs = _gates(input, hx, weights, 3)
    r, z = ((theirs[n] + ours[n]).sigmoid() for n in (0, 1))
    new = (ours[2] + theirs[2] * r).tanh()
    return (hx - new) * z + new


def _rnn_cell(function: Callable[[Tensor], Tensor], _: Noise, input: Tensor, hx: Tensor, *weights: Any) -> Tensor:
    """Compute f(W x + V h)."""
    (ours,), (theirs,) = _gates(input, hx, weights, 1)
    return function(ours + theirs)


def _weight_norm(_: Noise, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Compute ``v g / |v|``, the norm over all dims but one (Salimans and Kingma 2016)."""
    dims = None if dim == -1 else tuple(d for d in range(v.dim()) if d != dim % v.dim())
    norm: Tensor = torch.linalg.vector_norm(v, 2, dims, dim != -1)
    return v * (g / norm)


_SUM, _MEAN, _MAX = 0, 1, 2


def _embedding_bag(op: Op, emitter: Emitter) -> Results:
    """Emit sums, means or maxima of embeddings. Bags of equal lengths, which PyTorch makes of a matrix of indices, are
    rows of a matrix; others are added to the row of their bag. Gradients scaled by frequency stay as they are."""
    args = arguments(op)
    if args["scale_grad_by_freq"]:
        return None
    others = emitter.emit_as_is(op.target, *op.args, **dict(op.kwargs))[1:]  # dropped if unused
    return *(_bags_of(_length_of_bags(args, emitter))(op, emitter) or ()), *others


def _length_of_bags(args: dict[str, Any], emitter: Emitter) -> int:
    """Return the length that all bags have, if the offsets tell, else 0."""
    producer, count = emitter.producer.get(args["offsets"].name), emitter.value(args["indices"]).shape[0]
    if producer is None or producer.target is not aten.arange.start_step:
        return 0
    offsets = arguments(producer)
    bags, step = emitter.value(args["offsets"]).shape[0] - bool(args["include_last_offset"]), offsets["step"]
    is_whole = isinstance(step, int) and (offsets["start"], offsets["end"]) == (0, count) and bags * step == count
    return step if is_whole else 0


@cache
def _bags_of(length: int) -> Rewrite:
    return written_out(partial(_bags, length))


def _bags(length: int, _: Noise, table: Tensor, indices: Tensor, offsets: Tensor, *settings: Any) -> Tensor:
    """Return the sum, the mean or the maximum of each bag, 0 for an empty one or one of padding only. ``length``: of
    all bags, or 0."""
    _scaled, mode, _sparse, weights, include_last, padding, *_more = (*settings, None)
    bags, (count,) = offsets.shape[0] - bool(include_last), indices.shape
    rows = torch.nn.functional.embedding(indices, table)
    columns, is_max, counted = rows.shape[1], mode == _MAX, None
    if padding is not None:
        padding %= table.shape[0]
        counted = None if is_max else (indices != padding).to(rows.dtype)  # per index, 1 unless it is padding
    for scale in () if is_max else (weights, counted):
        rows = rows if scale is None else rows * scale.unsqueeze(-1)
    by_length = length and not (is_max and padding is not None)
    bag = indices
    if not by_length:
        ends = offsets.unsqueeze(0)
        bag = (torch.arange(count).unsqueeze(1) >= ends).sum((1,)) - 1
    if is_max and by_length:
        return rows.reshape(bags, length, columns).max(1)[0]
    if is_max:
        if padding is not None:  # in a bag of its own, behind the others
            bag = bag.masked_fill(indices == padding, bags)
        zeros = torch.full((bags + 1, columns), 0.0, dtype=rows.dtype)
        index = bag.unsqueeze(1).expand(count, columns)
        return zeros.scatter_reduce(0, index, rows, "amax", include_self=False)[:bags]

    def add(rows: Tensor) -> Tensor:
        if by_length:
            return rows.reshape(bags, length, rows.shape[1]).sum((1,))
        return torch.full((bags, rows.shape[1]), 0.0, dtype=rows.dtype).index_add(0, bag, rows)

    total = add(rows)
    if mode != _MEAN:
        return total
    counted = torch.full((count,), 1.0, dtype=rows.dtype) if counted is None else counted
    return total / add(counted.unsqueeze(-1)).clamp_min(1)


def _grouped_mm(op: Op, emitter: Emitter) -> Results:
    """Rewrite rows by expert times one matrix per expert; the operator's other forms stay."""
    x, weight, *rest = (op.args + tuple(arg for _, arg in op.kwargs))[:3]
    others = [arg for name, arg in arguments(op).items() if name in ("bias", "out_dtype")]
    if not rest or rest[0] is None or any(arg is not None for arg in others):
        return None
    shapes = emitter.value(x).shape, emitter.value(weight).shape
    if tuple(map(len, shapes)) != (2, 3):
        return None
    (rows, _), (experts, _, _) = shapes
    counting = emitter.emit(aten.arange.default, rows, dtype=emitter.value(rest[0]).dtype)
    experts_of_rows = emitter.emit(aten.searchsorted.Tensor, rest[0], counting, right=True)
    return (emitter.emit(GROUPED_MM, x, weight, experts_of_rows, (experts,), (0,), (experts,), True),)


def foreign_normalizations() -> dict[OpOverload, Rewrite]:
    """Return the rewrites for operators of imported libraries: those that ``transformers`` captures mixtures as."""
    packet = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {} if packet is None else {packet.default: _grouped_mm}


LAYER_NORMALIZATIONS: dict[OpOverload, Rewrite] = by_operator(
    {
        "lstm_cell": written_out(_lstm_cell),
        "gru_cell": written_out(_gru_cell),
        "rnn_tanh_cell": written_out(partial(_rnn_cell, torch.tanh)),
        "rnn_relu_cell": written_out(partial(_rnn_cell, torch.relu)),
        "_weight_norm": written_out(_weight_norm),
        "_grouped_mm": _grouped_mm,
        "embedding_bag embedding_bag.padding_idx": _embedding_bag,
    }
)


NONE, MEAN, SUM = 0, 1, 2
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def _mean_loss(
    loss: Callable[[int], Tensor], scores: Tensor, count: Callable[[Tensor], Tensor | int], *, promotes: bool = True
) -> Tensor:
    """Divide the sum of a loss by ``count`` of it. ``loss``: by its reduction; ``promotes``: whether targets in float32
    make it float32."""
    if scores.dtype not in _LOW_PRECISION:
        total = loss(SUM)
        return total / count(total)
    each = loss(NONE)
    total = each.sum(dtype=torch.float32)
    return (total / count(total)).to(each.dtype if promotes else scores.dtype)


def _class_loss(
    operator: OpOverload,
    _: Noise,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    *more: Any,
) -> Any:
    """Rewrite cross_entropy_loss and nll_loss: divide by the number of labels not ignored, or their classes' weights.

    With probabilities as targets (floating ``target``), divide by the number of samples.
    """

    def count(total: Tensor) -> Tensor | int:
        if target.is_floating_point():
            return scores.numel() // scores.shape[min(scores.dim() - 1, 1)]
        valid = target != ignored
        number = valid.to(total.dtype)
        if weight is not None:
            number = weight[target.masked_fill(valid.logical_not(), 0)] * number
        return number.sum()

    if reduction != MEAN:
        return NotImplemented
    return _mean_loss(lambda how: operator(scores, target, weight, how, ignored, *more), scores, count)


def _element_loss(operator: OpOverload, _: Noise, scores: Tensor, *rest: Any, **named: Any) -> Any:
    """Rewrite element-wise losses: divide by the number of elements after broadcasting."""
    place = [argument.name for argument in operator._schema.arguments].index("reduction") - 1
    if rest[place] != MEAN:
        return NotImplemented
    count = prod(torch.broadcast_shapes(*(x.shape for x in (scores, *rest) if isinstance(x, Tensor))))

    def loss(reduction: int) -> Tensor:
        total: Tensor = operator(scores, *rest[:place], reduction, *rest[place + 1 :], **named)
        return total

    # Kernels of these two return the dtype of their input, though fake tensors say otherwise.
    promotes = operator not in (torch.ops.aten.huber_loss.default, torch.ops.aten.soft_margin_loss.default)
    return _mean_loss(loss, scores, lambda _: count, promotes=promotes)


def _of_each(function: Callable[..., Any], names: str) -> dict[OpOverload, Rewrite]:
    return {target: written_out(partial(function, target)) for target in aten_operators(names)}


LOSS_NORMALIZATIONS: dict[OpOverload, Rewrite] = {
    **_of_each(_class_loss, "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"),
    **_of_each(
        _element_loss,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
        "soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss",
    ),
}
