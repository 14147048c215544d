"""Casts between the dtype in which a source is stored (or passed), that of the computation, and that of reductions.

In the instruction lists of a program, a source's name is the stored tensor. The value that the graph calls by that name
is its cast, computed once, ahead of the first instruction that reads it. A sharded source is cast before it is
gathered, so that the message has few bytes. The gradient of a parameter is cast before its first reduction, and to the
stored dtype as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from shardwise.graph.ir import Graph, Ref
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Instruction, Origin, memories

aten = torch.ops.aten
CAST = aten._to_copy.default


def computed_name(source: str) -> str:
    """Return the name of a source's cast."""
    return f"{source}~"


def cast(name: str, result: str, form: Form, origin: Origin) -> Compute:
    """Return the instruction that casts ``name`` to the dtype of ``form``, contiguous. ``origin``: of its reader."""
    kwargs = (("dtype", form.dtype), ("memory_format", torch.contiguous_format))
    return Compute(CAST, (Ref(name),), kwargs, (result,), ((),), (form,), (None,), replace(origin, part="cast"))


def before_first_use(
    instructions: Sequence[Instruction], casts: Mapping[str, Compute], ends: Iterable[str]
) -> list[Instruction]:
    """Return the instructions with every cast (keyed by its result) ahead of the first reader of its result. Casts in
    ``ends`` without a reader come last."""
    left, written = dict(casts), list[Instruction]()
    for instruction in instructions:
        due = [left.pop(name) for name in dict.fromkeys(instruction.operands) if name in left]
        written += [replace(due_cast, origin=replace(instruction.origin, part="cast")) for due_cast in due]
        written.append(instruction)
    return written + [left.pop(name) for name in dict.fromkeys(ends) if name in left]


def gradients_of(
    graph: Graph, cotangents: Mapping[str, str], backward: Sequence[Instruction], forms: dict[str, Form]
) -> tuple[list[Instruction], dict[str, str]]:
    """Return backward with gradients cast or copied where needed, each as soon as it is complete, and source -> name of
    its gradient: in the stored dtype, and in its own memory, because callers accumulate into it in place.
    ``cotangents``: of all values; ``forms``: of all names; those of results are added."""
    root = memories(backward)
    origins = {name: instruction.origin for instruction in backward for name in instruction.results}
    gradients: dict[str, str] = {}
    taken: set[str] = set()
    copies: dict[str, list[Compute]] = {}  # complete cotangent -> its casts and copies
    for source in graph.sources:
        name = cotangents.get(source.value)
        if name is None:
            continue
        memory, dtype = root.get(name, name), graph.by_name[source.value].kept_dtype
        dense = forms[name].num_bytes >= prod(forms[name].shape) * forms[name].dtype.itemsize  # not expanded
        if forms[name].dtype == dtype and dense and memory in origins and memory not in taken:
            taken.add(memory)
            gradients[source.value] = name
            continue
        result = gradients[source.value] = f"{name}:{source.value}"
        form = forms[result] = Form.contiguous(forms[name].shape, dtype)
        origin = Origin("", source.names[0], "weight")
        if forms[name].dtype == dtype:
            kwargs = (("memory_format", torch.contiguous_format),)
            copied = Compute(aten.clone.default, (Ref(name),), kwargs, (result,), ((),), (form,), (None,), origin)
        else:
            copied = cast(name, result, form, origins.get(name, origin))
        copies.setdefault(name, []).append(copied)
    last: dict[str, int] = {}  # memory -> the last instruction that defines a name for it, or writes to it
    for position, instruction in enumerate(backward):
        last.update((root.get(name, name), position) for name in (*instruction.results, *instruction.writes))
    due: dict[int, list[Compute]] = {}
    for name, made_of_it in copies.items():
        due.setdefault(last.get(root.get(name, name), -1), []).extend(made_of_it)  # -1: it exists from the start
    written: list[Instruction] = list(due.get(-1, ()))
    for position, instruction in enumerate(backward):
        written += [instruction, *due.get(position, ())]
    return written, gradients
