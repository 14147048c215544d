"""Adapter that runs stages of this package on the schedules of ``torch.distributed.pipelining``.

torch decides the order in which a pipeline rank works on micro-batches, and sends and receives the boundary tensors. A
stage is called for the forward, the backward, or half of the backward of a micro-batch, and runs its own program
without autograd.

Private parts of torch that are used: ``forward_maybe_with_nosync`` and ``backward_maybe_with_nosync`` of
``PipelineStage``, which run a stage; the preparation of its messages in torch 2.11; and ``_PipelineScheduleRuntime``,
which runs a given order. Only this file depends on them, and ``plans.schedule`` on ``pipeline_order`` of schedules.

While torch runs a schedule, a rank either works on its stages or waits for messages. All time outside stages is
therefore recorded as waiting in the rank's heartbeat file (``runtime.heartbeat_file``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, get_schedule_class

from shardwise.costs.pipeline_simulation import Action, Kind
from shardwise.plans.schedule import Schedule, format_order, order_of
from shardwise.runtime.communicator import finish_work
from shardwise.runtime.heartbeat_file import trail

_PARTS: dict[str, Kind] = {"full": "backward", "input": "input", "weight": "weight"}


class Worker(Protocol):
    """A stage as a schedule runs it. ``receives``, ``sends``: boundary tensors on meta; those with cotangents require
    gradients. The last stage sends nothing and returns the loss."""

    receives: tuple[Tensor, ...]
    sends: tuple[Tensor, ...]

    def forward(self, micro_batch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...] | Tensor:
        """Return the tensors to send, or the loss."""

    def backward(self, micro_batch: int, kind: Kind, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the cotangents of the received tensors; none for weights."""


TimedAction = tuple[Action, float, float]  # start in seconds of ``time.perf_counter``, duration


class _Progress:
    """Progress of this pipeline rank in an ``order``. ``record``: set to a list to measure actions, on ``device``;
    ``arrived``: called where the messages of an action arrive (None: at the end of the schedule)."""

    def __init__(self, order: Sequence[Action], device: torch.device) -> None:
        self.record: list[TimedAction] | None = None
        self.arrived: Callable[[Action | None], None] = lambda action: None
        self.device = device
        labels = {action: f"messages of other stages, ahead of stage {action.stage}, {action}" for action in order}
        self._labels = {action: label.encode() for action, label in labels.items()}
        self.begin(backward=True)

    def begin(self, *, backward: bool) -> None:
        self._left = deque(action for action in self._labels if backward or action.kind == "forward")
        self._done: set[Action] = set()

    def now(self) -> float:
        """Return the time after all work queued on the device; 0 unless actions are measured."""
        if self.record is None:
            return 0.0
        finish_work(self.device)
        return time.perf_counter()

    def done(self, action: Action, start: float) -> None:
        if self.record is not None:
            self.record.append((action, start, self.now() - start))
        self._done.add(action)
        while self._left and self._left[0] in self._done:
            self._left.popleft()

    @property
    def next_action(self) -> Action | None:
        """Return the first action that is not done, None if all are."""
        return self._left[0] if self._left else None

    @property
    def waits_for(self) -> bytes:
        return self._labels[self._left[0]] if self._left else b"messages of other stages, at the end of a pass"


