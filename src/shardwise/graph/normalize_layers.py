"""Decompositions of layers that PyTorch runs as one operator: recurrent ones, embedding bags, weight norm, experts; and
of mean losses, into a sum over the global count.

The mean of the shards' means is not the mean: a shard may have more ignored labels than another. The sum of the shards'
sums over the global count is exact. Half-precision losses are summed in float32, because the sum may overflow where the
mean does not.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Arg, Op, Ref
from shardwise.graph.normalize_random import drop
from shardwise.graph.schema import arguments, by_operator

aten = torch.ops.aten
GROUPED_MM: OpOverload = grouped_mm._opoverload
Results = tuple[Arg, ...] | None


def batch_norm_with_statistics(op: Op, emitter: Emitter) -> tuple[Ref, Ref, Ref]:
    """Emit a training-mode ``aten.batch_norm`` with sums: exact under every split, because they become global sums.

        mean = sum(x) / n        var = sum((x - mean)^2) / n        y = (x - mean) * rsqrt(var + eps) * weight + bias

    Return the result, and the batch's mean and unbiased variance (``sum((x - mean)^2) / (n - 1)``, for the running one:
    Ioffe and Szegedy 2015, algorithm 2), detached, of shape (channels,).
    """
    args = arguments(op)
    x: Ref = args["input"]
    value = emitter.value(x)
    channels = value.shape[1]
    per_channel = (1, channels, *[1] * (len(value.shape) - 2))
    dims = tuple(d for d in range(len(value.shape)) if d != 1)
    count = prod(value.shape[d] for d in dims)
    emit = emitter.emit
    low_precision = value.dtype in (torch.float16, torch.bfloat16)
    if low_precision:
        x = emit(aten.to.dtype, x, torch.float32)
    mean = emit(aten.div.Tensor, emit(aten.sum.dim_IntList, x, dims, True), count)
    centered = emit(aten.sub.Tensor, x, mean)
    squares = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, centered, centered), dims, True)
    variance = emit(aten.div.Tensor, squares, count)
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, args["eps"]))
    result = emit(aten.mul.Tensor, centered, scale)
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if args[name] is not None:
            result = emit(target, result, emit(aten.reshape.default, args[name], per_channel))
    if low_precision:
        result = emit(aten.to.dtype, result, value.dtype)
    unbiased = emit(aten.div.Tensor, squares, max(count - 1, 1))

    def statistic(ref: Ref) -> Ref:
        flat = emit(aten.reshape.default, ref, (channels,))
        return emit(aten.detach.default, flat) if emitter.value(flat).requires_grad else flat

    return result, statistic(mean), statistic(unbiased)


def _recurrent(op: Op, emitter: Emitter) -> Results:
    """Rewrite LSTM, GRU and RNN with dropout between layers: one operator per layer, and the global-index dropout."""
    args = arguments(op)
    layers = args["num_layers"]
    if not args["train"] or args["dropout"] == 0:
        return None
    states = args["hx"] if isinstance(args["hx"], tuple) else (args["hx"],)
    directions = 2 if args["bidirectional"] else 1
    num_params = len(args["params"]) // layers
    x = args["input"]
    finals: list[tuple[Ref, ...]] = []
    for layer in range(layers):
        first = layer * directions
        hx = tuple(emitter.emit(aten.slice.Tensor, s, 0, first, first + directions) for s in states)
        params = args["params"][layer * num_params : (layer + 1) * num_params]
        rest = (args["has_biases"], 1, 0.0, args["train"], args["bidirectional"], args["batch_first"])
        x, *last = emitter.emit_as_is(op.target, x, hx if isinstance(args["hx"], tuple) else hx[0], params, *rest)
        finals.append(tuple(last))
        if layer < layers - 1:
            x = drop(emitter, x, args["dropout"])
    return x, *(emitter.emit(aten.cat.default, together, 0) for together in zip(*finals, strict=True))


def _gates(emitter: Emitter, args: dict[str, Any], count: int) -> tuple[list[Ref], list[Ref]]:
    """Return the parts of the input, and of the state, in the gates of a recurrent cell."""
    state = args["hx"][0] if isinstance(args["hx"], tuple) else args["hx"]
    parts = []
    for x, side in ((args["input"], "ih"), (state, "hh")):
        whole = emitter.emit(aten.linear.default, x, args[f"w_{side}"], args[f"b_{side}"])
        size = emitter.value(whole).shape[-1] // count
        parts.append([emitter.emit(aten.slice.Tensor, whole, -1, n * size, (n + 1) * size) for n in range(count)])
    return parts[0], parts[1]


def _lstm_cell(op: Op, emitter: Emitter) -> Results:
    """Compute i, f, g, o = parts of W x + V h; c' = f c + i g; h' = o tanh(c') (Hochreiter and Schmidhuber 1997)."""
    args, emit = arguments(op), emitter.emit
    parts = [emit(aten.add.Tensor, x, h) for x, h in zip(*_gates(emitter, args, 4), strict=True)]
    i, f, o = (emit(aten.sigmoid.default, parts[n]) for n in (0, 1, 3))
    update = emit(aten.mul.Tensor, i, emit(aten.tanh.default, parts[2]))
    state = emit(aten.add.Tensor, emit(aten.mul.Tensor, f, args["hx"][1]), update)
    return emit(aten.mul.Tensor, o, emit(aten.tanh.default, state)), state


def _gru_cell(op: Op, emitter: Emitter) -> Results:
    """Compute h' = n + z (h - n), n = tanh(W x + r V h), for the gates r and z (Cho et al. 2014)."""
    args, emit = arguments(op), emitter.emit
    ours, theirs = _gates(emitter, args, 3)
    r, z = (emit(aten.sigmoid.default, emit(aten.add.Tensor, theirs[n], ours[n])) for n in (0, 1))
    new = emit(aten.tanh.default, emit(aten.add.Tensor, ours[2], emit(aten.mul.Tensor, theirs[2], r)))
    left = emit(aten.mul.Tensor, emit(aten.sub.Tensor, args["hx"], new), z)
    return (emit(aten.add.Tensor, left, new),)


def _rnn_cell(function: OpOverload, op: Op, emitter: Emitter) -> Results:
    """Compute f(W x + V h)."""
    (ours,), (theirs,) = _gates(emitter, arguments(op), 1)
    return (emitter.emit(function, emitter.emit(aten.add.Tensor, ours, theirs)),)


def _weight_norm(op: Op, emitter: Emitter) -> Results:
    """Compute ``v g / |v|``, the norm over all dims but one (Salimans and Kingma 2016)."""
    args = arguments(op)
    rank, kept = len(emitter.value(args["v"]).shape), args["dim"]
    dims = None if kept == -1 else tuple(d for d in range(rank) if d != kept % rank)
    norm = emitter.emit(aten.linalg_vector_norm.default, args["v"], 2, dims, kept != -1)
    return (emitter.emit(aten.mul.Tensor, args["v"], emitter.emit(aten.div.Tensor, args["g"], norm)),)


_SUM, _MEAN, _MAX = 0, 1, 2


def _embedding_bag(op: Op, emitter: Emitter) -> Results:
    """Emit sums, means or maxima of embeddings. Bags of equal lengths, which PyTorch makes of a matrix of indices, are
    rows of a matrix; others are added to the row of their bag. Gradients scaled by frequency stay as they are."""
    call_args, emit = arguments(op), emitter.emit
    if call_args["scale_grad_by_freq"]:
        return None
    padding = call_args.get("padding_idx")
    table = emitter.value(call_args["weight"]).shape[0]
    padding = None if padding is None else padding % table
    count = emitter.value(call_args["indices"]).shape[0]
    rows = emit(aten.embedding.default, call_args["weight"], call_args["indices"])
    others = emitter.emit_as_is(op.target, *op.args, **dict(op.kwargs))[1:]  # dropped if unused
    if call_args["mode"] == _MAX:
        return _bag_maxima(emitter, call_args, rows, padding), *others
    counted = None  # per index, 1 unless it is padding
    if padding is not None:
        counted = emit(aten.to.dtype, emit(aten.ne.Scalar, call_args["indices"], padding), emitter.value(rows).dtype)
    for weights in (call_args["per_sample_weights"], counted):
        if weights is not None:
            rows = emit(aten.mul.Tensor, rows, emit(aten.unsqueeze.default, weights, -1))
    bags, length, bag = _bags(emitter, call_args, count)

    def add(rows: Ref) -> Ref:
        value = emitter.value(rows)
        if bag is None:
            return emit(aten.sum.dim_IntList, emit(aten.reshape.default, rows, (bags, length, value.shape[1])), (1,))
        zeros = emit(aten.full.default, (bags, value.shape[1]), 0.0, dtype=value.dtype)
        return emit(aten.index_add.default, zeros, 0, bag, rows)

    total = add(rows)
    if call_args["mode"] == _MEAN:
        if counted is None:
            counted = emit(aten.full.default, (count,), 1.0, dtype=emitter.value(rows).dtype)
        lengths = emit(aten.clamp_min.default, add(emit(aten.unsqueeze.default, counted, -1)), 1)
        total = emit(aten.div.Tensor, total, lengths)
    return total, *others


def _bags(
    emitter: Emitter, args: dict[str, Any], count: int, *, is_padded: bool = False
) -> tuple[int, int, Ref | None]:
    """Return the number of bags, their length, and the bag of every index; None if all have this length. ``is_padded``:
    indices are left out, which then lengths do not tell."""
    emit, producer = emitter.emit, emitter.producer.get(args["offsets"].name)
    bags = emitter.value(args["offsets"]).shape[0] - bool(args["include_last_offset"])
    if producer is not None and producer.target is aten.arange.start_step and not is_padded:
        offsets = arguments(producer)
        step = offsets["step"]
        if isinstance(step, int) and (offsets["start"], offsets["end"]) == (0, count) and bags * step == count:
            return bags, step, None
    ends = emit(aten.unsqueeze.default, args["offsets"], 0)
    places = emit(aten.unsqueeze.default, emit(aten.arange.default, count), 1)
    reached = emit(aten.sum.dim_IntList, emit(aten.ge.Tensor, places, ends), (1,))
    return bags, 0, emit(aten.sub.Tensor, reached, 1)


def _bag_maxima(emitter: Emitter, args: dict[str, Any], rows: Ref, padding: int | None) -> Ref:
    """Return the maximum of ``[index, ...]`` per bag; 0 for an empty bag or one of padding only."""
    emit, value = emitter.emit, emitter.value(rows)
    count, columns = value.shape
    bags, length, bag = _bags(emitter, args, count, is_padded=padding is not None)
    if bag is None:
        return emitter.emit_several(aten.max.dim, emit(aten.reshape.default, rows, (bags, length, columns)), 1)[0]
    if padding is not None:  # in a bag of its own, behind the others
        bag = emit(aten.masked_fill.Scalar, bag, emit(aten.eq.Scalar, args["indices"], padding), bags)
    zeros = emit(aten.full.default, (bags + 1, columns), 0.0, dtype=value.dtype)
    index = emit(aten.expand.default, emit(aten.unsqueeze.default, bag, 1), (count, columns))
    largest = emit(aten.scatter_reduce.two, zeros, 0, index, rows, "amax", include_self=False)
    return emit(aten.slice.Tensor, largest, 0, 0, bags)


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
        "lstm.input gru.input rnn_tanh.input rnn_relu.input": _recurrent,
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
        "rnn_tanh_cell": partial(_rnn_cell, aten.tanh.default),
        "rnn_relu_cell": partial(_rnn_cell, aten.relu.default),
        "_weight_norm": _weight_norm,
        "_grouped_mm": _grouped_mm,
        "embedding_bag embedding_bag.padding_idx": _embedding_bag,
    }
)


