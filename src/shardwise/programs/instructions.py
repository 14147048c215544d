"""The instructions of a rank's training step, forward and backward.

Values have names. A name is defined once, and its value never changes afterwards, except by a kernel that declares it
(``Compute.writes``) or an exchange that may use its operand's memory (``overwrites``). Results that share memory with
another value declare this as well (``shares``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from shardwise.graph.ir import Arg, Ref, map_refs, refs
from shardwise.layouts.conversions import Collective
from shardwise.programs.forms import Form
from shardwise.programs.spmd_steps import Conversion, collectives_of

# The purpose of an instruction: results of an operator, cotangents of its inputs, gradients of its parameters, or the
# cast of a source or of its gradient (``programs.casts``).
Part = Literal["forward", "input", "weight", "cast"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The operator that an instruction belongs to, its line in the user's model, and the part of the step. ``again``:
    whether backward recomputes this part of forward."""

    op: str
    source: str
    part: Part
    again: bool = False

    def __str__(self) -> str:
        return f"{self.op} ({self.source}), {self.part}" if self.source else f"{self.op}, {self.part}"


class _SendsNothing:
    __slots__ = ()
    conversions: ClassVar[tuple[Conversion, ...]] = ()
    of_parameters: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False


class _WritesNothing:
    __slots__ = ()
    writes: ClassVar[tuple[str, ...]] = ()


class _HasNoResults(_WritesNothing):
    __slots__ = ()
    results: ClassVar[tuple[str, ...]] = ()
    forms: ClassVar[tuple[Form, ...]] = ()
    shares: ClassVar[tuple[str | None, ...]] = ()


@dataclass(frozen=True)
class Compute(_SendsNothing):
    """A kernel on this rank. ``places``: per result its index path in the value that the target returns (``()``: the
    value itself); ``forms`` and ``shares`` (the name of a value with the same memory, or None): per result; ``writes``:
    operands that it overwrites; ``workspace``: bytes of temporary memory."""

    target: Any
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]
    forms: tuple[Form, ...]
    shares: tuple[str | None, ...]
    origin: Origin
    writes: tuple[str, ...] = ()
    workspace: int = 0

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(refs((self.args, self.kwargs)))

    @property
    def is_view(self) -> bool:
        """Return whether all results are views, and nothing is overwritten."""
        return bool(self.results) and None not in self.shares and not self.writes


@dataclass(frozen=True, slots=True)
class Convert(_WritesNothing):
    """A blocking conversion of one or several values in one direction; several share their messages. ``operands``,
    ``results``: in the order of ``conversions``; ``overwrites``: whether the first message may use the memory of the
    operand."""

    conversions: tuple[Conversion, ...]
    backward: bool
    operands: tuple[str, ...]
    results: tuple[str, ...]
    forms: tuple[Form, ...]
    shares: tuple[str | None, ...]
    origin: Origin
    of_parameters: bool = False
    overwrites: bool = False


@dataclass(frozen=True, slots=True)
class Depart(_HasNoResults):
    """Starts the message of one or several conversions. ``flight``: the name by which ``Arrive`` refers to it."""

    flight: str
    conversions: tuple[Conversion, ...]
    backward: bool
    operands: tuple[str, ...]
    origin: Origin
    of_parameters: bool = False
    overwrites: bool = False


@dataclass(frozen=True, slots=True)
class Arrive(_WritesNothing):
    """Waits for a message and unpacks it."""

    flight: str
    conversions: tuple[Conversion, ...]
    backward: bool
    results: tuple[str, ...]
    forms: tuple[Form, ...]
    shares: tuple[str | None, ...]
    origin: Origin
    of_parameters: bool = False
    operands: ClassVar[tuple[str, ...]] = ()
    overwrites: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Copy(_WritesNothing, _SendsNothing):
    """Copies a value between the device and the host. ``apart``: asynchronously, on its own stream; until it has landed
    no instruction may read the copy, and the original must stay in memory."""

    value: str
    result: str
    to: Literal["host", "device"]
    form: Form
    origin: Origin
    apart: bool = False
    shares: ClassVar[tuple[str | None, ...]] = (None,)

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def results(self) -> tuple[str, ...]:
        return (self.result,)

    @property
    def forms(self) -> tuple[Form, ...]:
        return (self.form,)