class _TorchStage(PipelineStage):
    """One stage on this rank. torch runs it without the micro-batch number, which its calls around it have."""

    def __init__(
        self, worker: Worker, number: int, num_stages: int, device: torch.device, group: Any, progress: _Progress
    ) -> None:
        numbers = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        super().__init__(
            torch.nn.Module(),  # the program stays out of torch's sight
            number,
            num_stages,
            device,
            input_args=worker.receives if number else (numbers,),
            output_args=worker.sends if number < num_stages - 1 else (loss,),
            group=group,
        )
        self._worker, self._micro_batch, self._progress = worker, -1, progress

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._works("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self._works("backward" if full_backward else "input", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._works("weight", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextmanager
    def _works(self, kind: Kind, micro_batch: int) -> Iterator[None]:
        """Surround an action whose messages have arrived."""
        self._micro_batch = micro_batch
        trail.leave()
        action = Action(self.stage_index, kind, micro_batch)
        self._progress.arrived(action)
        start = self._progress.now()
        yield
        self._progress.done(action, start)
        trail.enter(self._progress.waits_for)

    # Forward alone, torch skips the backward work of a schedule, except for what folded schedules pass between stages
    # of one pipeline rank.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        taken: Any = super().get_local_bwd_output  # untyped in torch
        return taken(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Any:
        return self._worker.forward(self._micro_batch, () if self.is_first else args)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        cotangents = bwd_kwargs.get("output_grads") or ()
        gradients = self._worker.backward(self._micro_batch, _PARTS[backward_type], cotangents)
        return (None,) if self.is_first else gradients, []


class _TorchStage211(_TorchStage):
    """A stage for torch 2.11, which marks all boundary tensors as differentiable (integers cannot be) and sends a
    cotangent for each. Here nothing is marked, and tensors without cotangent get one number. If one pipeline rank has
    two neighbouring stages, their first message would go to itself, which gloo refuses; it is left out."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        messages: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [message for message in messages if message.peer != dist.get_rank()]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        trains, self.has_backward = self.has_backward, False
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = trains

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        received: Any = self.args_recv_info[mb_index]
        for info, tensor in zip(received, prev_stage_outputs, strict=True):
            info.buffer = tensor

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Do nothing: programs have the planned types, and the loss has any."""

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        received: Any = super()._create_grad_recv_info(act_send_info)
        for info, sent in zip(received, self._worker.sends, strict=False):  # the last stage receives none
            if not sent.requires_grad:
                info.buffer = info.buffer.new_empty(1)
        return received

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        cotangents = bwd_kwargs.get("output_grads") or ()
        differentiable = [sent.requires_grad for sent in self._worker.sends]
        kept = tuple(
            cotangent if is_one else None for cotangent, is_one in zip(cotangents, differentiable, strict=False)
        )
        gradients, rest = super().backward_maybe_with_nosync(backward_type, {**bwd_kwargs, "output_grads": kept})
        if self.is_first:
            return gradients, rest
        numbers = (torch.zeros(1, dtype=value.dtype, device=self.device) for value in self._worker.receives)
        return tuple(
            gradient if gradient is not None else n for gradient, n in zip(gradients, numbers, strict=False)
        ), rest


# Newer versions of torch describe boundary tensors by types and know which are differentiable.
_STAGE = _TorchStage if hasattr(_utils, "_TensorMeta") else _TorchStage211


class Scheduled:
    """A schedule over the stages of this rank, for a number of micro-batches."""

    def __init__(
        self,
        schedule: Schedule,
        workers: Mapping[int, Worker],
        num_stages: int,
        num_micro_batches: int,
        device: torch.device,
        group: Any,
    ) -> None:
        num_places = num_stages // schedule.stages_per_place
        place = schedule.place_of(min(workers), num_places)
        self.order = order_of(schedule, num_places, num_micro_batches)
        self._progress = _Progress(self.order[place], device)
        stages = [
            _STAGE(worker, number, num_stages, device, group, self._progress)
            for number, worker in sorted(workers.items())
        ]
        self._has_first, self._has_last = 0 in workers, num_stages - 1 in workers
        self._numbers = torch.arange(num_micro_batches)
        settings: dict[str, Any] = {"loss_fn": _is_loss, "scale_grads": False}
        if schedule.stages_per_place > 1:
            settings["backward_requires_autograd"] = False
        stages_or_one: Any = stages if schedule.stages_per_place > 1 else stages[0]
        if schedule.is_solved:
            self._schedule: Any = _in_order(schedule, stages, num_micro_batches, settings)
        else:
            self._schedule = get_schedule_class(schedule.base)(stages_or_one, num_micro_batches, **settings)

    def step(self) -> list[Tensor]:
        """Run forward and backward of all micro-batches and return their losses, in order, where the last stage is."""
        losses: list[Tensor] = []
        numbers = (self._numbers,) if self._has_first else ()
        target = self._numbers if self._has_last else None
        with torch.enable_grad(), self._runs(backward=True):  # torch asks for gradients; programs record nothing
            self._schedule.step(*numbers, target=target, losses=losses, return_outputs=False)
        return losses

    def forward(self) -> list[Tensor]:
        """Run forward of all micro-batches."""
        numbers = (self._numbers,) if self._has_first else ()
        target = self._numbers if self._has_last else None
        with torch.no_grad(), self._runs(backward=False):
            self._schedule.eval(*numbers, target=target, return_outputs=False)
        return []

    @contextmanager
    def _runs(self, *, backward: bool) -> Iterator[None]:
        self._progress.begin(backward=backward)
        with trail.waiting(self._progress.waits_for):
            yield
        self._progress.arrived(None)

    @property
    def next_action(self) -> Action | None:
        return self._progress.next_action

    def watch(self, arrived: Callable[[Action | None], None]) -> None:
        """Call ``arrived`` where kernels wait for the messages of an action, or (None) for the last sends."""
        self._progress.arrived = arrived

    @contextmanager
    def measured(self) -> Iterator[list[TimedAction]]:
        """Measure the actions of this pipeline rank within the context."""
        timed: list[TimedAction] = []
        self._progress.record = timed
        try:
            yield timed
        finally:
            self._progress.record = None


def _in_order(schedule: Schedule, stages: list[_TorchStage], num_micro_batches: int, settings: dict[str, Any]) -> Any:
    """Return torch's runtime for an order that is not its own."""
    runtime: Any = _PipelineScheduleRuntime(stages, num_micro_batches, **settings)
    lines = (line.split() for line in format_order(schedule.actions))
    runtime.pipeline_order = {place: [_Action.from_str(text) for text in line] for place, line in enumerate(lines)}
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)  # also sets where every stage is
    return runtime


def _is_loss(output: Tensor, target: Tensor) -> Tensor:
    return output