NONE, MEAN, SUM = 0, 1, 2
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def _total(op: Op, args: dict[str, Any], scores: Ref, emitter: Emitter) -> Ref:
    """Emit the summed loss, in float32 if the scores have half precision."""
    low_precision = emitter.value(scores).dtype in _LOW_PRECISION
    args = args | {"reduction": NONE if low_precision else SUM}
    schema = op.target._schema.arguments
    positional = [args[argument.name] for argument in schema if not argument.kwarg_only]
    keywords = {argument.name: args[argument.name] for argument in schema if argument.kwarg_only}
    loss = emitter.emit(op.target, *positional, **keywords)
    if low_precision:
        loss = emitter.emit(aten.sum.default, loss, dtype=torch.float32)
    return loss


def _divided(op: Op, total: Ref, count: Arg, scores: Ref, emitter: Emitter) -> tuple[Arg, ...]:
    mean = emitter.emit(aten.div.Tensor, total, count)
    dtype = emitter.value(scores).dtype
    return (emitter.emit(aten.to.dtype, mean, dtype) if dtype in _LOW_PRECISION else mean,)


def _class_loss(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite cross_entropy_loss and nll_loss: divide by the number of labels not ignored, or their classes' weights.

    With probabilities as targets (floating ``target``), divide by the number of samples.
    """
    args = arguments(op)
    if args["reduction"] != MEAN:
        return None
    scores, target = args["self"], args["target"]
    total = _total(op, args, scores, emitter)
    if emitter.value(target).dtype.is_floating_point:
        shape = emitter.value(scores).shape
        classes = shape[1] if len(shape) > 1 else shape[0]
        return _divided(op, total, prod(shape) // classes, scores, emitter)
    valid = emitter.emit(aten.ne.Scalar, target, args["ignore_index"])
    dtype = emitter.value(total).dtype
    count = emitter.emit(aten.to.dtype, valid, dtype)
    if args["weight"] is not None:
        labels = emitter.emit(aten.masked_fill.Scalar, target, emitter.emit(aten.logical_not.default, valid), 0)
        label_weight = emitter.emit(aten.index.Tensor, args["weight"], (labels,))
        count = emitter.emit(aten.mul.Tensor, label_weight, count)
    return _divided(op, total, emitter.emit(aten.sum.default, count), scores, emitter)


def _element_loss(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
    """Rewrite element-wise losses: divide by the number of elements after broadcasting."""
    call_args = arguments(op)
    if call_args["reduction"] != MEAN:
        return None
    scores: Ref = op.args[0]
    shapes = [
        emitter.value(call_args[name]).shape
        for name in ("self", "input", "input1", "input2", "target", "weight")
        if call_args.get(name) is not None
    ]
    count = prod(torch.broadcast_shapes(*shapes))
    return _divided(op, _total(op, call_args, scores, emitter), count, scores, emitter)


LOSS_NORMALIZATIONS: dict[OpOverload, Rewrite] = by_operator(
    {
        "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d": _class_loss,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
        "kl_div soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss": _element_loss,
    }
)
