"""Functions over tensors written out as operators of a graph: normal forms that are a few lines of PyTorch.

A function is traced on fake tensors, above autograd and above decompositions, once for calls of equal types. Its first
argument draws random numbers, which depend on the seed and the global index alone: the eager side of a verification
(``graph/to_float64.py``) calls the same functions, and draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor

from shardwise.graph.custom_operators import RANDOM, dropout, mask_columns, uniform
from shardwise.graph.emitter import Emitter, Rewrite
from shardwise.graph.ir import Arg, Op, Ref, Source, Value
from shardwise.graph.schema import arguments, filled, returns_one_tensor
from shardwise.graph.switches import CallCache
from shardwise.graph.trees import argument_key

DROPOUT: OpOverload = dropout._opoverload
UNIFORM: OpOverload = uniform._opoverload
SEED = "_shardwise_seed"
_TRACED: CallCache[tuple[fx.Graph | None]] = CallCache()
_OF_DEVICES = ("device", "layout", "pin_memory")


class Noise(Protocol):
    """Draws the random numbers of a model, call by call."""

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return uniform numbers of [0, 1)."""

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Apply dropout."""


class TracedNoise:
    """Random numbers whose seed and number of the call are set where the trace is emitted."""

    def __init__(self, seed: Tensor) -> None:
        self.seed = seed

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        zeros = (0,) * len(shape)
        drawn: Tensor = UNIFORM(self.seed, 0, shape, zeros, shape, shape, dtype)
        return drawn

    def drop(self, x: Tensor, p: float) -> Tensor:
        shape = tuple(x.shape)
        dropped: Tensor = DROPOUT(x, self.seed, float(p), 0, mask_columns(shape), shape, (0,) * len(shape))
        return dropped


class _StaysWhole(Exception):
    """Raised if a function returns NotImplemented."""


def written_out(function: Callable[..., Any]) -> Rewrite:
    """Return the rewrite of an operator to what a function computes. ``function``: of ``Noise`` and the operator's
    arguments, by position where the schema has them so; NotImplemented keeps the operator."""

    def rewrite(op: Op, emitter: Emitter) -> tuple[Arg, ...] | None:
        operands = tuple(dict.fromkeys(op.operands))
        by_name = arguments(op)
        names = {argument.name for argument in op.target._schema.arguments if argument.kwarg_only}
        positional = tuple(arg for name, arg in by_name.items() if name not in names)
        named = {name: arg for name, arg in by_name.items() if name in names}

        def type_of(name: str) -> object:
            value = emitter.values[name]
            return operands.index(name), value.shape, value.dtype, value.requires_grad

        def run(seed: Tensor, *tensors: Tensor) -> Any:
            of = dict(zip(operands, tensors, strict=True)).__getitem__
            keywords = {name: filled(arg, of) for name, arg in named.items()}
            result = function(TracedNoise(seed), *filled(positional, of), **keywords)
            if result is NotImplemented:
                raise _StaysWhole
            return result

        signature = function, op.target, argument_key((positional, tuple(named.items())), type_of)
        known = _TRACED.get(op.target, signature)
        if known is None:
            examples = [emitter.fake(Ref(name)) for name in operands]
            with emitter.fake_mode, torch.enable_grad():
                seed = torch.empty((), dtype=torch.int64)
                try:
                    known = (proxy_tensor.make_fx(run, pre_dispatch=True)(seed, *examples).graph,)
                except _StaysWhole:
                    known = (None,)
            _TRACED.keep(op.target, signature, known)
        return None if known[0] is None else _emitted(known[0], emitter, operands)

    return rewrite


def _emitted(traced: fx.Graph, emitter: Emitter, operands: Sequence[str]) -> tuple[Arg, ...]:
    def apply(op: Op) -> tuple[Arg, ...]:
        if op.target in RANDOM:
            args, names = list(op.args), [argument.name for argument in op.target._schema.arguments]
            args[names.index("seed")], args[names.index("call")] = next_random_call(emitter)
            op = replace(op, args=tuple(args))
        return emitter.apply(op)

    values: dict[fx.Node, Any] = {}
    inputs = iter((None, *map(Ref, operands)))  # the seed is that of every random call
    for node in traced.nodes:
        values[node] = next(inputs) if node.op == "placeholder" else emitted_node(node, values, emitter.origin, apply)
    results = values[traced.output_node()]
    return results if isinstance(results, tuple) else (results,)


def emitted_node(
    node: fx.Node, values: Mapping[fx.Node, Any], origin: Op, apply: Callable[[Op], tuple[Arg, ...]]
) -> Any:
    """Emit what a node of a trace computes from ``values`` by ``apply``, on behalf of ``origin``."""

    def argument(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return values[arg]
        return tuple(map(argument, arg)) if isinstance(arg, (list, tuple)) else arg

    args, target = argument(node.args), node.target
    if node.op == "output":
        return args[0]
    if not isinstance(target, OpOverload):  # getitem
        return args[0][args[1]]
    kwargs = tuple((name, argument(arg)) for name, arg in node.kwargs.items() if name not in _OF_DEVICES)
    results = apply(replace(origin, target=target, args=args, kwargs=kwargs))
    return results[0] if returns_one_tensor(target) else results


def next_random_call(emitter: Emitter) -> tuple[Ref, int]:
    """Return the seed, which the runtime sets in every step, and the number of this random call."""
    seed = emitter.add_source(Source(SEED, "buffer", (SEED,)), Value(SEED, (), torch.int64))
    emitter.num_random_calls += 1
    return seed, emitter.num_random_calls - 1
