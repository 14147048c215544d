"""A rank's program as an ``nn.Module`` around a ``torch.fx.GraphModule``: ordinary operators on local tensors and,
between them, conversions whose backward is the other column of the table (``runtime.transit``)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.ir import Graph, Ref, map_refs, refs
from shardwise.partition.buckets import Bucket
from shardwise.partition.linears import LinearStep, join_linears
from shardwise.partition.program import LocalOp, Program, overwritable
from shardwise.partition.steps import Conversion
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.hosted import HOST
from shardwise.runtime.linear import OverlappedLinear
from shardwise.runtime.transit import Arrive, Convert, ConvertTogether, Depart, Route


def emit(
    program: Program,
    ranks: Communicator,
    *,
    loss_only: bool = False,
    device: torch.device | None = None,
    traceable: bool = False,
    host: frozenset[str] = frozenset(),
    host_ranks: Communicator | None = None,
) -> fx.GraphModule:
    """The program as a GraphModule.

    It takes the local tensors of ``program.spmd.graph.sources`` in order, and returns (loss or None, outputs, values of
    mutations). With ``loss_only`` there are no outputs, and what only they need (gathering the logits, say) is left
    out. ``traceable``: for torch.compile, which places the waiting for messages by itself. ``host``: the values on the
    host (``runtime.hosted``), which ``host_ranks`` convert; the others are on ``device``.

    The node of a value of the Spmd program has its name as ``meta["value"]``.
    """
    spmd = program.spmd
    graph = fx.Graph()
    root = torch.nn.Module()
    nodes: dict[str, fx.Node] = {}
    may_overwrite = overwritable(program)
    for index, source in enumerate(spmd.graph.sources):
        nodes[source.value] = graph.placeholder(f"source_{index}")
    instructions = list(program.instructions) if traceable else join_linears(program)

    def ranks_of(conversions: tuple[Conversion, ...]) -> Communicator:
        return host_ranks if host_ranks is not None and conversions[0].value in host else ranks

    departures = {} if traceable else _departures(instructions, spmd.graph, ranks_of)
    for bucket, own in departures.items():
        if own.forward.message is None:
            _depart(own, bucket, root, graph, nodes)
    waiting = iter([bucket for bucket, own in departures.items() if own.forward.message is not None])
    _depart_next(waiting, departures, root, graph, nodes)
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Conversion):
            name = f"convert_{index}"
            free = may_overwrite.get(instruction.result, (False, False))
            root.add_module(name, Convert(instruction, spmd.graph, ranks_of((instruction,)), free))
            nodes[instruction.result] = graph.call_module(name, (nodes[instruction.value],))
        elif isinstance(instruction, Bucket):
            name, results = f"convert_{index}", [c.result for c in instruction.conversions]
            route = departures.get(index)
            if route is None:
                own_ranks = ranks_of(instruction.conversions)
                root.add_module(name, ConvertTogether(instruction, spmd.graph, own_ranks))
                arrived = graph.call_module(name, tuple(nodes[c.value] for c in instruction.conversions))
            else:
                if route.forward.message is not None:  # the next one leaves before this one is waited for
                    _depart_next(waiting, departures, root, graph, nodes)
                root.add_module(name, Arrive(route))
                arrived = graph.call_module(name, (nodes[f"flight {index}"], nodes[f"tensors {index}"]))
            for position, result in enumerate(results):
                nodes[result] = graph.call_function(operator.getitem, (arrived, position))
        elif isinstance(instruction, LinearStep):
            nodes[instruction.result] = _emit_linear(instruction, f"linear_{index}", root, graph, nodes, program, ranks)
        else:
            _emit_call(instruction, graph, nodes, device, host)

    for value in spmd.layouts.keys() & nodes.keys():
        nodes[value].meta["value"] = value

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


def _emit_linear(
    step: LinearStep,
    name: str,
    root: torch.nn.Module,
    graph: fx.Graph,
    nodes: dict[str, fx.Node],
    program: Program,
    ranks: Communicator,
) -> fx.Node:
    operands = tuple(nodes[value] for value in (step.x, step.weight, step.bias) if value is not None)
    if step.conversion is None:
        call = graph.call_function(torch.ops.aten.linear.default, operands)
        call.meta["op"], call.meta["source"] = step.product.op, step.product.source
        return call
    root.add_module(name, OverlappedLinear.of(step, program.spmd.graph, ranks))
    return graph.call_module(name, operands)


def _departures(
    instructions: Sequence[LocalOp | Conversion | Bucket | LinearStep],
    values: Graph,
    ranks_of: Callable[[tuple[Conversion, ...]], Communicator],
) -> dict[int, Route]:
    """Position of a bucket of parameters -> its route."""
    return {
        index: Route.of(instruction, values, ranks_of(instruction.conversions))
        for index, instruction in enumerate(instructions)
        if isinstance(instruction, Bucket) and instruction.of_parameters
    }


def _depart_next(
    waiting: Iterator[int], routes: dict[int, Route], root: torch.nn.Module, graph: fx.Graph, nodes: dict[str, fx.Node]
) -> None:
    bucket = next(waiting, None)
    if bucket is not None:
        _depart(routes[bucket], bucket, root, graph, nodes)


def _depart(route: Route, bucket: int, root: torch.nn.Module, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    name = f"depart_{bucket}"
    root.add_module(name, Depart(route))
    left = graph.call_module(name, tuple(nodes[c.value] for c in route.bucket.conversions))
    nodes[f"flight {bucket}"] = graph.call_function(operator.getitem, (left, 0))
    nodes[f"tensors {bucket}"] = graph.call_function(operator.getitem, (left, 1))


def _emit_call(
    local: LocalOp, graph: fx.Graph, nodes: dict[str, fx.Node], device: torch.device | None, host: frozenset[str]
) -> None:
    on_host = any(name in host for name in refs((local.call.args, tuple(value for _, value in local.call.kwargs))))

    def fill(arg: Any) -> Any:
        if isinstance(arg, Ref):
            if on_host and arg.name not in host:
                return graph.call_method("to", (nodes[arg.name], HOST))
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
    else:
        for index, result in enumerate(local.results):
            nodes[result] = graph.call_function(operator.getitem, (call, index))
    for result in local.results if on_host else ():
        nodes[result] = graph.call_method("to", (nodes[result], device))
