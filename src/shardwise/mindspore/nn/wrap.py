"""Cells that wrap a network: with its loss, and with its loss and update; and the reduction of its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from shardwise.errors import ShardwiseError, problem
from shardwise.mindspore import calls, context, rank_groups, staged
from shardwise.mindspore.checks import closest, flag, from_on
from shardwise.mindspore.communication.management import GlobalComm, find_group
from shardwise.mindspore.holding import as_gradient, averaged_over, parameter_of
from shardwise.mindspore.loss_scale import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    all_finite,
)
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.nn.optimizer import Optimizer
from shardwise.mindspore.ops.arithmetic import CLASSES as ELEMENTWISE
from shardwise.mindspore.ops.composite import GradOperation, HyperMap
from shardwise.mindspore.ops.functional import differentiate
from shardwise.mindspore.options import Options, ParallelMode
from shardwise.mindspore.tensor import ParameterTuple, Tensor

HALVES = (torch.float16, torch.bfloat16)
REDUCED = (ParallelMode.DATA_PARALLEL, ParallelMode.HYBRID_PARALLEL)


class WithLossCell(Cell):
    """``loss_fn(backbone(data), label)``."""

    is_wrapper = True

    def __init__(self, backbone: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self._backbone, self._loss_fn = backbone, loss_fn

    backbone_network = property(lambda self: self._backbone)

    def construct(self, data: Any, label: Any) -> Any:
        return self._loss_fn(self._backbone(data), label)


class WithEvalCell(Cell):
    """A network with its loss for metrics: it returns loss, output and label."""

    def __init__(self, network: nn.Module, loss_fn: Any, add_cast_fp32: bool = False) -> None:
        super().__init__()
        self._network, self._loss_fn, self.add_cast_fp32 = network, loss_fn, add_cast_fp32

    def construct(self, data: Any, label: Any) -> Any:
        output = self._network(data)
        output = output.float() if self.add_cast_fp32 else output
        return self._loss_fn(output, label), output, label


class DistributedGradReducer:
    """All-reduce of gradients: their sum over the ranks, with ``mean`` divided by ``degree``.

    Gradients of one dtype share messages of at most 25 MiB, filled in their order. (The reference sends each by itself
    unless fusion is configured.) The options comm_fusion and all_reduce_fusion_config and
    ``set_cost_model_context(costmodel_allreduce_fusion_algorithm=...)`` change that. With gradient_fp32_sync half
    precision is summed in float32.

    Args:
        parameters: the parameters of the gradients, in their order; a parameter with ``layerwise_parallel`` is every
            rank's own, and its gradient is not reduced.
        mean: whether to average; by default the option gradients_mean.
        degree: the divisor of the mean; by default the size of the group.
        fusion_type: accepted without effect.
        group: name of the group of ranks; by default all.

    Raises:
        ShardwiseError: for gradients that a plan has split and reduced (semi_auto_parallel, auto_parallel).
    """

    def __init__(
        self, parameters: Iterable[Any], mean: bool | None = None, degree: int | None = None, fusion_type: int = 1,
        group: str | None = None,
    ) -> None:  # fmt: skip
        self.group = GlobalComm.WORLD_COMM_GROUP if group is None else group
        options = context.options()
        self.mean = options.gradients_mean if mean is None else mean
        self.degree = find_group(self.group).size if degree is None else degree
        from_on("DistributedGradReducer: degree", self.degree, 1)
        flag("mean", self.mean)
        self._shared = [not getattr(parameter, "layerwise_parallel", False) for parameter in parameters]

    def __call__(self, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the reduced gradients. The arguments are not changed."""
        if len(grads) != len(self._shared):
            what = f"DistributedGradReducer has {len(self._shared)} parameters and is given {len(grads)} gradients"
            raise ValueError(problem(what, fix="give one gradient for every parameter, in their order"))
        if missing := [i for i, grad in enumerate(grads) if not isinstance(grad, torch.Tensor)]:
            what = f"DistributedGradReducer: gradient {missing[0]} is {grads[missing[0]]!r}, not a tensor"
            raise TypeError(problem(what, fix="give zeros for a parameter that is not used, as all ranks must agree"))
        if calls.is_split() and any(parameter_of(grad) is not None for grad in grads):
            what = "DistributedGradReducer got gradients that a plan has already reduced: each rank holds a part"
            fix = "leave it out in semi_auto_parallel and auto_parallel; data_parallel is the mode that needs it"
            raise ShardwiseError(what, fix=fix)
        options, results = context.options(), list(grads)
        for positions in fill_messages(grads, self._shared, options):
            flat = torch.cat([grads[i].detach().reshape(-1) for i in positions])
            widened = flat.dtype in HALVES and (options.gradient_fp32_sync or options.force_fp32_communication)
            total = rank_groups.all_reduce(flat.float() if widened else flat, "sum", find_group(self.group))
            total = total / self.degree if self.mean else total
            pieces = total.to(flat.dtype).split([grads[i].numel() for i in positions])
            for i, piece in zip(positions, pieces, strict=True):
                results[i] = piece.view(grads[i].shape)
        return tuple(results)


