"""The reference's names of operators and types, and hashes in names."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.mindspore.communication.management import gnu_hash
from shardwise.mindspore.named import TABLES

# PyTorch operators whose name in the reference is not their CamelCase name.
OPERATORS = dict(row.split("=") for row in TABLES["ir"]["operators"].split())
# The reference's names of an operator's inputs.
INPUTS = {"MatMul": ("x1", "x2"), "BatchMatMul": ("x1", "x2"), "ReLU": ("x",)}
TYPES = {torch.bfloat16: "BFloat16", torch.uint8: "UInt8"}
COLLECTIVES = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_to_all": "AlltoAll",
    "collective_permute": "NeighborExchange", "halo_exchange": "NeighborExchangeV2",
}  # fmt: skip


def operator(target: OpOverload) -> str:
    """Return the reference's name of an operator; operators that it lacks get their torch name in CamelCase."""
    name = target._schema.name.partition("::")[2]
    return OPERATORS.get(name) or "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def inputs(target: OpOverload, count: int) -> tuple[str, ...]:
    """Return the names of an operator's first inputs."""
    names = tuple("x" if argument.name == "self" else argument.name for argument in target._schema.arguments)
    return INPUTS.get(operator(target), names)[:count]


def dtype(of: torch.dtype) -> str:
    return TYPES.get(of) or str(of).removeprefix("torch.").capitalize()


def tensor(of: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"<Tensor[{dtype(of)}], {shape_text(shape)}>"


def reference(of: torch.dtype, shape: tuple[int, ...], key: str) -> str:
    """Return the type of a parameter."""
    return f"<Ref[Tensor[{dtype(of)}]], {shape_text(shape)}, ref_key=:{key}>"


def constant(value: Any) -> str:
    """Return the type of an operand that is not a tensor."""
    if isinstance(value, tuple):
        kinds = {constant(item)[1:-1] for item in value}
        return f"<Tuple[{kinds.pop()}*{len(value)}]>" if len(kinds) == 1 else f"<Tuple*{len(value)}>"
    return {bool: "<Bool>", int: "<Int64>", float: "<Float64>", str: "<String>"}.get(type(value), "<None>")


def shape_text(shape: tuple[int, ...]) -> str:
    """Return ``(16)`` for one dim, as in the reference."""
    return f"({', '.join(map(str, shape))})"


def hashed(*parts: object) -> int:
    """Return the number in the name of an inserted operator. It is the same on every rank and in every run."""
    return gnu_hash(" ".join(map(str, parts)).encode())
