"""Run one rank's program of a plan alone and compare what its operators take with the prediction.

There are no other ranks: PyTorch's fake process group makes messages free, and received data is derived from what was
sent. The values are meaningless, but shapes and computations are those of the rank. One device can thus measure its
part of a plan for thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import LaunchError, PlanError, ShardwiseError
from shardwise.graph.call_arguments import call_arguments
from shardwise.plans.bind_stages import bound, step_graph
from shardwise.plans.micro_batch_search import Example, planned_graph
from shardwise.plans.plan import Plan
from shardwise.programs.spmd import SpmdProgram
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.cuda_graphs import check_graphs
from shardwise.runtime.memory_check import check_memory, memory_on
from shardwise.runtime.program_cache import Compile, ProgramCache, RunSettings
from shardwise.runtime.step_profile import StepProfile, profile_step, steps_of

_SCALE = 0.02  # standard deviation of made-up parameters and inputs


def run_alone(
    module: torch.nn.Module,
    example_inputs: Any,
    plan: Plan,
    rank: int,
    *,
    loss: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    compile: Compile = False,
    steps: int = 3,
) -> StepProfile | StagesProfile:
    """Measure a training step of one rank of ``plan`` without the other ranks, next to the prediction.

    Operators and memory are compared; messages are not. All micro-batches are run. Under a plan of stages every stage
    of the rank is measured by itself.

    Args:
        module: The original module; its tensors may be on meta, since values are made up.
        example_inputs: Inputs of the module as given to ``sw.plan``; tensors may be on meta.
        plan: The plan to measure.
        rank: Rank of the plan, from 0.
        loss: The callable given to ``sw.plan``, if any.
        device: Device to run on; by default the current GPU, else the CPU.
        compile: Whether to compile the programs, as in ``parallelize``.
        steps: Number of measured steps, at least 1.

    Returns:
        A ``StepProfile``, or a ``StagesProfile`` for a plan of stages.

    Raises:
        PlanError: If the plan does not have the rank.
        LaunchError: If this process is one of several ranks.
        OutOfDeviceMemoryError: If the GPU has no room for the rank's program.
        ShardwiseError: If ``steps`` or ``device`` is invalid, or the module returns no loss.
    """
    if dist.is_initialized():
        fix = "run it in a single process, started without shardwise run -n or torchrun"
        raise LaunchError("this process is a rank of a job, but one rank alone must run outside", fix=fix)
    if not 0 <= rank < plan.num_ranks:
        raise PlanError(f"the plan is for ranks 0 to {plan.num_ranks - 1}, not {rank}", fix="choose one of these")
    if steps < 1:
        raise ShardwiseError(f"steps is a number from 1, not {steps!r}")
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ShardwiseError(f"{device!r} is not a device", fix="such as cuda:1 or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ShardwiseError(f"this machine has no {device}", fix="choose another device, such as cpu")
    if compile == "graphs":
        check_graphs(plan, device)
    if device.type == "cuda":
        check_memory(plan, {rank: memory_on(device)})
    call = Example.of(plan, module, call_arguments(example_inputs), loss)
    graph = planned_graph(call, plan)
    if graph.loss is None:
        fix = "return the loss first, or pass a loss with the inputs"
        raise ShardwiseError("the module returns no loss to differentiate", fix=fix)
    settings = RunSettings(loss, "global", device, compile)
    repeats = plan.is_pipeline or plan.micro_batches > 1  # gradients accumulate over micro-batches
    profiles: dict[int, StepProfile] = {}
    with _without_others(rank, plan.num_ranks):
        spmds = bound(plan, step_graph(graph) if plan.is_pipeline else graph, training=module.training).spmds
        for number, (stage, spmd) in enumerate(zip(plan.stages, spmds, strict=True)):
            if rank in stage.placement.ranks:
                ranks = Communicator(stage.placement)
                calls = ProgramCache(module, plan.alone(number), settings, ranks, ranks)
                profiles[number] = _measured(calls, spmd, rank, steps, repeats=repeats)
    return StagesProfile(rank, plan.num_ranks, profiles) if plan.is_pipeline else profiles[0]


@dataclass(frozen=True, slots=True)
class StagesProfile:
    """The stages of a rank by number, each measured by itself: seconds and operators of one micro-batch, forward and
    backward, and its memory. Memory for several micro-batches in flight is not included."""

    rank: int
    num_ranks: int
    stages: Mapping[int, StepProfile]

    def __str__(self) -> str:
        text = [f"rank {self.rank} of {self.num_ranks} alone: without messages, a micro-batch of each of its stages"]
        for number, profile in self.stages.items():
            _, *lines = str(profile).splitlines()  # skip the line that says it is alone
            text += [f"stage {number}", *(f"  {line}" for line in lines)]
        return "\n".join(text)


def _measured(calls: ProgramCache, spmd: SpmdProgram, rank: int, steps: int, *, repeats: bool) -> StepProfile:
    plan, device = calls.plan, calls.settings.device
    calls.create_groups(spmd)
    emitted_step = calls.step_of(spmd, loss_only=True, repeats=repeats)
    tensors = _made_up(spmd, calls.ranks, device)
    run = steps_of(emitted_step, tensors, plan.micro_batches)
    run()
    return profile_step(run, emitted_step, plan, list(tensors), device, steps, alone=rank)


@contextmanager
def _without_others(rank: int, size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _made_up(spmd: SpmdProgram, ranks: Communicator, device: torch.device) -> list[Tensor]:
    """Return a tensor for every source: small random numbers, or zeros for integers and booleans."""
    tensors = []
    for source in spmd.graph.sources:
        value = spmd.graph.by_name[source.value]
        shape = spmd.layouts[source.value].local_shape(ranks.coordinates)
        tensor = torch.zeros(shape, dtype=value.kept_dtype, device=device)
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.normal_(std=_SCALE)
        tensors.append(tensor.requires_grad_(source.trainable))
    return tensors