def fill_messages(grads: Sequence[torch.Tensor], shared: Sequence[bool], options: Options) -> list[list[int]]:
    """Return the positions of gradients that share a message: of one dtype and device, as the options say."""
    cuts = options.fusion_cuts
    limit = context.message_bytes(sum(grad.nbytes for grad, sent in zip(grads, shared, strict=True) if sent))
    messages: list[list[int]] = []
    open_messages: dict[object, tuple[list[int], int]] = {}
    for i, grad in enumerate(grads):
        if not shared[i]:
            continue
        key = grad.dtype, grad.device, sum(cut < i for cut in cuts)
        positions, filled = open_messages.get(key, ([], 0))
        if not positions or (not cuts and filled + grad.nbytes > limit):
            positions, filled = [], 0
            messages.append(positions)
        positions.append(i)
        open_messages[key] = positions, filled + grad.nbytes
    return messages


class TrainOneStepCell(Cell):
    """A training step: forward, backward and update. It returns the loss.

    A loss vector is summed for its gradient, as in the reference. In data_parallel and hybrid_parallel mode the
    gradients are reduced over the ranks. A subclass may define its own ``construct`` with ``self.grad(self.network,
    self.weights)(*inputs, sens)``, ``self.grad_reducer(grads)`` and ``self.optimizer(grads)``.

    Args:
        network: returns the loss (first).
        sens: the initial gradient of backward; the optimizer's ``loss_scale`` divides it out.
    """

    is_wrapper = True

    def __init__(self, network: nn.Module, optimizer: Optimizer, sens: float = 1.0, return_grad: bool = False) -> None:
        super().__init__()
        self.network, self.sens, self.return_grad = network, sens, return_grad
        self.optimizer = optimizer
        self.weights: Any = ParameterTuple(cast(Any, optimizer.parameters))
        self.grad = GradOperation(get_by_list=True, sens_param=True)
        self.parallel_mode = context.options().parallel_mode
        self.hyper_map, self.cast = HyperMap(), ELEMENTWISE["Cast"]()
        self.reducer_flag = self.parallel_mode in REDUCED
        self.mean, self.degree = context.options().gradients_mean, context.options().devices if self.reducer_flag else 1
        self.grad_reducer: Any = DistributedGradReducer(self.weights) if self.reducer_flag else lambda grads: grads

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.construct(*inputs, **kwargs)  # its parts are the outermost calls

    def construct(self, *inputs: Any, **kwargs: Any) -> Any:
        result, gradients = self._differentiated(inputs, kwargs, self.sens)
        self.optimizer(gradients)
        return (result, gradients) if self.return_grad else result

    def _differentiated(self, inputs: Any, kwargs: Any, sens: float) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return the network's results and the gradients of its weights, reduced over the ranks as the mode says."""
        result, gradients = differentiate(self.network, inputs, kwargs, self.weights, sens)
        options = context.options()
        if options.parallel_mode in REDUCED:
            reduced = DistributedGradReducer(self.weights, options.gradients_mean)(gradients)
            gradients = tuple(map(as_gradient, reduced, self.weights))
        return result, gradients


