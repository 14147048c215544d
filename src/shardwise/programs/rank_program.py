"""The training step of one rank, as data, and passes over its instruction lists. ``programs.invariants`` checks the
results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.graph.ir import refs
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Arrive, Convert, Depart, Instruction, memories, read_of, sent_by
from shardwise.programs.spmd import SpmdProgram


@dataclass(frozen=True)
class RankProgram:
    """The training step of one rank.

    ``forward`` computes from the sources ``delivered`` (the loss and outputs, each value once), ``mutations`` (buffer,
    new value) and ``saved``, which ``backward`` reads. ``cotangents``: per delivered value the name under which
    backward gets its cotangent, or None; ``gradients``: source -> the name of its gradient. ``aliases``: name -> the
    name of the same value in the lists. ``forms``: of all names. ``given``: values that forward takes beside the
    sources, for example those computed before the first micro-batch (``programs.grad_accum_program``).
    """

    rank: int
    spmd: SpmdProgram
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    saved: tuple[str, ...]
    delivered: tuple[str, ...]
    mutations: tuple[tuple[str, str], ...]
    cotangents: tuple[str | None, ...]
    gradients: Mapping[str, str]
    aliases: Mapping[str, str]
    forms: Mapping[str, Form]
    untraceable: Mapping[str, str]
    given: tuple[str, ...] = ()

    @property
    def taken(self) -> tuple[str, ...]:
        """Return the names that forward starts from: the sources and ``given``."""
        return (*self.spmd.graph.source_of, *self.given)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the names that forward delivers or writes to buffers."""
        return (*self.delivered, *(value for _, value in self.mutations))

    @property
    def handed(self) -> tuple[str, ...]:
        """Return the names that backward starts from: ``saved`` and the cotangents."""
        return (*self.saved, *(name for name in self.cotangents if name is not None))

    def resolve(self, name: str) -> str:
        """Return the name that a value of the Spmd program has in the lists."""
        return self.aliases.get(name, name)


def delivered_values(spmd: SpmdProgram, *, loss_only: bool) -> tuple[str, ...]:
    """Return the values that forward delivers, each once, the loss first."""
    names = [spmd.loss] if spmd.loss is not None else []
    if not loss_only or spmd.loss is None:
        names += refs(spmd.outputs)
    return tuple(dict.fromkeys(names))


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
    free = _free_operands(instructions, protected)
    return tuple(
        replace(instruction, overwrites=i in free)
        if isinstance(instruction, (Convert, Depart)) and instruction.overwrites != (i in free)
        else instruction
        for i, instruction in enumerate(instructions)
    )


def _free_operands(instructions: Sequence[Instruction], protected: set[str]) -> set[int]:
    """Return the positions of the exchanges that may use their operand's memory."""
    reducing = {
        i: instruction.operands[0]
        for i, instruction in enumerate(instructions)
        if isinstance(instruction, (Convert, Depart))
        and len(instruction.operands) == 1
        and [message.kind for message in sent_by(instruction)][:1] == ["all_reduce"]
    }
    if not reducing:
        return set()
    root = memories(instructions, protected)
    results = {name for instruction in instructions for name in instruction.results}
    kept = {root.get(name, name) for name in protected}
    memory_of = {i: root.get(name, name) for i, name in reducing.items()}
    memory_of = {i: memory for i, memory in memory_of.items() if memory in results and memory not in kept}
    arrivals = {instruction.flight: i for i, instruction in enumerate(instructions) if isinstance(instruction, Arrive)}
    reads: dict[str, dict[int, int]] = {memory: {} for memory in memory_of.values()}  # reader -> its last read
    for i, instruction in enumerate(instructions):
        end = arrivals.get(instruction.flight, i) if isinstance(instruction, Depart) else i  # it reads until it arrives
        for name in instruction.operands:
            if (memory := root.get(name, name)) in reads:
                reads[memory][i] = end
    return {i for i, memory in memory_of.items() if all(end < i for j, end in reads[memory].items() if j != i)}
