"""Rewrite of random tensors to functions of a seed and the global index, so that they are the same under every plan.

All are based on ``shardwise::uniform``: a comparison gives Bernoulli draws, a product integers, Box and Muller (1958)
normal numbers, the inverse of a distribution function the others. The eager side of a verification
(``graph/to_float64.py``) draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log1p, pi
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.graph.custom_operators import dropout as dropout_operator
from shardwise.graph.custom_operators import mask_columns
from shardwise.graph.custom_operators import uniform as uniform_operator
from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.ir import Arg, Op, Ref, Source, Value
from shardwise.graph.schema import arguments, by_operator

aten = torch.ops.aten
DROPOUT: OpOverload = dropout_operator._opoverload
UNIFORM: OpOverload = uniform_operator._opoverload
SEED = "_shardwise_seed"
Results = tuple[Arg, ...] | None
_WIDE = torch.float64


def next_random_call(emitter: Emitter) -> tuple[Ref, int]:
    """Return the seed, which the runtime sets in every step, and the number of this random call."""
    seed = emitter.add_source(Source(SEED, "buffer", (SEED,)), Value(SEED, (), torch.int64))
    emitter.num_random_calls += 1
    return seed, emitter.num_random_calls - 1


def _uniform(emitter: Emitter, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
    seed, call = next_random_call(emitter)
    return emitter.emit(UNIFORM, seed, call, shape, (0,) * len(shape), shape, shape, dtype)


def drop(emitter: Emitter, x: Ref, p: float) -> Ref:
    """Emit a dropout of a value by the hash of seed and global index."""
    seed, call = next_random_call(emitter)
    shape = emitter.value(x).shape
    return emitter.emit(DROPOUT, x, seed, float(p), call, mask_columns(shape), shape, (0,) * len(shape))


def _free(emitter: Emitter, arg: Arg) -> Arg:
    """Detach a parameter of a distribution: PyTorch passes it no gradient."""
    if isinstance(arg, Ref) and emitter.value(arg).requires_grad:
        return emitter.emit(aten.detach.default, arg)
    return arg


def _normal(emitter: Emitter, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
    """Emit ``sqrt(-2 log(1 - u)) cos(2 pi v)``; u is below 1."""
    first, second = _uniform(emitter, shape, _WIDE), _uniform(emitter, shape, _WIDE)
    emit = emitter.emit
    radius = emit(aten.sqrt.default, emit(aten.mul.Tensor, emit(aten.log1p.default, emit(aten.neg.default, first)), -2))
    angle = emit(aten.cos.default, emit(aten.mul.Tensor, second, 2 * pi))
    return emit(aten.to.dtype, emit(aten.mul.Tensor, radius, angle), dtype)


def _drawn(draw: Any, op: Op, emitter: Emitter) -> Results:
    """Rewrite ``rand(size)`` and similar, or ``rand_like(x)``."""
    args = arguments(op)
    if "self" in args:
        model = emitter.value(args["self"])
        shape, dtype = model.shape, args["dtype"] or model.dtype
    else:
        shape, dtype = tuple(args["size"]), args["dtype"] or torch.get_default_dtype()
    return (draw(emitter, shape, dtype),) if dtype.is_floating_point else None


def _in_range(emitter: Emitter, shape: tuple[int, ...], width: Any, low: Any) -> Ref:
    """Emit ``u width + low``."""
    return emitter.emit(aten.add.Tensor, emitter.emit(aten.mul.Tensor, _uniform(emitter, shape, _WIDE), width), low)


def _integers(op: Op, emitter: Emitter) -> Results:
    """Emit ``low + floor(u (high - low))``."""
    args = arguments(op)
    low = args.get("low", 0)
    if "self" in args:
        shape, dtype = emitter.value(args["self"]).shape, args["dtype"] or emitter.value(args["self"]).dtype
    else:
        shape, dtype = tuple(args["size"]), args["dtype"] or torch.int64
    scaled = emitter.emit(aten.mul.Tensor, _uniform(emitter, shape, _WIDE), args["high"] - low)
    whole = emitter.emit(aten.to.dtype, emitter.emit(aten.floor.default, scaled), dtype)
    return (emitter.emit(aten.add.Tensor, whole, low),)


def _permutation(op: Op, emitter: Emitter) -> Results:
    """Emit the argsort of as many uniform numbers."""
    args = arguments(op)
    order = emitter.emit(aten.argsort.default, _uniform(emitter, (args["n"],), _WIDE))
    dtype = args["dtype"] or torch.int64
    return (order if dtype == torch.int64 else emitter.emit(aten.to.dtype, order, dtype),)


def _filled(draw: Callable[[dict[str, Arg], Emitter, tuple[int, ...]], Ref], op: Op, emitter: Emitter) -> Results:
    """Rewrite ``x.cauchy_(...)`` and similar: ``draw`` gives float64 numbers of the shape."""
    args = arguments(op)
    value = emitter.value(args["self"])
    return (emitter.emit(aten.to.dtype, draw(args, emitter, value.shape), value.dtype),)


def _exponential(args: dict[str, Arg], emitter: Emitter, shape: tuple[int, ...]) -> Ref:
    """Emit ``-log(1 - u) / rate``."""
    return emitter.emit(aten.div.Tensor, _log_survival(emitter, shape), -args["lambd"])


def _log_survival(emitter: Emitter, shape: tuple[int, ...]) -> Ref:
    """Emit ``log(1 - u)``: minus an exponential number."""
    return emitter.emit(aten.log1p.default, emitter.emit(aten.neg.default, _uniform(emitter, shape, _WIDE)))


def _gaussian(args: dict[str, Arg], emitter: Emitter, shape: tuple[int, ...]) -> Ref:
    """Emit ``mean + std z``."""
    spread = emitter.emit(aten.mul.Tensor, _normal(emitter, shape, _WIDE), _free(emitter, args["std"]))
    return emitter.emit(aten.add.Tensor, spread, _free(emitter, args["mean"]))


def _gaussian_of(op: Op, emitter: Emitter) -> Results:
    """Rewrite ``torch.normal`` of two tensors, of a tensor and a number, or of two numbers and a size."""
    args = arguments(op)
    tensors = [emitter.value(arg) for arg in (args["mean"], args["std"]) if isinstance(arg, Ref)]
    shape = tuple(torch.broadcast_shapes(*(value.shape for value in tensors))) if tensors else tuple(args["size"])
    dtype = tensors[0].dtype if tensors else args["dtype"] or torch.get_default_dtype()
    return (emitter.emit(aten.to.dtype, _gaussian(args, emitter, shape), dtype),)


def _cauchy(args: dict[str, Arg], emitter: Emitter, shape: tuple[int, ...]) -> Ref:
    """Emit ``median + sigma tan(pi (u - 1/2))``."""
    emit = emitter.emit
    angle = emit(aten.mul.Tensor, emit(aten.sub.Tensor, _uniform(emitter, shape, _WIDE), 0.5), pi)
    spread = emit(aten.mul.Tensor, emit(aten.tan.default, angle), args["sigma"])
    return emit(aten.add.Tensor, spread, args["median"])


def _geometric(args: dict[str, Arg], emitter: Emitter, shape: tuple[int, ...]) -> Ref:
    """Emit the number of trials up to the first success: ``1 + floor(log(1 - u) / log(1 - p))``."""
    failures = emitter.emit(aten.div.Tensor, _log_survival(emitter, shape), log1p(-args["p"]))
    return emitter.emit(aten.add.Tensor, emitter.emit(aten.floor.default, failures), 1)


def _below(args: dict[str, Arg], emitter: Emitter, shape: tuple[int, ...]) -> Ref:
    """Rewrite ``random_(to)``."""
    scaled = emitter.emit(aten.mul.Tensor, _uniform(emitter, shape, _WIDE), args["to"])
    return emitter.emit(aten.floor.default, scaled)


def _bernoulli_of(args: dict[str, Arg], emitter: Emitter, shape: tuple[int, ...]) -> Ref:
    """Rewrite ``bernoulli_(p)`` with a tensor of probabilities, and ``bernoulli``, whose operand is these."""
    drawn = _uniform(emitter, shape, _WIDE)
    return emitter.emit(aten.lt.Tensor, drawn, _free(emitter, args["p"]) if "p" in args else args["self"])


def _multinomial(op: Op, emitter: Emitter) -> Results:
    """Without replacement, take the largest of ``weight / exponential`` (Efraimidis and Spirakis 2006, as in PyTorch);
    with it, count the cumulative weights at or below ``u`` times their sum."""
    args, emit = arguments(op), emitter.emit
    shape, count = emitter.value(args["self"]).shape, args["num_samples"]
    weights = emit(aten.to.dtype, args["self"], _WIDE)
    if count == 1 or not args["replacement"]:
        waited = emit(aten.neg.default, _log_survival(emitter, shape))
        return (emitter.emit_several(aten.topk.default, emit(aten.div.Tensor, weights, waited), count, -1)[1],)
    cumulated = emit(aten.cumsum.default, weights, -1)
    total = emit(aten.sum.dim_IntList, weights, (-1,), True)
    drawn = emit(aten.mul.Tensor, _uniform(emitter, (*shape[:-1], count), _WIDE), total)
    passed = emit(aten.ge.Tensor, emit(aten.unsqueeze.default, drawn, -1), emit(aten.unsqueeze.default, cumulated, -2))
    return (emit(aten.clamp.default, emit(aten.sum.dim_IntList, passed, (-1,)), None, shape[-1] - 1),)


def _rrelu(op: Op, emitter: Emitter) -> Results:
    """Multiply negative elements by a slope from [lower, upper); in evaluation by the mean slope."""
    args, emit = arguments(op), emitter.emit
    lower, upper = args["lower"], args["upper"]
    if not args["training"]:
        return (emit(aten.leaky_relu.default, args["self"], (lower + upper) / 2),)
    value = emitter.value(args["self"])
    slope = emit(aten.to.dtype, _in_range(emitter, value.shape, upper - lower, lower), value.dtype)
    kept = emit(aten.where.ScalarOther, emit(aten.le.Scalar, args["self"], 0), slope, 1.0)
    return (emit(aten.mul.Tensor, args["self"], kept),)


def alpha_scale(p: float) -> tuple[float, float]:
    """Return (a, a alpha') of alpha dropout: kept elements become ``a x + a alpha' p``, dropped ones
    ``a alpha' (p - 1)``, which keeps mean 0 and variance 1 (Klambauer et al., "Self-normalizing neural networks",
    2017)."""
    alpha = 1.7580993408473766  # lambda alpha of SELU
    a = ((alpha * alpha * p + 1) * (1 - p)) ** -0.5
    return a, a * alpha


def _alpha_dropout(op: Op, emitter: Emitter, *, features: bool) -> Results:
    """Rewrite alpha dropout. ``features``: drop whole channels."""
    args, emit = arguments(op), emitter.emit
    x, p = args["input"], args["p"]
    value = emitter.value(x)
    if not args["train"] or p == 0:
        return (x,)
    if p == 1:
        return (emit(aten.mul.Tensor, x, 0.0),)
    rank = len(value.shape)
    shape = (*value.shape[:2], *[1] * (rank - 2)) if features else value.shape
    a, shift = alpha_scale(p)
    kept = emit(aten.to.dtype, emit(aten.ge.Scalar, _uniform(emitter, shape, _WIDE), p), value.dtype)
    moved = emit(aten.add.Tensor, emit(aten.mul.Tensor, kept, shift), shift * (p - 1))
    return (emit(aten.add.Tensor, emit(aten.mul.Tensor, x, emit(aten.mul.Tensor, kept, a)), moved),)


def _without_generator(rewrite: Rewrite) -> Rewrite:
    """Apply a rewrite to the overload with a generator argument, for calls that pass none."""
    return lambda op, emitter: None if arguments(op)["generator"] is not None else rewrite(op, emitter)


RANDOM_NORMALIZATIONS: dict[OpOverload, Rewrite] = by_operator(
    {
        "rand rand_like": partial(_drawn, _uniform),
        "randn randn_like": partial(_drawn, _normal),
        "randint randint.low randint_like randint_like.low_dtype": _integers,
        "randperm": _permutation,
        "uniform": partial(
            _filled, lambda args, emitter, shape: _in_range(emitter, shape, args["to"] - args["from"], args["from"])
        ),
        "exponential": partial(_filled, _exponential),
        "rand.generator": _without_generator(partial(_drawn, _uniform)),
        "randn.generator": _without_generator(partial(_drawn, _normal)),
        "normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor": _gaussian_of,
        "normal_functional": partial(_filled, _gaussian),
        "log_normal": partial(
            _filled, lambda args, emitter, shape: emitter.emit(aten.exp.default, _gaussian(args, emitter, shape))
        ),
        "cauchy": partial(_filled, _cauchy),
        "geometric": partial(_filled, _geometric),
        "random.to": partial(_filled, _below),
        "bernoulli bernoulli.Tensor": partial(_filled, _bernoulli_of),
        "multinomial": _multinomial,
        "rrelu": _rrelu,
        "alpha_dropout": partial(_alpha_dropout, features=False),
        "feature_alpha_dropout": partial(_alpha_dropout, features=True),
    }
)
