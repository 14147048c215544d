"""Checks the invariants of rank programs. Every program that is emitted has been checked, after all passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.programs.instructions import Arrive, Compute, Convert, Copy, Depart, Instruction, Land, memories
from shardwise.programs.rank_program import RankProgram


class BrokenProgram(AssertionError):
    """Raised when a pass broke a program. ``str`` names the instruction and the reason. Always a bug in shardwise."""


def check_program(program: RankProgram) -> None:
    """Raise BrokenProgram unless forward and backward keep all invariants. Every name is defined once, before its first
    use. Every departure has one arrival. Every asynchronous copy lands once and is not read before. Saved, delivered
    and mutated values and gradients exist. Kernels overwrite only memory of their own operator. No value is read after
    an exchange used its memory. No memory is written while a message is sent from it. Every gradient has memory that
    backward allocated for it alone."""
    start_names = set(program.handed)
    _check(program.forward, set(program.taken), (*program.ends, *program.saved), "forward")
    _check(program.backward, start_names, program.gradients.values(), "backward")
    root = memories(program.backward, start_names)
    holder: dict[str, str] = dict.fromkeys({root[name] for name in start_names}, "what backward was given")
    for source, name in program.gradients.items():
        if root[name] in holder:
            raise BrokenProgram(f"backward: the gradient of {source!r} is in the memory of {holder[root[name]]}")
        holder[root[name]] = f"the gradient of {source!r}"


def _check(instructions: Sequence[Instruction], fixed: set[str], ends: Iterable[str], part: str) -> None:
    defined = set(fixed)
    in_flight: dict[str, set[str]] = {}  # message in flight -> the memories from which it is sent
    root = memories(instructions, fixed)
    overwritten: dict[str, str] = {}  # memory -> the exchange that used it
    maker: dict[str, str] = {}  # memory -> the operator that made it
    copying: set[str] = set()  # asynchronous copies
    for position, instruction in enumerate(instructions):
        where = f"{part} {position} ({instruction.origin.op or type(instruction).__name__})"
        for name in instruction.operands:
            if name not in defined:
                raise BrokenProgram(f"{where} uses {name!r} before it is made")
            if root[name] in overwritten:
                raise BrokenProgram(f"{where} reads {name!r}, whose memory {overwritten[root[name]]} has used")
            if name in copying and not isinstance(instruction, Land):
                raise BrokenProgram(f"{where} reads {name!r}, which is still being copied")
        for name in _written(instruction):
            foreign = isinstance(instruction, Compute) and maker.get(root[name]) != instruction.origin.op
            if root[name] in fixed or foreign:
                raise BrokenProgram(f"{where} overwrites {name!r}, which it does not own")
            if any(root[name] in memories_sent for memories_sent in in_flight.values()):
                raise BrokenProgram(f"{where} overwrites {name!r}, from which a message is still sent")
            if not isinstance(instruction, Compute):
                overwritten[root[name]] = where
        if isinstance(instruction, Depart):
            if instruction.flight in in_flight:
                raise BrokenProgram(f"{where} leaves as {instruction.flight!r}, which is on its way")
            in_flight[instruction.flight] = {root[name] for name in instruction.operands}
        elif isinstance(instruction, Arrive):
            if instruction.flight not in in_flight:
                raise BrokenProgram(f"{where} waits for {instruction.flight!r}, which has not left")
            del in_flight[instruction.flight]
        elif isinstance(instruction, Copy) and instruction.apart:
            copying.add(instruction.result)
        elif isinstance(instruction, Land):
            if instruction.copy not in copying:
                raise BrokenProgram(f"{where} waits for {instruction.copy!r}, which nothing copies")
            copying.remove(instruction.copy)
        for name in instruction.results:
            if name in defined:
                raise BrokenProgram(f"{where} makes {name!r} a second time")
            defined.add(name)
            maker.setdefault(root[name], instruction.origin.op)
    if in_flight:
        raise BrokenProgram(f"{part}: nothing waits for {', '.join(sorted(in_flight))}")
    if copying:
        raise BrokenProgram(f"{part}: nothing waits for the copies {', '.join(sorted(copying))}")
    for name in ends:
        if name not in defined:
            raise BrokenProgram(f"{part}: {name!r} is never made")
        if root[name] in overwritten:
            raise BrokenProgram(f"{part}: the memory of {name!r} was used by {overwritten[root[name]]}")


def _written(instruction: Instruction) -> tuple[str, ...]:
    overwrites = isinstance(instruction, (Convert, Depart)) and instruction.overwrites
    return instruction.operands if overwrites else instruction.writes
