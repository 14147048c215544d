"""Applies the memory policy to values that backward reads: kept from forward, recomputed, or offloaded to the host.

A value that is not kept is recomputed where backward first reads it, by the instructions that computed it in forward:
kernels, and the conversions that ``Lifetimes`` lists. Recomputation and gathering parameters again (ZeRO-3, Rajbhandari
et al. 2020, arXiv:1910.02054) are the same pass. Kept values may be offloaded (``programs.activation_offload``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from shardwise.layouts.conversions import Collective
from shardwise.programs.activation_offload import offloaded
from shardwise.programs.buckets import cuts_windows
from shardwise.programs.comm_schedule import legs_ahead
from shardwise.programs.instructions import (
    Arrive,
    Compute,
    Convert,
    Copy,
    Depart,
    Instruction,
    Land,
    converts_only,
    in_flight,
    memories,
    sent_by,
    with_operands,
)
from shardwise.programs.keyed_rows import ReadCounts
from shardwise.programs.rank_program import RankProgram, with_saved
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.vjp import Record

AGAIN = "^"  # name suffix of recomputed values


def with_lifetimes(program: RankProgram, leader: RankProgram | None = None) -> RankProgram:
    """Return the program with the lifetimes of its ``spmd`` applied. ``leader``: the program of the rank whose messages
    all ranks repeat, if this rank's parts have other sizes (``differentiate``)."""
    lifetimes = program.spmd.lifetimes
    if not lifetimes or not program.backward:
        return program
    if lifetimes.operators or lifetimes.conversions:
        kept, program = program, _recompute(program)
        if leader is not None:
            messages = _messages_again(_recompute(leader).backward)
            if messages != _messages_again(program.backward):
                program = _recompute_with(kept, messages)
    return offloaded(program) if lifetimes.offloaded else program


def repeated(program: RankProgram) -> tuple[frozenset[str], frozenset[str]]:
    """Return the (operators, results of conversions) that a program recomputes in backward."""
    operators: set[str] = set()
    conversions: set[str] = set()
    for instruction in program.backward:
        if not instruction.origin.again:
            continue
        if isinstance(instruction, Compute):
            operators.add(instruction.origin.op)
        conversions.update(conversion.result for conversion in instruction.conversions)
    return frozenset(operators), frozenset(conversions)


def backward_collectives(program: RankProgram, *, in_passes: bool = False) -> tuple[Collective, ...]:
    """Return every collective of one backward pass, in order. ``in_passes``: of one micro-batch of several, followed by
    those that run once after the last."""
    lifetimes = program.spmd.lifetimes
    if not lifetimes:
        return program.spmd.backward_collectives(in_passes=in_passes)
    backward = list(program.backward)
    if in_passes:
        backward.sort(key=lambda instruction: converts_only(instruction, lifetimes.once))
    return tuple(collective for instruction in backward for collective in sent_by(instruction))


def is_repeatable(instruction: Compute, changed: Iterable[str] = ()) -> bool:
    """Return whether a kernel gives the same result when repeated. ``changed``: sources that have changed by then."""
    target = instruction.target
    if isinstance(target, Record):
        target = target.call[0]
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return not draws and not set(changed).intersection(instruction.operands)


# -- recomputation -----------------------------------------------------------------------------------------------------


def _recompute(program: RankProgram) -> RankProgram:
    again = _Repeater(program, dropped_values(program))
    backward: list[Instruction] = []
    begins: dict[str, int] = {}  # operator -> where its backward begins
    for instruction in program.backward:
        begin = begins.setdefault(instruction.origin.op, len(backward))
        repeated = again.repeat(instruction.operands)
        early, late = _sent_ahead(repeated, {again.names.get(name, name) for name in instruction.operands})
        if early:
            leaves = _behind(backward, begin, early)
            backward[leaves:leaves] = early
            begins = {op: at + len(early) if at >= leaves else at for op, at in begins.items()}
        backward += late
        backward.append(with_operands(instruction, again.names))
    return again.finish(_leaving_early(backward, program.spmd))


