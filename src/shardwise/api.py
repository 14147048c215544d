"""``sw.plan``: from a module to a plan, without devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.costs.cluster import Cluster
from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_dtype, format_layout
from shardwise.partition.spmd import Conversion, Spmd, build_spmd
from shardwise.plans.decide import decide
from shardwise.plans.plan import CollectiveEntry, ConversionEntry, OperatorEntry, Plan, TensorEntry
from shardwise.search.modes import Choice


def plan(
    module: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster | int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    mode: str = "auto",
    search: str = "sharding_propagation",
    mesh: Mesh | None = None,
    strategies: Mapping[str, Any] | None = None,
) -> Plan:
    """Choose how to split ``module`` over a cluster. No devices are needed; parameters and inputs may be meta tensors.

    ``example_inputs``: the positional inputs of one whole batch, as a tuple (or one tensor); ``kwargs``: the named ones. ``loss``: a callable
    ``loss(output, *targets)`` when the module does not return its loss; the targets are then the last inputs. ``mode``:
    ``"auto"``, ``"semi_auto"``, ``"data_parallel"`` or ``"stand_alone"`` (``search.modes``). ``mesh``: by default one axis ``dp``
    over all devices. ``strategies``: module path patterns to strategies, the same as ``sw.shard`` on these submodules.

    Raises CaptureError, LayoutError or ShardwiseError for what a user can mend.
    """
    if search != "sharding_propagation":
        raise ShardwiseError(f"unknown search {search!r}: sharding_propagation is the one there is so far")
    devices = cluster if isinstance(cluster, int) else cluster.num_devices
    mesh = mesh or Mesh(dp=devices)
    if mesh.num_devices != devices:
        raise PlanError(f"{mesh} has {mesh.num_devices} devices, the cluster has {devices}")
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    captured = capture(module, args, dict(kwargs or {}), loss=loss, strategies=strategies)
    factored, choice = decide(captured.graph, captured.annotations, mesh, mode)
    spmd = build_spmd(captured.graph, factored.rules, choice.strategies, choice.sources, mesh)
    return _plan_of(captured.graph, factored.rules, choice, spmd, mode, search, optimizer)


def _plan_of(
    graph: Graph, rules: Mapping[str, Any], choice: Choice, spmd: Spmd, mode: str, search: str, optimizer: str
) -> Plan:
    mesh = spmd.mesh

    def tensors(kind: str) -> tuple[TensorEntry, ...]:
        found = []
        for source in graph.sources:
            if source.kind == kind and source.names[0] != "_shardwise_seed":
                value, layout = graph.by_name[source.value], choice.sources[source.value]
                found.append(
                    TensorEntry(
                        source.names[0], format_dtype(value.dtype), value.shape, format_layout(layout, value.dtype)
                    )
                )
        return tuple(found)

    return Plan(
        mesh=mesh,
        mode=mode,
        search=search,
        optimizer=optimizer,
        inputs=tensors("input"),
        parameters=tensors("parameter"),
        buffers=tensors("buffer"),
        operators=tuple(
            OperatorEntry(
                op.name, str(op.target), str(rules[op.name]), choice.strategies[op.name].format(mesh), op.source
            )
            for op in graph.ops
        ),
        conversions=tuple(_conversion_entry(c, spmd) for c in spmd.conversions),
    )


def _conversion_entry(conversion: Conversion, spmd: Spmd) -> ConversionEntry:
    dtype = spmd.graph.by_name[conversion.value].dtype

    def entries(collectives: tuple[Collective, ...]) -> tuple[CollectiveEntry, ...]:
        return tuple(CollectiveEntry(c.kind, spmd.mesh.format_axes(c.axes), c.num_bytes) for c in collectives)

    def text(layout: Layout) -> str:
        return format_layout(layout, dtype)

    backward = conversion.collectives(backward=True) if spmd.receives_gradient(conversion) else ()
    return ConversionEntry(
        conversion.value,
        conversion.op,
        text(conversion.source),
        text(conversion.target),
        entries(conversion.collectives()),
        entries(backward),
    )
