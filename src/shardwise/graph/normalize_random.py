"""Random tensors as functions of a seed and the global index, so that they are the same under every plan.

All of them are made of ``shardwise::uniform``: a comparison gives Bernoulli draws, a product integers, Box and Muller
(1958) normal numbers. The eager side of a verification (``graph/widen.py``) draws the same ones.
"""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.ir import Arg, Op, Ref, Source, Value
from shardwise.graph.operators import uniform as uniform_operator
from shardwise.graph.schema import arguments

aten = torch.ops.aten
UNIFORM: OpOverload = uniform_operator._opoverload
SEED = "_shardwise_seed"
Results = tuple[Arg, ...] | None


def next_call(emitter: Emitter) -> tuple[Ref, int]:
    """The seed, which the runtime provides anew for every step, and the number of this random call."""
    seed = emitter.add_source(Source(SEED, "buffer", (SEED,)), Value(SEED, (), torch.int64))
    emitter.num_random_calls += 1
    return seed, emitter.num_random_calls - 1


def _uniform(emitter: Emitter, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
    seed, call = next_call(emitter)
    result: Ref = emitter.emit(UNIFORM, seed, call, shape, (0,) * len(shape), shape, shape, dtype)
    return result


def _normal(emitter: Emitter, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
    """``sqrt(-2 log(1 - u)) cos(2 pi v)``; u is below 1."""
    first, second = _uniform(emitter, shape, torch.float64), _uniform(emitter, shape, torch.float64)
    emit = emitter.emit
    radius = emit(aten.sqrt.default, emit(aten.mul.Tensor, emit(aten.log1p.default, emit(aten.neg.default, first)), -2))
    angle = emit(aten.cos.default, emit(aten.mul.Tensor, second, 2 * pi))
    result: Ref = emit(aten.to.dtype, emit(aten.mul.Tensor, radius, angle), dtype)
    return result


def _made(draw: Any) -> Rewrite:
    """``rand(size)`` and its like, or ``rand_like(x)``."""

    def rewrite(op: Op, emitter: Emitter) -> Results:
        given = arguments(op)
        if "self" in given:
            model = emitter.value(given["self"])
            shape, dtype = model.shape, given["dtype"] or model.dtype
        else:
            shape, dtype = tuple(given["size"]), given["dtype"] or torch.get_default_dtype()
        return (draw(emitter, shape, dtype),) if dtype.is_floating_point else None

    return rewrite


def _integers(op: Op, emitter: Emitter) -> Results:
    """``low + floor(u (high - low))``."""
    given = arguments(op)
    low = given.get("low", 0)
    if "self" in given:
        shape, dtype = emitter.value(given["self"]).shape, given["dtype"] or emitter.value(given["self"]).dtype
    else:
        shape, dtype = tuple(given["size"]), given["dtype"] or torch.int64
    scaled = emitter.emit(aten.mul.Tensor, _uniform(emitter, shape, torch.float64), given["high"] - low)
    whole = emitter.emit(aten.to.dtype, emitter.emit(aten.floor.default, scaled), dtype)
    return (emitter.emit(aten.add.Tensor, whole, low),)


def _bernoulli(op: Op, emitter: Emitter) -> Results:
    """Ones where a uniform number is below the probability."""
    given = arguments(op)
    value = emitter.value(given["self"])
    drawn = _uniform(emitter, value.shape, torch.float64)
    return (emitter.emit(aten.to.dtype, emitter.emit(aten.lt.Tensor, drawn, given["self"]), value.dtype),)


def _between(op: Op, emitter: Emitter) -> Results:
    """``uniform_(low, high)``."""
    given = arguments(op)
    value = emitter.value(given["self"])
    width = emitter.emit(aten.mul.Tensor, _uniform(emitter, value.shape, torch.float64), given["to"] - given["from"])
    return (emitter.emit(aten.to.dtype, emitter.emit(aten.add.Tensor, width, given["from"]), value.dtype),)


def _exponential(op: Op, emitter: Emitter) -> Results:
    """``-log(1 - u) / rate``."""
    given = arguments(op)
    value = emitter.value(given["self"])
    negative = emitter.emit(aten.neg.default, _uniform(emitter, value.shape, torch.float64))
    scaled = emitter.emit(aten.div.Tensor, emitter.emit(aten.log1p.default, negative), -given["lambd"])
    return (emitter.emit(aten.to.dtype, scaled, value.dtype),)


def _permutation(op: Op, emitter: Emitter) -> Results:
    """The order of as many uniform numbers."""
    given = arguments(op)
    order = emitter.emit(aten.argsort.default, _uniform(emitter, (given["n"],), torch.float64))
    dtype = given["dtype"] or torch.int64
    return (order if dtype == torch.int64 else emitter.emit(aten.to.dtype, order, dtype),)


RANDOM_NORMALIZATIONS: dict[OpOverload, Rewrite] = {
    aten.rand.default: _made(_uniform),
    aten.rand_like.default: _made(_uniform),
    aten.randn.default: _made(_normal),
    aten.randn_like.default: _made(_normal),
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.randperm.default: _permutation,
    aten.uniform.default: _between,
    aten.exponential.default: _exponential,
    aten.bernoulli.default: _bernoulli,
}