def _recompute_with(program: RankProgram, messages: Sequence[Sequence[tuple[str, ...]]]) -> RankProgram:
    """Recompute with exactly the given messages (``_messages_again``), whatever this rank's own kernels read.

    What a message delivers that this rank does not read is dropped. A value whose message is not repeated, or later
    than this rank needs it, is kept.
    """
    dropped = dropped_values(program)
    own = _delivered(program.backward)
    while True:
        again, between = _Repeater(program, dropped), iter(messages)
        backward: list[Instruction] = []
        kept: set[str] = set()  # what messages deliver that are not repeated here
        for instruction in (None, *program.backward):
            if instruction is not None:
                backward += again.repeat(instruction.operands)
                kept |= again.delivered
                backward.append(with_operands(instruction, again.names))
            if instruction is None or id(instruction) in own:
                for results in next(between):
                    backward += again.repeat(results, always=True)
                    kept |= again.delivered.difference(results)
        if not kept:
            return again.finish(backward)
        dropped -= kept


def _messages_again(backward: Sequence[Instruction]) -> list[list[tuple[str, ...]]]:
    """Return what the repeated messages of backward deliver: those before its first other message, those before its
    second, ..."""
    between: list[list[tuple[str, ...]]] = [[]]
    delivered = _delivered(backward)
    for instruction in backward:
        if id(instruction) in delivered:
            if instruction.origin.again:
                between[-1].append(tuple(name.removesuffix(AGAIN) for name in delivered[id(instruction)]))
            else:
                between.append([])
    return between


def _delivered(instructions: Sequence[Instruction]) -> dict[int, tuple[str, ...]]:
    """Map the ids of the instructions that send a message to what it delivers."""
    arrivals = {x.flight: x.results for x in instructions if isinstance(x, Arrive)}
    sends = [x for x in instructions if isinstance(x, (Convert, Depart)) and sent_by(x)]
    return {id(x): arrivals[x.flight] if isinstance(x, Depart) else x.results for x in sends}


class _Repeater:
    """Repeats instructions of forward in backward. ``names``: dropped value -> the name of its recomputed one."""

    def __init__(self, program: RankProgram, dropped: Set[str]) -> None:
        self.program, self.dropped, self.names, self.forms = program, dropped, dict[str, str](), dict(program.forms)
        forward = program.forward
        self.maker = {name: i for i, instruction in enumerate(forward) for name in instruction.results}
        self.departure = {x.flight: i for i, x in enumerate(forward) if isinstance(x, Depart)}
        self.together = _written_together(forward)
        self.delivers = _delivered(forward)
        self.delivered: set[str] = set()

    def repeat(self, names: Iterable[str], *, always: bool = False) -> list[Instruction]:
        """Return the instructions that recompute those of ``names`` that are dropped and were not recomputed yet.
        ``always``: all of them. ``delivered`` is then what their messages deliver."""
        originals = [self.program.forward[i] for i in self._needed(names, always)]
        self.delivered = {name for x in originals for name in self.delivers.get(id(x), ())}
        repeated = [_duplicate(x, self.names) for x in originals]
        self.forms.update((n, form) for x in repeated for n, form in zip(x.results, x.forms, strict=True))
        return repeated

    def finish(self, backward: Iterable[Instruction]) -> RankProgram:
        return with_saved(replace(self.program, backward=tuple(backward), forms=self.forms))

    def _needed(self, names: Iterable[str], always: bool) -> list[int]:
        """Return the positions in forward of the instructions that recompute some names, in order."""
        forward, positions = self.program.forward, set[int]()
        waiting = list(names) if always else self._missing(names)
        while waiting:
            position = self.maker[waiting.pop()]
            if position in positions:
                continue
            for i in self.together.get(position, (position,)):
                positions.add(i)
                instruction = forward[i]
                operands = instruction.operands
                if isinstance(instruction, Arrive):
                    positions.add(self.departure[instruction.flight])
                    operands = forward[self.departure[instruction.flight]].operands
                waiting += self._missing(operands)
        return sorted(positions)

    def _missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self.dropped and name not in self.names]


