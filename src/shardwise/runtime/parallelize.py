"""``sw.parallelize``: turn a module and a plan into this rank's part of the module, once the ranks agree on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError, PlanError, PlanWarning, ShardwiseError, listed, warn_user
from shardwise.graph.module_checks import check_kinds
from shardwise.layouts.placement import Placement
from shardwise.plans.plan import Plan
from shardwise.plans.quantities import format_ranges
from shardwise.plans.result import PlanningResult, plan_of
from shardwise.plans.schedule import SCHEDULES, schedule_of
from shardwise.runtime.agree import from_rank_zero, raise_first, rank_and_world_size, show_progress_once
from shardwise.runtime.communicator import rank_device
from shardwise.runtime.cpu_embedding import matching_parameters
from shardwise.runtime.cuda_graphs import check_graphs
from shardwise.runtime.hooks import announce_hooks
from shardwise.runtime.initial.materialize import Init
from shardwise.runtime.memory_check import require_memory
from shardwise.runtime.parallel import Parallel
from shardwise.runtime.program_cache import Compile, Inputs, Outputs, RunSettings
from shardwise.runtime.replicas import checked_interval

Randomness = Literal["same_as_one_device", "per_shard"]


def parallelize(
    module: torch.nn.Module,
    plan: Plan | PlanningResult | str | Path | None,
    *,
    loss: Callable[..., Any] | None = None,
    inputs: Inputs = "global",
    seed: int | None = None,
    init: Init | None = None,
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    compile: Compile | None = None,
    check_replicas: int | None = None,
    check_finite: int | None = None,
    randomness: Randomness = "same_as_one_device",
    host: Sequence[str] = (),
    outputs: Outputs | None = None,
) -> Parallel:
    """Return this rank's part of ``module`` under ``plan``. Every rank calls it.

    Args:
        module: The original module. Parameters are kept in the dtype of the plan's precision, with the values they
            have.
        plan: A Plan or the path of one. Ranks other than 0 may pass None and receive rank 0's; if several ranks pass
            one, all must be equal.
        loss: The callable given to ``sw.plan``, if any.
        inputs: ``"global"``: every rank passes the whole batch. If ranks pass different ones in training, the next call
            (with inputs on a GPU: the one after) raises ShardwiseError. ``"local"``: every rank passes its own part, of
            any size. Under a plan of several micro-batches that is its part of the batch of a step, and a micro-batch
            takes the same share of every rank's part; random numbers are those of one device whose batch is in that
            order. Under stages it is the part of this rank's device in ``plan.input_layouts``, the same on the ranks
            with that device number in all stages.
        seed: Seed of the initial values of parameters and buffers without values (built under ``sw.deferred`` or on
            meta; by default the seed given to ``sw.deferred``), and of dropout. Tensors that have values keep them.
        init: Callable ``init(name, tensor)`` for tensors without values. It fills the whole tensor, returns one of its
            shape and dtype, or returns NotImplemented for the value that the module's own code gives
            (``runtime.initial``).
        weights: A safetensors file or a folder of them, as saved by Hugging Face and readable by every rank. A rank
            reads only its own part of each tensor. A tensor without values that the files lack is an error, or is left
            to ``init``.
        device: Device of this rank; by default the current GPU with NCCL, else the CPU.
        compile: Whether ``torch.compile`` generates the kernels of the programs. With ``"auto"``, the default on CUDA,
            a program that does not compile runs eager, and a warning says why; so do all under a schedule that splits
            backward into input and weight gradients. The default on CPUs is False, since compiling takes longer there
            than most runs gain. ``"graphs"``: as True, and the kernels between messages are CUDA graphs from the second
            call on (``runtime.cuda_graphs``), for steps so short that the host limits them. It needs a GPU, and a plan
            without stages and offload. What the graphs keep from step to step is known once they are captured: the
            check of memory here does not count it, and ``profile`` measures it.
        check_replicas: Interval, in training calls from the first, at which ranks compare the values of which they hold
            copies (``runtime.replicas``). A ReplicaError names the first operator, parameter or input that differs.
            Such a call is not compiled. Rank 0's setting counts; 0 or None: never.
        check_finite: Interval, in training calls from the first, at which the loss and the gradients are looked at. If
            one is NaN or infinite on any rank, the step is run again operator by operator (``Parallel.check_finite``),
            and every rank raises NotFiniteError, which names where that begins; nothing was updated. Such a step pays
            for one pass over its gradients. A call whose backward you call yourself runs operator by operator whenever
            it is checked, unless its replicas are. With a ``GradScaler``, which looks for infinite gradients itself,
            only the loss is looked at. Rank 0's setting counts; 0 or None: never.
        randomness: Random numbers are those of one device, whatever the plan. ``"per_shard"`` is accepted with a
            warning: a generator per shard would be no faster.
        host: Names of tables, or patterns (``"embed.weight"``, ``"fields.*.weight"``), that stay on the CPU with their
            gradients and optimizer states. Indices are copied there and the looked-up rows come back
            (``runtime.cpu_embedding``). Prices and ``memory_bytes`` of the plan still count them on the device.
        outputs: ``"when read"``: outputs other than the loss stay sharded and are gathered when they are read, which
            every rank must do. ``"whole"``: every call gathers them, and a single rank may read them. By default
            outputs of 1 MiB or more (logits of a language model) stay sharded. Under stages all are gathered.

    Returns:
        The ``Parallel`` module.

    Raises:
        LaunchError: Without process group, or if ranks disagree.
        ShardwiseError: If an argument is invalid.
        PlanError: If the plan does not fit the module or the ranks.
        OutOfDeviceMemoryError: If a rank's GPU has less memory left than a step is predicted to take.
    """
    plan = plan_of(plan)
    if not isinstance(plan, Plan | str | Path | None):
        raise ShardwiseError(
            f"the plan is of type {type(plan).__name__}", fix="pass the result of sw.plan or sw.Plan.load"
        )
    if not dist.is_initialized():
        what = "parallelize needs a process group, and torch.distributed is not initialised"
        fix = "call sw.init_ranks() first and start the script with: shardwise run -n 8 train.py (or torchrun)"
        raise LaunchError(what, fix=fix)
    for name, value, allowed, meaning in (
        ("inputs", inputs, ("global", "local"), '"global" (the whole batch on every rank) or "local" (its part)'),
        (
            "compile",
            compile,
            (None, True, False, "auto", "graphs"),
            'True, False, "auto" (where it compiles) or "graphs" (with CUDA graphs)',
        ),
        ("randomness", randomness, ("same_as_one_device", "per_shard"), '"same_as_one_device" (the default)'),
        (
            "outputs",
            outputs,
            (None, "when read", "whole"),
            '"when read" (gathered then, by every rank) or "whole" (at the call)',
        ),
    ):
        if value not in allowed:
            raise ShardwiseError(f"{name} is {meaning}, not {value!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | None):
        raise ShardwiseError(f"seed is a whole number, not {seed!r}")
    check_kinds(module)
    agreed = agree_on_plan(plan)
    if _check_ranks(agreed, dist.get_world_size(), compile):
        compile = False
    if device is None:
        device = rank_device()
    device = torch.device(device)
    if compile == "graphs":
        check_graphs(agreed, device)
    require_memory(agreed, device, {name for name, p in module.named_parameters() if p.requires_grad})
    if compile is None:
        compile = "auto" if device.type == "cuda" else False
    replicas, finite, on_host = from_rank_zero(
        lambda: (
            checked_interval("check_replicas", check_replicas),
            checked_interval("check_finite", check_finite),
            matching_parameters(module, host),
        )
    )
    announce_hooks(module)
    if randomness == "per_shard" and dist.get_rank() == 0:
        warn_user(
            'randomness="per_shard" draws the numbers of one device, which cost no more than a generator per shard: '
            "omit it",
            PlanWarning,
        )
    settings = RunSettings(loss, inputs, device, compile, replicas, finite, on_host, outputs)
    with show_progress_once("making the ranks' parts of the model"):
        return Parallel(module, agreed, settings, seed=seed, init=init, weights=weights)


def _check_ranks(plan: Plan, size: int, compile: Compile | None) -> bool:
    """Return whether the plan splits backward, which compiled kernels do not. Raises PlanError unless the plan is for
    the running ranks, and if it splits backward and ``compile`` is True."""
    if size != plan.num_ranks:
        places = "; ".join(f"stage {i} on ranks {format_ranges(s.placement.ranks)}" for i, s in enumerate(plan.stages))
        raise PlanError(
            f"the plan is for {plan.num_ranks} devices ({places if plan.is_pipeline else plan.mesh}); {size} ranks "
            "are running",
            fix=f"start {plan.num_ranks} ranks, or plan for {size}",
        )
    if not plan.is_pipeline:
        ranks = plan.only_stage.placement.ranks
        if ranks != Placement.whole(plan.mesh).ranks:
            raise PlanError(
                f"the plan puts the devices of {plan.mesh} on ranks {format_ranges(ranks)}; a plan of one stage "
                "runs on all ranks in their order",
                fix=f'write "ranks": "0-{size - 1}" in the file, and name the mesh axes in the intended order',
            )
        return False
    splits_backward = schedule_of(plan.schedule, plan.order).splits_backward
    if compile is True and splits_backward:
        whole = listed([name for name, schedule in SCHEDULES.items() if not schedule.splits_backward])
        what = f"{plan.schedule} splits input and weight gradients, but compiled kernels compute both at once"
        raise PlanError(what, fix=f"plan with another schedule ({whole}), or omit compile=True")
    return splits_backward


def agree_on_plan(plan: Plan | str | Path | None) -> Plan:
    """Return rank 0's plan on every rank. Raises LaunchError if another rank has a different one, or rank 0 none."""

    def given() -> Plan:
        if plan is None:
            raise LaunchError("rank 0 has no plan", fix="make or load the plan on rank 0; other ranks may pass None")
        return Plan.load(plan) if isinstance(plan, str | Path) else plan

    agreed, (rank, _) = from_rank_zero(given, "its plan"), rank_and_world_size()
    fault: ShardwiseError | None = None
    try:
        if rank and plan is not None and (own := given()).digest != agreed.digest:
            what = f"the plan: rank 0 has {agreed.digest[:12]}, rank {rank} has {own.digest[:12]}"
            fix = "plan on rank 0 and pass None elsewhere, or load the same file on every rank"
            raise LaunchError(f"ranks disagree on {what}", fix=fix)
    except ShardwiseError as error:
        fault = error
    raise_first(LaunchError, fault)
    return agreed
