"""Plan a module without devices: ``sw.plan``, ``sw.compare`` and ``sw.step_memory``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Literal

import torch

from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.memory import MemoryEstimate, memory_of
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import simulate
from shardwise.errors import PlanError, ShardwiseError
from shardwise.graph.call_arguments import call_arguments
from shardwise.graph.segments import Recompute
from shardwise.graph.step_precision import Precision
from shardwise.layouts.mesh import Mesh
from shardwise.planning.execute import execute
from shardwise.planning.plan_cache import PlanCache
from shardwise.planning.suggestions import execute_or_suggest
from shardwise.plans.micro_batch_search import planned_program
from shardwise.plans.plan import Plan
from shardwise.plans.price_scope import prices_of
from shardwise.plans.request import SEARCHES, PlanRequest, SearchName
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.programs.vjp import VjpCache
from shardwise.report.alternatives import ComparedPlan, Comparison
from shardwise.rules.keyed_rows import IMBALANCE
from shardwise.search.decide import Kept
from shardwise.search.memory_policy import Offload
from shardwise.search.modes import Mode
from shardwise.search.zero import Zero
from shardwise.untrusted_text import is_number, shorten_repr


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
    per_micro_batch: Sequence[str] = (),
    memory_bytes: float | None = None,
    strategies: Mapping[str, Any] | None = None,
    layouts: Mapping[str, Kept] | None = None,
    bucket_bytes: int | None = None,
    row_chunks: int | Literal["fused"] | None = None,
    imbalance: float = IMBALANCE,
    recompute: Recompute | Literal["auto"] | None = "auto",
    offload: Offload = "auto",
    zero: int | Zero | None = None,
    stages: int | Literal["marked", "auto"] | None = None,
    schedule: str | None = None,
    seconds: float | None = None,
    cache: bool = True,
) -> PlanningResult:
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
            ``"muon"``, ``"adafactor"``, ``"shampoo"``, ``"soap"`` and ``"adam8bit"`` update each matrix that is split
            on one device, which gathers it. With ``"lbfgs"`` (``"lbfgs 10"``: a history of 10) each device gathers all.
            With ``"... on host"`` its states stay in host memory between steps; the update brings them to the device
            in groups of parameters.
        precision: The dtypes of compute, storage and reductions, if they differ from the model's (``sw.Precision``).
        mode: ``"auto"``, ``"semi_auto"``, ``"data_parallel"`` or ``"stand_alone"`` (``search.modes``).
        search: How ``"auto"`` decides (``search.auto``). Default: ``"dynamic_programming"``; if strategies are given,
            ``"sharding_propagation"``, which completes them.
        mesh: The mesh; with ``stages``, the mesh of one stage. By default searches by price try all shapes of up to
            ``max_mesh_axes`` axes that respect the cluster's levels. They name an axis by its role if it has only one
            (``search.axis_names``). Otherwise the default is one axis ``dp`` over all devices.
        max_mesh_axes: The largest number of axes of the meshes that are tried.
        global_batch: Samples of an optimizer step. ``par.step`` takes the whole batch.
        micro_batch: Samples of a micro-batch; a step runs as many micro-batches as it needs. If the inputs have
            ``global_batch`` samples and this is None, a search by price chooses it. It tries divisors, the largest
            first, until one fits and steps get no faster; each is a search of its own
            (``result.report.explain("micro_batch")``). If both sizes are None, a step is one pass over the example
            inputs, or several micro-batches if only these fit. With ``stages``, a search by price chooses it; other
            modes take the largest that fills the schedule.
        per_micro_batch: Terms of the loss that every micro-batch computes from its own samples. The step takes their
            average over the micro-batches, weighted by samples. This is what gradient accumulation on one device does,
            and what Megatron and torchtitan do with the load-balancing loss of experts, which over the whole batch is
            no sum over micro-batches. Names of outputs (``"aux_loss"``), modules (``"layers.*.router"``: the scalars
            that it computes for others) or operators (``"/mul_3"``), or patterns. The rest of the loss stays that of
            the whole batch.
        memory_bytes: Bytes that the tensors of a device may take at the peak of a step. Default: the memory of the
            cluster's devices less their reserve. A given number is used without subtracting the reserve. If
            ``cluster`` is a number of devices, the default is no limit.
        strategies: Module path patterns to strategies, as ``sw.shard`` on these submodules.
        layouts: Inputs, parameters or buffers to the layouts in which they are delivered or stored:
            ``"[32@dp, 512]"``, or the number of parts per dim, ``(8, 1)``. The rest is chosen as if these were free,
            and they are converted. Use it for the way a data loader splits its batches, for example.
        bucket_bytes: The largest message, in bytes, that carries several gradients or gathered parameters; 0: one
            message each. Default: 25 MiB, or where layouts are chosen by price, without stages, the size with the
            shortest simulated step that fits. The prefetch depth of gathers is chosen so for a given size, too.
        row_chunks: The chunks into which rows are divided between operators that mix them, so that the message of one
            chunk travels beside the products of another. ``"fused"``: rows stay whole, and gathers and scatters of
            values run within the products that read or feed them, part by part, by torch's symmetric memory (NVIDIA
            GPUs of one machine; elsewhere one after the other, which is printed). Default: 1, or where layouts are
            chosen by price, without stages, 2, 4 or ``"fused"`` if the simulated step is shorter and fits.
        imbalance: Rows that are planned for on the busiest device that owns experts, over the mean of the owners, in
            seconds and bytes. A step may have more: it takes longer, and needs more memory than was planned.
        recompute: What backward recomputes. ``"full"``, ``"cheap"``, ``"gathers"`` or ``"cheap+gathers"``
            (``sw.recompute``) apply to the model's repeated blocks, in addition to what the model asks for. ``"none"``:
            nothing. None: only what the model asks for (``sw.recompute``, ``torch.utils.checkpoint``). ``"auto"``: as
            None; if nothing fits, searches by price also recompute what makes a plan fit (``search.fit_memory``).
        offload: What waits in host memory for backward. ``"all"``: the saved tensors of the repeated blocks.
            ``"none"``: nothing. ``"auto"``: what the model asks for (``sw.offload``); if nothing fits, also what makes
            a plan fit.
        zero: 1, 2, 3 or ``sw.Zero``: shard parameters, gradients and optimizer states wherever they would be copied.
            Stage 3 frees gathered parameters after forward and gathers them again in backward.
        stages: The number of pipeline stages. Every stage has an equal part of the devices. Cuts make the
            slowest stage as fast as possible within the memory, and may be before any operator; a stage that needs
            recomputation has whole blocks (``search.stage_partition``). ``"marked"``: cut at ``sw.stage``.
            ``"auto"`` chooses the number (one: no pipeline), schedule and micro-batch by price, for the samples of a
            step (``plans.auto_stages``); ``result.report.explain("stages")`` lists what was tried.
        schedule: A schedule of ``torch.distributed.pipelining`` by name (``plans.schedule``), default ``"1F1B"``; or
            ``"Solved"``: an order searched for these stages within the memory. All but ``GPipe`` and ``1F1B`` run two
            stages per pipeline rank; loops run as many as the name gives, ``"Interleaved1F1B:4"``.
        seconds: When planning ends. The result is the best plan that was found by then, and a warning says by which
            share it may be slower than others. Ctrl-C has the same effect once there is a plan. Default: no deadline.
        cache: Whether a plan of the same graph, cluster, settings and versions is read from the user's cache folder,
            and kept there (``planning.plan_cache``). The environment variable SHARDWISE_CACHE names another folder, or
            is ``off``.

    Returns:
        The result: ``.plan`` is data to print, save or give to ``sw.parallelize``; ``.report`` answers why it was
        chosen (``explain``, ``what_if``, ``top``, ``trace``, ``write``).

    Raises:
        ShardwiseError: The model or a setting has a fault that the user can fix (also CaptureError and LayoutError).
        PlanError: Nothing fits; if planning takes a few seconds, the error lists up to three fixes, the cheapest first.
            Or nothing was found in time.
            Or a step has several micro-batches, and the loss is no sum over them (``programs.time_axis``).
    """
    request = PlanRequest.of(
        module, example_inputs, cluster, kwargs=kwargs, loss=loss, optimizer=optimizer, precision=precision, mode=mode,
        search=search, mesh=mesh, max_mesh_axes=max_mesh_axes, global_batch=global_batch, micro_batch=micro_batch,
        per_micro_batch=per_micro_batch, memory_bytes=memory_bytes, strategies=strategies, layouts=layouts,
        bucket_bytes=bucket_bytes, row_chunks=row_chunks, imbalance=imbalance, recompute=recompute, offload=offload,
        zero=zero, stages=stages, schedule=schedule,
    )  # fmt: skip
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise ShardwiseError(f"seconds is {seconds!r}", fix="seconds for planning, above 0; None: no deadline")
    return execute_or_suggest(request, inf if seconds is None else seconds, PlanCache.of_user() if cache else None)


