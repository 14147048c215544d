"""Prepares the gradients that backward returns: in the stored dtype, and each in its own memory, because callers
accumulate into them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from shardwise.graph.ir import Graph, Ref
from shardwise.programs.casts import cast
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Instruction, Origin, memories, writes_of

aten = torch.ops.aten


def gradients_of(
    graph: Graph, cotangents: Mapping[str, str], backward: Sequence[Instruction], forms: dict[str, Form]
) -> tuple[list[Instruction], dict[str, str]]:
    """Return backward with gradients cast or copied where needed, each as soon as it is complete, and source -> name of
    its gradient. ``cotangents``: of all values; ``forms``: of all names; those of results are added."""
    root = memories(backward)
    origins = {name: instruction.origin for instruction in backward for name in instruction.results}
    backward_names = origins.keys()
    gradients: dict[str, str] = {}
    taken: set[str] = set()
    copies: dict[str, list[Compute]] = {}  # complete cotangent -> its casts and copies
    for source in graph.sources:
        name = cotangents.get(source.value)
        if name is None:
            continue
        memory, dtype = root.get(name, name), graph.by_name[source.value].kept_dtype
        dense = forms[name].num_bytes >= prod(forms[name].shape) * forms[name].dtype.itemsize  # not expanded
        if forms[name].dtype == dtype and dense and memory in backward_names and memory not in taken:
            taken.add(memory)
            gradients[source.value] = name
            continue
        result = gradients[source.value] = f"{name}:{source.value}"
        form = forms[result] = Form.contiguous(forms[name].shape, dtype)
        if forms[name].dtype == dtype:
            kwargs, origin = (("memory_format", torch.contiguous_format),), Origin("", source.names[0], "weight")
            copied = Compute(aten.clone.default, (Ref(name),), kwargs, (result,), ((),), (form,), (None,), origin)
        else:
            copied = cast(name, result, form, origins.get(name, Origin("", source.names[0], "weight")))
        copies.setdefault(name, []).append(copied)
    last = _last_writes(backward, root)
    due: dict[int, list[Compute]] = {}
    for name, made_of_it in copies.items():
        due.setdefault(last.get(root.get(name, name), -1), []).extend(made_of_it)  # -1: it exists from the start
    written: list[Instruction] = list(due.get(-1, ()))
    for position, instruction in enumerate(backward):
        written += [instruction, *due.get(position, ())]
    return written, gradients


def _last_writes(instructions: Sequence[Instruction], root: Mapping[str, str]) -> dict[str, int]:
    """Map each memory to the position of the last instruction that defines a name for it, or writes to it."""
    last: dict[str, int] = {}
    for position, instruction in enumerate(instructions):
        written = (*instruction.results, *writes_of(instruction))
        last.update((root.get(name, name), position) for name in written)
    return last
