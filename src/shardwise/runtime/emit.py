"""A rank's program as an ``nn.Module`` around a ``torch.fx.GraphModule``: ordinary operators on local tensors and,
between them, conversions whose backward is the other column of the table."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardwise.graph.ir import Ref, map_refs, refs
from shardwise.layouts.conversions import Move
from shardwise.partition.program import LocalOp, Program
from shardwise.partition.spmd import Conversion
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.moves import run_primitive


class _Convert(torch.autograd.Function):
    """All moves of one conversion on this rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, moves: tuple[Move, ...], ranks: Communicator) -> torch.Tensor:
        ctx.moves, ctx.ranks = moves, ranks
        result = tensor
        for move in moves:
            result = ranks.perform(run_primitive(move.entry.forward, move, result, ranks.coordinates, backward=False))
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        for move in reversed(ctx.moves):
            cotangent = ctx.ranks.perform(
                run_primitive(move.entry.backward, move, cotangent, ctx.ranks.coordinates, backward=True)
            )
        return cotangent, None, None


class Convert(torch.nn.Module):
    """A conversion as a module, so that it prints with its name and layouts."""

    def __init__(self, conversion: Conversion, ranks: Communicator) -> None:
        super().__init__()
        self.conversion, self.ranks = conversion, ranks

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Convert.apply(tensor, self.conversion.moves, self.ranks)
        return result

    def extra_repr(self) -> str:
        return f"{self.conversion.source} -> {self.conversion.target}"


def emit(
    program: Program, ranks: Communicator, *, loss_only: bool = False, device: torch.device | None = None
) -> fx.GraphModule:
    """The program as a GraphModule.

    It takes the local tensors of ``program.spmd.graph.sources`` in order, and returns (loss or None, outputs, values of
    mutations). With ``loss_only`` there are no outputs, and what only they need (gathering the logits, say) is left
    out.
    """
    spmd = program.spmd
    graph = fx.Graph()
    root = torch.nn.Module()
    nodes: dict[str, fx.Node] = {}
    for index, source in enumerate(spmd.graph.sources):
        nodes[source.value] = graph.placeholder(f"source_{index}")
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Conversion):
            name = f"convert_{index}"
            root.add_module(name, Convert(instruction, ranks))
            nodes[instruction.result] = graph.call_module(name, (nodes[instruction.value],))
        else:
            _emit_call(instruction, graph, nodes, device)

    def node(arg: Any) -> Any:
        return map_refs(arg, lambda name: nodes[name])

    graph.output(
        (
            nodes[spmd.loss] if spmd.loss is not None else None,
            () if loss_only else tuple(node(output) for output in spmd.outputs),
            tuple(nodes[value] for _, value in spmd.mutations),
        )
    )
    module = fx.GraphModule(root, graph, "RankProgram")
    if loss_only:
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        module.recompile()
    return module


def _emit_call(local: LocalOp, graph: fx.Graph, nodes: dict[str, fx.Node], device: torch.device | None) -> None:
    def fill(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return nodes[arg.name]
        return [fill(item) for item in arg] if isinstance(arg, tuple) else arg

    args = [fill(arg) for arg in local.call.args]
    kwargs = {key: fill(arg) for key, arg in local.call.kwargs}
    if not any(refs((local.call.args, tuple(value for _, value in local.call.kwargs)))):
        # A graph names no device: what it makes from nothing is made where it runs.
        names = [argument.name for argument in local.call.target._schema.arguments]
        if "device" in names[: len(args)]:
            args[names.index("device")] = device
        elif "device" in names:
            kwargs["device"] = device
    call = graph.call_function(local.call.target, tuple(args), kwargs)
    call.meta["op"], call.meta["source"] = local.op, local.source
    schema = local.call.target._schema.returns
    if len(schema) == 1 and not isinstance(schema[0].type, torch.ListType):
        nodes[local.results[0]] = call
        return
    for index, result in enumerate(local.results):
        nodes[result] = graph.call_function(operator.getitem, (call, index))
