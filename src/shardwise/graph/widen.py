"""Float64 for both sides of a verification: the graph with its casts widened, and the same for the eager module.

A model that computes a softmax or a norm "in float32" would leave 1e-9 of noise in a float64 comparison. ``widen``
turns every floating-point cast and constant type of a graph to float64; ``reference_mode`` does the same to the module
that runs eagerly, and gives it the hashed dropout masks of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.graph.ir import Arg, Graph
from shardwise.graph.operators import dropout_mask

NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


def widen(graph: Graph) -> Graph:
    """The graph with float64 in place of every lower floating-point type."""

    def wide(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(wide(item) for item in arg)
        return torch.float64 if isinstance(arg, torch.dtype) and arg in NARROW else arg

    return replace(
        graph,
        values=tuple(replace(value, dtype=wide(value.dtype)) for value in graph.values),
        ops=tuple(
            replace(op, args=wide(op.args), kwargs=tuple((key, wide(value)) for key, value in op.kwargs))
            for op in graph.ops
        ),
    )


@contextmanager
def reference_mode(seed: int) -> Iterator[None]:
    """Run eager code with widened casts and with the dropout masks of the graph under ``seed``."""
    with _Reference(seed):
        yield


class _Reference(TorchFunctionMode):
    """Rewrites torch calls: types to float64, dropout to the hashed masks, numbered in the order of execution."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = torch.tensor(seed, dtype=torch.int64)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        own = REPLACED.get(func)
        if own is not None:
            return own(self, *args, **kwargs)
        if func in CASTS:
            return args[0].to(torch.float64)
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in NARROW else a for a in args)
        kwargs = {k: torch.float64 if isinstance(v, torch.dtype) and v in NARROW else v for k, v in kwargs.items()}
        return func(*args, **kwargs)

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """``x`` under the mask of the next dropout."""
        shape = tuple(x.shape)
        mask = dropout_mask(self.seed, p, self.calls, shape, (0,) * len(shape), shape)
        self.calls += 1
        return torch.where(mask, x / (1 - p), torch.zeros((), dtype=x.dtype))


def _dropout(
    mode: _Reference, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    return mode.drop(input, p)


def _attention(
    mode: _Reference,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p == 0:
        return torch._C._nn.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-1, -2) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if is_causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, columns, dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return mode.drop(scores.softmax(-1), dropout_p) @ value


CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
REPLACED: dict[Any, Callable[..., torch.Tensor]] = {
    torch.nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
