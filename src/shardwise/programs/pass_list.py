"""Passes over a step: list -> list. ``programs.invariants`` holds every list against what a pass must keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwise.programs.instructions import Arrive, Convert, Depart, Instruction, sent_by, shares_of
from shardwise.programs.rank_program import RankProgram


def memories(instructions: Iterable[Instruction], known: Iterable[str] = ()) -> dict[str, str]:
    """Name -> the name that first had its memory. ``known``: names from before."""
    root = {name: name for name in known}
    for instruction in instructions:
        for name, shared in zip(instruction.results, shares_of(instruction), strict=True):
            root[name] = name if shared is None else root.get(shared, shared)
    return root


def mark_overwrites(program: RankProgram) -> RankProgram:
    """Exchanges may use their operand's memory where nothing reads that later and nobody else holds it."""
    fixed = {*program.taken, *program.delivered, *(value for _, value in program.mutations)}
    forward = _marked(program.forward, {*fixed, *program.saved})
    return mark_overwrites_of_backward(replace(program, forward=forward))


def mark_overwrites_of_backward(program: RankProgram) -> RankProgram:
    """The same, for a backward in another order."""
    protected = {*program.saved, *(name for name in program.cotangents if name), *program.gradients.values()}
    return replace(program, backward=_marked(program.backward, protected))


def _marked(instructions: Sequence[Instruction], protected: set[str]) -> tuple[Instruction, ...]:
    root = memories(instructions, protected)
    results = {name for instruction in instructions for name in instruction.results}
    kept = {root.get(name, name) for name in protected}
    arrivals = {instruction.flight: i for i, instruction in enumerate(instructions) if isinstance(instruction, Arrive)}
    ends = [  # where it has read: a message what it sends, until it has arrived
        arrivals.get(instruction.flight, i) if isinstance(instruction, Depart) else i
        for i, instruction in enumerate(instructions)
    ]
    reads: dict[str, dict[int, int]] = {}  # memory -> who reads it, and until when
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
