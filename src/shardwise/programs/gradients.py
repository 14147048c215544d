"""What backward hands out: the gradient of every source, in the dtype of what is stored and in memory of its own, since
whoever gets gradients adds to them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from shardwise.graph.ir import Graph, Ref
from shardwise.programs.casts import cast
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Instruction, Origin
from shardwise.programs.pass_list import memories

aten = torch.ops.aten


def gradients_of(
    graph: Graph, cotangents: Mapping[str, str], backward: Sequence[Instruction], forms: dict[str, Form]
) -> tuple[list[Instruction], dict[str, str]]:
    """Backward with what its gradients still need, each cast or copied as soon as it is complete, and source -> the
    name of its gradient. ``cotangents``: of all values; ``forms``: of all names, to which those of results are added.
    """
    root = memories(backward)
    origins = {name: instruction.origin for instruction in backward for name in instruction.results}
    backward_names = origins.keys()
    gradients: dict[str, str] = {}
    taken: set[str] = set()
    copies: dict[str, list[Compute]] = {}  # complete cotangent -> what is made of it
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
        due.setdefault(last.get(root.get(name, name), -1), []).extend(made_of_it)  # -1: of what was given
    written: list[Instruction] = list(due.get(-1, ()))
    for position, instruction in enumerate(backward):
        written += [instruction, *due.get(position, ())]
    return written, gradients


def _last_writes(instructions: Sequence[Instruction], root: Mapping[str, str]) -> dict[str, int]:
    """Memory -> the position of the last instruction that makes a name for it, or writes to it."""
    last: dict[str, int] = {}
    for position, instruction in enumerate(instructions):
        writes = instruction.writes if isinstance(instruction, Compute) else ()
        last.update((root.get(name, name), position) for name in (*instruction.results, *writes))
    return last
