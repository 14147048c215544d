"""Sends messages of values beside products: of rows in chunks, and of rows that follow keys.

**Chunks of rows** (``programs.row_chunks``). A message of a chunk departs as soon as its operand exists, and arrives
where its result is read. What lies between are products of other chunks, forward and backward. Departures keep their
order among all messages.

**Rows that follow keys** travel beside products that need none of them, such as those of shared experts. An exchange of
rows is one message that the next instruction waits for. Its departure stays where it is. Between it and
its arrival come later kernels that read neither its result nor what comes of it. Messages keep their order, which is
that of all ranks; kernels that overwrite memory, and what reads such memory, stay as well.

A model of shared experts computes them behind the tokens' return, so that they can run beside both exchanges. Both have
the same rows: the way out gets the first half of these products, the return the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.graph.ir import needed_for
from shardwise.programs.buckets import cuts_windows
from shardwise.programs.instructions import (
    Arrive,
    Compute,
    Convert,
    Depart,
    Instruction,
    Land,
    in_flight,
    memories,
    sent_by,
)
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd_steps import OpStep, chunk_of


def with_rows_beside_products(program: RankProgram) -> RankProgram:
    """Return the program whose exchanges of rows travel beside independent products, forward and backward."""
    if not any(conversion.ways for conversion in program.spmd.conversions):
        return program
    products = frozenset(
        step.placed.op.name for step in program.spmd.steps if isinstance(step, OpStep) and step.placed.rule.is_product
    )
    forward, backward = (_overlapped(part, products) for part in (program.forward, program.backward))
    return replace(program, forward=forward, backward=backward)


def with_chunks_beside_products(program: RankProgram) -> RankProgram:
    """Return the program whose messages of chunks travel from where they can depart to where they are read."""
    if not any(chunk_of(conversion.origin) for conversion in program.spmd.conversions):
        return program
    return replace(program, forward=_spread(program.forward), backward=_spread(program.backward))


def _spread(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    apart: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, Convert) and _is_of_chunk(instruction) and len(sent_by(instruction)) == 1:
            apart += in_flight(instruction, f"flight of {instruction.results[0]}")
        else:
            apart.append(instruction)
    # Positions: (of the instruction beside which it stands, ahead of it or behind, in which order).
    positions: list[tuple[int, float, int]] = [(i, 0.0, i) for i in range(len(apart))]
    root, touched = memories(apart), dict[str, int]()  # memory -> the last instruction that made or wrote it
    sent = -1, 0.0, -1  # the position of the last message
    for i, instruction in enumerate(apart):
        if isinstance(instruction, Depart) and _is_of_chunk(instruction):
            ready = max((touched.get(root.get(name, name), -1) for name in instruction.operands), default=-1)
            positions[i] = sent = max((ready, 1.0, i), (sent[0], 1.0, i))
        elif sent_by(instruction):
            sent = positions[i]
        for name in (*instruction.results, *instruction.writes):
            touched[root.get(name, name)] = i
    reads: dict[str, tuple[int, float, int]] = {}  # name -> the position of its first reader
    for i, instruction in reversed([*enumerate(apart)]):
        if isinstance(instruction, Arrive) and _is_of_chunk(instruction):
            found = [reads[name] for name in instruction.results if name in reads]
            if found and min(found)[1] == 0.0:
                positions[i] = min(found)[0], -1.0, i
        for name in instruction.operands:
            reads[name] = min(reads.get(name, positions[i]), positions[i])
    return tuple(apart[i] for i in sorted(range(len(apart)), key=positions.__getitem__))


def _is_of_chunk(instruction: Instruction) -> bool:
    conversions = instruction.conversions
    return bool(conversions) and bool(chunk_of(conversions[0].origin)) and not cuts_windows(conversions)


def _overlapped(instructions: Sequence[Instruction], products: frozenset[str]) -> tuple[Instruction, ...]:
    exchanges = [
        i
        for i, instruction in enumerate(instructions)
        if isinstance(instruction, Convert) and instruction.conversions[0].ways and sent_by(instruction)
    ]
    root = memories(instructions)
    beside: dict[int, list[int]] = {}  # exchange -> the kernels that run while it travels
    away: set[int] = set()
    for number, exchange in enumerate(exchanges):
        following, end = (*exchanges[number + 1 :], len(instructions), len(instructions))[:2]
        later = [i for i in range(exchange + 1, end) if i not in away]
        free = _independent(instructions, exchange, later, root)
        computes = ((i, one) for i in free if isinstance(one := instructions[i], Compute) and not one.is_view)
        of_products = [i for i, one in computes if one.origin.op in products]
        shared = [i for i in of_products if i > following]  # which the next exchange could have as well
        taken = [*(i for i in of_products if i < following), *shared[: (len(shared) + 1) // 2]]
        if taken:
            results = [name for i in taken for name in instructions[i].results]
            needed = needed_for(results, [instructions[i] for i in free])[1]
            beside[exchange] = moved = [i for i in free if needed.intersection(instructions[i].results)]
            away.update(moved)
    order: list[Instruction] = []
    for i, instruction in enumerate(instructions):
        if i in beside and isinstance(instruction, Convert):
            departure, arrival = in_flight(instruction, f"flight of {instruction.results[0]}")
            order += [departure, *(instructions[j] for j in beside[i]), arrival]
        elif i not in away:
            order.append(instruction)
    return tuple(order)


def _independent(
    instructions: Sequence[Instruction], exchange: int, later: Sequence[int], root: dict[str, str]
) -> list[int]:
    """Return the kernels among ``later`` that can run while an exchange travels, in order."""
    waiting = set(instructions[exchange].results)
    written: set[str] = set()  # memories
    free = []
    for i in later:
        instruction = instructions[i]
        touched = {root.get(name, name) for name in (*instruction.operands, *instruction.results)}
        if (
            isinstance(instruction, Compute)
            and not instruction.writes
            and waiting.isdisjoint(instruction.operands)
            and written.isdisjoint(touched)
        ):
            free.append(i)
            continue
        waiting.update((instruction.copy,) if isinstance(instruction, Land) else instruction.results)
        written.update(root.get(name, name) for name in instruction.writes)
    return free
