"""``sw.plan``: from a module to a plan, without devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.footprints import Footprints
from shardwise.costs.prices import Precision, Prices
from shardwise.errors import PlanError, ShardwiseError, problem
from shardwise.graph.capture import call_arguments, capture
from shardwise.graph.ir import Graph
from shardwise.graph.naming import value_name
from shardwise.layouts.conversions import Collective
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.text import format_dtype, format_layout
from shardwise.partition.buckets import BUCKET_BYTES, Bucket
from shardwise.partition.memory import Memory, memory_of
from shardwise.partition.pricing import Fragments, price_program
from shardwise.partition.simulate import SimulatedStep, simulate
from shardwise.partition.spmd import Spmd, build_spmd, conversions_of
from shardwise.partition.steps import Conversion
from shardwise.plans.bind import bind
from shardwise.plans.decide import Decided, decide, decide_by_price
from shardwise.plans.kept import Kept, keep
from shardwise.plans.plan import CollectiveEntry, ConversionEntry, OperatorEntry, Plan, SharedEntry, TensorEntry
from shardwise.report.comparison import Compared, Comparison
from shardwise.rules.atoms import Factored
from shardwise.search.auto import PRICED_SEARCHES, Prediction, Search, candidate_meshes
from shardwise.search.modes import MODES, Choice, batch_size

SEARCHES = (*PRICED_SEARCHES, "sharding_propagation")


def plan(
    module: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster | int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    mode: str = "auto",
    search: str | None = None,
    mesh: Mesh | None = None,
    max_mesh_axes: int = 2,
    global_batch: int | None = None,
    memory_bytes: float | None = None,
    strategies: Mapping[str, Any] | None = None,
    layouts: Mapping[str, Kept] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Plan:
    """Choose how to split ``module`` over a cluster. No devices are needed; parameters and inputs may be meta tensors.

    ``example_inputs``: the inputs of one whole batch: a tuple (or one tensor), or a dict of named ones; ``kwargs``:
    named ones beside positional ones.
    ``loss``: a callable ``loss(output, *targets)`` when the module does not return its loss; the targets are then the
    last inputs. ``optimizer``: the one whose states are counted, and that ``sw.verify`` steps with. ``precision``: the
    dtypes that are priced, where they are not the model's. ``mode``: ``"auto"``, ``"semi_auto"``, ``"data_parallel"``
    or ``"stand_alone"`` (``search.modes``). ``search``: how ``"auto"`` decides (``search.auto``); by default
    ``"dynamic_programming"``, and where strategies are given ``"sharding_propagation"``, which completes them.
    ``mesh``: by default the searches that go by price try all shapes of up to ``max_mesh_axes`` axes that respect the
    cluster's levels, the others use one axis ``dp`` over all devices. ``global_batch``: the samples of an optimizer
    step that accumulates the gradients of several such batches. ``memory_bytes``: what a device may hold of parameters,
    gradients, optimizer states and saved values; by default what the cluster's devices have (a number of devices is no
    description: they have what it takes). ``strategies``: module path patterns to strategies, the same as ``sw.shard``
    on these submodules. ``layouts``: inputs, parameters or buffers that are delivered or kept in a given layout,
    ``"[32@dp, 512]"``, or split so many ways per dim, ``(8, 1)``; the rest is chosen as if they were free, and they are
    converted (how a data loader splits its batches, say). ``bucket_bytes``: the largest message in which gradients (or
    gathered parameters) travel together; 0: each by itself.

    Raises CaptureError, LayoutError or ShardwiseError for what a user can mend; PlanError when nothing fits.
    """
    if search is not None and search not in SEARCHES:
        raise ShardwiseError(problem(f"unknown search {search!r}", fix=f"one of {', '.join(SEARCHES)}"))
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
        raise ShardwiseError(
            problem(f"bucket_bytes is {bucket_bytes!r}", fix="a whole number of bytes; 0: no buckets; default 25 MiB")
        )
    if mode not in MODES:
        raise ShardwiseError(problem(f"unknown mode {mode!r}", fix=f"one of {', '.join(MODES)}"))
    if isinstance(cluster, int):  # devices that nobody described: they have the memory it takes
        cluster, memory_bytes = Cluster.local(cluster), inf if memory_bytes is None else memory_bytes
    if mesh is not None:
        _check_mesh(mesh, cluster)
    args, named = call_arguments(example_inputs, kwargs)
    captured = capture(module, args, named, loss=loss, strategies=strategies)
    if search is None:
        nothing_said = mode == "auto" and not captured.annotations and not captured.graph.constraints
        search = "dynamic_programming" if nothing_said else "sharding_propagation"
    priced = mode == "auto" and search in PRICED_SEARCHES
    settings = (mode, search, optimizer, module.training, bucket_bytes)
    if not priced:
        mesh = mesh or Mesh(dp=cluster.num_devices)
        factored, choice = decide(captured.graph, captured.annotations, mesh, mode)
        choice = keep(choice, layouts or {}, captured.graph, factored, mesh)
        return _plan_of(
            captured.graph,
            factored.rules,
            choice,
            _spmd(captured.graph, factored, choice, mesh, bucket_bytes),
            settings,
        )
    precision = precision or Precision()
    meshes = candidate_meshes(cluster, max_mesh_axes) if mesh is None else (mesh,)
    footprints = Footprints()
    programs: dict[tuple[str, tuple[int, ...]], Spmd] = {}  # those that were simulated

    def simulated(search: Search, assignment: list[int]) -> SimulatedStep:
        domains = search.cost.domains
        factored = Factored(domains.rules, domains.atoms)
        choice = keep(search.choice(assignment), layouts or {}, captured.graph, factored, search.mesh)
        spmd = _spmd(captured.graph, factored, choice, search.mesh, bucket_bytes)
        programs[str(search.mesh), tuple(assignment)] = spmd
        return simulate(spmd, domains.prices, footprints)

    found = decide_by_price(
        captured.graph,
        captured.annotations,
        cluster,
        meshes,
        search,
        optimizer,
        precision,
        _passes(captured.graph, global_batch),
        memory_bytes,
        Fragments,
        simulated,
    )
    choice = keep(found.choice, layouts or {}, captured.graph, found.factored, found.mesh)
    spmd = programs.get((str(found.mesh), tuple(found.search.outcome.assignment)))
    if spmd is None:
        spmd = _spmd(captured.graph, found.factored, choice, found.mesh, bucket_bytes)
    plan = _plan_of(captured.graph, found.factored.rules, choice, spmd, settings)
    prediction = _as_emitted(found.prediction, spmd, found.search)
    if layouts:
        prediction = _as_kept(prediction, spmd, found)
    return replace(plan, pricing=found.pricing, prediction=prediction, found=found.search)


def _as_emitted(prediction: Prediction, spmd: Spmd, search: Search) -> Prediction:
    """The prediction with the seconds of the program that the plan is."""
    domains = search.cost.domains
    free = {op.name for op in domains.graph.ops} - {op.name for op in domains.operators}
    price = price_program(spmd, domains.prices, free)
    return replace(prediction, exposed=price.exposed + price.update, compute=price.compute, traffic=price.traffic)


def _as_kept(prediction: Prediction, spmd: Spmd, found: Decided) -> Prediction:
    """The prediction with what parameters hold in the layouts in which the user keeps them. The searched plans have no
    conversions from those, so that the bound is compared with the step that has."""
    graph, prices = found.search.cost.domains.graph, found.search.cost.domains.prices
    more = 0.0
    for source in graph.sources:
        if source.kind == "parameter":
            numel = spmd.layouts[source.value].max_local_numel - found.choice.sources[source.value].max_local_numel
            more += numel * prices.state_bytes(graph.by_name[source.value], source.value in graph.updated)
    objective = max(prediction.objective, prediction.pass_seconds)
    return replace(prediction, num_bytes=prediction.num_bytes + more, objective=objective)


def compare(
    module: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster | int,
    *,
    searches: Sequence[str] = SEARCHES,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    mesh: Mesh | None = None,
    **settings: Any,
) -> Comparison:
    """Plans of several searches side by side: how long each takes, and a simulated step of what it found, at the same
    prices. ``settings`` and all others: those of ``sw.plan``. A search that finds nothing that fits has a row that says
    so; whatever else is wrong raises as ``sw.plan`` does."""
    cluster = Cluster.local(cluster) if isinstance(cluster, int) else cluster
    args, named = call_arguments(example_inputs, kwargs)
    captured = capture(module, args, named, loss=loss, strategies=settings.get("strategies"))
    footprints, rows = Footprints(), []
    for search in searches:
        start = time.perf_counter()
        try:
            found = plan(
                module,
                example_inputs,
                cluster,
                kwargs=kwargs,
                loss=loss,
                optimizer=optimizer,
                precision=precision,
                search=search,
                mesh=mesh,
                **settings,
            )
        except PlanError as error:
            rows.append(Compared(search, time.perf_counter() - start, error=str(error)))
            continue
        seconds = time.perf_counter() - start
        factored, choice = bind(found, captured.graph, training=module.training)
        prices = Prices(Links(cluster, found.mesh), optimizer, precision or Precision())
        spmd = _spmd(captured.graph, factored, choice, found.mesh, found.bucket_bytes)
        rows.append(Compared(search, seconds, found, simulate(spmd, prices, footprints)))
    return Comparison(tuple(rows))


def step_memory(
    module: torch.nn.Module,
    example_inputs: Any,
    plan: Plan,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
) -> Memory:
    """What a device holds during a training step under a plan: the peak, where it is and what it is made of. Inputs and
    parameters may be meta tensors. Raises PlanError when the plan does not fit."""
    args, named = call_arguments(example_inputs, kwargs)
    captured = capture(module, args, named, loss=loss)
    factored, choice = bind(plan, captured.graph, training=module.training)
    if choice.router is not None:
        prices = choice.router.prices
    else:
        prices = Prices(Links(Cluster.local(plan.mesh.num_devices), plan.mesh), plan.optimizer)
    return memory_of(_spmd(captured.graph, factored, choice, plan.mesh, plan.bucket_bytes), prices)


def _passes(graph: Graph, global_batch: int | None) -> int:
    """How many batches of the example's size a step accumulates."""
    batch = batch_size(graph)
    if global_batch is None:
        return 1
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1 or not batch:
        raise ShardwiseError(problem(f"global_batch is {global_batch!r}", fix="a whole number of samples from 1"))
    if global_batch % batch:
        raise ShardwiseError(
            problem(
                f"global_batch is {global_batch}, the example inputs have {batch} samples: {global_batch} / {batch} is "
                "not whole",
                fix="give example inputs whose number of samples divides it",
            )
        )
    return global_batch // batch


def _check_mesh(mesh: Mesh, cluster: Cluster) -> None:
    if mesh.num_devices != cluster.num_devices:
        product = " x ".join(str(size) for _, size in mesh.axes)
        raise PlanError(
            problem(
                f"{mesh} needs {product} = {mesh.num_devices} devices, the cluster has {cluster.num_devices}",
                fix=f"choose axes whose sizes multiply to {cluster.num_devices}",
            )
        )


def _spmd(graph: Graph, factored: Factored, choice: Choice, mesh: Mesh, bucket_bytes: int) -> Spmd:
    return build_spmd(
        graph,
        factored.rules,
        choice.strategies,
        choice.sources,
        mesh,
        bucket_bytes=bucket_bytes,
        route=choice.router,
        shared=choice.shared,
    )


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
        shared=tuple(SharedEntry(value_name(name, graph), format_layout(own)) for name, own in choice.shared.items()),
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
        value_name(conversion.origin, spmd.graph),
        conversion.op,
        text(conversion.source),
        text(conversion.target),
        entries(conversion.collectives()),
        entries(backward),
        bucket,
    )