def compare(
    module: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | int,
    *,
    searches: Sequence[SearchName] = SEARCHES,
    loss: Callable[..., Any] | None = None,
    **settings: Any,
) -> Comparison:
    """Plan with several searches, and compare planning times and simulated steps at the same prices.

    All arguments but ``searches`` are those of ``sw.plan``.

    Args:
        searches: Names of the searches, a list or tuple; by default all.
        **settings: Other arguments of ``sw.plan``.

    Returns:
        One row per search. If a search raises PlanError (nothing fits), its row holds the error.

    Raises:
        ShardwiseError: ``searches`` is not a list or tuple, or ``sw.plan`` raises an error other than PlanError.
    """
    if not isinstance(searches, list | tuple):
        raise ShardwiseError(f"searches is {shorten_repr(searches)}", fix=f"a list of some of {', '.join(SEARCHES)}")
    given = PlanRequest.of(module, example_inputs, cluster, loss=loss, **settings)
    vjp_cache, rows = VjpCache(), []
    for search in searches:
        request, start = given.varied(search=search), time.perf_counter()
        try:
            found = execute(request).plan
        except PlanError as error:
            rows.append(ComparedPlan(search, time.perf_counter() - start, error=str(error)))
            continue
        seconds = time.perf_counter() - start
        prices = Prices(Links(request.cluster, found.mesh), found.optimizer, found.micro_batches)
        spmd = planned_program(found, module, (request.args, dict(request.kwargs)), loss)
        rows.append(ComparedPlan(search, seconds, found, simulate(spmd, prices, vjp_cache)))
    return Comparison(tuple(rows), given.cluster)


def step_memory(
    module: torch.nn.Module,
    example_inputs: Any,
    plan: Plan | PlanningResult,
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
    data: Plan = plan_of(plan)
    return memory_of(planned_program(data, module, call_arguments(example_inputs, kwargs), loss), prices_of(data))