def dropped_values(program: RankProgram) -> frozenset[str]:
    """Return the names that forward makes and does not keep for backward: results of the operators and conversions to
    repeat, unless they are views of other memory, and all views of these, which would hold it."""
    lifetimes, forward = program.spmd.lifetimes, program.forward
    changed = {buffer for buffer, _ in program.mutations}
    steady = {
        instruction.origin.op
        for instruction in forward
        if isinstance(instruction, Compute) and not is_repeatable(instruction, changed)
    }
    candidates: set[str] = set()
    views: set[str] = set()
    for instruction in forward:
        if isinstance(instruction, Compute):
            views.update(instruction.results if instruction.is_view else ())
            op, part = instruction.origin.op, instruction.origin.part
            once = part == "cast" or isinstance(instruction.target, ReadCounts)  # the host would wait again
            drops = op in lifetimes.operators and op not in steady and not once
        elif isinstance(instruction, (Convert, Arrive)):
            drops = all(conversion.result in lifetimes.conversions for conversion in instruction.conversions)
        else:
            drops = False
        if drops:
            candidates.update(instruction.results)
    root = memories(forward, program.spmd.graph.source_of)
    stay = {root[name] for name in program.ends}
    return frozenset(name for name in candidates | views if root[name] in candidates and root[name] not in stay)


def _written_together(forward: Sequence[Instruction]) -> dict[int, tuple[int, ...]]:
    """Map a kernel's position to those of all kernels of its operator, if one of them overwrites memory: these must be
    recomputed together."""
    of_op: dict[str, list[int]] = {}
    for i, instruction in enumerate(forward):
        if isinstance(instruction, Compute) and instruction.origin.part != "cast":
            of_op.setdefault(instruction.origin.op, []).append(i)
    writing = {
        instruction.origin.op for instruction in forward if isinstance(instruction, Compute) and instruction.writes
    }
    return {i: tuple(of_op[op]) for op in writing for i in of_op[op]}


def _duplicate(instruction: Instruction, recomputed: dict[str, str]) -> Instruction:
    """Return the instruction under the names of its recomputed operands, and record the names of its results."""
    assert not isinstance(instruction, (Copy, Land)), "values are offloaded after others are recomputed"
    results = tuple(name + AGAIN for name in instruction.results)
    recomputed.update(zip(instruction.results, results, strict=True))
    fields: dict[str, Any] = {"origin": replace(instruction.origin, again=True)}
    if isinstance(instruction, (Depart, Arrive)):
        fields["flight"] = instruction.flight + AGAIN
    if not isinstance(instruction, Depart):
        fields["results"] = results
    return with_operands(instruction, recomputed, **fields)


def _sent_ahead(repeated: Sequence[Instruction], read: Set[str]) -> tuple[list[Instruction], list[Instruction]]:
    """Split the instructions repeated for an instruction that reads ``read`` into (early, late). Early: departures of
    messages that deliver some of ``read``, with what they need, to overlap with earlier kernels. Late: the rest."""
    early: list[Instruction] = []
    late: list[Instruction] = []
    for duplicate in repeated:
        if isinstance(duplicate, Convert) and len(sent_by(duplicate)) == 1 and read >= set(duplicate.results):
            needs = _ancestors(duplicate, late)
            stays = duplicate.of_parameters or cuts_windows(duplicate.conversions)
            if not stays and not any(isinstance(need, (Depart, Arrive)) or sent_by(need) for need in needs):
                departure, arrival = in_flight(duplicate, f"flight of {duplicate.results[0]}")
                early += [*needs, departure]
                late = [*(instruction for instruction in late if instruction not in needs), arrival]
                continue
        late.append(duplicate)
    return early, late


