"""Constant hoisting: values that depend on neither inputs nor parameters are computed once and cached.

Rotary tables, positions, ALiBi, relative positions and masks depend only on constants and on buffers that the step does
not write. Those of them that the rest of a step reads are *kept* from step to step. The program is divided into one
that computes them and one that takes them as operands. Each rank keeps only its own shards. The runtime recomputes them
when a buffer has changed (``runtime.step``).

Kept values occupy memory permanently. So they may take at most ``SHARE`` of the bytes that a rank holds of the sources
and of the largest value of the step. Larger values are computed in every step from the kept ones. The decision depends
on layouts only, so it is equal on all ranks and for every variant of a program. Never kept are random numbers, results
of conversions that send messages, and values that the step returns, because the caller may change these in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from shardwise.graph.ir import Ref, needed_for, refs
from shardwise.graph.schema import is_random, is_view, may_be_view, operator_name
from shardwise.graph.written_out import SEED
from shardwise.programs.casts import computed_name
from shardwise.programs.forms import Form
from shardwise.programs.instructions import (
    Compute,
    Convert,
    Copy,
    Instruction,
    memories,
    sent_by,
    with_operands,
    with_results,
)
from shardwise.programs.lifetimes import AGAIN
from shardwise.programs.micro_batches import is_of_step
from shardwise.programs.rank_program import RankProgram, mark_overwrites, part_of, with_saved
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion, OpStep
from shardwise.programs.vjp import numbered, typed_key

# Of the bytes of sources and of the largest value. A rotary table is 1/32 of a hidden state of a Llama 8B, a boolean
# mask over 131,072 positions is 16 hidden states.
SHARE = 1 / 16

_COPY = torch.ops.aten.clone.default


@dataclass(frozen=True)
class HoistedProgram:
    """A divided program: ``constants`` delivers the values that ``step`` takes beside the sources."""

    constants: RankProgram
    step: RankProgram


def constant_values(spmd: SpmdProgram) -> frozenset[str]:
    """Return the computed values that depend on no input and no parameter. Results of messages are excluded."""
    return frozenset(_Analysis(spmd).makers)


def fixed_sources(spmd: SpmdProgram) -> frozenset[str]:
    """Return the constants, and the buffers that the step does not write."""
    written = {buffer for buffer, _ in spmd.mutations}
    return frozenset(
        source.value
        for source in spmd.graph.sources
        if source.kind in ("buffer", "constant")
        and source.value not in written
        and source.names[0] != SEED
        and not is_of_step(source.value)
    )


# ----------------------------------------------------------------------------------------- what is kept, by its layouts


@dataclass
class _Analysis:
    """The constants of a program. ``makers``: value -> step; ``root``: name -> the name whose memory it may share."""

    spmd: SpmdProgram
    makers: dict[str, OpStep | Conversion] = field(default_factory=dict)
    root: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fixed = fixed_sources(self.spmd)
        self.root = {name: name for name in self.fixed}
        grad = self.spmd.graph.by_name
        for step in self._all:
            if not self.root.keys() >= set(step.operands):
                continue
            results = step.results
            if isinstance(step, Conversion):
                steady = not step.collectives()
            else:
                target = step.placed.op.target
                steady = not is_random(target) and not any(grad[name].requires_grad for name in results)
            if steady:
                self.makers.update(dict.fromkeys(results, step))
                self.root.update({name: self._root(step, name) for name in results})

    @cached_property
    def _all(self) -> list[OpStep | Conversion]:
        return [
            part for step in self.spmd.steps for part in ((step,) if isinstance(step, OpStep) else step.conversions)
        ]

    def _is_constant(self, step: OpStep | Conversion) -> bool:
        return self.makers.get(step.results[0]) is step

    def _root(self, step: OpStep | Conversion, name: str) -> str:
        """Return the name whose memory a result may share, or its own name."""
        if isinstance(step, Conversion) or not is_view(step.placed.op.target) or not step.operands:
            return name
        operand, layouts = step.operands[0], self.spmd.layouts
        grows = layouts[name].max_local_numel > layouts[operand].max_local_numel
        return name if grows and operator_name(step.placed.op.target) != "expand" else self.root[operand]

    @cached_property
    def returned(self) -> frozenset[str]:
        """Return the constants that the step returns, and those of which these may be views."""
        spmd = self.spmd
        returned = {*refs(spmd.outputs), *(value for _, value in spmd.mutations)} | {spmd.loss} - {None}
        for step in reversed(self._all):
            may_be_operand = isinstance(step, Conversion) or may_be_view(step.placed.op.target)
            if self._is_constant(step) and returned.intersection(step.results) and may_be_operand:
                returned.update(step.operands)
        return frozenset(name for name in returned if name in self.makers)

    @cached_property
    def same(self) -> Mapping[str, str]:
        """Map each constant to the first one that is computed equally (every layer may make the same mask)."""
        results_of: dict[object, tuple[str, ...]] = {}
        same: dict[str, str] = {name: name for name in self.fixed}
        for step in self._all:
            if self._is_constant(step):
                results, operands = step.results, tuple(same[name] for name in step.operands)
                key = _made_by(step), operands, tuple(self.spmd.layouts[name] for name in results)
                firsts = results if self.returned.intersection(results) else results_of.setdefault(key, results)
                same.update(zip(results, firsts, strict=True))
        return same

    @cached_property
    def kept(self) -> frozenset[str]:
        """Return the constants that the rest of the step reads and that fit into the memory limit."""
        limit = SHARE * (sum(map(self._num_bytes, self.spmd.graph.source_of)) + self._largest())
        used: set[str] = set(self.returned)
        kept: set[str] = set()
        roots: set[str] = set(self.fixed)
        for step in reversed(self._all):
            results = step.results
            if self._is_constant(step):
                read = used.intersection(results)
                if not read:
                    continue
                more = {self.root[name] for name in read} - roots
                size = sum(map(self._num_bytes, more))
                if size <= limit and not self.returned.intersection(results):
                    limit -= size
                    kept |= read
                    roots |= more
                    continue
            used.update(self.same.get(name, name) for name in step.operands)
        casts = {name for name in self.fixed & used if self.spmd.graph.by_name[name].stored is not None}
        return frozenset(kept | casts)

    def _num_bytes(self, name: str) -> int:
        """Return the largest number of bytes that a rank holds of a value."""
        maker, graph = self.makers.get(name), self.spmd.graph
        value = graph.by_name[maker.origin if isinstance(maker, Conversion) else name]
        dtype = value.kept_dtype if name in graph.source_of else value.dtype
        return self.spmd.layouts[name].max_local_numel * dtype.itemsize

    def _largest(self) -> int:
        results = (name for s in self.spmd.steps if isinstance(s, OpStep) for name in s.results)
        return max((self._num_bytes(name) for name in results if name not in self.makers), default=0)


def _made_by(step: OpStep | Conversion) -> object:
    """Return a key for the computation of a step, without names."""
    if isinstance(step, Conversion):
        return step.source, step.target, step.moves
    return typed_key(numbered(step.placed.op)[0]), step.operand_layouts, step.placed.strategy


# ----------------------------------------------------------------------------------------------- the program of a rank


def with_constants_apart(program: RankProgram, among: Collection[str] | None = None) -> HoistedProgram:
    """Divide the program into its constants and the rest of the step. ``among``: keep only these values (those that
    another variant of the program keeps)."""
    analysis = _Analysis(program.spmd)
    used = {computed_name(n) if n in analysis.fixed else program.resolve(n) for n in analysis.kept}
    if among is not None:
        used &= set(among)
    computed = _computed_constants(program, analysis)
    copied = {i.value for i in (*program.forward, *program.backward) if isinstance(i, Copy)}
    used = (used - copied) & computed
    duplicates = {program.resolve(name): program.resolve(first) for name, first in analysis.same.items()}
    same = {name: name for name in used} | {name: kept for name, kept in duplicates.items() if kept in used}
    same |= {name + AGAIN: kept for name, kept in same.items()}
    # Of constants, also recomputed ones, those that no instruction reads any more go.
    gone, read = {*computed, *(name + AGAIN for name in computed)}, set(program.ends)
    halves: list[tuple[Instruction, ...]] = []
    for instructions in (program.backward, [i for i in program.forward if not used.intersection(i.results)]):
        left: list[Instruction] = []
        for instruction in (with_operands(instruction, same) for instruction in reversed(instructions)):
            is_constant = bool(instruction.results) and gone.issuperset(instruction.results)
            if not is_constant or read.intersection(instruction.results):
                read.update(instruction.operands)
                left.append(instruction)
        halves.append(tuple(reversed(left)))
    constants = tuple(n for i in program.forward for n in i.results if n in used and n in read)
    step = replace(
        program,
        forward=halves[1],
        backward=halves[0],
        aliases={name: same.get(other, other) for name, other in program.aliases.items()} | same,
        given=(*program.given, *constants),
    )
    step = mark_overwrites(with_saved(step)) if constants else program
    forms = dict(program.forms)
    forward = tuple(_of_their_own(needed_for(constants, program.forward)[0], constants, program, forms))
    return HoistedProgram(part_of(program, forward=forward, delivered=constants, forms=forms, given=()), step)


def _computed_constants(program: RankProgram, analysis: _Analysis) -> set[str]:
    """Return the names that instructions of forward compute from constants."""
    values = {program.resolve(name) for name in analysis.makers} | {computed_name(n) for n in analysis.fixed}
    computed: set[str] = set()
    for instruction in program.forward:
        steady = isinstance(instruction, Convert) or (
            isinstance(instruction, Compute)
            and isinstance(instruction.target, torch._ops.OpOverload)
            and not is_random(instruction.target)
            and not instruction.writes
        )
        is_constant = all(name in computed or name in analysis.fixed for name in instruction.operands)
        if steady and is_constant and values.issuperset(instruction.results) and not sent_by(instruction):
            computed.update(instruction.results)
    return computed


def _of_their_own(
    forward: Sequence[Instruction], constants: Sequence[str], program: RankProgram, forms: dict[str, Form]
) -> list[Instruction]:
    """Return the instructions that compute constants, each in memory of its own if that takes less."""
    root = memories(forward, program.spmd.graph.source_of)
    of_root: dict[str, list[str]] = {}
    for name in constants:
        if root[name] not in program.spmd.graph.source_of:
            of_root.setdefault(root[name], []).append(name)
    parts = {
        name
        for base, names in of_root.items()
        for name in names
        if sum(forms[part].num_bytes for part in names) < forms[base].num_bytes
        and all(forms[n].is_dense for n in names)
    }
    written: list[Instruction] = []
    for instruction in forward:
        names = {name: f"{name}@whole" for name in instruction.results if name in parts}
        if not names:
            written.append(instruction)
            continue
        written.append(with_results(instruction, [names.get(name, name) for name in instruction.results]))
        for name, whole in names.items():
            forms[whole] = forms[name]
            form = (forms[name],)
            written.append(Compute(_COPY, (Ref(whole),), (), (name,), ((),), form, (None,), instruction.origin))
    return written
