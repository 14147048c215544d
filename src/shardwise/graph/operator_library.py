"""Registration of this package's operators, ``torch.ops.shardwise``, by the annotations of their functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, Final, TypeAlias

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload

LIBRARY: Final = torch.library.Library("shardwise", "FRAGMENT")
ATOMS: Final = "int[] sizes, int[] offsets, int[] lengths"
Scalar: TypeAlias = float  # an integer stays one
_TYPES = {"torch.Tensor": "Tensor", "torch.dtype": "ScalarType", "torch.device": "Device", "None": "()"}


def composite(
    function: Callable[..., Any], rest: str = ATOMS, *, schema: str = "", key: str = "CompositeImplicitAutograd"
) -> OpOverload:
    """Register a composition of other operators, which PyTorch sees through, and return its operator.

    Args:
        function: Its name is that of the operator, and its annotations are the schema.
        rest: The arguments that the schema has in place of the function's ``*args``.
        schema: The whole schema, if annotations do not say it.
        key: The dispatch key of the function.
    """
    schema = schema or _name(function) + _schema(function, rest)
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, function, key)
    operator: OpOverload = getattr(torch.ops.shardwise, name).default
    return operator


def kernel(fake: Callable[..., Any], rest: str = ATOMS) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that registers a function as an operator that PyTorch does not look into.

    Args:
        fake: Returns tensors without data like those that the function returns.
        rest: The arguments that the schema has in place of the function's ``*args``.
    """

    def registered(function: Callable[..., Any]) -> CustomOpDef:
        name, schema = f"shardwise::{_name(function)}", _schema(function, rest)
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        return operator

    return registered


def _name(function: Callable[..., Any]) -> str:
    return function.__name__.removeprefix("_")


def _schema(function: Callable[..., Any], rest: str) -> str:
    parameters = signature(function).parameters.values()
    taken = [rest if p.kind is p.VAR_POSITIONAL else _argument(p.annotation, p.name, p.default) for p in parameters]
    return f"({', '.join(taken)}) -> {_type(signature(function).return_annotation)}"


def _argument(annotation: str, name: str, default: Any) -> str:
    return f"{_type(annotation)} {name}" + ("" if default is Parameter.empty else f"={default}")


def _type(annotation: str) -> str:
    """Return the type in a schema: ``Sequence[int]`` is ``int[]``, ``Tensor | None`` is ``Tensor?``."""
    if annotation.endswith(" | None"):
        return _type(annotation.removesuffix(" | None")) + "?"
    if found := re.fullmatch(r"(?:Sequence|list)\[(.*)\]", annotation):
        return f"{_type(found[1])}[]"
    if found := re.fullmatch(r"tuple\[(.*)\]", annotation):
        return f"({', '.join(map(_type, found[1].split(', ')))})"
    return _TYPES.get(annotation, annotation)
