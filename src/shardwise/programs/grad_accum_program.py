"""Gradient accumulation: casts and gathers parameters once before the first micro-batch, and reduces their gradients
once after the last.

Conversions and casts are linear, so the sum over micro-batches of reduced gradients is the reduction of their sum. A
micro-batch takes such a parameter in the layout in which operators use it, and its gradients are accumulated locally on
every device. That needs no message per micro-batch. It needs no memory if a parameter is stored in the layout in which
it is used. Else (sharded storage, ``search.zero``) whole gradients are kept between micro-batches: ZeRO stage 1, not 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.programs.casts import CAST, computed_name, gradients_of
from shardwise.programs.exchanges import ExchangeWriter
from shardwise.programs.instructions import Arrive, Compute, Convert, Depart, Instruction, converts_only
from shardwise.programs.rank_program import RankProgram, mark_overwrites, part_of, with_saved
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion, OpStep


@dataclass(frozen=True)
class GradAccumProgram:
    """A rank's step of several micro-batches. ``each``: one micro-batch, which takes the values ``given`` beside the
    sources; ``ahead`` delivers them and has no backward; ``behind`` has only a backward: from the accumulated gradients
    (``saved``, in the order of its ``gradients``) to those of the parameters. ``ahead`` and ``behind`` are empty if
    nothing is done once."""

    ahead: RankProgram
    each: RankProgram
    behind: RankProgram

    @property
    def sums(self) -> Mapping[str, str]:
        """Map the sources that ``behind`` converts to the names there of their accumulated gradients."""
        return dict(zip(self.behind.gradients, self.behind.saved, strict=True))


def with_once(spmd: SpmdProgram, *, scattered: bool) -> SpmdProgram:
    """Return the program in which parameters are converted once per step where possible. ``scattered``: also those that
    are stored in smaller shards than operators use; their whole gradients are then kept between micro-batches."""

    def keeps_size(_: str, into: Conversion | None) -> bool:
        return into is None or scattered or into.source.max_local_numel == into.target.max_local_numel

    return replace(spmd, lifetimes=replace(spmd.lifetimes, once=converted_once(spmd, keeps_size)))


def converted_once(spmd: SpmdProgram, predicate: Callable[[str, Conversion | None], bool]) -> frozenset[str]:
    """Return the parameters that a step may convert once: they are used in one layout only, backward does not gather
    them again, and no other values share their messages. ``predicate``: selects by value and conversion (None:
    stored in the layout in which they are used)."""
    read = Counter(
        name
        for step in spmd.steps
        if isinstance(step, OpStep) and not spmd.of_scales(step.results)
        for name in set(step.operands)
    )
    used = Counter(conversion.value for conversion in spmd.conversions)
    used.update(read.keys())
    into = {conversion.value: conversion for conversion in spmd.conversions}
    written = {value for _, value in spmd.mutations}
    converted: set[str] = set()
    for source in spmd.graph.sources:
        name, conversion = source.value, into.get(source.value)
        is_parameter = source.kind == "parameter" and name not in written and used[name] <= 1
        is_recomputed = conversion is not None and conversion.result in spmd.lifetimes.conversions
        if is_parameter and not is_recomputed and predicate(name, conversion):
            converted.add(name)
    messages = [set(step.operands) for step in spmd.steps if not isinstance(step, OpStep)]
    while partly := {name for together in messages if not together <= converted for name in together & converted}:
        converted -= partly
    return frozenset(converted)


def repeated(program: RankProgram) -> GradAccumProgram:
    """Divide ``program``, the step of one micro-batch, into the part of every micro-batch and the parts done once."""
    once = program.spmd.lifetimes.once
    of_scales = program.spmd.of_scales
    first = [i for i in program.forward if converts_only(i, once) or of_scales(i.results)]
    casts = {computed_name(name) for name in once}.union(*(instruction.operands for instruction in first))
    ahead: list[Instruction] = []  # the casts, scales and conversions of parameters that are done once
    rest: list[Instruction] = []
    for instruction in program.forward:
        is_cast = instruction.origin.part == "cast" and bool(casts.intersection(instruction.results))
        is_ahead = is_cast or converts_only(instruction, once) or of_scales(instruction.results)
        (ahead if is_ahead else rest).append(instruction)
    reductions = _Reductions(program, once)
    (backward, gradients), (behind, final) = reductions.apart()
    read = {name for instruction in (*rest, *backward) for name in instruction.operands} | {*program.ends}
    made_ahead = tuple(name for instruction in ahead for name in instruction.results if name in read)
    each = replace(program, forward=tuple(rest), backward=tuple(backward), gradients=gradients, given=made_ahead)
    sums = tuple(gradients[source] for source in final)
    behind_alone = part_of(program, backward=tuple(behind), gradients=final, given=sums, saved=sums)
    return GradAccumProgram(
        mark_overwrites(part_of(program, forward=tuple(ahead), delivered=made_ahead)),
        mark_overwrites(with_saved(replace(each, forms=reductions.forms))),
        mark_overwrites(replace(behind_alone, forms=reductions.forms)),
    )


_Half = tuple[list[Instruction], dict[str, str]]  # instructions of backward, and source -> its gradient


class _Reductions:
    """Divides the backward of a program into that of a micro-batch and the reductions of the accumulated gradients."""

    def __init__(self, program: RankProgram, once: frozenset[str]) -> None:
        self.program, self.once = program, once
        self.graph, self.forms = program.spmd.graph, dict(program.forms)
        self.exchanges = ExchangeWriter(self.graph, program.spmd.mesh.coordinates(program.rank), self.forms)

    def apart(self) -> tuple[_Half, _Half]:
        """Return the backward of a micro-batch, and that after the last one."""
        repeated: list[Instruction] = []
        reductions: list[Instruction] = []  # and what depends on them alone
        landed: set[str] = set()
        for instruction in self.program.backward:
            follows = bool(instruction.operands) and landed.issuperset(instruction.operands)
            if follows or converts_only(instruction, self.once):
                reductions.append(instruction)
                landed.update(instruction.results)
            else:
                repeated.append(instruction)
        taken = self._reduced_cotangents(repeated, reductions)  # source -> the cotangent that is reduced
        final = {source: name for source, name in self.program.gradients.items() if source in taken}
        cotangents = {**self.program.gradients, **taken}
        read = {name for instruction in repeated for name in instruction.operands} | set(cotangents.values())
        left = [i for i in repeated if not _is_cast(i) or read.intersection(i.results)]
        each = gradients_of(self.graph, cotangents, left, self.forms)
        behind = self._of_sums(reductions, {source: each[1][source] for source in final})
        # A reduction may return a view of the sum, which then needs a copy.
        return each, gradients_of(self.graph, final, behind, self.forms)

    def _reduced_cotangents(self, repeated: Sequence[Instruction], reductions: Sequence[Instruction]) -> dict[str, str]:
        """Map parameters to their gradients as the operators compute them, before the cast for the reduction."""
        casts = {name: i.operands[0] for i in repeated if _is_cast(i) for name in i.results}
        landed = {name for instruction in reductions for name in instruction.results}
        return {
            conversion.value: casts.get(operand, operand)
            for instruction in reductions
            if isinstance(instruction, (Convert, Depart)) and landed.isdisjoint(instruction.operands)
            for conversion, operand in zip(instruction.conversions, instruction.operands, strict=True)
        }

    def _of_sums(self, reductions: Sequence[Instruction], sums: Mapping[str, str]) -> list[Instruction]:
        """Return the reductions of the accumulated gradients, cast to the dtype in which they are reduced."""
        written: list[Instruction] = []
        sent: dict[str, tuple[str, ...]] = {}  # flight -> the operands of its departure
        landed = {name for instruction in reductions for name in instruction.results}
        for instruction in reductions:
            if isinstance(instruction, (Convert, Depart)):
                ready: list[str] = []
                for conversion, name in zip(instruction.conversions, instruction.operands, strict=True):
                    is_further = name in landed  # a further message of an exchange
                    total, dtype = name if is_further else sums[conversion.value], self.forms[name].dtype
                    if not is_further and self.forms[total].dtype != dtype:
                        written.append(self.exchanges.cast(total, dtype, instruction.conversions[0]))
                        total = written[-1].results[0]
                    ready.append(total)
                operands = tuple(ready)
                if isinstance(instruction, Depart):
                    sent[instruction.flight] = operands
                    written.append(replace(instruction, operands=operands))
                else:
                    written.append(self._reduced(instruction, operands))
            elif isinstance(instruction, Arrive):
                written.append(self._reduced(instruction, sent[instruction.flight]))
            else:
                written.append(instruction)
        return written

    def _reduced(self, instruction: Convert | Arrive, operands: tuple[str, ...]) -> Instruction:
        """Return the instruction with the forms of its results for these operands."""
        forms, shares = self.exchanges.forms_and_shares(
            instruction.conversions, operands, instruction.results, backward=True
        )
        changed = replace(instruction, forms=forms, shares=shares)
        return replace(changed, operands=operands) if isinstance(changed, Convert) else changed


def _is_cast(instruction: Instruction) -> bool:
    return isinstance(instruction, Compute) and instruction.target == CAST and instruction.origin.part == "cast"
