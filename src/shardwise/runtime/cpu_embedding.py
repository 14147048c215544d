"""Keep embedding tables in CPU memory while the rest of the program runs on a device.

Such a parameter, its gradient and its optimizer states are CPU tensors, and its conversions run over gloo. Indices are
copied to the CPU and the looked-up rows back to the device, so only lookups may read the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from shardwise.errors import ShardwiseError
from shardwise.graph.ir import refs
from shardwise.programs.buckets import Bucket
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Arrive, Compute, Copy, Depart, Instruction, with_operands
from shardwise.programs.program import LocalOp, LocalProgram
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.spmd import conversions_of
from shardwise.rules.local_kernels import EMBEDDING_ROWS, INDEX_SELECT_ROWS

aten = torch.ops.aten

LOOKUPS = frozenset(
    {
        aten.embedding.default,
        aten.embedding_bag.default,
        aten.embedding_bag.padding_idx,
        aten.index_select.default,
        EMBEDDING_ROWS,
        INDEX_SELECT_ROWS,
    }
)
HOST = torch.device("cpu")


def matching_parameters(module: torch.nn.Module, patterns: Iterable[str]) -> frozenset[str]:
    """Return the names of the parameters that match any of the patterns (``*`` matches anything), including all names
    of tied ones. Raises ShardwiseError for a pattern that matches none."""
    if isinstance(patterns, str):
        fix = f"host=({patterns!r},)"
        raise ShardwiseError(f"host is a sequence of parameter names or patterns, not {patterns!r}", fix=fix)
    named = dict(module.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for pattern in patterns:
        matches = [name for name in named if fnmatchcase(name, pattern)]
        if not matches:
            near = get_close_matches(pattern, list(named), 1)
            fix = f"did you mean {near[0]}?" if near else f"the parameters are {', '.join(list(named)[:8])}"
            raise ShardwiseError(f"host: no parameter is called {pattern}", fix=fix)
        chosen.update(id(named[name]) for name in matches)
    return frozenset(name for name, parameter in named.items() if id(parameter) in chosen)


def place_on_cpu(program: LocalProgram, names: frozenset[str]) -> tuple[LocalProgram, frozenset[str]]:
    """Place some parameters on the host, and split their conversions from shared buckets. Return the program and the
    names of its values on the host. Raises ShardwiseError if an operator that is no lookup reads one, or the module
    returns one."""
    spmd = program.spmd
    values = {source.value for source in spmd.graph.sources if names.intersection(source.names)}
    name_of = {value: spmd.graph.source_of[value].names[0] for value in values}
    if not values:
        return program, frozenset()
    instructions: list[Any] = []
    for instruction in program.instructions:
        for conversion in () if isinstance(instruction, LocalOp) else conversions_of(instruction):
            if conversion.value in values:
                values.add(conversion.result)
                name_of[conversion.result] = name_of[conversion.value]
        if isinstance(instruction, LocalOp):
            _check(instruction, name_of)
        instructions.extend(_split_bucket(instruction, values) if isinstance(instruction, Bucket) else [instruction])
    returned = [spmd.loss, *refs(spmd.outputs), *(value for _, value in spmd.mutations)]
    for value in returned:
        if value in values:
            raise ShardwiseError(
                f"{name_of[value]} is kept on the host, but the module returns it",
                fix="return the looked-up rows, or remove it from host=",
            )
    return replace(program, instructions=tuple(instructions)), frozenset(values)


def with_copies(program: RankProgram, on_host: frozenset[str]) -> tuple[RankProgram, frozenset[str]]:
    """Insert copies between device and host: operators that read a table run on the host, forward and backward, and
    their results are copied to the device where needed. Return the program and the names of all values on the host."""
    if not on_host:
        return program, on_host
    lookups = {
        instruction.origin.op
        for instruction in program.forward
        if isinstance(instruction, Compute) and on_host.intersection(instruction.operands)
    }
    placing = _CpuAssignment(program.spmd.layouts, lookups, set(on_host), dict(program.forms))
    forward = placing.through(program.forward, program.ends)
    backward = placing.through(program.backward, (), mark="'")
    return replace(program, forward=forward, backward=backward, forms=placing.forms), frozenset(placing.on_host)


@dataclass
class _CpuAssignment:
    """Assigns instructions to host or device. ``on_host``: names of values on the host; ``values``: names of the SPMD
    program; ``forms``: of all names, extended by those of copies."""

    values: Collection[str]
    lookups: set[str]
    on_host: set[str]
    forms: dict[str, Form]

    def through(
        self, instructions: Sequence[Instruction], delivered: Sequence[str], mark: str = ""
    ) -> tuple[Instruction, ...]:
        """Return a list of instructions with copies. ``mark``: suffix of this list's copies."""
        self.mark = mark
        self.copies: dict[str, str] = {}  # name -> that of its copy on the other side
        self.placed: list[Instruction] = []
        for instruction in instructions:
            if isinstance(instruction, Compute):
                self._compute(instruction)
                continue
            if self.on_host.intersection(instruction.operands):
                self.on_host.update(instruction.results)
                if isinstance(instruction, Depart):
                    self.on_host.add(instruction.flight)
            elif isinstance(instruction, Arrive) and instruction.flight in self.on_host:
                self.on_host.update(instruction.results)
            self.placed.append(instruction)
        assert not self.on_host.intersection(delivered), "results of lookups return to the device"
        return tuple(self.placed)

    def _compute(self, instruction: Compute) -> None:
        here = instruction.origin.op in self.lookups
        forms = dict(zip(instruction.results, instruction.forms, strict=True))
        moved = {
            name: self._copied(name, instruction) for name in instruction.operands if (name in self.on_host) != here
        }
        if moved:
            instruction = with_operands(instruction, moved)
        if not here:
            self.placed.append(instruction)
            return
        if instruction.origin.part != "forward":
            self.on_host.update(instruction.results)
            self.placed.append(instruction)
            return
        back = [name for name in instruction.results if name in self.values]  # values that the device may read
        names = {name: f"{name}@host" if name in back else name for name in instruction.results}
        self.forms.update({names[name]: forms[name] for name in back})
        self.on_host.update(names.values())
        self.copies.update({name: names[name] for name in back})
        self.placed.append(replace(instruction, results=tuple(names.values())))
        self.placed += [Copy(names[name], name, "device", forms[name], instruction.origin) for name in back]

    def _copied(self, name: str, instruction: Compute) -> str:
        if name not in self.copies:
            to_host = name not in self.on_host
            side: Literal["host", "device"] = "host" if to_host else "device"
            self.copies[name] = copied = f"{name}@{side}{self.mark}"
            self.forms[copied] = self.forms[name]
            self.placed.append(Copy(name, copied, side, self.forms[name], instruction.origin))
            if to_host:
                self.on_host.add(copied)
        return self.copies[name]


def _split_bucket(bucket: Bucket, values: set[str]) -> Iterator[Bucket]:
    for on_host in (True, False):
        conversions = tuple(c for c in bucket.conversions if (c.value in values) == on_host)
        if conversions:
            yield replace(bucket, conversions=conversions)


def _check(local: LocalOp, name_of: dict[str, str]) -> None:
    names = [*refs((local.call.args, tuple(value for _, value in local.call.kwargs)))]
    read = [name for name in names if name in name_of]
    if read and (local.call.target not in LOOKUPS or names[:1] != read):
        raise ShardwiseError(
            f"{name_of[read[0]]} is kept on the host, but {local.call.target} computes with it on the device",
            op=local.op,
            source=local.source,
            fix="only lookups (embedding, embedding_bag, index_select) can read a table on the host: remove it "
            "from host=, or untie it",
        )


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device for exchanging a number about these tensors: a non-CPU one if any tensor is on one."""
    devices = {tensor.device for tensor in tensors}
    return next((device for device in devices if device != HOST), HOST)
