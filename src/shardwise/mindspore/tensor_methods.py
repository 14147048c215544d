"""Methods of ``Tensor`` that torch lacks or defines differently.

The reference counts dims as ``axis``, reduces over all of them by default, and keeps them with ``keep_dims`` or
``keepdims``. Its ``max`` returns a value, and its ``std`` and ``var`` are those of a population. A call with torch's
argument names (``dim=``, ``keepdim=``, ``unbiased=``, ``correction=``) is torch's method.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import closest

WORDS = frozenset(("dim", "dtype", "keepdim", "unbiased", "correction"))
DTYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
Axes = int | Sequence[int] | None
# Functions that methods call by name: ``initializer`` and those of ``ops``, whose modules add them when imported.
CALLED: dict[str, Callable[..., Any]] = {}


class Count(int):
    """The number of elements, ``x.size``. A call returns the shape, as in torch: ``x.size()``, ``x.size(0)``."""

    shape: torch.Size

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


def size(x: torch.Tensor) -> Count:
    count = Count(prod(x.shape))
    count.shape = x.shape
    return count


def dtype_of(name: Any) -> torch.dtype:
    """Return the torch dtype of a dtype, its name, or numpy's or Python's."""
    if isinstance(name, torch.dtype):
        return name
    word = name if isinstance(name, str) else np.dtype(name).name
    if word not in DTYPES:
        raise TypeError(problem(f"there is no dtype {name!r}", fix=closest(word, DTYPES)))
    return DTYPES[word]


def number(x: Any) -> Any:
    """Return a tensor or array of one element as a Python number."""
    return x.item() if isinstance(x, (torch.Tensor, np.ndarray)) else x


def flag(x: Any) -> bool:
    """Return a flag, or a number that stands for one. Raises TypeError for a dtype, which would be true."""
    if isinstance(x, (torch.dtype, str)):
        raise TypeError(problem(f"{x} is in the place of keepdims", fix="dtype=, by its name"))
    return bool(x)


def dims_of(x: torch.Tensor, axis: Any) -> tuple[int, ...]:
    """Return one or several dims as a tuple; all dims for None and ()."""
    if isinstance(axis, int):
        return (axis,)
    return tuple(axis) if axis is not None and len(axis) else tuple(range(x.dim()))


def narrowed(found: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and their indices, as int32."""
    values, indices = found
    return values, indices.to(torch.int32)