@dataclass(frozen=True, slots=True)
class Land(_HasNoResults, _SendsNothing):
    """Waits for an asynchronous copy. ``copy``: its result; ``on_device``: the operand or result on the device."""

    copy: str
    on_device: str
    origin: Origin

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.on_device,)


Instruction = Compute | Convert | Depart | Arrive | Copy | Land
Changed = TypeVar("Changed", bound=Instruction)


def with_operands(instruction: Changed, names: Mapping[str, str], **fields: Any) -> Changed:
    """Return the instruction with the names replaced that it reads, writes to or shares memory with, and with other
    ``fields``."""
    if names.keys().isdisjoint((*instruction.operands, *instruction.writes, *filter(None, instruction.shares))):
        return replace(instruction, **fields) if fields else instruction

    def renamed(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in values)

    if isinstance(instruction, Compute):
        read = map_refs((instruction.args, instruction.kwargs), lambda name: Ref(names.get(name, name)))
        fields |= {"args": read[0], "kwargs": read[1], "writes": renamed(instruction.writes)}
    elif isinstance(instruction, (Convert, Depart)):
        fields["operands"] = renamed(instruction.operands)
    elif isinstance(instruction, Copy):
        fields["value"] = names[instruction.value]
    elif isinstance(instruction, Land):
        fields["on_device"] = names[instruction.on_device]
    if isinstance(instruction, (Compute, Convert, Arrive)):
        fields["shares"] = tuple(None if name is None else names.get(name, name) for name in instruction.shares)
    return replace(instruction, **fields)


def with_results(instruction: Instruction, names: Sequence[str]) -> Instruction:
    """Return the instruction with other names for its results."""
    if isinstance(instruction, Copy):
        return replace(instruction, result=names[0])
    return instruction if isinstance(instruction, (Depart, Land)) else replace(instruction, results=tuple(names))


def converts_only(instruction: Instruction, values: Collection[str]) -> bool:
    """Return whether an instruction is a first conversion of some of these values and of no others. (Results of
    conversions have other names.)"""
    first = instruction.conversions and not instruction.origin.again
    return bool(first) and all(conversion.value in values for conversion in instruction.conversions)


def sent_by(instruction: Instruction) -> tuple[Collective, ...]:
    """Return the collectives that an instruction starts, in order."""
    if isinstance(instruction, (Convert, Depart)):
        return collectives_of(instruction.conversions, backward=instruction.backward)
    return ()


def in_flight(whole: Convert, flight: str) -> tuple[Depart, Arrive]:
    """Return a conversion of one message as its departure and its arrival."""
    message, ends = (flight, whole.conversions, whole.backward), (whole.origin, whole.of_parameters)
    return Depart(*message, whole.operands, *ends), Arrive(*message, whole.results, whole.forms, whole.shares, *ends)


def memories(instructions: Iterable[Instruction], names: Iterable[str] = ()) -> dict[str, str]:
    """Map each name to the name that first had its memory. ``names``: names that exist before the instructions."""
    root = {name: name for name in names}
    for instruction in instructions:
        for name, shared in zip(instruction.results, instruction.shares, strict=True):
            root[name] = name if shared is None else root.get(shared, shared)
    return root


def read_of(instructions: Iterable[Instruction], available: Collection[str]) -> tuple[str, ...]:
    """Return the names among ``available`` that instructions read, in the order in which they are first read."""
    read = dict.fromkeys(name for instruction in instructions for name in instruction.operands)
    return tuple(name for name in read if name in available)
