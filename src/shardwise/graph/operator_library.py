"""Registration of this package's operators, ``torch.ops.shardwise``: compositions of other operators.

Most have no derivative, meta kernel or compiled form of their own: PyTorch sees through them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, Final, TypeAlias

import torch
from torch._ops import OpOverload

LIBRARY: Final = torch.library.Library("shardwise", "FRAGMENT")
ATOMS: Final = "int[] sizes, int[] offsets, int[] lengths"
Scalar: TypeAlias = float  # an integer stays one
_TYPES = {"torch.Tensor": "Tensor", "torch.dtype": "ScalarType", "torch.device": "Device", "None": "()"}


def composite(
    function: Callable[..., Any], rest: str = ATOMS, *, schema: str = "", key: str = "CompositeImplicitAutograd"
) -> OpOverload:
    """Register a function over tensors and return its operator, which has the function's name.

    Args:
        function: Its annotations are the operator's schema.
        rest: The arguments that the schema has in place of the function's ``*args``.
        schema: The whole schema, if annotations do not say it.
        key: The dispatch key of the function.
    """
    if not schema:
        parameters = signature(function).parameters.values()
        taken = [rest if p.kind is p.VAR_POSITIONAL else _argument(p.annotation, p.name, p.default) for p in parameters]
        name = function.__name__.removeprefix("_")
        schema = f"{name}({', '.join(taken)}) -> {_type(signature(function).return_annotation)}"
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, function, key)
    operator: OpOverload = getattr(torch.ops.shardwise, name).default
    return operator


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
