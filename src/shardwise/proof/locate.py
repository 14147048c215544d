"""Locates the fault in a wrong plan: the first operator whose result differs from one device or, if all results are
right, the first wrong gradient in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import PARTIAL_KINDS, Layout
from shardwise.programs.instructions import Compute, Convert, Depart
from shardwise.programs.rank_program import RankProgram
from shardwise.proof.errors_by_tensor import TensorError, magnitude, relative_difference
from shardwise.proof.ranks import VirtualRanks, VirtualStep
from shardwise.proof.runs import OneDevice
from shardwise.proof.virtual import reduce_tensors, run_forward
from shardwise.runtime.local_shards import shard


def first_wrong(ranks: VirtualRanks, wrong: Sequence[TensorError], tolerance: float) -> str:
    """Return operator, line and rank at which the first micro-batch of a program goes wrong first, or "". ``wrong``:
    the differences that are no rounding."""
    if not wrong:
        return ""
    ranks.adopt(OneDevice(ranks.start))
    step = VirtualStep(ranks, 0)
    parts = ranks.first.cut.parts
    expected: dict[str, Tensor] = {}
    for stage, (part, spmd) in enumerate(zip(parts, ranks.first.spmds, strict=True)):
        taken = {s.value: expected[s.value] for s in part.sources if s.kind == "activation"}
        given = ranks.start.given(part, 0, step.whole[0]) | taken
        sources = ranks.start.bindings(part, ranks.full, 0, given)
        received = [
            {name: shard(x, spmd.layouts[name], coordinates) for name, x in taken.items()}
            for coordinates in ranks.clusters[stage].coordinates
        ]
        programs = list(map(_without_overwrites, ranks.programs[step.sizes[0]][stage]))
        values = run_forward(ranks.clusters[stage], programs, step.bindings(stage, spmd, 0, received))
        with torch.no_grad():
            of_model = interpret(part, sources)
        if fault := _wrong_result(ranks, stage, of_model, values, sources, tolerance):
            return fault
        expected |= of_model
    gradients = {d.name: d.rank for d in wrong if d.kind == "gradient"}
    return next(filter(None, (_wrong_gradient(part, gradients) for part in reversed(parts))), "")


def _wrong_result(
    ranks: VirtualRanks,
    stage: int,
    of_model: Mapping[str, Tensor],
    values: Sequence[Mapping[str, Tensor]],
    sources: Mapping[str, Tensor],
    tolerance: float,
) -> str:
    """Return the first wrong result of a stage, or "". ``of_model``: the values of the graph without lowerings, to
    detect wrong lowerings; ``values``: of every rank, after the forward of ``_without_overwrites``; ``sources``: value
    name -> the whole tensor."""
    spmd, part = ranks.first.spmds[stage], ranks.first.cut.parts[stage]
    programs = ranks.programs[ranks.passes.sizes[0]][stage]
    with torch.no_grad():
        expected = interpret(spmd.graph, sources)
    computed = (i for program in programs for i in program.forward if isinstance(i, Compute))
    written = {name for instruction in computed for name in instruction.writes}  # the memory holds another value now
    for op in spmd.graph.ops:
        for name in op.results:
            results = [
                rank_values.get(program.resolve(name)) for rank_values, program in zip(values, programs, strict=True)
            ]
            if any(tensor is None for tensor in results) or any(p.resolve(name) in written for p in programs):
                continue
            largest = max(
                [magnitude(expected[name]), *(1e-3 * magnitude(expected[operand]) for operand in op.operands)]
            )
            original = part.producer.get(name, op)
            if not relative_difference(of_model.get(name, expected[name]), expected[name], largest) <= tolerance:
                return f"the result of {original.name} ({original.source}): its lowering differs, on every rank"
            layout = spmd.layouts[name]
            whole = _summed(layout, [tensor for tensor in results if tensor is not None])
            for device, (rank, tensor) in enumerate(zip(ranks.plan.stages[stage].placement.ranks, whole, strict=True)):
                want = shard(expected[name], replace(layout, states=()), spmd.mesh.coordinates(device))
                if not relative_difference(want, tensor, largest) <= tolerance:
                    return f"the result of {op.name} ({op.source}) on rank {rank}"
    return ""


def _wrong_gradient(graph: Graph, wrong: Mapping[str, int]) -> str:
    reads = {operand: position for position, op in enumerate(graph.ops) for operand in op.operands}
    values = {s.names[0]: reads[s.value] for s in graph.sources if s.names[0] in wrong and s.value in reads}
    if not values:
        return ""
    name = max(values, key=values.__getitem__)
    op = graph.ops[values[name]]
    return f"the gradient of {name}, which {op.name} reads ({op.source}), on rank {wrong[name]}"


def _without_overwrites(program: RankProgram) -> RankProgram:
    """Return the program with exchanges that do not overwrite their operands, so that these can be inspected later."""
    forward = (replace(i, overwrites=False) if isinstance(i, (Convert, Depart)) else i for i in program.forward)
    return replace(program, forward=tuple(forward))


def _summed(layout: Layout, shards: Sequence[Tensor]) -> list[Tensor]:
    """Reduce a partial value over its partial axes and return the result of each rank."""
    whole = list(shards)
    for state, kind in PARTIAL_KINDS.items():
        axes = tuple(axis for axis, on_axis in layout.states if on_axis == state)
        if axes:
            groups = [layout.mesh.group(axes, rank) for rank in range(len(whole))]
            whole = [reduce_tensors([whole[member] for member in group], kind) for group in groups]
    return whole
