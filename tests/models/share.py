"""Compute the share of a model's FLOPs and parameters that a plan really splits.

An operator that runs whole on every device is correct, but saves nothing. Over N devices, with ``whole`` operations in
the model and ``busiest`` on the device that does most, the share is

    (1 - busiest / whole) / (1 - 1 / N)

It is 1 if every operator is divided by N, and 0 if every device does everything. The same formula measures the
parameters, over the axes that do not split the inputs: data parallelism keeps parameters whole on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from shardwise.costs.flops import FLOPS, Shapes, flops_of
from shardwise.graph.ir import Graph
from shardwise.layouts.layout import Atom, Layout
from shardwise.layouts.mesh import Mesh
from shardwise.plans.bind import program_of
from shardwise.plans.plan import Plan
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import OpStep
from shardwise.rules.rule import base_name
from shardwise.rules.tables import rule_of


@dataclass(frozen=True, slots=True)
class Unsplit:
    """An operator or a parameter that is not divided over all devices.

    ``of_total``: its part of the model's FLOPs (or parameter bytes). ``lost``: its reduction of the share. ``reason``:
    the axes that leave it whole, or the sizes that do not divide.
    """

    name: str
    of_total: float
    lost: float
    reason: str


@dataclass(frozen=True, slots=True)
class BytesSent:
    """Bytes that the busiest device sends in a step, with the bandwidth-optimal algorithm of every collective.

    ``delivered``: bytes that return whole outputs (logits, for example) to the user and that store buffers. ``forward``
    is the rest of the forward pass.
    """

    forward: float
    backward: float
    delivered: float


@dataclass(frozen=True)
class SplitShare:
    """The split shares of a plan. ``flops`` and ``parameters`` are from 0 to 1, or None if there is nothing to split
    over (one device; only data axes). ``without_rule``: the operators that run unsplit because they have no rule; the
    FLOPs may lack them. Unsplit items are in the order of their loss, the worst first.
    """

    mesh: Mesh
    data_axes: tuple[str, ...]
    num_operators: int
    without_rule: tuple[str, ...]
    flops: float | None
    parameters: float | None
    operators_unsplit: tuple[Unsplit, ...]
    parameters_unsplit: tuple[Unsplit, ...]
    bytes_sent: BytesSent


def share_of_plan(plan: Plan, graph: Graph) -> SplitShare:
    """Return the share that a plan splits. ``graph``: the captured model, which may have meta tensors.

    Raises PlanError if the plan is for another model.
    """
    return split_share(program_of(plan, graph))


def split_share(spmd: SpmdProgram, *, data_axes: tuple[str, ...] | None = None) -> SplitShare:
    """Return the share that a program splits. ``data_axes``: the sub-axes that need not split parameters; by default
    those that split the inputs."""
    mesh, graph = spmd.mesh, spmd.graph
    if data_axes is None:
        inputs = [spmd.layouts[source.value] for source in graph.sources if source.kind == "input"]
        data_axes = tuple(axis for axis in mesh.sub_axes if any(axis in layout.positions for layout in inputs))
    flops, operators_unsplit = _flops(spmd)
    parameters, parameters_unsplit = _parameters(spmd, data_axes)
    return SplitShare(
        mesh=mesh,
        data_axes=data_axes,
        num_operators=len(graph.ops),
        without_rule=tuple(op.name for op in graph.ops if rule_of(op, graph) is None),
        flops=flops,
        parameters=parameters,
        operators_unsplit=operators_unsplit,
        parameters_unsplit=parameters_unsplit,
        bytes_sent=_bytes_sent(spmd),
    )


def _flops(spmd: SpmdProgram) -> tuple[float | None, tuple[Unsplit, ...]]:
    """Return the share of the FLOPs, and the operators that are not fully split. Equal operators are computed once."""
    mesh = spmd.mesh
    steps = [step for step in spmd.steps if isinstance(step, OpStep) and step.placed.op.target in FLOPS]
    kinds = {_kind(step): step for step in steps}
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    whole: dict[object, int] = {}
    local: dict[object, list[int]] = {}
    for kind, step in kinds.items():
        op = step.placed.op
        whole[kind] = flops_of(op, _shapes(step.operand_layouts), _shapes(step.result_layouts))
        local[kind] = [
            flops_of(op, _local_shapes(step.operand_layouts, at), _local_shapes(step.result_layouts, at))
            for at in coordinates
        ]
    count = Counter(map(_kind, steps))
    total = sum(whole[kind] * times for kind, times in count.items())
    busiest = max(sum(local[kind][rank] * times for kind, times in count.items()) for rank in range(mesh.num_devices))
    scale = _scale(total, mesh.num_devices)
    unsplit = [
        Unsplit(step.placed.op.name, whole[kind] / total, lost, _reason_of_step(step, mesh))
        for step in steps
        if (lost := scale * (max(local[kind := _kind(step)]) - whole[kind] / mesh.num_devices)) > 0
    ]
    return _share(total, busiest, mesh.num_devices), tuple(sorted(unsplit, key=lambda item: -item.lost))


def _parameters(spmd: SpmdProgram, data_axes: tuple[str, ...]) -> tuple[float | None, tuple[Unsplit, ...]]:
    """Return the share of the parameter bytes over all but data axes, and the parameters that are not fully split."""
    mesh = spmd.mesh
    axes = tuple(axis for axis in mesh.sub_axes if axis not in data_axes)
    devices = mesh.size_of(axes)
    coordinates = {tuple(at.items()): at for at in map(mesh.coordinates, range(mesh.num_devices))}
    sources = [source for source in spmd.graph.sources if source.kind == "parameter"]
    values = [spmd.graph.by_name[source.value] for source in sources]
    layouts = [_without(spmd.layouts[source.value], data_axes) for source in sources]
    elements = {
        layout: [prod(layout.local_shape(at)) for at in coordinates.values()] for layout in dict.fromkeys(layouts)
    }
    itemsizes = [value.dtype.itemsize for value in values]
    total = sum(value.num_bytes for value in values)
    busiest = max(
        sum(elements[layout][rank] * itemsize for layout, itemsize in zip(layouts, itemsizes, strict=True))
        for rank in range(mesh.num_devices)
    )
    scale = _scale(total, devices)
    unsplit = [
        Unsplit(source.names[0], value.num_bytes / total, lost, _reason_of_layout(layout, axes))
        for source, value, layout in zip(sources, values, layouts, strict=True)
        if (lost := scale * (max(elements[layout]) * value.dtype.itemsize - value.num_bytes / devices)) > 0
    ]
    return _share(total, busiest, devices), tuple(sorted(unsplit, key=lambda item: -item.lost))


def _share(total: int, busiest: int, devices: int) -> float | None:
    return (1 - busiest / total) / (1 - 1 / devices) if total and devices > 1 else None


def _scale(total: int, devices: int) -> float:
    """Return the reduction of the share per additional operation or byte on the busiest device."""
    return 1 / (total * (1 - 1 / devices)) if total and devices > 1 else 0.0


def _kind(step: OpStep) -> tuple[object, ...]:
    """Return a key of all that the FLOPs of a step depend on."""
    op = step.placed.op
    constants = tuple(arg for arg in op.args if isinstance(arg, str))  # the equation of an einsum
    return op.target, constants, step.operand_layouts, step.result_layouts


def _shapes(layouts: tuple[Layout, ...]) -> Shapes:
    return tuple(layout.shape for layout in layouts)


def _local_shapes(layouts: tuple[Layout, ...], coordinates: Mapping[str, int]) -> Shapes:
    return tuple(layout.local_shape(coordinates) for layout in layouts)


def _without(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """Return the layout with some axes removed, as if they had size 1."""
    dims = tuple(
        tuple(Atom(atom.size, tuple(axis for axis in atom.axes if axis not in axes)) for atom in dim)
        for dim in layout.dims
    )
    return replace(layout, dims=dims)


def _reason_of_step(step: OpStep, mesh: Mesh) -> str:
    """Format the reason: ``whole over tp``, or ``h: 8 over 3`` for a factor whose size does not divide."""
    strategy = step.placed.strategy
    idle = tuple(axis for axis in mesh.sub_axes if not any(axis in axes for _, axes in strategy.factors))
    uneven = [
        f"{base_name(factor)}: {size} over {mesh.size_of(axes)}"
        for factor, axes in strategy.factors
        if (size := step.placed.rule.factor(factor).size) % mesh.size_of(axes)
    ]
    return _reason(idle, uneven, mesh)


def _reason_of_layout(layout: Layout, axes: tuple[str, ...]) -> str:
    uneven = [
        f"dim {d}: {atom.size} over {layout.mesh.size_of(atom.axes)}"
        for d, dim in enumerate(layout.dims)
        for atom in dim
        if atom.size % layout.mesh.size_of(atom.axes)
    ]
    return _reason(tuple(axis for axis in axes if axis not in layout.positions), uneven, layout.mesh)


def _reason(idle: tuple[str, ...], uneven: list[str], mesh: Mesh) -> str:
    return ", ".join([f"whole over {mesh.format_axes(idle)}"] * bool(idle) + uneven)


def _bytes_sent(spmd: SpmdProgram) -> BytesSent:
    forward = backward = delivered = 0.0
    for conversion in spmd.conversions:
        sent = conversion.itemsize * sum(move.num_sent() for move in conversion.moves)
        if conversion.op:
            forward += sent
        else:
            delivered += sent
        if spmd.receives_gradient(conversion):
            backward += conversion.grad_itemsize * sum(move.num_sent(backward=True) for move in conversion.moves)
    return BytesSent(forward, backward, delivered)
