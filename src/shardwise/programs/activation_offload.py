"""Activation offloading: values that backward reads are kept in host memory between forward and backward.

A value is copied to the host right after forward computes it, while the following kernels run. It is copied back ahead
of the backward that reads it. At most two copies are in flight: a third one starts only after the first has landed, and
while backward waits for one value the next one is copied. This bounds the extra device memory that copies hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.programs.forms import Form
from shardwise.programs.instructions import (
    Compute,
    Copy,
    Instruction,
    Land,
    Origin,
    memories,
    with_operands,
    with_results,
)
from shardwise.programs.rank_program import RankProgram

ON_HOST = "@waiting"  # name suffix of a copy on the host
BACK = "@back"  # name suffix of a value that was copied back, and of views of it
SMALLEST_BYTES = 1 << 16  # smaller values stay on the device: starting a copy takes longer than the copy
ON_THEIR_WAY = 2


@dataclass(frozen=True, slots=True)
class _OffloadedMemory:
    """A memory that is offloaded to the host. ``value``: the copied value; ``views``: positions in forward of the views
    of it that backward reads; ``origin``: origin of the kernel that allocates the memory."""

    value: str
    views: tuple[int, ...]
    origin: Origin


def offloaded(program: RankProgram) -> RankProgram:
    """Return the program with results of the ``offloaded`` operators kept on the host between forward and backward.
    Only dense results that backward reads are offloaded, and only if nothing else holds their memory."""
    waiting = _waiting(program)
    if not waiting:
        return program
    forms = dict(program.forms)
    for item in waiting:
        forms[item.value + ON_HOST] = forms[item.value + BACK] = program.forms[item.value]
    forward = _leaving(program, waiting)
    backward = _coming(program, waiting, forms)
    gone = {name for item in waiting for name in (item.value, *_names(program.forward, item.views))}
    saved = dict.fromkeys(name for name in program.saved if name not in gone)
    saved.update(dict.fromkeys(item.value + ON_HOST for item in waiting))
    return replace(program, forward=forward, backward=backward, saved=tuple(saved), forms=forms)


def offloaded_operators(program: RankProgram) -> frozenset[str]:
    """Return the operators whose results a program moves to the host."""
    return frozenset(i.origin.op for i in program.forward if isinstance(i, Copy) and i.apart)


def _waiting(program: RankProgram) -> tuple[_OffloadedMemory, ...]:
    """Return the memories to offload, in the order in which forward computes them."""
    forward, moved = program.forward, program.spmd.lifetimes.offloaded
    maker = {name: i for i, instruction in enumerate(forward) for name in instruction.results}
    root = memories(forward, program.spmd.graph.source_of)
    stay = {root[name] for name in (*program.spmd.graph.source_of, *program.ends)}
    read: dict[str, list[str]] = {}
    for name in program.saved:
        if name in maker and root[name] not in stay:
            read.setdefault(root[name], []).append(name)
    waiting = []
    for memory, names in read.items():
        producer = forward[maker[memory]]
        if not isinstance(producer, Compute) or producer.origin.op not in moved or producer.origin.part != "forward":
            continue
        value = names[0] if len(names) == 1 else memory
        views = _views(forward, maker, names, value)
        if views is not None and program.forms[value].is_dense and program.forms[value].num_bytes >= SMALLEST_BYTES:
            waiting.append(_OffloadedMemory(value, views, producer.origin))
    return tuple(sorted(waiting, key=lambda item: maker[item.value]))


def _views(
    forward: Sequence[Instruction], maker: Mapping[str, int], names: Sequence[str], value: str
) -> tuple[int, ...] | None:
    """Return the positions of the views that make ``names`` from ``value``, in order; None if views are not enough."""
    positions: set[int] = set()
    for name in names:
        while name != value:
            instruction = forward[maker[name]]
            shared = dict(zip(instruction.results, instruction.shares, strict=True))[name]
            is_view = isinstance(instruction, Compute) and not instruction.writes
            if not is_view or shared is None or set(instruction.operands) != {shared}:
                return None
            positions.add(maker[name])
            name = shared
    return tuple(sorted(positions))


def _names(forward: Sequence[Instruction], positions: Sequence[int]) -> Iterator[str]:
    for i in positions:
        yield from forward[i].results


# -- forward -----------------------------------------------------------------------------------------------------------


def _leaving(program: RankProgram, waiting: Sequence[_OffloadedMemory]) -> tuple[Instruction, ...]:
    """Return forward in which the copy of each value starts after the last kernel of its operator."""
    last_of = {i.origin.op: at for at, i in enumerate(program.forward) if isinstance(i, Compute)}
    maker = {name: i for i, instruction in enumerate(program.forward) for name in instruction.results}
    leaves: dict[int, list[Copy]] = {}
    for item in waiting:
        form = program.forms[item.value]
        at = max(maker[item.value], last_of.get(item.origin.op, 0))  # later kernels of the operator may write to it
        leaves.setdefault(at, []).append(Copy(item.value, item.value + ON_HOST, "host", form, item.origin, apart=True))
    listed: list[Instruction] = []
    away: list[Copy] = []
    for i, instruction in enumerate(program.forward):
        listed.append(instruction)
        for copy in leaves.get(i, ()):
            if len(away) == ON_THEIR_WAY:
                listed.append(_landed(away.pop(0)))
            listed.append(copy)
            away.append(copy)
    return (*listed, *map(_landed, away))


def _landed(copy: Copy) -> Land:
    return Land(copy.result, copy.value if copy.to == "host" else copy.result, copy.origin)


# -- backward ----------------------------------------------------------------------------------------------------------


def _coming(
    program: RankProgram, waiting: Sequence[_OffloadedMemory], forms: dict[str, Form]
) -> tuple[Instruction, ...]:
    """Return backward in which the copy of a value starts when backward waits for the one before it. The forms of
    recomputed views are added to ``forms``."""
    owner = {name: item for item in waiting for name in (item.value, *_names(program.forward, item.views))}
    first: dict[str, int] = {}
    for i, instruction in enumerate(program.backward):
        for name in instruction.operands:
            if name in owner:
                first.setdefault(owner[name].value, i)
    order = sorted((item for item in waiting if item.value in first), key=lambda item: first[item.value])
    needed: dict[int, list[int]] = {}
    for number, item in enumerate(order):
        needed.setdefault(first[item.value], []).append(number)
    back: dict[str, str] = {}
    copies = []
    for item in order:
        form, origin = program.forms[item.value], program.backward[first[item.value]].origin
        copies.append(Copy(item.value + ON_HOST, item.value + BACK, "device", form, origin, apart=True))
    listed: list[Instruction] = []
    for i, instruction in enumerate(program.backward):
        for number in needed.get(i, ()):
            listed += copies[number : number + ON_THEIR_WAY] if number == 0 else copies[number + 1 : number + 2]
            listed.append(_landed(copies[number]))
            back[order[number].value] = copies[number].result
            for position in order[number].views:
                view = program.forward[position]
                rebuilt = with_operands(view, back)
                rebuilt = with_results(rebuilt, [name + BACK for name in view.results])
                rebuilt = replace(rebuilt, origin=replace(view.origin, again=True))
                back.update(zip(view.results, rebuilt.results, strict=True))
                forms.update(zip(rebuilt.results, rebuilt.forms, strict=True))
                listed.append(rebuilt)
        listed.append(with_operands(instruction, back))
    return tuple(listed)
