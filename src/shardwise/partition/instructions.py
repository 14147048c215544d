"""The instructions of a rank's training step: what each calls, uses and makes, which of them are needed, how long a
value lives and which messages leave early. Memory (``memory``) and time (``simulate``) walk over the same list.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.graph.ir import Arg, Ref, refs
from shardwise.partition.buckets import Bucket
from shardwise.partition.linears import LinearStep, join_linears
from shardwise.partition.program import LocalOp, Program
from shardwise.partition.spmd import Spmd, conversions_of
from shardwise.partition.steps import Conversion

Instruction = LocalOp | Conversion | Bucket | LinearStep


def call_of(
    instruction: LocalOp | LinearStep,
) -> tuple[object, tuple[Arg, ...], tuple[tuple[str, Arg], ...], tuple[str, ...]]:
    """Target, args, kwargs and results."""
    if isinstance(instruction, LocalOp):
        call = instruction.call
        return call.target, call.args, call.kwargs, instruction.results
    own = (instruction.x, instruction.weight, instruction.bias)
    args = tuple(Ref(name) for name in own if name is not None)
    return instruction.product.call.target, args, (), (instruction.result,)


def operator_of(instruction: Instruction) -> str:
    """The operator that an instruction belongs to."""
    if isinstance(instruction, LocalOp):
        return instruction.op
    if isinstance(instruction, LinearStep):
        return instruction.product.op
    return conversions_of(instruction)[0].op


def _uses(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, (Conversion, Bucket)):
        return tuple(conversion.value for conversion in conversions_of(instruction))
    _, args, kwargs, _ = call_of(instruction)
    return tuple(refs((args, tuple(value for _, value in kwargs))))


def _makes(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, (Conversion, Bucket)):
        return tuple(conversion.result for conversion in conversions_of(instruction))
    return call_of(instruction)[3]


def needed_instructions(program: Program) -> list[Instruction]:
    """Those that the loss or a mutation needs: a training step computes no other outputs. Linear layers are joined."""
    instructions, spmd = join_linears(program), program.spmd
    wanted = {value for _, value in spmd.mutations}
    if spmd.loss is not None:
        wanted.add(spmd.loss)
    else:
        wanted.update(refs(spmd.outputs))
    found: list[Instruction] = []
    for instruction in reversed(instructions):
        if wanted.intersection(_makes(instruction)):
            wanted.update(_uses(instruction))
            found.append(instruction)
    return found[::-1]


def last_uses(instructions: Sequence[Instruction], spmd: Spmd) -> dict[int, list[str]]:
    """Position -> the values that nothing uses after it. Sources, the loss and what is written back stay."""
    last: dict[str, int] = {}
    for index, instruction in enumerate(instructions):
        last.update(dict.fromkeys((*_uses(instruction), *_makes(instruction)), index))
    stay = {*spmd.graph.source_of, spmd.loss, *(value for _, value in spmd.mutations)}
    found: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in stay:
            found.setdefault(index, []).append(name)
    return found


def departures(instructions: Sequence[Instruction]) -> dict[int, int | None]:
    """Position of a bucket of parameters that sends a message in forward -> that of the next, which leaves before this
    one is waited for. The first leaves at the start."""
    sends = [
        i for i, own in enumerate(instructions) if isinstance(own, Bucket) and own.of_parameters and own.collectives()
    ]
    return dict(zip(sends, [*sends[1:], None], strict=True)) if sends else {}
