"""Random operators as functions of a seed and the global index, so that they draw the same under every plan.

All are based on uniform numbers: a comparison gives Bernoulli draws, a product integers, Box and Muller (1958) normal
numbers, the inverse of a distribution function the others. The functions are those of the graph (``written_out``), and
of the eager side of a verification (``graph/to_float64.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, log1p, pi
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.graph.emitter import Rewrite
from shardwise.graph.schema import by_operator
from shardwise.graph.written_out import Noise, TracedNoise, written_out

aten = torch.ops.aten
Shape = Sequence[int]
_WIDE = torch.float64


def _free(x: Any) -> Any:
    """Detach a parameter of a distribution: PyTorch passes it no gradient."""
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


# ------------------------------------------------------------------------------------- numbers of a shape, in float64


def normal(draws: Noise, shape: Shape, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    """Return ``mean + std z``."""
    drawn: Tensor = standard_normal(draws, shape) * _free(std) + _free(mean)
    return drawn


def standard_normal(draws: Noise, shape: Shape) -> Tensor:
    """Return ``sqrt(-2 log(1 - u)) cos(2 pi v)``; u is below 1."""
    first, second = draws.uniform(shape), draws.uniform(shape)
    return (torch.log1p(-first) * -2).sqrt() * torch.cos(second * (2 * pi))


def _log_normal(draws: Noise, shape: Shape, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return normal(draws, shape, mean, std).exp()


def _between(draws: Noise, shape: Shape, low: float = 0.0, high: float = 1.0, **names: float) -> Tensor:
    """Return ``u (high - low) + low``."""
    low, high = names.get("from", low), names.get("to", high)
    return draws.uniform(shape) * (high - low) + low


def _log_survival(draws: Noise, shape: Shape) -> Tensor:
    """Return ``log(1 - u)``: minus an exponential number."""
    return torch.log1p(-draws.uniform(shape))


def _exponential(draws: Noise, shape: Shape, lambd: float = 1.0) -> Tensor:
    """Return ``-log(1 - u) / rate``."""
    return _log_survival(draws, shape) / -lambd


def _cauchy(draws: Noise, shape: Shape, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    """Return ``median + sigma tan(pi (u - 1/2))``."""
    return torch.tan((draws.uniform(shape) - 0.5) * pi) * sigma + median


def _geometric(draws: Noise, shape: Shape, p: float) -> Tensor:
    """Return the number of trials up to the first success: ``1 + floor(log(1 - u) / log(1 - p))``."""
    return (_log_survival(draws, shape) / log1p(-p)).floor() + 1


def _below(draws: Noise, shape: Shape, to: int) -> Tensor:
    return (draws.uniform(shape) * to).floor()


def integers(draws: Noise, shape: Shape, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return ``low + floor(u (high - low))``."""
    return (draws.uniform(shape) * (high - low)).floor().to(dtype) + low


# What ``x.cauchy_(...)`` and similar write, by the name of the method.
FILLS: dict[str, Callable[..., Tensor]] = {
    "uniform": _between,
    "exponential": _exponential,
    "normal": normal,
    "log_normal": _log_normal,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "random": _below,
}

# ------------------------------------------------------------------------------------------------ whole operators


def dropout(draws: Noise, input: Tensor, p: float, train: bool) -> Tensor:
    return draws.drop(input, p) if train and p != 0 else input


def _ones(x: Tensor, shape: Shape) -> Tensor:
    return torch.full(tuple(shape), 1.0, dtype=x.dtype if x.dtype.is_floating_point else torch.float32)


def _per_channel(x: Tensor) -> Shape:
    return *x.shape[:2], *[1] * (x.dim() - 2)


def feature_dropout(draws: Noise, input: Tensor, p: float, train: bool) -> Tensor:
    """Drop whole channels: multiply by a dropout of ones of shape (n, c, 1, ...)."""
    return input * draws.drop(_ones(input, _per_channel(input)), p) if train and p != 0 else input


