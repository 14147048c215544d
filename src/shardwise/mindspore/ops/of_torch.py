"""Functions of torch with the reference's arguments, as rows of ``names.toml``.

A row is a name, ``=`` and torch's name where it differs, and the arguments in the reference's order. An argument is
``name:kind>word=default``: a value of a ``kind`` is converted (``KINDS``), and torch takes it by the keyword ``word``
instead of by its position. Arguments behind ``*`` are keyword-only. ``->`` precedes what becomes of the result
(``RESULTS``). A row without arguments has those of torch's function, with ``axis`` for ``dim`` and so on.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore.common.seed import drawn
from shardwise.mindspore.named import Function, bound_to, in_order, parameters_of
from shardwise.mindspore.tensor_methods import dims_of, dtype_of, flag, narrowed, number, of_kind

COMPUTED: dict[str, Function] = {}  # the functions of ``ops``, which that module adds; results keep torch's methods
HOMES = {
    "torch": torch, "linalg": torch.linalg, "functional": F, "fft": torch.fft, "special": torch.special,
    "method": torch.Tensor,
}  # fmt: skip


def sizes_of(size: Any) -> tuple[Any, ...]:
    """Return sizes as a tuple. Those that an export leaves open stay so, which ``int`` would fix."""
    if isinstance(size, (int, torch.SymInt)):
        return (size,)
    return tuple(number if isinstance(number, (int, torch.SymInt)) else int(number) for number in size)


def as_int(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64)


def type_of(dtype: Any) -> torch.dtype | None:
    return None if dtype is None else dtype_of(dtype)


def as_tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


# Conversions of an argument. Those of dims also take the first argument, the tensor.
KINDS: dict[str, Callable[[Any], Any]] = {
    "dtype": type_of, "float": lambda dtype: type_of(dtype) or torch.float32, "long": as_int, "bool": flag,
    "number": number, "plain": lambda x: number(x) + 0,  # True is 1
    "seed": drawn, "sizes": sizes_of, "tensor": as_tensor, "tuple": tuple,
}  # fmt: skip
DIMS, UNUSED = "dims", "unused"


def _narrow(x: Any, result: Any, values: dict[str, Any]) -> Any:
    return narrowed(result) if isinstance(result, tuple) else result.to(torch.int32)


# Conversions of a result, by the first argument and all arguments.
RESULTS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "int32": _narrow, "list": lambda x, result, values: list(result),
    "like": lambda x, result, values: of_kind(x, result, values.get("dtype")),
}  # fmt: skip


def _as_in_torch(function: Function) -> Function:
    function = in_order(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return _plain(function(*args, **kwargs))

    vars(call)["__signature__"] = _signature(function)
    return call


def _signature(function: Function) -> Signature:
    """Return a function's signature, for ``inspect``; of one in C++ that of its first overload."""
    try:
        return signature(function)
    except ValueError:
        pass
    names = (f"aten::{prefix}{function.__name__}" for prefix in ("", "special_", "linalg_", "fft_"))
    schema = next(filter(None, map(torch._C._jit_get_schemas_for_operator, names)))[0]
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return Signature([
        Parameter(own.name.replace("self", "input"), kinds[own.kwarg_only],
                  default=own.default_value if own.has_default_value() else Parameter.empty)
        for own in schema.arguments if not own.is_out
    ])  # fmt: skip


def _plain(result: Any) -> Any:
    return tuple(result) if isinstance(result, tuple) else result  # a plain tuple instead of torch's named one


class TorchFunction:
    """A torch function with the reference's arguments."""

    def __init__(self, name: str, function: Function, text: str) -> None:
        self.name = name
        self.__doc__ = f"Compute torch's ``{function.__name__}`` with the reference's arguments."
        arguments, _, self.result = (part.strip() for part in text.partition("->"))
        parts = [re.fullmatch(r"(\w+|\*)(?::(\w+))?(?:>(\w+))?(=.+)?", word) for word in arguments.split()]
        found = [part.groups(default="") for part in parts if part is not None]
        assert len(found) == len(parts), text
        self.function = in_order(function)
        self.__signature__ = Signature(parameters_of([name + default for name, _, _, default in found]))
        parameters = self.__signature__.parameters
        by_name = {name for name in parameters if parameters[name].kind is Parameter.KEYWORD_ONLY}
        # how each argument is passed on: its kind, and its word if torch takes it by one
        self.steps = [(name, kind, word or (name if name in by_name else "")) for name, kind, word, _ in found
                      if name != "*" and kind != UNUSED]  # fmt: skip
        self.defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.count = len(parameters) - len(by_name)
        self.required = [name for name, default in self.defaults.items() if default is Parameter.empty]
        is_plain = len(self.steps) == self.count and not any(kind or word for _, kind, word in self.steps)
        self.is_direct = is_plain and not self.result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_direct and not kwargs and len(args) == self.count:  # the usual call of most functions
            return _plain(self.function(*args))
        placed = dict(zip(self.defaults, args, strict=False))
        values = self.defaults | placed | kwargs
        is_known = len(args) <= self.count and len(values) == len(self.defaults) and placed.keys().isdisjoint(kwargs)
        missing = self.required[len(args) :]
        if not is_known or (missing and not kwargs.keys() >= {*missing}):
            values = bound_to(self.name, self.__signature__, args, kwargs)  # which raises the error
        x = next(iter(values.values()))
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for name, kind, word in self.steps:
            value = values[name]
            converted = dims_of(x, value) if kind == DIMS else KINDS[kind](value) if kind else value
            if word:
                named[word] = converted
            else:
                positional.append(converted)
        result = _plain(self.function(*positional, **named))
        return RESULTS[self.result](x, result, values) if self.result else result


def rows_of(home: str, text: str) -> Iterator[tuple[str, Function]]:
    """Yield the functions of rows, separated by semicolons, of a module of torch (``HOMES``)."""
    for row in filter(str.strip, text.split(";")):
        names, *arguments = row.split()
        name, _, torchs = names.partition("=")
        function = getattr(HOMES[home], torchs or name)
        yield name, TorchFunction(name, function, " ".join(arguments)) if arguments else _as_in_torch(function)


def of_torch(tables: dict[str, str]) -> dict[str, Function]:
    """Return the functions of tables: home -> rows."""
    return {name: function for home, text in tables.items() for name, function in rows_of(home, text)}


class OfFunction:
    """A function of ``ops``, or of Python's ``operator``, with settings as its keyword-only arguments."""

    def __init__(self, name: str, settings: list[str]) -> None:
        self.name = name
        operands = Parameter("operands", Parameter.VAR_POSITIONAL)
        self.__signature__ = Signature([operands, *parameters_of(["*", *settings])])

    def __call__(self, *operands: Any, use_locking: bool = False, **settings: Any) -> Any:
        home, _, name = self.name.rpartition(".")
        return (getattr(operator, name) if home else COMPUTED[name])(*operands, **settings)


def of_functions(rows: str) -> dict[str, Function]:
    """Return table entries of rows ``NAME=FUNCTION SETTING=DEFAULT ...``, separated by semicolons. A row without a
    function has that of the same name in lower case."""
    entries: dict[str, Function] = {}
    for row in rows.split(";"):
        names, *settings = row.split()
        name, _, function = names.partition("=")
        entries[name] = OfFunction(function or name.lower(), settings)
    return entries
