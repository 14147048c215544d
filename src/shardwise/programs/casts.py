"""Casts between the dtype in which a source is stored (or given), that of the computation, and that of reductions.

In the lists of a program, a source's name is the tensor that is stored; what the graph calls by that name is its cast,
made once, ahead of the first instruction that reads it: where the source is sharded, that is the shard, so that what is
gathered has few bytes. The gradient of a parameter is cast before its first reduction, and to what is stored as soon as
it is complete.
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
    """The name of a source's cast."""
    return f"{source}~"


def cast(name: str, result: str, form: Form, origin: Origin) -> Compute:
    """``name`` in the dtype of ``form``, contiguous. ``origin``: of what needs it."""
    kwargs = (("dtype", form.dtype), ("memory_format", torch.contiguous_format))
    return Compute(CAST, (Ref(name),), kwargs, (result,), ((),), (form,), (None,), replace(origin, part="cast"))


def before_first_use(
    instructions: Sequence[Instruction], casts: Mapping[str, Compute], ends: Iterable[str]
) -> list[Instruction]:
    """The instructions with every cast (by the name that it makes) ahead of the first one that reads it; at the end
    those of ``ends`` that nothing reads."""
    left, written = dict(casts), list[Instruction]()
    for instruction in instructions:
        due = [left.pop(name) for name in dict.fromkeys(instruction.operands) if name in left]
        written += [replace(due_cast, origin=replace(instruction.origin, part="cast")) for due_cast in due]
        written.append(instruction)
    return written + [left.pop(name) for name in dict.fromkeys(ends) if name in left]
