"""Float64 for both sides of a verification: the graph with its casts widened, and the same for the eager module.

A model that computes a softmax or a norm "in float32" would leave 1e-9 of noise in a float64 comparison. ``to_float64``
turns every floating-point and complex type of a graph to float64 and complex128. ``reference_mode`` does the same to
the eager module, and gives it the hashed dropout masks of the graph. Both sides run with float64 as torch's default
dtype, which determines the results of constructors without a dtype and of quotients of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError
from shardwise.graph.custom_operators import dropout_mask, mask_columns, uniform
from shardwise.graph.float8 import linear
from shardwise.graph.infer import TypeInference
from shardwise.graph.ir import Arg, Graph, Op
from shardwise.graph.normalize_random import (
    FILLS,
    alpha_dropout,
    attention,
    bernoulli,
    dropout,
    feature_dropout,
    integers,
    multinomial,
    normal_of,
    recurrent,
    rrelu,
    standard_normal,
)
from shardwise.graph.segments import keep_checkpointed_values
from shardwise.graph.switches import default_dtype
from shardwise.graph.trees import storage_of

WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}


def to_float64(graph: Graph) -> Graph:
    """Return the graph with float64 in place of every lower floating-point type, and complex128 for complex ones."""

    def wide(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(wide(item) for item in arg)
        return WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg

    def wide_op(op: Op) -> Op:
        if op.target is torch.ops.aten.chalf.default:  # the one cast whose dtype is in its name
            return replace(op, target=torch.ops.aten.to.dtype, args=(op.args[0], torch.complex128), kwargs=())
        return replace(op, args=wide(op.args), kwargs=tuple((key, wide(value)) for key, value in op.kwargs))

    for op in graph.ops:
        _check_bits(op, graph)
    ops = tuple(map(wide_op, graph.ops))
    values = {v.name: replace(v, dtype=wide(v.dtype), stored=None, reduced=None) for v in graph.values}
    types = TypeInference()
    with default_dtype(torch.float64):
        for op in ops:
            inferred = types.results(op, values.__getitem__)
            values |= {
                name: replace(values[name], dtype=inferred_value.dtype)
                for name, inferred_value in zip(op.results, inferred, strict=True)
            }
    return replace(graph, values=tuple(values[value.name] for value in graph.values), ops=ops)


def _check_bits(op: Op, graph: Graph) -> None:
    """Raise ShardwiseError for operators that read the bits of numbers, which differ in float64."""
    dtypes = [graph.by_name[name].dtype for name in (*op.operands, *op.results)]
    are_bits = len(set(dtypes)) > 1 and set(dtypes) != {torch.float32, torch.complex64}
    if op.target is torch.ops.aten.view.dtype and are_bits and not WIDE.keys().isdisjoint(dtypes):
        shown = " as ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ShardwiseError(
            f"the model reads the bits of {shown}, but verification computes in float64, which has other bits",
            op=op.name,
            source=op.source,
            fix="verify the model without this operator; sw.plan and sw.parallelize support it",
        )


_ACTIVE: ContextVar[bool] = ContextVar("shardwise_reference", default=False)


class Dtypes:
    """The original dtypes of tensors that a verification holds in float64, by their memory. ``of_others``: the dtype of
    tensors that are not ``known``; None if a model has several."""

    def __init__(self, initial: Iterable[tuple[torch.Tensor, torch.dtype]] = ()) -> None:
        self._of = {storage_of(tensor): dtype for tensor, dtype in initial if dtype.is_floating_point}
        self.of_others = next(iter(self._of.values())) if len(set(self._of.values())) == 1 else None
        self._copies: list[torch.Tensor] = []  # kept alive, so that their memory is not reused
        self._were_read = False  # float64, of a tensor that is widened: what is cast to float64 may be cast to that

    def read(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that the model's code reads of a tensor: its original one if known."""
        dtype = self.of(tensor)
        self._were_read |= dtype is None
        return dtype or tensor.dtype

    def after_cast(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return the result of a widened call, copied if only the original cast makes a copy."""
        target = self._cast_to(func, args, kwargs)
        before = None if target is None else self.of(args[0])
        if target is None or before in (None, target) or storage_of(result) != storage_of(args[0]):
            return result
        copied = result.clone()
        self._of[storage_of(copied)] = target
        self._copies.append(copied)
        return copied

    def of(self, tensor: torch.Tensor) -> torch.dtype | None:
        """Return the dtype of a tensor in the model, or None."""
        return self._of.get(storage_of(tensor), self.of_others) if tensor.is_floating_point() else tensor.dtype

    def _cast_to(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """Return the floating-point type that a call casts to, or None if it is no cast of such a tensor."""
        if func in CASTS and args[0].is_floating_point():
            return CASTS[func]
        if func not in _CASTS_TO or not args[0].is_floating_point():
            return None
        named = [*args[1:], *kwargs.values()]
        likes = (self.of(tensor) for tensor in named if isinstance(tensor, torch.Tensor))
        target = next((dtype for dtype in named if isinstance(dtype, torch.dtype)), next(likes, None))
        # If the model reads dtypes (usually ``x.to(y.dtype)``), float64 stands for the model's own dtype.
        return self.of_others if target == torch.float64 and self._were_read else target


@contextmanager
def reference_mode(reference: Reference) -> Iterator[None]:
    """Run eager code, the calls inside of functions too, by a reference."""
    with functions_opened(), _legacy_data_rounded(reference), reference:
        yield


@contextmanager
def _legacy_data_rounded(mode: Reference) -> Iterator[None]:
    """Round the numbers in ``torch.Tensor([0.1])`` like those in ``torch.tensor``: no function mode sees this call."""
    base: Any = torch._C.TensorBase
    tensor: Any = torch.Tensor

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        is_of_data = mode.widens and cls is tensor and _is_data(args)
        with default_dtype(mode.models_default) if is_of_data else nullcontext():
            made = base.__new__(cls, *args, **kwargs)
        return _wide_argument(made) if is_of_data else made

    tensor.__new__ = new
    try:
        yield
    finally:
        del tensor.__new__


@contextmanager
def functions_opened() -> Iterator[None]:
    """Let a function mode see calls inside of functions. Not to be entered by several threads.

    A function mode sees a call of ``torch.nn.functional`` as one, and none inside it, such as the dropout of
    ``multi_head_attention_forward``. So these functions are made to see no mode, and their inner calls reach it.
    Checkpoints keep what backward needs: backward runs outside, and would recompute something else.
    """
    functions = vars(torch.nn.functional)
    originals = {name: functions[name] for name in functions if name.startswith("has_torch_function")}
    functions.update(dict.fromkeys(originals, lambda *operands: False))
    token = _ACTIVE.set(True)
    try:
        with keep_checkpointed_values():
            yield
    finally:
        _ACTIVE.reset(token)
        functions.update(originals)


def in_reference_mode() -> bool:
    """Return whether a module runs as the single device with which a plan is compared."""
    return _ACTIVE.get()


def call_in_float64(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the call with float64 and complex128 in place of every lower type that it names or that its operands have
    (tensors that are no parameters, buffers or inputs: attributes, closure contents)."""
    if func in CASTS:
        return args[0].to(WIDE.get(CASTS[func], CASTS[func]))
    name = getattr(func, "__name__", "")
    is_written = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
    operands, named = pytree.tree_map(_wide_argument, (tuple(args[is_written:]), dict(kwargs)))
    return func(*args[:is_written], *operands, **{**named, **{key: kwargs[key] for key in kwargs if key == "out"}})


def _wide_argument(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):  # ``to`` the same dtype loses gradients inside of torch.func.jvp
        return arg.to(WIDE[arg.dtype]) if arg.dtype in WIDE else arg
    return WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg


class Reference(TorchFunctionMode):
    """Function mode that rewrites torch calls: types to float64 (``widens``), or as they are; dropout and random
    numbers to those of the graph under ``seed``, numbered in the order of execution.

    ``passes``: the samples of micro-batches, over each of which training batch norm takes its statistics, one after
    another. ``dtypes``: those of tensors before they were widened. ``averaged``: the identities of running means that
    average over all batches so far. ``models_default``: torch's default dtype at capture, to which data in Python code
    is rounded. ``rounded``: the memories of weights whose products are in float8, and whether by rows.
    """

    def __init__(
        self,
        seed: int,
        passes: Sequence[int] = (),
        *,
        widens: bool = True,
        dtypes: Dtypes | None = None,
        averaged: Collection[int] = (),
        models_default: torch.dtype | None = None,
        rounded: Mapping[int, bool] | None = None,
    ) -> None:
        super().__init__()
        self.rounded = dict(rounded or {})
        self.averaged = averaged
        self.passes, self.widens, self.dtypes = tuple(passes), widens, dtypes or Dtypes()
        self.models_default = models_default or torch.get_default_dtype()
        self.seed = torch.tensor(seed, dtype=torch.int64)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        replacement = REPLACED.get(func)
        if replacement is not None:
            result = replacement(self, *args, **kwargs)
            return result.requires_grad_() if kwargs.get("requires_grad") else result
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that is not replaced."""
        if not self.widens:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is _DTYPE:
            return self.dtypes.read(args[0])
        return self.dtypes.after_cast(func, args, kwargs, call_in_float64(func, args, kwargs))

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """Apply the mask of the next dropout to ``x``."""
        shape = tuple(x.shape)
        mask = dropout_mask(self.seed, p, self.calls, mask_columns(shape), shape, (0,) * len(shape), shape)
        self.calls += 1
        return x * mask * (1 / (1 - p) if p < 1 else 0)

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Return the numbers of the next random call."""
        self.calls += 1
        zeros = (0,) * len(shape)
        dtype = torch.float64 if self.widens else torch.get_default_dtype()
        drawn: torch.Tensor = uniform(self.seed, self.calls - 1, shape, zeros, shape, shape, dtype)
        return drawn


def _uniform(mode: Reference, shape: Sequence[int]) -> torch.Tensor:
    return mode.uniform(shape)  # by name: subclasses note that numbers are drawn


def _sized(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``rand(size)`` and its like."""

    def sized(mode: Reference, *size: Any, **kwargs: Any) -> torch.Tensor:
        size = kwargs.get("size") or size
        is_one = len(size) == 1 and not isinstance(size[0], int)  # ``rand((2, 3))``, not ``rand(2, 3)``
        return draw(mode, tuple(size[0]) if is_one else tuple(size))

    return sized


def _like(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``rand_like(x)`` and its like."""
    return lambda mode, input, **kwargs: draw(mode, tuple(input.shape))


def _in_place(
    draw: Callable[..., torch.Tensor],
    mode: Reference,
    x: torch.Tensor,
    *args: Any,
    generator: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return ``x.cauchy_(...)`` and its like. ``draw``: numbers of a shape, by the arguments of the call."""
    return _filled(x, draw(mode, tuple(x.shape), *args, **kwargs))


def _randint(mode: Reference, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    named = dict(zip(("low", "high", "size") if len(args) == 3 else ("high", "size"), args, strict=False)) | kwargs
    low, shape = named.get("low", 0), tuple(named["size"])
    return integers(mode, shape, int(low), named["high"], dtype or torch.int64)


def _randint_like(
    mode: Reference, input: torch.Tensor, *bounds: int, high: int | None = None, low: int = 0, **kwargs: Any
) -> torch.Tensor:
    first, last = bounds if len(bounds) == 2 else (low, bounds[0] if bounds else high)
    return _randint(mode, first, last, tuple(input.shape), dtype=kwargs.get("dtype") or input.dtype)


def _filled(x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Write new values to ``x``. A tensor of lower precision cannot hold them, so a widened one takes its place."""
    x.copy_(drawn)
    return _beside(drawn, x) if x.dtype in WIDE else x


def _beside(drawn: torch.Tensor, *operands: Any) -> torch.Tensor:
    """Return ``drawn`` with zero gradients for ``operands``, as PyTorch's own random operators have them."""
    for operand in operands:
        if isinstance(operand, torch.Tensor) and operand.requires_grad:
            drawn = torch.fill(operand, -0.0) + drawn
    return drawn


def _bernoulli_(mode: Reference, x: torch.Tensor, p: float | torch.Tensor = 0.5, **kwargs: Any) -> torch.Tensor:
    return _filled(x, _beside(bernoulli(mode, x.double(), p), p))


def _drawing(function: Callable[..., torch.Tensor], mode: Reference, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a function of the graph's normal forms, with zero gradients for operands that it detaches."""
    call = pytree.tree_map(_wide_argument, (args, kwargs)) if mode.widens else (args, kwargs)
    drawn = function(mode, *call[0], **call[1])
    needs_zeros = drawn.is_floating_point() and not drawn.requires_grad
    return _beside(drawn, *args, *kwargs.values()) if needs_zeros else drawn


def _attention(mode: Reference, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute attention with the mask of the next dropout."""
    dropped = attention(mode, *args, **kwargs)
    if dropped is NotImplemented:
        dropped = torch._C._nn.scaled_dot_product_attention(*args, **kwargs)
    result: torch.Tensor = dropped
    return result


def _recurrent(function: Callable[..., tuple[torch.Tensor, ...]], mode: Reference, *args: Any) -> Any:
    is_packed = isinstance(args[3], (tuple, list))  # (data, batch_sizes, hx, params, ...)
    result = NotImplemented if is_packed else recurrent(function, mode, *args)
    return function(*args) if result is NotImplemented else result


def _from_data(function: Callable[..., torch.Tensor], mode: Reference, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Round numbers in the model's code to its own dtype, as capture reads them."""
    if not mode.widens:
        return function(*args, **kwargs)
    if function is torch.Tensor.new_tensor and kwargs.get("dtype") is None:
        kwargs["dtype"] = mode.dtypes.of(args[0])
    with default_dtype(mode.models_default):
        made = function(*args, **kwargs)
        if function is _NEW and _is_data(args[1:]):
            made = made.to(mode.dtypes.of(args[0]))
    wide: torch.Tensor = _wide_argument(made)
    return wide


def _is_data(args: Sequence[Any]) -> bool:
    """Return whether these arguments of ``torch.Tensor`` are numbers in Python, not sizes or a tensor."""
    return bool(args) and isinstance(args[0], list | tuple) and not isinstance(args[0], torch.Size)


def _setitem(mode: Reference, x: torch.Tensor, index: Any, value: Any) -> None:
    """Round a number in the model's code to the dtype of the tensor it is written to, as capture reads it."""
    if mode.widens and isinstance(value, float) and x.is_floating_point():
        value = float(torch.tensor(value, dtype=mode.dtypes.of(x)))
    call_in_float64(torch.Tensor.__setitem__, (x, index, value), {}) if mode.widens else x.__setitem__(index, value)


def _grouped_mm(
    mode: Reference, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Multiply the rows of one expert after the other, zeros past the last: PyTorch has no float64 kernel."""
    if x.dim() != 2 or weight.dim() != 3 or offs is None:
        result: torch.Tensor = torch._grouped_mm(x, weight, offs=offs, **kwargs)
        return result
    ends = [0, *offs.tolist()]
    blocks = [x[start:stop] @ matrix for start, stop, matrix in zip(ends, ends[1:], weight, strict=False)]
    return torch.cat([*blocks, x.new_zeros(x.shape[0] - ends[-1], weight.shape[2])])


CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
    torch.Tensor.cfloat: torch.complex64,  # type: ignore[attr-defined]
    torch.Tensor.chalf: torch.complex32,
}
_DTYPE = torch.Tensor.dtype  # the descriptor
_NEW: Any = torch.Tensor.new
_CASTS_TO = frozenset({torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as})  # what they are told


def _linear(
    mode: Reference, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Round the operands of products in float8, those of every micro-batch by themselves."""
    by_rows = mode.rounded.get(storage_of(weight))
    if by_rows is None:
        result: torch.Tensor = mode.call(torch._C._nn.linear, (input, weight, bias), {})
        return result
    rows, rest = divmod(input.shape[0], max(sum(mode.passes), 1))  # of a sample
    alone = len(mode.passes) < 2 or rest or input.dim() < 2
    sizes = [input.shape[0]] if alone else [rows * samples for samples in mode.passes]
    x = _wide_argument(input) if mode.widens else input
    product = torch.cat([linear(part, weight, by_rows) for part in x.split(sizes)])
    return product if bias is None else product + bias


def _batch_norm(mode: Reference, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Apply batch norm per micro-batch, if there are several."""
    rows, rest = divmod(input.shape[0], max(sum(mode.passes), 1))  # of a sample
    if len(mode.passes) < 2 or rest:
        result: torch.Tensor = call_in_float64(torch.batch_norm, (input, *args), kwargs)
        return result
    parts = []
    for number, part in enumerate(input.split([rows * samples for samples in mode.passes])):
        call_args = args
        if len(args) > 5 and id(args[2]) in mode.averaged:  # momentum 1 / n: every micro-batch is one batch more
            call_args = (*args[:5], 1.0 / (round(1.0 / args[5]) + number), *args[6:])
        parts.append(call_in_float64(torch.batch_norm, (part, *call_args), kwargs))
    return torch.cat(parts)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    **{
        function: partial(_from_data, function)
        for function in (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, _NEW)
    },
    torch.Tensor.__setitem__: _setitem,
    torch.rand: _sized(_uniform),
    torch.rand_like: _like(_uniform),
    torch.randn: _sized(standard_normal),
    torch.randn_like: _like(standard_normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: lambda mode, n, *, dtype=None, **kwargs: mode.uniform((n,)).argsort().to(dtype or torch.int64),
    torch.Tensor.bernoulli_: _bernoulli_,
    **{
        replaced: partial(_drawing, function)
        for replaced, function in (
            (torch.bernoulli, bernoulli),
            (torch.Tensor.bernoulli, bernoulli),
            (torch.normal, normal_of),
            (torch.multinomial, multinomial),
            (torch.Tensor.multinomial, multinomial),
            (torch.rrelu, rrelu),
            (torch.alpha_dropout, alpha_dropout),
            (torch.feature_alpha_dropout, partial(alpha_dropout, features=True)),
            (torch.dropout, dropout),
            (torch.feature_dropout, feature_dropout),
        )
    },
    **{getattr(torch.Tensor, f"{name}_"): partial(_in_place, draw) for name, draw in FILLS.items()},
    torch._grouped_mm: _grouped_mm,
    **{f: partial(_recurrent, f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    torch.batch_norm: _batch_norm,
    torch.dropout_: lambda mode, input, p, train: input.copy_(dropout(mode, input, p, train)),
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
