"""``sw.parallelize``: from a module and a plan to this rank's part of it, once the ranks agree on both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError, PlanError, PlanWarning, ShardwiseError, listed, problem
from shardwise.graph.kinds import check_kinds
from shardwise.layouts.placement import Placement
from shardwise.plans.file import format_ranks
from shardwise.plans.plan import Plan
from shardwise.plans.plan_precision import only_priced
from shardwise.plans.schedule import SCHEDULES, schedule_of
from shardwise.runtime.agree import from_rank_zero, meet_rank_zero, show_progress_once
from shardwise.runtime.cpu_embedding import matching_parameters
from shardwise.runtime.hooks import announce_hooks
from shardwise.runtime.initial.materialize import Init
from shardwise.runtime.memory_check import require_memory
from shardwise.runtime.parallel import Parallel
from shardwise.runtime.pipeline import Pipeline
from shardwise.runtime.program_cache import Compile, Inputs, Outputs, RunSettings
from shardwise.runtime.replicas import checked_interval

Randomness = Literal["same_as_one_device", "per_shard"]


def parallelize(
    module: torch.nn.Module,
    plan: Plan | str | Path | None,
    *,
    loss: Callable[..., Any] | None = None,
    inputs: Inputs = "global",
    seed: int | None = None,
    init: Init | None = None,
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
    compile: Compile | None = None,
    check_replicas: int | None = None,
    randomness: Randomness = "same_as_one_device",
    host: Sequence[str] = (),
    outputs: Outputs | None = None,
) -> Parallel | Pipeline:
    """This rank's part of ``module`` under ``plan``; called on every rank.

    ``plan``: a Plan or the path of one. It is made once: ranks other than 0 may pass None and receive rank 0's; where
    several ranks give one, all must be equal. Parameters are kept in the dtype of its precision, with the values that
    they have in the module. ``loss``: the callable given to ``sw.plan``, if any. ``inputs``: whether
    calls pass the whole batch on every rank (where ranks pass different ones in training, the next call, or with
    inputs on a GPU the one after, raises ShardwiseError) or this rank's part of it, of any size (under a plan of
    several micro-batches, the batch of a step: a pass takes the same share of every rank's part; random numbers are
    those of one device whose batch is in that order; under stages, the part of this rank's device in
    ``plan.input_layouts``, which the ranks of that number in all stages pass alike). ``seed``, ``init``: how
    parameters and buffers of a module without values (built under ``sw.deferred`` or on meta) get them
    (``runtime.initial``; by default from the seed given to ``sw.deferred``); those that have values keep them.
    ``init(name, tensor)`` fills the whole tensor, or returns one of its shape and dtype, or NotImplemented: then it
    gets the value that the module's own code gives it. ``seed`` also starts dropout. ``weights``: a safetensors file or
    a folder of them, as Hugging Face has them, seen by every rank: of each tensor a rank reads its own part; what the
    files lack of a module without values is an error, or is left to ``init``. ``compile``: whether
    PyTorch's compiler makes kernels of the programs. With ``"auto"``, the default on CUDA, the first ten training steps
    run eager and compiled in turns and the faster way stays; it is remembered on disk (``runtime.compile_benchmark``;
    eager under a schedule whose backward works on cotangents and on weights apart, and within hooks for saved tensors).
    The default on CPUs is False: there it takes longer to compile than most runs gain. ``check_replicas``: in every so
    many training calls, the first included, what ranks must hold alike is compared (``runtime.replicas``), and a
    ReplicaError names the first operator, parameter or input that differs; such a call is not compiled. Rank 0's
    setting counts. ``randomness``: dropout and other random numbers are by default those of one device, whatever the
    plan; with ``"per_shard"`` every shard draws from a generator of its own, which is faster: replicas still agree,
    shards differ and a seed gives the same again, but under this plan only. ``host``: names of tables, or patterns
    (``"embed.weight"``, ``"fields.*.weight"``), that are kept on the CPU with their gradients and optimizer states:
    indices go there and the rows that were looked up come back (``runtime.cpu_embedding``). Prices and ``memory_bytes``
    of the plan still count them on the device. ``outputs``: with ``"when read"`` a call's outputs beside its loss are
    tensors that stay split and are brought together when they are read, which every rank must do alike; with
    ``"whole"`` every call does it, and a rank may read them alone. By default those of a MiB or more stay split (logits
    of a language model), and smaller ones come at once. Under stages all come at once.

    Raises LaunchError without process group, or when ranks disagree; PlanError when the plan does not fit the module or
    the ranks; OutOfDeviceMemoryError when a rank's GPU has less memory left than a step is predicted to take.
    """
    if not isinstance(plan, Plan | str | Path | None):
        raise ShardwiseError(
            problem(f"the plan is of type {type(plan).__name__}", fix="what sw.plan returns, or sw.Plan.load(path)")
        )
    if not dist.is_initialized():
        raise LaunchError(
            problem(
                "parallelize needs a process group, and torch.distributed is not initialised",
                fix="call sw.init_ranks() first and start the script with: shardwise run -n 8 train.py (or torchrun)",
            )
        )
    if inputs not in ("global", "local"):
        raise ShardwiseError(
            f'inputs is "global" (the whole batch on every rank) or "local" (its part), not {inputs!r}'
        )
    if compile not in (None, True, False, "auto"):
        raise ShardwiseError(f'compile is True, False or "auto" (what is faster, measured), not {compile!r}')
    if randomness not in ("same_as_one_device", "per_shard"):
        raise ShardwiseError(f'randomness is "same_as_one_device" or "per_shard", not {randomness!r}')
    if isinstance(seed, bool) or not isinstance(seed, int | None):
        raise ShardwiseError(f"seed is a whole number, not {seed!r}")
    if outputs not in (None, "when read", "whole"):
        raise ShardwiseError(
            f'outputs is "when read" (brought together then, by every rank) or "whole" (at the call), not {outputs!r}'
        )
    check_kinds(module)
    agreed = agree_on_plan(plan)
    size = dist.get_world_size()
    if agreed.is_pipeline:
        _check_pipeline(agreed, size, compile)
        if schedule_of(agreed.schedule, agreed.order).splits_backward:
            compile = False
    else:
        _check_ranks(agreed, size)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    device = torch.device(device)
    require_memory(agreed, device)
    if compile is None:
        compile = "auto" if device.type == "cuda" else False
    every, streams, on_host = from_rank_zero(
        lambda: (checked_interval(check_replicas), randomness == "per_shard", matching_parameters(module, host))
    )
    announce_hooks(module)
    if dist.get_rank() == 0 and (sentence := only_priced(agreed)):
        warnings.warn(f"the plan was {sentence}", PlanWarning, stacklevel=2)
    settings = RunSettings(loss, inputs, device, compile, every, streams, on_host, outputs)
    kind = Pipeline if agreed.is_pipeline else Parallel
    with show_progress_once("making the ranks' parts of the model"):
        return kind(module, agreed, settings, seed=seed, init=init, weights=weights)


def _check_ranks(plan: Plan, size: int) -> None:
    """Raise PlanError unless a plan of one stage is for the ranks that are running."""
    if size != plan.mesh.num_devices:
        raise PlanError(
            problem(
                f"the plan is for {plan.mesh.num_devices} devices ({plan.mesh}); {size} ranks are running",
                fix=f"start {plan.mesh.num_devices} ranks, or plan for {size}",
            )
        )
    ranks = plan.only_stage.placement.ranks
    if ranks != Placement.whole(plan.mesh).ranks:
        raise PlanError(
            problem(
                f"the plan puts the devices of {plan.mesh} on ranks {format_ranks(ranks)}; a plan of one stage runs "
                "on all ranks in their order",
                fix=f'write "ranks": "0-{size - 1}" in the file, and name the mesh axes in the order that is meant',
            )
        )


def _check_pipeline(plan: Plan, size: int, compile: Compile | None) -> None:
    """Raise PlanError unless a plan of stages is for the ranks that are running, and what is asked of it can be."""
    if size != plan.num_ranks:
        places = "; ".join(f"stage {i} on ranks {format_ranks(s.placement.ranks)}" for i, s in enumerate(plan.stages))
        raise PlanError(
            problem(
                f"the plan is for {plan.num_ranks} devices ({places}); {size} ranks are running",
                fix=f"start {plan.num_ranks} ranks, or plan for {size}",
            )
        )
    if compile is True and schedule_of(plan.schedule, plan.order).splits_backward:
        whole = listed([name for name, schedule in SCHEDULES.items() if not schedule.splits_backward])
        raise PlanError(
            problem(
                f"{plan.schedule} works on cotangents and on weights apart, and compiled kernels do both at once",
                fix=f"plan with a schedule that does not ({whole}), or leave compile=True out",
            )
        )


def agree_on_plan(plan: Plan | str | Path | None) -> Plan:
    """Rank 0's plan on every rank. Raises LaunchError where another rank brought a different one, or rank 0 none."""
    failure: ShardwiseError | None = None
    agreed: Plan | None = None
    try:
        agreed = Plan.load(plan) if isinstance(plan, str | Path) else plan
    except ShardwiseError as error:
        failure = error
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1:
        meet_rank_zero("its plan")
    states: list[Any] = [None] * size
    dist.all_gather_object(states, agreed.digest if agreed else ("failed" if failure else None))
    if failure is not None:
        raise failure
    broken = [i for i, state in enumerate(states) if state == "failed"]
    if broken:
        raise LaunchError(f"rank {', '.join(map(str, broken))} could not load its plan")
    if states[0] is None:
        raise LaunchError(
            problem("rank 0 has no plan", fix="make or load the plan on rank 0; other ranks may pass None")
        )
    others = [i for i, state in enumerate(states) if state not in (None, states[0])]
    if others:
        shown = ", ".join(f"rank {i} has {states[i][:12]}" for i in others[:4])
        raise LaunchError(
            problem(
                f"ranks disagree on the plan: rank 0 has {states[0][:12]}, {shown}",
                fix="plan on rank 0 and pass None elsewhere, or load the same file on every rank",
            )
        )
    if None in states:
        box = [agreed.to_json() if rank == 0 and agreed else None]
        dist.broadcast_object_list(box, src=0)
        received = Plan.from_json(str(box[0]), name="the plan of rank 0")
        agreed = agreed or received
    assert agreed is not None, "a plan is known on every rank by now"
    assert agreed.digest == states[0], "the broadcast changed the plan"
    return agreed


__all__ = ["agree_on_plan", "parallelize"]