def _native_dropout(draws: Noise, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return input, torch.full(tuple(input.shape), True, dtype=torch.bool)
    noise = draws.drop(_ones(input, input.shape), p)
    return input * noise, noise != 0


def alpha_dropout(draws: Noise, input: Tensor, p: float, train: bool, *, features: bool = False) -> Tensor:
    """Apply alpha dropout: kept elements become ``a x + a alpha' p``, dropped ones ``a alpha' (p - 1)``, which keeps
    mean 0 and variance 1 (Klambauer et al., "Self-normalizing neural networks", 2017). ``features``: drop whole
    channels."""
    if not train or p == 0:
        return input
    if p == 1:
        return input * 0.0
    alpha = 1.7580993408473766  # lambda alpha of SELU
    a: float = ((alpha * alpha * p + 1) * (1 - p)) ** -0.5
    kept = (draws.uniform(_per_channel(input) if features else tuple(input.shape)) >= p).to(input.dtype)
    moved = kept * (a * alpha) + a * alpha * (p - 1)
    return input * (kept * a) + moved


def bernoulli(draws: Noise, input: Tensor, p: Any = None, **_: Any) -> Tensor:
    """Return ones with a probability for all, the kept elements of a dropout of ones; or with one of each element,
    ``p`` or the input."""
    if isinstance(p, (int, float)):
        return (draws.drop(_ones(input, input.shape), 1.0 - p) != 0).to(input.dtype)
    chance = input if p is None else _free(p)
    return (draws.uniform(tuple(input.shape)) < chance).to(input.dtype)


def normal_of(
    draws: Noise, mean: Any, std: Any = 1.0, size: Shape | None = None, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """Return what ``torch.normal`` does of two tensors, of a tensor and a number, or of two numbers and a size."""
    tensors = [arg for arg in (mean, std) if isinstance(arg, Tensor)]
    shape = tuple(torch.broadcast_shapes(*(x.shape for x in tensors)) if tensors else size or ())
    dtype = tensors[0].dtype if tensors else dtype or torch.get_default_dtype()
    return normal(draws, shape, mean, std).to(dtype)


def multinomial(draws: Noise, input: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    """Without replacement, take the largest of ``weight / exponential`` (Efraimidis and Spirakis 2006, as in PyTorch);
    with it, count the cumulative weights at or below ``u`` times their sum."""
    shape, weights = tuple(input.shape), input.to(_WIDE)
    if num_samples == 1 or not replacement:
        return (weights / -_log_survival(draws, shape)).topk(num_samples, -1)[1]
    cumulated, total = weights.cumsum(-1), weights.sum((-1,), True)
    drawn = draws.uniform((*shape[:-1], num_samples)) * total
    return (drawn.unsqueeze(-1) >= cumulated.unsqueeze(-2)).sum((-1,)).clamp(None, shape[-1] - 1)


def rrelu(
    draws: Noise, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any
) -> Tensor:
    """Multiply negative elements by a slope from [lower, upper); in evaluation by the mean slope."""
    if not training:
        return torch.nn.functional.leaky_relu(input, (lower + upper) / 2)
    slope = _between(draws, tuple(input.shape), lower, upper).to(input.dtype)
    return input * torch.where(input <= 0, slope, 1.0)


def attention(
    draws: Noise,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Return attention with dropout: softmax(q k^T * scale + mask), dropped, times v (Vaswani et al. 2017, 3.2.1).
    NotImplemented without dropout. ``options``: ``scale`` and ``enable_gqa``."""
    if dropout_p == 0:
        return NotImplemented
    scale, groups = options.get("scale"), query.shape[-3] // key.shape[-3] if options.get("enable_gqa") else 1
    if groups > 1:
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        rows = torch.arange(query.shape[-2]).unsqueeze(1)
        scores = scores.masked_fill(torch.arange(key.shape[-2]) > rows, -inf)
    if attn_mask is None:
        return draws.drop(scores.softmax(-1), dropout_p) @ value
    is_choice = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(attn_mask.logical_not(), -inf) if is_choice else scores + attn_mask
    return draws.drop(torch._safe_softmax(scores, -1), dropout_p) @ value


def recurrent(function: Callable[..., tuple[Tensor, ...]], draws: Noise, x: Tensor, hx: Any, *rest: Any) -> Any:
    """Run LSTM, GRU or RNN layer by layer if there is dropout between the layers, else return NotImplemented."""
    params, has_biases, layers, p, train, bidirectional, batch_first = rest
    if not train or p == 0:
        return NotImplemented
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    directions, num_params, finals = 2 if bidirectional else 1, len(params) // layers, []
    for layer in range(layers):
        sliced = [aten.slice.Tensor(s, 0, layer * directions, (layer + 1) * directions) for s in states]
        own = params[layer * num_params : (layer + 1) * num_params]
        settings = (has_biases, 1, 0.0, train, bidirectional, batch_first)
        x, *last = function(x, sliced[0] if isinstance(hx, Tensor) else sliced, own, *settings)
        finals.append(last)
        x = draws.drop(x, p) if layer < layers - 1 else x
    return x, *(torch.cat(together, 0) for together in zip(*finals, strict=True))


def _drawn(
    draw: Callable[..., Tensor], draws: TracedNoise, of: Any, *, dtype: torch.dtype | None, **others: Any
) -> Any:
    """Return ``rand(size)`` and similar, or ``rand_like(x)``; of floating numbers, by no generator."""
    shape = tuple(of.shape if isinstance(of, Tensor) else of)
    dtype = dtype or (of.dtype if isinstance(of, Tensor) else torch.get_default_dtype())
    is_usual = dtype.is_floating_point and others.get("generator") is None
    return draw(draws, shape, dtype) if is_usual else NotImplemented


def _randint(draws: TracedNoise, *args: Any, dtype: Any = None, **_: Any) -> Tensor:
    """Return ``randint(low, high, size)`` and similar, or ``randint_like(x, low, high)``; the low number may lack."""
    *low, high = (arg for arg in args if isinstance(arg, int))
    (of,) = (arg for arg in args if not isinstance(arg, int))
    is_like = isinstance(of, Tensor)
    kind = dtype if isinstance(dtype, torch.dtype) else of.dtype if is_like else torch.int64  # a number: the default
    return integers(draws, tuple(of.shape if is_like else of), low[0] if low else 0, high, kind)


def _randperm(draws: TracedNoise, n: int, *, dtype: Any, **_: Any) -> Tensor:
    """Return the argsort of as many uniform numbers."""
    order = draws.uniform((n,)).argsort()
    return order.to(dtype) if isinstance(dtype, torch.dtype) and dtype != torch.int64 else order


def _written(draw: Callable[..., Tensor]) -> Rewrite:
    """Rewrite ``x.cauchy_(...)`` and similar."""

    def like(draws: Noise, x: Tensor, *args: Any, **_: Any) -> Tensor:
        return draw(draws, tuple(x.shape), *args).to(x.dtype)

    return written_out(like)


_OPERATORS = {"normal": "normal_functional", "random": "random.to"}
_UNIFORM = partial(_drawn, lambda draws, shape, dtype: draws.uniform(shape, dtype))
_NORMAL = partial(_drawn, lambda draws, shape, dtype: standard_normal(draws, shape).to(dtype))
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rand rand_like rand.generator": _UNIFORM,
    "randn randn_like randn.generator": _NORMAL,
    "randint randint.low randint_like randint_like.low_dtype": _randint,
    "randperm": _randperm,
    "normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor": normal_of,
    "bernoulli bernoulli.Tensor bernoulli.p": bernoulli,
    "multinomial": multinomial,
    "rrelu": rrelu,
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    "native_dropout": _native_dropout,
    "alpha_dropout": alpha_dropout,
    "feature_alpha_dropout": partial(alpha_dropout, features=True),
    **{f"{name}.input": partial(recurrent, getattr(torch, name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
RANDOM_NORMALIZATIONS: dict[OpOverload, Rewrite] = by_operator(
    {name: written_out(function) for name, function in _FUNCTIONS.items()}
    | {_OPERATORS.get(name, name): _written(draw) for name, draw in FILLS.items()}
)
