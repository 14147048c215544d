"""Emit a rank's program as two ``torch.fx.GraphModule``s, forward and backward: kernels on local tensors and the
exchanges of ``runtime.transit`` between them. Autograd records nothing inside."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from torch import fx

from shardwise.errors import ShardwiseError
from shardwise.graph.ir import Ref, map_refs
from shardwise.programs.fused_products import FusedProduct
from shardwise.programs.instructions import Arrive, Compute, Convert, Copy, Depart, Instruction, Land, Origin
from shardwise.programs.invariants import check_program
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.cpu_embedding import HOST
from shardwise.runtime.host_copies import StartCopy, WaitForCopy
from shardwise.runtime.transit import Arriving, Converting, Departing, RunFusedProduct


@dataclass(frozen=True)
class Emitted:
    """An emitted program. ``forward``: local source tensors in order, then given values -> tuples (delivered,
    mutations, saved); ``backward``: (saved, a list that it empties; the cotangents present, in order) -> gradients in
    the order of ``program.gradients``; ``writer``: writes parts of it by themselves."""

    program: RankProgram
    forward: fx.GraphModule
    backward: fx.GraphModule
    writer: ModuleWriter


def emit(
    program: RankProgram,
    ranks: Communicator,
    *,
    device: torch.device | None = None,
    on_host: frozenset[str] = frozenset(),
    host_ranks: Communicator | None = None,
) -> Emitted:
    """Check and emit a program. ``on_host``: the values on the host (``runtime.cpu_embedding``), whose conversions
    ``host_ranks`` performs; the others are on ``device``.

    The node of a program value has the value's name as ``meta["value"]``.
    """
    check_program(program)
    writer = ModuleWriter(program, ranks, host_ranks or ranks, device, on_host)
    return Emitted(program, writer.forward(), writer.backward(), writer)


class _ErrorNamingModule(fx.GraphModule):
    """A module whose errors name the operator in which they were raised."""

    def recompile(self) -> Any:
        code = super().recompile()
        of_module: Any = type(self)  # a class of its own
        run = of_module.forward

        def forward(module: _ErrorNamingModule, *args: Any) -> Any:
            try:
                return run(module, *args)
            except Exception as error:
                if (origin := module.origin_of(error, run.__code__)) is not None and not isinstance(
                    error, ShardwiseError
                ):
                    late = isinstance(error, torch.AcceleratorError)  # kernels of a GPU fail behind the host
                    error.add_note(f"noticed in {origin}, or in an operator ahead of it" if late else f"in {origin}")
                raise

        of_module.forward = forward
        return code

    def origin_of(self, error: Exception, code: CodeType) -> Origin | None:
        """Return the operator whose line of ``code`` raised an error."""
        for frame, line in walk_tb(error.__traceback__):
            if frame.f_code is code and self._lineno_map:
                at = self._lineno_map.get(line - self._prologue_start)
                origin = None if at is None else list(self.graph.nodes)[at].meta.get("origin")
                return origin if isinstance(origin, Origin) else None
        return None


class Boxed:
    """An instruction target that takes its operands in a list and empties it, so that the caller keeps no reference
    while it runs."""


def box_operands(*operands: Any) -> list[Any]:
    return list(operands)


def take_all(values: list[Any]) -> tuple[Any, ...]:
    """Empty a list and return its items, so that the caller keeps no reference to them."""
    taken = tuple(values)
    values.clear()
    return taken


fx.wrap("take_all")


@dataclass
class ModuleWriter:
    """Emits a program, or a part of it by itself. Fields: the arguments of ``emit``."""

    program: RankProgram
    ranks: Communicator
    host_ranks: Communicator
    device: torch.device | None
    on_host: frozenset[str]
    departing: dict[str, Departing] = field(init=False, default_factory=dict)
    copying: dict[str, StartCopy] = field(init=False, default_factory=dict)

    def forward(self) -> fx.GraphModule:
        self.root, self.graph, self.nodes = torch.nn.Module(), fx.Graph(), dict[str, fx.Node]()
        for index, source in enumerate(self.program.spmd.graph.sources):
            self.nodes[source.value] = self.graph.placeholder(f"source_{index}")
        for index, name in enumerate(self.program.given):
            self.nodes[name] = self.graph.placeholder(f"given_{index}")
        self._write(self.program.forward)
        delivered = tuple(self.nodes[name] for name in self.program.delivered)
        written = tuple(self.nodes[name] for _, name in self.program.mutations)
        saved = tuple(self.nodes[name] for name in self.program.saved)
        return self._module("Forward", (delivered, written, saved))

    def backward(self) -> fx.GraphModule:
        self.root, self.graph, self.nodes = torch.nn.Module(), fx.Graph(), dict[str, fx.Node]()
        saved = self.graph.placeholder("saved")
        for index, name in enumerate(name for name in self.program.cotangents if name is not None):
            self.nodes[name] = self.graph.placeholder(f"cotangent_{index}")
        taken = self.graph.call_function(take_all, (saved,))
        for index, name in enumerate(self.program.saved):
            self.nodes[name] = self.graph.call_function(operator.getitem, (taken, index))
        self._write(self.program.backward)
        return self._module("Backward", tuple(self.nodes[name] for name in self.program.gradients.values()))

    def kernels(
        self, parts: Sequence[tuple[object, Sequence[Instruction]]], operands: Sequence[str], results: Sequence[str]
    ) -> fx.GraphModule:
        """Emit some instructions: operands -> results. ``parts``: (mark, instructions); their nodes have the mark as
        ``meta["custom"]["section"]``."""
        self.root, self.graph, self.nodes = torch.nn.Module(), fx.Graph(), dict[str, fx.Node]()
        for index, operand in enumerate(operands):
            self.nodes[operand] = self.graph.placeholder(f"operand_{index}")
        count = 0
        for mark, instructions in parts:
            before = len(self.graph.nodes)
            self._write(instructions, count)
            count += len(instructions)
            for node in list(self.graph.nodes)[before:]:
                node.meta["custom"] = {"section": mark}
        return self._module("Kernels", tuple(self.nodes[name] for name in results))

    def _module(self, name: str, output: Any) -> fx.GraphModule:
        for value, node in self.nodes.items():
            node.meta["value"] = value
        self.graph.output(output)
        return _ErrorNamingModule(self.root, self.graph, name)

    def _write(self, instructions: Sequence[Instruction], first: int = 0) -> None:
        for index, instruction in enumerate(instructions, first):
            if isinstance(instruction, Compute):
                self._compute(index, instruction)
            elif isinstance(instruction, Convert):
                settings = self.program.spmd.graph, self._ranks_of(instruction)
                if isinstance(instruction, FusedProduct):
                    module: Converting = RunFusedProduct(instruction, *settings)
                else:
                    module = Converting(instruction, *settings)
                converted = self._call_module(f"convert_{index}", module, instruction.operands)
                self._name(converted, instruction.results, single=len(instruction.results) == 1)
            elif isinstance(instruction, Depart):
                departing = Departing(instruction, self.program.spmd.graph, self._ranks_of(instruction))
                self.departing[instruction.flight] = departing
                self.nodes[instruction.flight] = self._call_module(f"depart_{index}", departing, instruction.operands)
            elif isinstance(instruction, Arrive):
                arriving = Arriving(instruction, self.departing.pop(instruction.flight))
                arrived = self._call_module(f"arrive_{index}", arriving, (instruction.flight,))
                self._name(arrived, instruction.results, single=False)
            elif isinstance(instruction, Land):
                self._call_module(
                    f"land_{index}", WaitForCopy(self.copying.pop(instruction.copy)), (instruction.on_device,)
                )
            else:
                self._copy(index, instruction)

    def _ranks_of(self, instruction: Convert | Depart) -> Communicator:
        return self.host_ranks if instruction.conversions[0].value in self.on_host else self.ranks

    def _call_module(self, name: str, module: torch.nn.Module, operands: Sequence[str]) -> fx.Node:
        self.root.add_module(name, module)
        return self.graph.call_module(name, tuple(self.nodes[operand] for operand in operands))

    def _name(self, node: fx.Node, results: Sequence[str], *, single: bool) -> None:
        for position, result in enumerate(results):
            self.nodes[result] = node if single else self.graph.call_function(operator.getitem, (node, position))

    def _copy(self, index: int, copy: Copy) -> None:
        if copy.apart:
            self.copying[copy.result] = module = StartCopy(copy.to, self.device)
            self.nodes[copy.result] = self._call_module(f"copy_{index}", module, (copy.value,))
            return
        to = HOST if copy.to == "host" else self.device
        self.nodes[copy.result] = self.graph.call_method("to", (self.nodes[copy.value], to))

    def _compute(self, index: int, instruction: Compute) -> None:
        target, operands = instruction.target, instruction.operands
        device = HOST if self.on_host.intersection(instruction.results) else self.device
        args = [self._fill(arg, device) for arg in instruction.args]
        kwargs = {key: self._fill(arg, device) for key, arg in instruction.kwargs}
        if isinstance(target, Boxed):
            self.root.add_module(f"section_{index}", _Opaque(target))
            call = self.graph.call_module(f"section_{index}", (self.graph.call_function(box_operands, tuple(args)),))
        elif not isinstance(target, torch._ops.OpOverload):  # autograd inside (``programs.vjp``)
            self.root.add_module(f"opaque_{index}", _Opaque(target))
            call = self.graph.call_module(f"opaque_{index}", tuple(args))
        else:
            if not operands:  # graphs name no device: factory calls run on the program's
                names = [argument.name for argument in target._schema.arguments]
                if "device" in names[: len(args)]:
                    args[names.index("device")] = device
                elif "device" in names:
                    kwargs["device"] = device
            call = self.graph.call_function(target, tuple(args), kwargs)
        call.meta["origin"] = instruction.origin
        call.meta["index"] = index  # in its list
        taken: dict[tuple[int, ...], fx.Node] = {(): call}
        for result, place in zip(instruction.results, instruction.places, strict=True):
            for depth in range(1, len(place) + 1):
                if place[:depth] not in taken:
                    outer = taken[place[: depth - 1]]
                    taken[place[:depth]] = self.graph.call_function(operator.getitem, (outer, place[depth - 1]))
            self.nodes[result] = taken[place]

    def _fill(self, arg: Any, device: torch.device | None) -> Any:
        if isinstance(arg, tuple):
            return [self._fill(item, device) for item in arg]
        if isinstance(arg, torch.device):  # of the traced tensors
            return device
        return map_refs(arg, lambda name: self.nodes[name]) if isinstance(arg, Ref) else arg


class _Opaque(torch.nn.Module):
    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = target

    def forward(self, *args: Any) -> Any:
        return self.target(*args)
