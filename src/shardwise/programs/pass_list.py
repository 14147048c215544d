"""Passes that transform a step's instruction lists. ``programs.invariants`` checks the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.programs.instructions import Arrive, Convert, Depart, Instruction, memories, read_of, sent_by
from shardwise.programs.rank_program import RankProgram


def part_of(program: RankProgram, **fields: Any) -> RankProgram:
    """Return the program of a part of a program's instructions: other fields than these are empty. ``delivered`` values
    get no cotangents."""
    empty: dict[str, Any] = dict.fromkeys(("forward", "backward", "saved", "delivered", "mutations"), ())
    cotangents = (None,) * len(fields.get("delivered", ()))
    return replace(program, **empty | {"cotangents": cotangents, "gradients": {}} | fields)


def with_saved(program: RankProgram) -> RankProgram:
    """Return the program with ``saved``: what backward reads of the values that forward is given and computes."""
    available = {*program.taken, *(name for instruction in program.forward for name in instruction.results)}
    saved = read_of(program.backward, available)
    made = {name for instruction in program.backward for name in instruction.results}
    assert made.isdisjoint(saved), "backward computes a value that forward has"
    return replace(program, saved=saved)


def mark_overwrites(program: RankProgram) -> RankProgram:
    """Let exchanges use their operand's memory if no instruction reads it later and nothing else holds it."""
    fixed = {*program.taken, *program.ends}
    forward = _marked(program.forward, {*fixed, *program.saved})
    return mark_overwrites_of_backward(replace(program, forward=forward))


def mark_overwrites_of_backward(program: RankProgram) -> RankProgram:
    """Repeat ``mark_overwrites`` for backward alone, after it was reordered."""
    protected = {*program.handed, *program.gradients.values()}
    return replace(program, backward=_marked(program.backward, protected))


def _marked(instructions: Sequence[Instruction], protected: set[str]) -> tuple[Instruction, ...]:
    root = memories(instructions, protected)
    results = {name for instruction in instructions for name in instruction.results}
    kept = {root.get(name, name) for name in protected}
    arrivals = {instruction.flight: i for i, instruction in enumerate(instructions) if isinstance(instruction, Arrive)}
    ends = [  # the last position at which an instruction reads: a departure reads until its arrival
        arrivals.get(instruction.flight, i) if isinstance(instruction, Depart) else i
        for i, instruction in enumerate(instructions)
    ]
    reads: dict[str, dict[int, int]] = {}  # memory -> reader -> its last read
    for i, instruction in enumerate(instructions):
        for name in instruction.operands:
            reads.setdefault(root.get(name, name), {})[i] = ends[i]
    marked: list[Instruction] = []
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, (Convert, Depart)) and len(instruction.operands) == 1:
            memory = root.get(instruction.operands[0], instruction.operands[0])
            reduces = [message.kind for message in sent_by(instruction)][:1] == ["all_reduce"]
            others = (end for reader, end in reads[memory].items() if reader != i)
            free = reduces and memory in results and memory not in kept and all(end < i for end in others)
            instruction = replace(instruction, overwrites=free)
        marked.append(instruction)
    return tuple(marked)
