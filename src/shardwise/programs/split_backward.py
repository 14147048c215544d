"""Splits backward in two parts: the cotangents of received values, and the rest, mainly weight gradients.

A pipeline stage sends cotangents to the previous stage, which waits for them. Weight gradients are not needed until the
step ends. Both are instructions of one list. The first part is what the cotangents need, the second the rest, each in
its order. The first part returns the values that the second one reads.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.programs.instructions import Arrive, Depart, Instruction, Land, memories, read_of
from shardwise.programs.invariants import check_program
from shardwise.programs.pass_list import mark_overwrites_of_backward
from shardwise.programs.rank_program import RankProgram


def split_backward(program: RankProgram) -> tuple[RankProgram, RankProgram]:
    """Return the program with the first part of its backward, and with the second.

    The first part returns the cotangents of received values and, under their own names, the values that the second part
    reads. ``saved`` of the second contains these, values of forward, and cotangents.
    """
    chosen = _needed_by_cotangents(program)
    ordered = [i for is_first in (True, False) for i, c in zip(program.backward, chosen, strict=True) if c == is_first]
    whole = mark_overwrites_of_backward(replace(program, backward=tuple(ordered)))
    check_program(whole)
    first, second = whole.backward[: sum(chosen)], whole.backward[sum(chosen) :]
    first_results = {name for instruction in first for name in instruction.results}
    early = {source: name for source, name in program.gradients.items() if name in first_results}
    late = {source: name for source, name in program.gradients.items() if name not in first_results}
    handed = {name: name for name in read_of(second, first_results)}
    of_first = {name for instruction in first for name in instruction.operands}
    taken, left = tuple(n for n in program.saved if n in of_first), read_of(second, first_results.union(program.handed))
    none = (None,) * len(program.cotangents)
    return (
        replace(whole, backward=first, saved=taken, gradients={**early, **handed}),
        replace(whole, backward=second, saved=left, cotangents=none, gradients=late),
    )


def _needed_by_cotangents(program: RankProgram) -> list[bool]:
    """Return per instruction of backward whether a cotangent of a received value needs its results or its writes into
    memory that is read later."""
    sources = program.spmd.graph.source_of
    needed = {name for source, name in program.gradients.items() if sources[source].kind == "activation"}
    root = memories(program.backward, program.handed)
    chosen = [False] * len(program.backward)
    while True:
        flights, read = set[str](), {root.get(name, name) for name in needed}  # memory that is read later
        for index in reversed(range(len(program.backward))):
            instruction = program.backward[index]
            is_flight = isinstance(instruction, Depart) and instruction.flight in flights
            fills = any(root.get(x, x) in read for x in instruction.writes)
            lands = isinstance(instruction, Land) and instruction.copy in needed
            if chosen[index] or is_flight or fills or lands or needed.intersection(instruction.results):
                chosen[index] = True
                needed.update(instruction.operands)
                read.update(root.get(name, name) for name in instruction.operands)
                if isinstance(instruction, Arrive):
                    flights.add(instruction.flight)
        before = _before_overwrites(program.backward, chosen, root)
        if not before:
            return chosen
        for index in before:
            chosen[index] = True


def _before_overwrites(instructions: tuple[Instruction, ...], chosen: list[bool], root: dict[str, str]) -> list[int]:
    """Return the unchosen instructions that read memory which a later chosen kernel overwrites."""
    readers, overwritten = [], set[str]()
    for index in reversed(range(len(instructions))):
        instruction = instructions[index]
        if chosen[index]:
            overwritten.update(root.get(name, name) for name in instruction.writes)
        elif any(root.get(name, name) in overwritten for name in instruction.operands):
            readers.append(index)
    return readers
