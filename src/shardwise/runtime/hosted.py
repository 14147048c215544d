"""Tables on the host: parameters that stay in the memory of the CPU while the rest of the program runs on a device.

Such a parameter, its gradient and its optimizer states are CPU tensors, and so are its conversions (over gloo). Indices
go to the host, the rows that were looked up come back to the device: so only lookups may read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from shardwise.errors import ShardwiseError, problem
from shardwise.graph.ir import refs
from shardwise.partition.buckets import Bucket
from shardwise.partition.program import LocalOp, Program
from shardwise.partition.spmd import conversions_of
from shardwise.rules.kernels import EMBEDDING_ROWS, INDEX_SELECT_ROWS

aten = torch.ops.aten

LOOKUPS = frozenset(
    {
        aten.embedding.default,
        aten.embedding_bag.default,
        aten.embedding_bag.padding_idx,
        aten.index_select.default,
        EMBEDDING_ROWS,
        INDEX_SELECT_ROWS,
    }
)
HOST = torch.device("cpu")


def matching(module: torch.nn.Module, patterns: Iterable[str]) -> frozenset[str]:
    """The names of the parameters that match any of the patterns (``*`` matches anything), all names of tied ones
    included. Raises ShardwiseError for a pattern that matches none."""
    if isinstance(patterns, str):
        fix = f"host=({patterns!r},)"
        raise ShardwiseError(problem(f"host is a sequence of parameter names or patterns, not {patterns!r}", fix=fix))
    named = dict(module.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for pattern in patterns:
        found = [name for name in named if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, list(named), 1)
            fix = f"did you mean {near[0]}?" if near else f"the parameters are {', '.join(list(named)[:8])}"
            raise ShardwiseError(problem(f"host: no parameter is called {pattern}", fix=fix))
        chosen.update(id(named[name]) for name in found)
    return frozenset(name for name, parameter in named.items() if id(parameter) in chosen)


@dataclass(frozen=True)
class Hosted:
    """A program, and those of its values that are on the host."""

    program: Program
    values: frozenset[str]


def hosted(program: Program, names: frozenset[str]) -> Hosted:
    """The program with some parameters on the host: what travels with conversions of the others in one message is
    converted apart. Raises ShardwiseError naming the operator that reads one and looks nothing up."""
    spmd = program.spmd
    values = {source.value for source in spmd.graph.sources if names.intersection(source.names)}
    name_of = {value: spmd.graph.source_of[value].names[0] for value in values}
    if not values:
        return Hosted(program, frozenset())
    instructions: list[Any] = []
    for instruction in program.instructions:
        for conversion in () if isinstance(instruction, LocalOp) else conversions_of(instruction):
            if conversion.value in values:
                values.add(conversion.result)
                name_of[conversion.result] = name_of[conversion.value]
        if isinstance(instruction, LocalOp):
            _check(instruction, name_of)
        instructions.extend(_apart(instruction, values) if isinstance(instruction, Bucket) else [instruction])
    returned = [spmd.loss, *refs(spmd.outputs), *(value for _, value in spmd.mutations)]
    for value in returned:
        if value in values:
            raise ShardwiseError(
                problem(
                    f"{name_of[value]} is kept on the host, and the module returns it",
                    fix="return what was looked up, or leave it out of host=",
                )
            )
    return Hosted(replace(program, instructions=tuple(instructions)), frozenset(values))


def _apart(bucket: Bucket, values: set[str]) -> Iterator[Bucket]:
    for on_host in (True, False):
        own = tuple(c for c in bucket.conversions if (c.value in values) == on_host)
        if own:
            yield replace(bucket, conversions=own)


def _check(local: LocalOp, name_of: dict[str, str]) -> None:
    names = [*refs((local.call.args, tuple(value for _, value in local.call.kwargs)))]
    read = [name for name in names if name in name_of]
    if read and (local.call.target not in LOOKUPS or names[:1] != read):
        raise ShardwiseError(
            problem(
                f"{name_of[read[0]]} is kept on the host, and {local.call.target} computes with it on the device",
                op=local.op,
                source=local.source,
                fix="only lookups (embedding, embedding_bag, index_select) read a table on the host: leave it out of "
                "host=, or untie it",
            )
        )


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where the ranks exchange a number about these tensors: on their device, though some are on the host."""
    found = {tensor.device for tensor in tensors}
    return next((device for device in found if device != HOST), HOST)
