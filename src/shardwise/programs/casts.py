"""Casts between the dtype in which a source is stored (or passed), that of the computation, and that of reductions.

In the instruction lists of a program, a source's name is the stored tensor. The value that the graph calls by that name
is its cast, computed once, ahead of the first instruction that reads it. A sharded source is cast before it is
gathered, so that the message has few bytes. The gradient of a parameter is cast before its first reduction, and to the
stored dtype as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from shardwise.graph.ir import Ref
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Instruction, Origin

CAST = torch.ops.aten._to_copy.default


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