class TrainOneStepWithLossScaleCell(TrainOneStepCell):
    """A training step with loss scaling. It returns the loss, whether the step was skipped, and its scale.

    Gradients are divided by the scale. A step whose gradients are not finite on some rank changes nothing, and the
    scale is adjusted. A user-defined ``construct`` may call ``start_overflow_check``, ``get_overflow_status`` and
    ``process_loss_scale``.

    Args:
        scale_sense: a loss scale manager or its update cell, or a constant number (or tensor).
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, scale_sense: Any) -> None:
        super().__init__(network, optimizer)
        manager = hasattr(scale_sense, "update_loss_scale")
        self.manager = scale_sense if manager else FixedLossScaleManager(float(scale_sense))

    scale_sense = property(lambda self: Tensor(float(self.manager.get_loss_scale())), doc="The present scale.")

    def set_sense_scale(self, sens: Any) -> None:
        """Set a constant scale."""
        self.manager = FixedLossScaleManager(float(sens))

    def start_overflow_check(self, pre_cond: Any, compute_input: Any) -> tuple[Any, Any]:
        """Return a dummy status, as nothing has to be cleared, and the present value of ``compute_input``."""
        is_written = isinstance(compute_input, nn.Parameter)
        return Tensor(0), Tensor(compute_input.detach().clone()) if is_written else compute_input

    def get_overflow_status(self, status: Any, compute_output: Any) -> Tensor:
        """Return whether a gradient is not finite on any rank, as a bool scalar."""
        return Tensor(~all_finite(compute_output, group=GlobalComm.WORLD_COMM_GROUP))

    def process_loss_scale(self, overflow: Any) -> Any:
        """Choose the scale of the next step. Return whether this step is skipped."""
        self.manager.update_loss_scale(bool(overflow))
        return overflow

    def loss_scaling_manager(self, loss_scale: Any, overflow: Any) -> Any:
        return self.process_loss_scale(overflow)

    def construct(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
        scale = float(self.manager.get_loss_scale())
        result, gradients = self._differentiated(inputs, kwargs, scale)
        overflow = self.get_overflow_status(None, gradients)
        if not overflow:
            self.optimizer([gradient / scale for gradient in gradients])
        self.process_loss_scale(overflow)
        return (result[0] if isinstance(result, (tuple, list)) else result), overflow, Tensor(scale)


def training_cell(network: nn.Module, optimizer: Optimizer, manager: Any) -> TrainOneStepCell:
    """Return the training cell of a network that returns its loss. ``manager``: a loss scale manager or None."""
    if manager is None:
        return TrainOneStepCell(network, optimizer)
    if manager.get_drop_overflow_update():
        return TrainOneStepWithLossScaleCell(network, optimizer, manager)
    return TrainOneStepCell(network, optimizer, float(manager.get_loss_scale()))


class MicroBatchInterleaved(Cell):
    """A network that runs on ``interleave_num`` parts of its batch in turn and returns the sum of the results."""

    is_wrapper = True

    def __init__(self, network: nn.Module, interleave_num: int = 2) -> None:
        super().__init__()
        self.network, self.interleave_num = network, from_on("interleave_num", interleave_num, 1)

    def construct(self, *inputs: Any) -> Any:
        parts = [x.chunk(self.interleave_num, 0) for x in inputs]
        return torch.stack([self.network(*part) for part in zip(*parts, strict=True)]).sum(0)


class TimeDistributed(Cell):
    """A layer applied to every step of the dim ``time_axis``."""

    def __init__(self, layer: Any, time_axis: int, reshape_with_axis: int | None = None) -> None:
        super().__init__()
        self.layer, self.time_axis = layer, time_axis

    def construct(self, inputs: Any) -> Any:
        return torch.stack([self.layer(step) for step in inputs.unbind(self.time_axis)], self.time_axis)


class PipelineCell(Cell):
    """The sum of a network's losses over ``micro_size`` micro-batches of its batch. With ``pipeline_stages`` its cells
    run in their stages (``pipeline_stage``), several micro-batches at a time. Then the sum is a scalar; a loss vector
    is summed."""

    is_wrapper = True

    def __init__(self, network: nn.Module, micro_size: int, stage_config: dict[str, int] | None = None) -> None:
        super().__init__()
        self.network, self.micro_size = network, from_on("micro_size", micro_size, 1)
        cells = dict(network.named_modules())
        for name, stage in (stage_config or {}).items():
            if not isinstance(cell := cells.get(name), Cell):
                raise ValueError(problem(f"stage_config names {name!r}", fix=closest(name, cells)))
            cell.pipeline_stage = stage

    def construct(self, *inputs: Any) -> Any:
        if staged.is_on() and torch.compiler.is_exporting():
            what = "a PipelineCell in stages is planned per micro-batch, but is captured whole here"
            fix = "sw.verify(staged.MicroBatch(cell.network), (torch.tensor(1.0), *inputs), plan)"
            raise ShardwiseError(what, fix=fix)
        losses = [self.network(*part) for part in staged.parts_of(inputs, self.micro_size)]
        return sum(losses[1:], losses[0])


def _VirtualDatasetCell(backbone: nn.Module) -> nn.Module:
    """Return the network. Inputs of every network are split as the option ``dataset_strategy`` says."""
    return backbone


class GradAccumulationCell(PipelineCell):
    """A step without stages: it sums gradients over ``micro_size`` parts of a batch and updates once."""


class GradientAccumulation(Cell):
    """Accumulation of gradients (``mindspore.boost``): ``GradientAccumulation(steps, optimizer)(loss, grads)`` adds up
    gradients, each divided by the number of steps, and updates the parameters at every last step."""

    def __init__(self, max_accumulation_step: int, optimizer: Any) -> None:
        super().__init__()
        self._steps, self._optimizer = from_on("max_accumulation_step", max_accumulation_step, 1), optimizer
        self._taken = 0
        self._sums: list[torch.Tensor] = []

    def __call__(self, loss: Any, grads: Sequence[torch.Tensor]) -> Any:
        """Return the loss."""
        parts = [grad.detach() / self._steps for grad in grads]
        self._sums = [a + b for a, b in zip(self._sums, parts, strict=True)] if self._taken else parts
        self._taken += 1
        if self._taken == self._steps:
            self._optimizer(tuple(self._sums))
            self._taken = 0
        return loss


class PipelineGradReducer(Cell):
    """Scaling of a ``PipelineCell``'s gradients, which are sums over micro-batches and ranks, by ``scale_sense``, and
    with ``gradients_mean`` by the number of ranks: ``PipelineGradReducer(parameters)(grads)``."""

    def __init__(self, parameters: Any, scale_sense: float = 1.0, opt_shard: Any = None) -> None:
        super().__init__()
        self._of, self.scale_sense = tuple(parameters), float(scale_sense)

    def __call__(self, grads: Any) -> tuple[Any, ...]:
        mean = context.options().gradients_mean and staged.is_on()
        ranks = [averaged_over(parameter) if mean else 1 for parameter in self._of]
        scaled = (grad / (self.scale_sense * n) for grad, n in zip(grads, ranks, strict=True))
        return tuple(map(as_gradient, scaled, self._of))


Pipeline, GradAccumulation = PipelineCell, GradAccumulationCell  # newer names, in mindspore.parallel.nn
__all__ = [
    "DistributedGradReducer", "DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell", "GradAccumulationCell",
    "MicroBatchInterleaved", "PipelineCell", "PipelineGradReducer", "TimeDistributed",
    "TrainOneStepCell", "TrainOneStepWithLossScaleCell", "WithEvalCell", "WithLossCell",
]  # fmt: skip
