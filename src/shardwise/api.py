"""Plan a module without devices: ``sw.plan``, ``sw.compare`` and ``sw.step_memory``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any, Literal

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.memory import MemoryEstimate, memory_of
from shardwise.costs.optimizers import is_on_host, parse_optimizer
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import simulate
from shardwise.errors import PlanError, PlanWarning, ShardwiseError, problem
from shardwise.garbage_collector import with_rare_gc
from shardwise.graph.autocast import no_autocast
from shardwise.graph.batch import batch_size, num_samples
from shardwise.graph.call_arguments import call_arguments
from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.graph.segments import Recompute, check_how
from shardwise.graph.step_precision import Precision
from shardwise.graph.trees import constants_of
from shardwise.layouts.mesh import Mesh
from shardwise.plans.auto_stages import LowerBound, StageConfig, check_joint, joint_search, settings_of, tries_of
from shardwise.plans.axis_names import AxisUsage, name_axes_by_role
from shardwise.plans.bind import program_of
from shardwise.plans.bind_stages import step_graph
from shardwise.plans.listing import stage_of
from shardwise.plans.micro_batch_search import Captures, Example, MicroBatchSearch, planned_graph
from shardwise.plans.pipeline_config import PipelineRequest
from shardwise.plans.pipelines import plan_captured_pipeline
from shardwise.plans.plan import Plan, PricingEntry
from shardwise.plans.price_scope import prices_of
from shardwise.plans.refusal import nothing_fits
from shardwise.plans.stage_estimator import StageEstimator, estimated_policies_of
from shardwise.programs.buckets import BUCKET_BYTES
from shardwise.programs.micro_batches import Passes
from shardwise.programs.vjp import VjpCache
from shardwise.progress import report_progress
from shardwise.report.auto_stages_plan import AutoStagesPlan
from shardwise.report.comparison import ComparedPlan, Comparison
from shardwise.report.options import with_suggestions, without_suggestions
from shardwise.report.planned import Planned, StagedPlan
from shardwise.runtime.agree import report_alive, show_progress_once
from shardwise.runtime.torch_schedules import order_of
from shardwise.search.auto import PRICED_SEARCHES, MeshSearch, PricedSearch
from shardwise.search.config import SearchConfig
from shardwise.search.decide import decide
from shardwise.search.fit_memory import fit_memory
from shardwise.search.memory_policy import OFFLOADS, MemoryPolicy, Offload
from shardwise.search.mesh_shapes import candidate_meshes
from shardwise.search.micro_batch import batches_of
from shardwise.search.modes import MODES, Mode
from shardwise.search.planner import Planner
from shardwise.search.stored_program import build_program
from shardwise.search.user_layouts import Kept, apply_layouts
from shardwise.search.zero import Zero
from shardwise.untrusted_text import is_number, shorten_repr

SearchName = PricedSearch | Literal["sharding_propagation"]
SEARCHES: tuple[SearchName, ...] = (*PRICED_SEARCHES, "sharding_propagation")


def plan(
    module: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    mode: Mode = "auto",
    search: SearchName | None = None,
    mesh: Mesh | None = None,
    max_mesh_axes: int = 2,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    memory_bytes: float | None = None,
    strategies: Mapping[str, Any] | None = None,
    layouts: Mapping[str, Kept] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    recompute: Recompute | Literal["auto"] | None = "auto",
    offload: Offload = "auto",
    zero: int | Zero | None = None,
    stages: int | Literal["marked", "auto"] | None = None,
    schedule: str | None = None,
) -> Plan:
    """Choose how to split ``module`` over a cluster, and return the plan.

    No devices are needed; parameters and inputs may be meta tensors. Searches by price are those of ``search.auto``
    under mode ``"auto"``.

    Args:
        module: The model to plan.
        example_inputs: Inputs of one micro-batch or of the whole global batch: a tuple, one tensor, or a dict of named
            inputs. Tensors whose dim 0 has the size of the first tensor's dim 0 hold samples; every micro-batch gets
            all others whole.
        cluster: A cluster, its name (``"h100-2x8"``), or a number of devices of this machine.
        kwargs: Named inputs, in addition to positional ones.
        loss: ``loss(output, *targets)``, for a module that does not return its loss. The targets are the last inputs.
        optimizer: The optimizer whose states and temporaries count as memory; ``sw.verify`` steps with it. Add
            ``fused``, ``foreach`` or ``single`` (``"adamw fused"``) if it does not update as torch does by default.
            With ``"... on host"`` its states stay in host memory between steps; the update brings them to the device
            in groups of parameters.
        precision: The dtypes of compute, storage and reductions, if they differ from the model's (``sw.Precision``).
        mode: ``"auto"``, ``"semi_auto"``, ``"data_parallel"`` or ``"stand_alone"`` (``search.modes``).
        search: How ``"auto"`` decides (``search.auto``). Default: ``"dynamic_programming"``; if strategies are given,
            ``"sharding_propagation"``, which completes them.
        mesh: The mesh; with ``stages``, the mesh of one stage. By default searches by price try all shapes of up to
            ``max_mesh_axes`` axes that respect the cluster's levels. They name an axis by its role if it has only one
            (``plans.axis_names``). Otherwise the default is one axis ``dp`` over all devices.
        max_mesh_axes: The largest number of axes of the meshes that are tried.
        global_batch: Samples of an optimizer step. ``par.step`` takes the whole batch.
        micro_batch: Samples of a micro-batch; a step runs as many micro-batches as it needs. If the inputs have
            ``global_batch`` samples and this is None, a search by price chooses it. It tries divisors, the largest
            first, until one fits and steps get no faster; each is a search of its own
            (``plan.explain("micro_batch")``). If both sizes are None, a step is one pass over the example inputs, or
            several micro-batches if only these fit. With ``stages``, a search by price chooses it; other modes take
            the largest that fills the schedule.
        memory_bytes: Bytes that the tensors of a device may take at the peak of a step. Default: the memory of the
            cluster's devices less their reserve. A given number is used without subtracting the reserve. If
            ``cluster`` is a number of devices, the default is no limit.
        strategies: Module path patterns to strategies, as ``sw.shard`` on these submodules.
        layouts: Inputs, parameters or buffers to the layouts in which they are delivered or stored:
            ``"[32@dp, 512]"``, or the number of parts per dim, ``(8, 1)``. The rest is chosen as if these were free,
            and they are converted. Use it for the way a data loader splits its batches, for example.
        bucket_bytes: The largest message, in bytes, that carries several gradients or gathered parameters; 0: one
            message each.
        recompute: What backward recomputes. ``"full"``, ``"cheap"``, ``"gathers"`` or ``"cheap+gathers"``
            (``sw.recompute``) apply to the model's repeated blocks, in addition to what the model asks for. ``"none"``:
            nothing. None: only what the model asks for (``sw.recompute``, ``torch.utils.checkpoint``). ``"auto"``: as
            None; if nothing fits, searches by price also recompute what makes a plan fit (``search.fit_memory``).
        offload: What waits in host memory for backward. ``"all"``: the saved tensors of the repeated blocks.
            ``"none"``: nothing. ``"auto"``: what the model asks for (``sw.offload``); if nothing fits, also what makes
            a plan fit.
        zero: 1, 2, 3 or ``sw.Zero``: shard parameters, gradients and optimizer states wherever they would be copied.
            Stage 3 frees gathered parameters after forward and gathers them again in backward.
        stages: The number of pipeline stages, balanced by price and memory at any operator boundary; ``"marked"``: cut
            at ``sw.stage``. Every stage has an equal part of the devices. ``"auto"`` chooses the number (one: no
            pipeline), schedule and micro-batch by price, for the samples of a step (``plans.auto_stages``);
            ``plan.explain("stages")`` lists what was tried.
        schedule: A schedule of ``torch.distributed.pipelining`` by name (``plans.schedule``), default ``"1F1B"``; or
            ``"Solved"``: an order searched for these stages within the memory. All but ``GPipe`` and ``1F1B`` run two
            stages per pipeline rank; loops run as many as the name gives, ``"Interleaved1F1B:4"``.

    Returns:
        The plan: print it, save it, or give it to ``sw.parallelize``.

    Raises:
        ShardwiseError: The model or a setting has a fault that the user can fix (also CaptureError and LayoutError).
        PlanError: Nothing fits; if planning takes a few seconds, the error lists up to three fixes, the cheapest first.
            Or a step has several micro-batches, and the loss is no sum over them (``programs.time_axis``).
    """
    arguments = dict(locals())
    _check_words(mode, search, bucket_bytes, recompute, offload)
    check_kinds(mesh, precision, optimizer)
    _check_names("strategies", strategies, "{'blocks.*.up': 'n@tp'}: module path patterns to strategies")
    _check_names("layouts", layouts, "{'args[0]': '[32@dp, 512]'}: inputs, parameters or buffers to layouts")
    if memory_bytes is not None and not (is_number(memory_bytes) and memory_bytes > 0):
        raise ShardwiseError(
            problem(f"memory_bytes is {memory_bytes!r}", fix="bytes for the tensors of a device, above 0")
        )
    if isinstance(cluster, int) and memory_bytes is None:  # devices without a description: no memory limit
        memory_bytes = inf
    cluster = Cluster.of(cluster)
    if mesh is not None and stages is None:
        _check_mesh(mesh, cluster)
    precision = (precision or Precision()).at_hand
    captures = Captures()
    constants = constants_of(call_arguments(example_inputs, kwargs))
    call = Example(module, call_arguments(example_inputs, kwargs), loss, strategies, precision, captures)
    with (
        with_suggestions(plan, arguments),
        show_progress_once("planning"),
        report_alive(),
        no_autocast(),
        with_rare_gc(),
    ):
        if precision.lost_share:
            warnings.warn(
                f"parameters are stored as {precision.parameter} and used as {precision.compute}: an update smaller "
                f"than {precision.lost_share:.2g} of a parameter is lost",
                PlanWarning,
                stacklevel=2,
            )
        if is_on_host(optimizer):
            _announce_one_memory(cluster, stacklevel=3)
        report_progress("capturing the model")
        captured = capture(module, *call.arguments, loss=loss, strategies=strategies, precision=precision)
        graph, annotations = captured.graph, captured.annotations
        if search is None:
            is_free = mode == "auto" and not annotations and not graph.constraints
            search = "dynamic_programming" if is_free else "sharding_propagation"
        stage = Zero.of(zero)
        gathered = "held" if stage is None else stage.gathered
        by_price = mode == "auto" and search in PRICED_SEARCHES

        def planned_with(
            stages: int | str | None,
            schedule: str | None,
            global_batch: int | None,
            micro_batch: int | None,
            known: float = inf,
        ) -> Plan:
            if stages is not None or schedule is not None:
                requested = PipelineRequest(
                    stages,
                    schedule,
                    mesh,
                    max_mesh_axes,
                    global_batch,
                    micro_batch,
                    recompute,
                    gathered,
                    offload,
                    stage,
                )
                template = Plan((), mode, search, optimizer, module.training, bucket_bytes, precision=precision)
                settings = SearchConfig(
                    search, optimizer, 1, memory_bytes, bucket_bytes, layouts or {}, zero=stage, known=known
                )
                pipeline = plan_captured_pipeline(
                    call, captured, cluster, requested, settings, template, by_price=by_price, order=order_of
                )
                return StagedPlan.of(pipeline)
            samples = num_samples(call.arguments)
            chooses = by_price and graph.loss is not None
            batches = batches_of(samples, global_batch, micro_batch, cluster.num_devices, chooses=chooses)
            wanted = SearchConfig(
                search,
                optimizer,
                1,
                memory_bytes,
                bucket_bytes,
                layouts or {},
                MemoryPolicy.of(
                    graph, captured.segments, None if recompute == "auto" else recompute, gathered, offload
                ),
                stage,
                known=known,
            )
            if wanted.levers.moves_to_host:
                _announce_one_memory(cluster, stacklevel=4)
            meshes = candidate_meshes(cluster, max_mesh_axes) if mesh is None else (mesh,)

            def plan_of(graph: Graph, passes: int) -> Plan:
                settings = (mode, search, optimizer, module.training, bucket_bytes)
                if not by_price:
                    plan_mesh = mesh or Mesh(dp=cluster.num_devices)
                    if mode == "data_parallel":
                        _announce_repeated(graph, plan_mesh, stacklevel=4)
                    factored, choice = decide(graph, annotations, plan_mesh, mode)
                    choice = apply_layouts(choice, layouts or {}, graph, factored, plan_mesh)
                    asked = replace(wanted, passes=passes)
                    program = build_program(graph, factored.rules, choice, plan_mesh, asked, VjpCache())
                    stages = (stage_of(graph, factored.rules, program.choice, program.spmd),)
                    prices = Prices(Links(cluster, plan_mesh), optimizer, passes)
                    prediction = program.prediction(prices.with_buckets(graph, bucket_bytes))
                    pricing = PricingEntry.of(cluster, memory_bytes)
                    return Plan(stages, *settings, pricing, prediction, precision, passes)
                planner = Planner.of(graph, annotations, cluster, meshes, replace(wanted, passes=passes))
                planner = replace(planner, kinds=captures.kinds)
                if recompute == "auto":
                    planned = fit_memory(planner, captured.segments, None if stage is None else gathered, offload)
                else:
                    planned = planner.plan()
                if planned.ranking.excess:
                    raise nothing_fits(planned.ranking)
                rules, choice = planned.factored.rules, planned.choice
                listed = stage_of(graph, rules, choice, planned.spmd)
                if mesh is None:
                    (listed,) = name_axes_by_role((listed,), (AxisUsage(graph, rules, choice.strategies),))
                pricing = _pricing(cluster, memory_bytes, planned.search, listed.mesh)
                chosen = Plan((listed,), *settings, pricing, planned.prediction, precision, passes)
                return Planned.of(chosen, planned.search, planned.ranking.best.peak)

            trials = MicroBatchSearch(call, graph, batches)
            for pass_graph, passes in trials:
                try:
                    trials.add(plan_of(pass_graph, passes))
                except PlanError as error:
                    trials.refuse(error)
            best = trials.best()
            if wanted.levers.moves_to_host and not any(entry.offloaded for entry in best.operators):
                warnings.warn(
                    "nothing is offloaded to the host: what backward needs of these parts is recomputed, is smaller "
                    "than 64 KiB on a device, or is kept on the device anyway",
                    PlanWarning,
                    stacklevel=3,
                )
            return replace(best, tried=trials.choices) if isinstance(best, Planned) else best

        if stages == "auto":
            check_joint(module, by_price=by_price)
            samples = num_samples(call.arguments)
            whole = (samples or 1) if global_batch is None else global_batch
            batches = batches_of(samples, whole, micro_batch, cluster.num_devices, chooses=True)
            assert batches is not None, "the samples of a step are known"
            step = batches.step
            stage_devices = None if mesh is None else mesh.num_devices
            settings = settings_of(graph, batches, cluster.num_devices, schedule, stage_devices)

            def plan_of_setting(setting: StageConfig, known: float) -> Plan:
                num_stages = setting.stages if setting.stages > 1 else None
                return planned_with(num_stages, setting.schedule or None, step, setting.micro_batch, known)

            def meshes_of(part: Cluster) -> tuple[Mesh, ...]:
                return candidate_meshes(part, max_mesh_axes) if mesh is None else (mesh,)

            def pass_of(short: Graph, size: int) -> Graph:
                return short if size == step else Passes.over(module, short, size, call.graph).graphs[size]

            @cache
            def fronts() -> StageEstimator:
                whole = step_graph(graph if samples == step else call.graph(step))
                priced = SearchConfig(search, optimizer, 1, memory_bytes, bucket_bytes)
                rungs = estimated_policies_of(recompute, None if stage is None else gathered)
                return StageEstimator(whole, pass_of, meshes_of, cluster, priced, captured.segments, rungs)

            floor, tries = LowerBound.of(graph, step / (samples or 1), cluster), tries_of(graph)
            slower = (lambda setting: fronts().least(setting), lambda setting: fronts().seconds(setting))
            estimates = () if graph.loss is None else slower
            joint = joint_search(settings, floor, cluster, plan_of_setting, tries=tries, estimates=estimates)
            return replace(AutoStagesPlan.of(*joint), constants=constants)
        return replace(planned_with(stages, schedule, global_batch, micro_batch), constants=constants)


def compare(
    module: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | int,
    *,
    searches: Sequence[SearchName] = SEARCHES,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    mesh: Mesh | None = None,
    **settings: Any,
) -> Comparison:
    """Plan with several searches, and compare planning times and simulated steps at the same prices.

    All arguments but ``searches`` are those of ``sw.plan``.

    Args:
        searches: Names of the searches, a list or tuple; by default all.
        **settings: Other settings of ``sw.plan``.

    Returns:
        One row per search. If a search raises PlanError (nothing fits), its row holds the error.

    Raises:
        ShardwiseError: ``searches`` is not a list or tuple, or ``sw.plan`` raises an error other than PlanError.
    """
    if isinstance(cluster, int):  # as in ``plan``
        settings = {"memory_bytes": inf, **settings}
    cluster = Cluster.of(cluster)
    check_kinds(mesh, precision, optimizer)
    precision = precision or Precision()
    arguments = call_arguments(example_inputs, kwargs)
    call = Example(module, arguments, loss, settings.get("strategies"), precision)
    kinds, rows = VjpCache(), []
    if not isinstance(searches, list | tuple):
        raise ShardwiseError(
            problem(f"searches is {shorten_repr(searches)}", fix=f"a list of some of {', '.join(SEARCHES)}")
        )
    for search in searches:
        start = time.perf_counter()
        try:
            with without_suggestions():
                compared_plan = plan(
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
            rows.append(ComparedPlan(search, time.perf_counter() - start, error=str(error)))
            continue
        seconds = time.perf_counter() - start
        prices = Prices(Links(cluster, compared_plan.mesh), optimizer, compared_plan.micro_batches)
        spmd = program_of(compared_plan, planned_graph(call, compared_plan), training=module.training)
        rows.append(ComparedPlan(search, seconds, compared_plan, simulate(spmd, prices, kinds)))
    return Comparison(tuple(rows), cluster)


def step_memory(
    module: torch.nn.Module,
    example_inputs: Any,
    plan: Plan,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
) -> MemoryEstimate:
    """Return the peak memory of a device in a training step under ``plan``, where the peak is, and what it consists of.

    All arguments but ``plan`` are those of ``sw.plan``; inputs and parameters may be meta tensors.

    Args:
        plan: The plan of the step.

    Raises:
        PlanError: The plan does not fit the model.
    """
    call = Example(module, call_arguments(example_inputs, kwargs), loss, precision=plan.precision)
    return memory_of(program_of(plan, planned_graph(call, plan), training=module.training), prices_of(plan))


def _announce_one_memory(cluster: Cluster, stacklevel: int) -> None:
    if not cluster.device.host_bandwidth:
        warnings.warn(
            f"{cluster.device.name} shares its memory with the host (no host_bandwidth): offloading only adds "
            "copies and gains nothing",
            PlanWarning,
            stacklevel=stacklevel,
        )


def _announce_repeated(graph: Graph, mesh: Mesh, stacklevel: int) -> None:
    samples = batch_size(graph)
    if samples is not None and samples < mesh.num_devices:
        warnings.warn(
            f"a batch of {samples} on {mesh.num_devices} devices: some devices repeat the work of others. Use a "
            f"micro-batch of at least {mesh.num_devices} samples.",
            PlanWarning,
            stacklevel=stacklevel,
        )


def _check_words(mode: str, search: str | None, bucket_bytes: int, recompute: str | None, offload: str) -> None:
    """Raise ShardwiseError for an invalid mode, search, bucket size, recompute or offload setting."""
    if offload not in OFFLOADS:
        fix = f"one of {', '.join(map(repr, OFFLOADS))}, or sw.offload(module.layers[3]) for parts"
        raise ShardwiseError(problem(f"unknown offload={offload!r}", fix=fix))
    if recompute not in ("auto", None):
        check_how(recompute, "recompute=", "auto")
    if search is not None and search not in SEARCHES:
        raise ShardwiseError(problem(f"unknown search {search!r}", fix=f"one of {', '.join(SEARCHES)}"))
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
        raise ShardwiseError(
            problem(f"bucket_bytes is {bucket_bytes!r}", fix="a whole number of bytes; 0: no buckets; default 25 MiB")
        )
    if mode not in MODES:
        raise ShardwiseError(problem(f"unknown mode {mode!r}", fix=f"one of {', '.join(MODES)}"))


def check_kinds(mesh: Any, precision: Any, optimizer: str) -> None:
    """Raise ShardwiseError for an invalid mesh or precision, or an optimizer whose states are not known."""
    parse_optimizer(optimizer)
    if not isinstance(mesh, Mesh | None):
        raise ShardwiseError(problem(f"mesh is {mesh!r}", fix="sw.Mesh(dp=2, tp=4), or sw.Mesh({'dp': 2, 'tp': 4})"))
    if not isinstance(precision, Precision | None):
        fix = "sw.Precision(compute=torch.bfloat16); parameter= and reduce= set the other dtypes"
        raise ShardwiseError(problem(f"precision is {precision!r}", fix=fix))


def _check_names(setting: str, entries: Any, example: str) -> None:
    if entries is not None and not (isinstance(entries, Mapping) and all(isinstance(name, str) for name in entries)):
        raise ShardwiseError(problem(f"{setting} is {shorten_repr(entries)}", fix=f"a dict such as {example}"))


def _pricing(cluster: Cluster, memory_bytes: float | None, search: MeshSearch, called: Mesh) -> PricingEntry:
    """Return the plan's record of its prices. ``called``: the mesh of the search with the axis names of the plan."""
    mesh, groups = search.mesh, search.cost.domains.axes.groups
    separate = tuple(
        called_name
        for (name, _), (called_name, _) in zip(mesh.axes, called.axes, strict=True)
        if len(mesh.expand(name)) > 1 and mesh.expand(name) not in groups
    )
    return PricingEntry.of(cluster, memory_bytes, separate)


def _check_mesh(mesh: Mesh, cluster: Cluster) -> None:
    if mesh.num_devices != cluster.num_devices:
        product = " x ".join(str(size) for _, size in mesh.axes) or "1"
        needed = f"{product} = {mesh.num_devices}" if len(mesh.axes) > 1 else product
        raise PlanError(
            problem(
                f"{mesh} needs {needed} devices, the cluster has {cluster.num_devices}",
                fix=f"choose axes whose sizes multiply to {cluster.num_devices}",
                section="mesh-size",
            )
        )