def _in_torchs_words(name: str, x: torch.Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call torch's method, also with the reference's words."""
    torchs = {word: value for word, value in named.items() if word not in ("axis", "keep_dims", "keepdims")}
    dim = {} if named.get("axis") is None else {"dim": named["axis"]}
    keepdim = {"keepdim": True} if named.get("keep_dims") or named.get("keepdims") else {}
    return TORCHS[name](x, *args, **torchs, **dim, **keepdim)


def _calling(name: str, method_name: str = "", words: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """Return a method that calls the function ``name`` of ``ops``; called with ``words`` of torch, it is torch's."""

    def method(x: torch.Tensor, *args: Any, **named: Any) -> Any:
        if words and named.keys() & words:
            return _in_torchs_words(name, x, args, named)
        return CALLED[name](x, *args, **named)

    method.__name__ = method_name or name
    return method


def of_kind(x: torch.Tensor, total: torch.Tensor, dtype: Any = None) -> torch.Tensor:
    """Return a sum of int32 as int32, where torch widens it, unless a dtype is asked for."""
    return total.to(x.dtype) if dtype is None and x.dtype == torch.int32 else total


def product(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Multiply over several dims; torch takes one."""
    for dim in sorted((dim % x.dim() for dim in dims), reverse=True):
        x = torch.prod(x, dim, keepdim=flag(keepdim))
    return x


def _summed(x: torch.Tensor, axis: Axes = None, dtype: Any = None, keepdims: bool = False, **words: Any) -> Any:
    """Sum over ``axis``. A flag in the place of the dtype keeps the dims, as in torch."""
    if isinstance(dtype, (bool, int, float, np.bool_)):
        dtype, keepdims = None, dtype
    if axis is not None:
        words["axis"] = axis
    if dtype is not None:
        words["dtype"] = dtype_of(dtype)
    if flag(keepdims):
        words["keepdims"] = True
    return _SUM(x, **words)


_SUM = _calling("sum", words=WORDS)


def transpose(x: torch.Tensor, *axes: Any) -> torch.Tensor:
    """Permute the dims, by default in reverse. Two dims of a tensor with more are swapped, as in torch."""
    order = tuple(axes[0]) if len(axes) == 1 and not isinstance(axes[0], int) else axes
    if len(order) == 2 and x.dim() > 2:
        return x.swapaxes(*order)
    return x.permute(order or tuple(reversed(range(x.dim()))))


def indexed(x: torch.Tensor, index: Any) -> Any:
    """Return ``x[index]``. Slices with a negative step are allowed: their dims are flipped first."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(_is_backward(entry) for entry in entries):
        return TORCHS["__getitem__"](x, index)
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    place, turned, forward = 0, [], []
    for entry in entries:
        if _is_backward(entry):
            positions = [x.shape[place] - 1 - i for i in range(*entry.indices(x.shape[place]))]
            turned.append(place)
            forward.append(slice(positions[0], positions[-1] + 1, -entry.step) if positions else slice(0, 0))
        else:
            forward.append(entry)
        place += x.dim() - named if entry is Ellipsis else entry is not None
    return TORCHS["__getitem__"](x.flip(turned), tuple(forward))


def assigned(x: torch.Tensor, index: Any, value: Any) -> None:
    """Set ``x[index] = value``, where the value may be an array, or numbers in lists."""
    if isinstance(value, (np.ndarray, list, tuple)):
        value = torch.as_tensor(np.asarray(value), dtype=x.dtype, device=x.device)
    TORCHS["__setitem__"](x, index, value)


def _is_backward(entry: Any) -> bool:
    return isinstance(entry, slice) and isinstance(entry.step, int) and entry.step < 0


def _extreme(name: str) -> Callable[..., Any]:
    """Return the method ``max`` or ``min``: the value, over ``axis=``; with ``return_indices``, or with a dim as its
    first argument as in torch, also its index."""

    def extreme(x: torch.Tensor, *dims: Any, axis: Axes = None, keep_dims: bool = False, **others: Any) -> Any:
        if others.keys() & WORDS or (dims and isinstance(dims[0], (int, torch.Tensor))):
            return _in_torchs_words(name, x, dims, {"axis": axis, "keep_dims": keep_dims, **others})
        axis, kept = dims[0] if dims else axis, others.pop("keepdims", keep_dims)
        if not others.pop("return_indices", False):
            return CALLED[f"a{name}"](x, axis, kept, **others)
        return CALLED[name](x, axis, kept, **others)

    extreme.__name__ = name
    return extreme


def _narrow(name: str) -> Callable[..., Any]:
    """Return a method of torch's whose indices are int32 in the reference, unless torch's own words are used."""

    def method(x: torch.Tensor, *args: Any, **named: Any) -> Any:
        words = {word: value for word, value in named.items() if word != "dim" or value is not None}
        found = _in_torchs_words(name, x, args, words)
        return found.to(torch.int32) if isinstance(found, torch.Tensor) else narrowed(found)

    method.__name__ = name
    return method


def taken(x: torch.Tensor, indices: Any, axis: int | None = None, mode: str = "clip") -> torch.Tensor:
    """Return the elements, or slices along ``axis``, at some indices."""
    places = torch.as_tensor(indices).long()
    if axis is None:
        return torch.take(x, places)
    chosen = torch.index_select(x, axis, places.reshape(-1))
    return chosen.reshape(*x.shape[:axis], *places.shape, *x.shape[axis % x.dim() + 1 :])


def _flattened(x: torch.Tensor, *dims: Any, order: str = "C", **named: Any) -> Any:
    """Flatten all dims, or ``start_dim`` to ``end_dim``. With ``order="F"`` the first dim varies fastest."""
    if order not in ("C", "F"):
        raise ValueError(problem(f"flatten(order={order!r})", fix="C or F"))
    return TORCHS["flatten"](x.permute(*reversed(range(x.dim()))) if order == "F" else x, *dims, **named)


def _resized(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Reshape after truncating the elements or padding them with zeros."""
    count = prod(sizes)
    return torch.nn.functional.pad(x.reshape(-1)[:count], (0, max(count - x.numel(), 0))).reshape(tuple(sizes))


def assigned_value(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy the value into ``x`` and return it. Raises ValueError for another shape."""
    if x.shape != value.shape:
        raise ValueError(problem(f"a tensor {list(x.shape)} gets a value {list(value.shape)}", fix="equal shapes"))
    with torch.no_grad():
        return x.copy_(value)


def asnumpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(x.detach().as_subclass(torch.Tensor).numpy(force=True))


def _of_array(name: str) -> Callable[..., Any]:
    """Return the operator of ``array - x``, where numpy leaves it to the tensor."""
    torchs = getattr(torch.Tensor, name)

    def method(x: torch.Tensor, other: Any) -> Any:
        return torchs(x, torch.from_numpy(other).to(x.device) if isinstance(other, np.ndarray) else other)

    return method


REFLECTED = [f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "matmul")]
_FUNCTIONS = """
    approximate_equal cumsum expand_dims gather_elements gather_nd inv invert split top_k reverse
    reverse_sequence searchsorted unsorted_segment_max unsorted_segment_min unsorted_segment_prod xdivy addcdiv
    addcmul index_fill scatter"""
_SCATTERS = "scatter_sub scatter_mul scatter_div scatter_max scatter_min"
_REDUCTIONS = "mean all any prod std var median"
METHODS: dict[str, Any] = {
    **{name: _of_array(name) for name in REFLECTED},
    "size": property(size), "__getitem__": indexed, "__setitem__": assigned, "transpose": transpose,
    "asnumpy": asnumpy, "assign_value": assigned_value, "take": taken, "flatten": _flattened,
    # every element; with a number per dim the tensor, as in torch
    "repeat": lambda x, *repeats, axis=None: TORCHS["repeat"](x, *repeats) if axis is None and (
        len(repeats) != 1 or isinstance(repeats[0], (tuple, list))) else torch.repeat_interleave(x, repeats[0], axis),
    # ``x.gather(input_indices, axis)``; with a dim first, torch's
    "gather": lambda x, first, second=None, batch_dims=0, **others: CALLED["gather"](x, first, second, batch_dims)
    if isinstance(first, torch.Tensor) else TORCHS["gather"](x, first, second, **others),
    # also of a tensor that is not contiguous; with a dtype torch's
    "view": lambda x, *shape: TORCHS["view" if len(shape) == 1 and not isinstance(shape[0], (int, tuple, list))
                                     else "reshape"](x, *shape),
    # an element as a Python number, by a flat index or one per dim, else the only one
    "item": lambda x, index=None: TORCHS["item"](
        x if index is None else x.reshape(-1)[index] if isinstance(index, int) else x[index]),
    "resize": lambda x, *shape: _resized(x, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape),
    **dict.fromkeys(("value", "to_tensor"), lambda x: x),
    "fill": lambda x, value: torch.full_like(x, number(value)),
    "astype": lambda x, dtype, copy=True: x.to(dtype_of(dtype), copy=copy),
    "diagonal": lambda x, offset=0, axis1=0, axis2=1, **words: TORCHS["diagonal"](
        x, offset, **(words or {"dim1": axis1, "dim2": axis2})),
    "select": lambda x, condition, y: (
        torch.where(condition, x, y) if isinstance(condition, torch.Tensor) else TORCHS["select"](x, condition, y)),
    "copy": lambda x: x.clone(), "init_data": lambda x, *settings, **named: x,
    **{name: _extreme(name) for name in ("max", "min")},
    **{name: _narrow(name) for name in ("argmin", "argsort", "sort", "topk")},
    "__floordiv__": lambda x, other: torch.div(x, other, rounding_mode="floor"),
    "argmax_with_value": lambda x, axis=0, keep_dims=False: torch.max(x, axis, keep_dims)[::-1],
    "argmin_with_value": lambda x, axis=0, keep_dims=False: torch.min(x, axis, keep_dims)[::-1],
    "ptp": lambda x, axis=None, keepdims=False: x.amax(dims_of(x, axis), keepdims) - x.amin(dims_of(x, axis), keepdims),
    "strides": property(lambda x: tuple(x.element_size() * step for step in x.stride())),
    "has_init": property(lambda x: False), "tobytes": lambda x: asnumpy(x).tobytes(),
    **{name: _calling(f"tensor_{name}", name) for name in _SCATTERS.split()},
    **{name: _calling(name) for name in _FUNCTIONS.split()},
    **{name: _calling(name, words=WORDS) for name in _REDUCTIONS.split()},
    "sum": _summed,
    "norm": lambda x, *args, **words: (TORCHS["norm"] if "p" in words else CALLED["norm"])(x, *args, **words),
}  # fmt: skip
TORCHS: dict[str, Callable[..., Any]] = {  # torch's own methods, before in_words replaces them
    name: getattr(torch.Tensor, name) for name in (*METHODS, "clone", "reshape") if hasattr(torch.Tensor, name)
}


def call_functions(functions: dict[str, Callable[..., Any]]) -> None:
    """Add the functions of ``ops``, which methods of the same names call; these get their signatures."""
    CALLED.update(functions)
    for name in (*_FUNCTIONS.split(), *_REDUCTIONS.split()):
        vars(METHODS[name])["__signature__"] = inspect.signature(functions[name])


# -- inside construct --------------------------------------------------------------------------------------------------

NEW = {name: method for name, method in METHODS.items() if not hasattr(torch.Tensor, name)}
TORCH, OWN = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


def _is_torchs(frame: Any) -> bool:
    """Return whether the calling code expects torch's methods: torch, this library, and modules that are no cells."""
    if frame.f_code.co_filename.startswith((TORCH, OWN)):
        return True
    owner = frame.f_locals.get("self")
    return isinstance(owner, torch.nn.Module) and not hasattr(owner, "construct")


def _otherwise(name: str, reference: Any) -> Any:
    """Return a method that dispatches to torch's or the reference's version by its caller."""
    torchs = TORCHS[name]

    def method(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (torchs if _is_torchs(sys._getframe(1)) else reference)(x, *args, **kwargs)

    return method


def by_caller(kind: type[torch.Tensor], clone: Callable[..., Any]) -> dict[str, Any]:
    """Return methods of parameters that follow the reference where the caller expects it, including ``clone``. Results
    of operators are of class ``kind`` there, outside of cells."""

    def operator(name: str) -> Any:
        torchs = METHODS[name] if name in REFLECTED else getattr(torch.Tensor, name)

        def method(x: torch.Tensor, *args: Any) -> Any:
            result = torchs(x, *args)
            ours = isinstance(result, torch.Tensor) and not _active[0] and not _is_torchs(sys._getframe(1))
            return result.as_subclass(kind) if ours else result

        return method

    def in_place(name: str) -> Any:
        torchs = getattr(torch.Tensor, name)

        def method(x: torch.Tensor, *args: Any) -> Any:
            if _is_torchs(sys._getframe(1)):
                return torchs(x, *args)
            with torch.no_grad():
                return torchs(x, *args)

        return method

    def data(x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = torchs_data.__get__(x)
        return values if _is_torchs(sys._getframe(1)) else values.as_subclass(kind)

    torchs_data: Any = vars(torch._C.TensorBase)["data"]
    operators = [f"__{name}__" for name in ("add", "sub", "mul", "truediv", "pow")]
    return {
        **NEW,
        **OTHERWISE,
        "clone": _otherwise("clone", clone),
        "data": property(data, torchs_data.__set__),
        **{name: operator(name) for name in (*operators, *REFLECTED, "__neg__", "__matmul__", "__getitem__")},
        **{f"__{name}__": in_place(f"__{name}__") for name in ("iadd", "isub", "imul", "itruediv", "setitem")},
    }


# Torch itself uses ``size``, which stays torch's.
OTHERWISE = {name: _otherwise(name, METHODS[name]) for name in METHODS if name not in NEW and name != "size"}
_active = [0]  # depth of nested calls


@contextmanager
def in_words() -> Iterator[None]:
    """Give torch tensors the reference's methods within the context."""
    _active[0] += 1
    try:
        if _active[0] > 1:
            yield
            return
        before = {name: vars(torch.Tensor)[name] for name in OTHERWISE if name in vars(torch.Tensor)}
        for name, method in {**NEW, **OTHERWISE}.items():
            setattr(torch.Tensor, name, method)
        try:
            yield
        finally:
            for name in (*NEW, *OTHERWISE):
                delattr(torch.Tensor, name)
            for name, method in before.items():
                setattr(torch.Tensor, name, method)
    finally:
        _active[0] -= 1