def _ancestors(instruction: Instruction, instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return the earlier instructions that an instruction depends on, with all kernels of an operator that writes."""
    writing = {earlier.origin.op for earlier in instructions if isinstance(earlier, Compute) and earlier.writes}
    needed, ops, ancestors, grows = set(instruction.operands), set[str](), set[int](), True
    while grows:
        grows = False
        for i, earlier in enumerate(instructions):
            if i not in ancestors and (needed.intersection(earlier.results) or earlier.origin.op in ops):
                ancestors.add(i)
                needed.update(earlier.operands)
                ops.update(writing.intersection((earlier.origin.op,)))
                grows = True
    return [earlier for i, earlier in enumerate(instructions) if i in ancestors]


def _behind(backward: Sequence[Instruction], begin: int, early: Sequence[Instruction]) -> int:
    """Return the position at which to issue ``early`` for an operator whose backward begins at ``begin``: after the
    last wait for a message of values before ``begin``, and after the operands of ``early``."""
    needs = {name for instruction in early for name in instruction.operands}
    leaves = next((i + 1 for i in reversed(range(begin)) if _waits(backward[i])), begin)
    return max((i + 1 for i in range(leaves, len(backward)) if needs.intersection(backward[i].results)), default=leaves)


def _waits(instruction: Instruction) -> bool:
    """Return whether an instruction waits for a message of values, not of parameters."""
    if isinstance(instruction, Convert):
        return bool(sent_by(instruction))
    return isinstance(instruction, Arrive) and not instruction.of_parameters


def _leaving_early(backward: Sequence[Instruction], spmd: SpmdProgram) -> list[Instruction]:
    """Issue the messages of parameters that backward gathers again ahead of their use, as in forward
    (``programs.comm_schedule``), if their operands exist by then."""
    exchanges = _gathered_again(backward)
    arrivals = [arrival for legs in exchanges if isinstance(arrival := backward[legs[-1][0]], Arrive)]
    assert len(arrivals) == len(exchanges), "an exchange ends with an arrival"
    places = [spmd.place_of(arrival.conversions) for arrival in arrivals]
    slots = legs_ahead([len(legs) - 1 for legs in exchanges], places, spmd.lifetimes.prefetch)
    starts = [*(legs[0][0] for legs in exchanges[:1]), *(legs[-1][0] for legs in exchanges)]
    ahead: dict[int, list[int]] = {}  # position -> the positions of instructions moved ahead of it
    stay: set[int] = set()
    for start, slot in zip(starts, slots, strict=False):
        for number, leg in slot:
            positions = exchanges[number][leg]
            between = {name for instruction in backward[start : positions[0]] for name in instruction.results}
            if leg == 0 and (positions[0] < start or between.intersection(backward[positions[0]].operands)):
                stay.add(number)
            if number not in stay:
                ahead.setdefault(start, []).extend(positions)
    away = {position for positions in ahead.values() for position in positions}
    order = (position for i in range(len(backward)) for position in (*ahead.get(i, ()), *(() if i in away else (i,))))
    return [backward[position] for position in order]


def _gathered_again(backward: Sequence[Instruction]) -> list[list[list[int]]]:
    """Return the exchanges of parameters that backward gathers again, in the order in which they are needed: per leg
    the positions of its instructions."""
    leaves = {x.flight: i for i, x in enumerate(backward) if isinstance(x, Depart)}
    exchanges: list[list[list[int]]] = []
    brought: dict[str, list[list[int]]] = {}  # name -> the exchange that brings it
    for i, x in enumerate(backward):
        if isinstance(x, Arrive) and x.of_parameters and x.origin.again:
            departure = leaves[x.flight]
            legs = brought.get(backward[departure].operands[0])
            if legs is None:
                legs = [[]]
                exchanges.append(legs)
            legs[-1].append(departure)
            legs.append([i])
            brought.update(dict.fromkeys(x.results, legs))
    return sorted(exchanges, key=lambda legs: legs[-1][0])
