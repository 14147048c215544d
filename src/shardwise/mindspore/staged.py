"""Pipelines: cells have stages, a ``PipelineCell`` has micro-batches, and its loss is the sum of their losses. The
stages and schedules are those of ``sw.plan`` and torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import listed, problem
from shardwise.mindspore import context, rank_groups, strict
from shardwise.mindspore.library import APART
from shardwise.mindspore.options import FULL_BATCH, Options

# The reference's name -> torch's schedule.
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zero_bubble_v": "ZBVZeroBubble"}
INTERLEAVED = {"gpipe": "LoopedBFS", "1f1b": "Interleaved1F1B", "zero_bubble_v": "ZBVZeroBubble"}
FOLDED = "zero_bubble_v"  # segment 1 runs through the stages backwards


def is_on() -> bool:
    """Return whether cells with parameters run in stages."""
    options = context.options()
    return options.distributed and options.pipeline_stages > 1


class MicroBatch(nn.Module):
    """The loss of one micro-batch of a ``PipelineCell``, times ``scale``. A loss vector is summed."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.training = network.training
        setattr(self, APART, True)

    def forward(self, scale: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        result = self.network(*inputs)
        loss: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return loss.sum() * scale


def parts_of(inputs: Sequence[torch.Tensor], micro_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return the inputs of every micro-batch. Raises ValueError for a batch that does not divide."""
    for number, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] % micro_size:
            what = f"of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            what = f"input {number} of a PipelineCell is {what}, for {micro_size} micro-batches"
            fix = f"tensors whose dim 0 is a multiple of {micro_size}, or another micro_size"
            raise ValueError(problem(what, fix=fix))
    return zip(*(x.chunk(micro_size) for x in inputs), strict=True)


# -- stages ------------------------------------------------------------------------------------------------------------


def mark(network: nn.Module, options: Options) -> int:
    """Mark the modules of a network with the library's stages and return their number.

    With ``pipeline_interleave`` and ``pipeline_segment`` a pipeline rank has two stages. Raises ValueError for a stage
    out of range, and in strict mode for cells that have parameters and no stage, naming them.
    """
    places, config = options.pipeline_stages, options.pipeline_config
    is_folded = config["pipeline_scheduler"] == FOLDED
    stages = {path: (module, number) for path, module in network.named_modules()
              if (number := vars(module).get("_stage", vars(module).get("pipeline_stage"))) is not None}  # fmt: skip
    beyond = [f"{path or 'the network'} in stage {number}" for path, (_, number) in stages.items() if number >= places]
    if beyond:
        what = f"pipeline_stages is {places}, and there are {listed(beyond)}"
        raise ValueError(problem(what, fix=f"number from 0 to {places - 1}"))
    if not stages and options.auto_pipeline:
        return places * _segments(options)
    bare = _without_stage(network, set(stages))
    if bare and (options.strict or not stages):
        raise strict.failure(
            "pipeline_stage",
            f"pipeline_stages is {places}, and these cells have parameters and no pipeline_stage: {listed(bare)}",
            "net.layer1.pipeline_stage = 0 for every cell with parameters (or for one around it), ascending in the "
            "order of execution; or auto_pipeline=True, which cuts the network by itself",
        )
    for module, number in stages.values():
        segment: int = vars(module).get("_segment") or 0
        folds = is_folded and segment % 2
        sw.stage(module, segment * places + (places - 1 - number if folds else number))
    return places * _segments(options)


def _segments(options: Options) -> int:
    config = options.pipeline_config
    return 2 if config["pipeline_interleave"] or config["pipeline_scheduler"] == FOLDED else 1


def _without_stage(network: nn.Module, marked: set[str]) -> list[str]:
    """Return the modules with parameters of their own that neither have a stage nor lie in a module with one."""

    def is_inside(path: str) -> bool:
        return path in marked or (bool(path) and is_inside(path.rpartition(".")[0]))

    owners = [(path, module) for path, module in network.named_modules() if module._parameters]
    return [f"{path} ({type(module).__name__})" for path, module in owners if not is_inside(path)]


def settings(model: nn.Module, args: tuple[Any, ...], micro_size: int, options: Options) -> dict[str, Any]:
    """Return the arguments of ``sw.plan`` for stages and micro-batches."""
    places, scheduler = options.pipeline_stages, options.pipeline_config["pipeline_scheduler"]
    if options.devices % places:
        what = f"pipeline_stages is {places}, and {options.devices} devices do not divide by it"
        raise ValueError(problem(what, fix="a number of devices that pipeline_stages divides"))
    if micro_size < places:
        what = f"micro_size is {micro_size}, and pipeline_stages {places}"
        raise ValueError(problem(what, fix="at least one micro-batch per stage"))
    batch = args[1].shape[0]
    schedule = (INTERLEAVED if options.pipeline_config["pipeline_interleave"] else SCHEDULES)[scheduler]
    return {"stages": mark(model, options), "schedule": schedule, "global_batch": batch,
            "micro_batch": batch // micro_size}  # fmt: skip


# -- steps -------------------------------------------------------------------------------------------------------------


def fed(inputs: tuple[torch.Tensor, ...], micro_size: int, options: Options) -> tuple[torch.Tensor, ...]:
    """Return the whole batch. The ranks of a stage feed parts of it: every micro-batch has rows of each of them."""
    ranks = options.stage_devices
    if options.full_batch or options.dataset_strategy == FULL_BATCH or ranks == 1:
        return inputs
    if not isinstance(options.dataset_strategy, str):
        what = f"dataset_strategy {options.dataset_strategy} with pipeline_stages {options.pipeline_stages}"
        raise ValueError(problem(what, fix='"data_parallel" or "full_batch"'))
    first = dist.get_rank() // ranks * ranks
    list(parts_of(inputs, micro_size))
    batches = []
    for x in inputs:
        rows = rank_groups.all_gather(x, rank_groups.all_ranks_group()).view(
            -1, micro_size, x.shape[0] // micro_size, *x.shape[1:]
        )
        batches.append(rows[first : first + ranks].transpose(0, 1).reshape(-1, *x.shape[1:]))
    return tuple(batches)


def loss_of(par: sw.Parallel, inputs: tuple[torch.Tensor, ...], micro_size: int, scale: float) -> torch.Tensor:
    """Return the sum of the micro-batches' losses, on all ranks. In training it is differentiable: the step has run."""
    factor = torch.tensor(scale)
    if not (par.training and torch.is_grad_enabled()):
        unscaled = torch.tensor(1.0)
        return torch.stack([par(unscaled, *part) for part in parts_of(inputs, micro_size)]).sum()
    parameters = [parameter for parameter in par.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    list(parts_of(inputs, micro_size))
    total = par.step(factor, *inputs)
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    stepped: Any = _Stepped
    loss: torch.Tensor = stepped.apply(total, scale, gradients, *parameters)
    return loss


class _Stepped(torch.autograd.Function):
    """The loss of a step that has run forward and backward; its gradients were of ``scale`` times the loss."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, scale: float, gradients: Any, *_: torch.Tensor) -> torch.Tensor:
        ctx.scale, ctx.gradients = scale, gradients
        return total / scale

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        factor = cotangent / ctx.scale
        return None, None, None, *(gradient * factor for gradient in ctx.gradients)


def shows_loss() -> bool:
    """Return whether this rank prints the training loss: ranks of the last stage, or all with
    ``pipeline_result_broadcast``. (All ranks know the loss, so that their callbacks decide the same.)"""
    options = context.options()
    if not is_on() or options.pipeline_result_broadcast:
        return True
    scheduler = options.pipeline_config["pipeline_scheduler"]
    last = 0 if scheduler == FOLDED else options.pipeline_stages - 1  # a V-shaped pipeline ends on its first rank
    return dist.get_rank() // options.stage_devices == last
