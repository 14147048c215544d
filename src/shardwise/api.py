"""``sw.plan``: from a module to a plan, without devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.costs.cluster import Cluster
from shardwise.errors import PlanError, ShardwiseError, problem
from shardwise.graph.capture import call_arguments, capture
from shardwise.graph.ir import Graph
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_dtype, format_layout
from shardwise.partition.buckets import BUCKET_BYTES, Bucket
from shardwise.partition.spmd import Spmd, build_spmd, conversions_of
from shardwise.partition.steps import Conversion
from shardwise.plans.decide import decide
from shardwise.plans.plan import CollectiveEntry, ConversionEntry, OperatorEntry, Plan, TensorEntry
from shardwise.search.modes import MODES, Choice

SEARCHES = ("sharding_propagation",)


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
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Choose how to split ``module`` over a cluster. No devices are needed; parameters and inputs may be meta tensors.

    ``example_inputs``: the inputs of one whole batch: a tuple (or one tensor), or a dict of named ones; ``kwargs``:
    named ones beside positional ones.
    ``loss``: a callable ``loss(output, *targets)`` when the module does not return its loss; the targets are then the
    last inputs. ``optimizer``: the one that ``sw.verify`` steps with. ``mode``: ``"auto"``, ``"semi_auto"``,
    ``"data_parallel"`` or ``"stand_alone"`` (``search.modes``). ``mesh``: by default one axis ``dp`` over all devices.
    ``strategies``: module path patterns to strategies, the same as ``sw.shard`` on these submodules. ``bucket_bytes``:
    the largest message in which gradients (or gathered parameters) travel together; 0: each by itself.

    Raises CaptureError, LayoutError or ShardwiseError for what a user can mend.
    """
    if search not in SEARCHES:
        raise ShardwiseError(problem(f"unknown search {search!r}", fix=f"one of {', '.join(SEARCHES)}"))
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
        raise ShardwiseError(
            problem(f"bucket_bytes is {bucket_bytes!r}", fix="a whole number of bytes; 0: no buckets; default 25 MiB")
        )
    if mode not in MODES:
        raise ShardwiseError(problem(f"unknown mode {mode!r}", fix=f"one of {', '.join(MODES)}"))
    devices = (Cluster.local(cluster) if isinstance(cluster, int) else cluster).num_devices
    mesh = mesh or Mesh(dp=devices)
    if mesh.num_devices != devices:
        product = " x ".join(str(size) for _, size in mesh.axes)
        raise PlanError(
            problem(
                f"{mesh} needs {product} = {mesh.num_devices} devices, the cluster has {devices}",
                fix=f"choose axes whose sizes multiply to {devices}",
            )
        )
    args, named = call_arguments(example_inputs, kwargs)
    captured = capture(module, args, named, loss=loss, strategies=strategies)
    factored, choice = decide(captured.graph, captured.annotations, mesh, mode)
    spmd = build_spmd(
        captured.graph, factored.rules, choice.strategies, choice.sources, mesh, bucket_bytes=bucket_bytes
    )
    settings = (mode, search, optimizer, module.training, bucket_bytes)
    return _plan_of(captured.graph, factored.rules, choice, spmd, settings)


def _plan_of(
    graph: Graph, rules: Mapping[str, Any], choice: Choice, spmd: Spmd, settings: tuple[str, str, str, bool, int]
) -> Plan:
    mesh = spmd.mesh
    mode, search, optimizer, training, bucket_bytes = settings

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
        training=training,
        bucket_bytes=bucket_bytes,
        inputs=tensors("input"),
        parameters=tensors("parameter"),
        buffers=tensors("buffer"),
        operators=tuple(
            OperatorEntry(
                op.name, str(op.target), str(rules[op.name]), choice.strategies[op.name].format(mesh), op.source
            )
            for op in graph.ops
        ),
        conversions=_conversions(spmd),
    )


def _conversions(spmd: Spmd) -> tuple[ConversionEntry, ...]:
    """All conversions in order; buckets of several are numbered from 1."""
    entries: list[ConversionEntry] = []
    number = 0
    for step in spmd.steps:
        shares = isinstance(step, Bucket) and len(step.conversions) > 1
        number += shares
        bucket = number if shares else 0
        entries += [_conversion_entry(conversion, spmd, bucket) for conversion in conversions_of(step)]
    return tuple(entries)


def _conversion_entry(conversion: Conversion, spmd: Spmd, bucket: int) -> ConversionEntry:
    dtype = spmd.graph.by_name[conversion.origin].dtype

    def entries(collectives: tuple[Collective, ...]) -> tuple[CollectiveEntry, ...]:
        return tuple(CollectiveEntry(c.kind, spmd.mesh.format_axes(c.axes), c.num_bytes) for c in collectives)

    def text(layout: Layout) -> str:
        return format_layout(layout, dtype)

    backward = conversion.collectives(backward=True) if spmd.receives_gradient(conversion) else ()
    return ConversionEntry(
        _value_name(conversion.origin, spmd.graph),
        conversion.op,
        text(conversion.source),
        text(conversion.target),
        entries(conversion.collectives()),
        entries(backward),
        bucket,
    )


def _value_name(value: str, graph: Graph) -> str:
    """A value as a reader knows it: the parameter or input, or the operator that computes it (which result, if
    several)."""
    producer = graph.producer.get(value)
    if producer is None:
        return graph.source_of[value].names[0]
    return producer.name if len(producer.results) == 1 else f"{producer.name}[{producer.results.index(value)}]"
