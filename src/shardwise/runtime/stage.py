"""The stages of a plan on this rank: their programs, and what they save between forward and backward of micro-batches.

A plan without stages is one stage, which runs forward and backward of each micro-batch in turn. Gradients of the
micro-batches are accumulated separately and reach the parameters together at the end. Hooks of parameters therefore run
once and see the same gradient as after one pass over the whole batch.

Tensors between stages have the shape of the largest micro-batch; a smaller one fills the first part. Booleans are sent
as bytes and complex numbers as pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from shardwise.costs.pipeline_simulation import Kind
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.graph.batch import inputs_with_samples
from shardwise.graph.capture import Capture
from shardwise.graph.ir import Graph, Ref
from shardwise.plans.bind_stages import BoundStages, delivered_layouts
from shardwise.plans.plan import Plan
from shardwise.programs.micro_batches import Passes, values_of_step
from shardwise.programs.rank_program import RankProgram
from shardwise.programs.split_backward import split_backward
from shardwise.runtime.communicator import Communicator, new_groups
from shardwise.runtime.host_copies import Arrivals
from shardwise.runtime.lazy_gather import write_buffers
from shardwise.runtime.local_shards import shard
from shardwise.runtime.program_cache import Executable
from shardwise.runtime.replicas import ReplicaCheck
from shardwise.runtime.signatures import Wanted
from shardwise.runtime.step import GradAccumState
from shardwise.runtime.torch_schedules import Scheduled


@dataclass(frozen=True)
class BoundaryTensor:
    """A value between two stages, as a rank has it. ``shape``: this rank's part; ``returns``: whether a cotangent comes
    back."""

    value: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    returns: bool

    def example(self) -> Tensor:
        """Return a meta tensor with the form in which the value is sent."""
        wire = _on_wire(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        shape = wire.shape if wire.numel() else (1,)
        return torch.empty(shape, dtype=wire.dtype, device="meta", requires_grad=self.returns)

    def packed(self, tensor: Tensor, example: Tensor) -> Tensor:
        """Convert a rank's part to the form in which it is sent."""
        wire = _on_wire(tensor)
        if wire.shape == example.shape:
            return wire.contiguous()
        flat = wire.new_zeros(example.numel())
        flat[: wire.numel()] = wire.reshape(-1)
        return flat.view(example.shape)

    def unpacked(self, wire: Tensor) -> Tensor:
        """Invert ``packed``."""
        wire, is_complex = wire.detach(), self.dtype.is_complex
        shape = (*self.shape, 2) if is_complex else self.shape
        if wire.shape != shape:
            wire = wire.reshape(-1)[: prod(shape)].view(shape)
        if is_complex:
            return torch.view_as_complex(wire)
        return wire.view(self.dtype) if self.dtype == torch.bool else wire


def _on_wire(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.contiguous())
    return tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bool else tensor


@dataclass(frozen=True)
class StageProgram:
    """A stage's program for micro-batches of one size. ``sends``: the values for the next stage, in order;
    ``returned``: the received or sent values whose cotangents are sent back."""

    compiled: Executable
    ranks: Communicator
    sends: tuple[str, ...] = ()
    returned: frozenset[str] = frozenset()

    @property
    def part(self) -> Graph:
        return self.compiled.captured.graph

    @cached_property
    def program(self) -> RankProgram:
        """Return this rank's program of a micro-batch, before compilation."""
        return self.compiled.runs.emitted.program

    @cached_property
    def received(self) -> tuple[BoundaryTensor, ...]:
        """Return the tensors received from the previous stage, in order."""
        layouts = self.compiled.spmd.layouts
        names = [source.value for source in self.part.sources if source.kind == "activation"]
        return tuple(self._crossing(name, layouts[name].local_shape(self.ranks.coordinates)) for name in names)

    @cached_property
    def sent(self) -> tuple[BoundaryTensor, ...]:
        """Return the tensors sent to the next stage, in order."""
        layouts = delivered_layouts(self.part, self.compiled.spmd)
        return tuple(self._crossing(name, layouts[name].local_shape(self.ranks.coordinates)) for name in self.sends)

    def _crossing(self, name: str, shape: tuple[int, ...]) -> BoundaryTensor:
        return BoundaryTensor(name, shape, self.part.by_name[name].dtype, name in self.returned)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Map each output of the part, or its loss, to its position among the values that the program returns."""
        spmd = self.compiled.spmd
        at = {name: i for i, name in enumerate(self.compiled.delivered)}
        pairs = [
            (out.name, emitted_out.name)
            for out, emitted_out in zip(self.part.outputs, spmd.outputs, strict=True)
            if isinstance(out, Ref)
        ]
        if self.part.loss is not None and spmd.loss is not None:
            pairs.append((self.part.loss, spmd.loss))
        return {name: at[emitted_name] for name, emitted_name in pairs if emitted_name in at}

    @cached_property
    def halves(self) -> tuple[tuple[RankProgram, fx.GraphModule], tuple[RankProgram, fx.GraphModule]]:
        """Return (program, emitted module) of backward for cotangents, and of backward for weights."""
        writer, (first, second) = self.compiled.runs.emitted.writer, split_backward(self.program)
        return (first, replace(writer, program=first).backward()), (second, replace(writer, program=second).backward())


@dataclass
class StageInputs:
    """Inputs of this rank's stages for one step. ``inputs``: by name, whole or this rank's parts (``are_parts``);
    ``with_samples``: inputs that micro-batches split; ``whole``: values of the prelude; ``scale``: factor on the loss
    for backward; ``arrivals``: brings inputs to the device."""

    inputs: Mapping[str, Tensor]
    are_parts: bool
    with_samples: frozenset[str]
    whole: Mapping[str, Tensor]
    seed: Tensor
    arrivals: Arrivals
    scale: Tensor | None = None


@dataclass
class StageWorker:
    """A stage as a schedule runs it (``torch_schedules.Worker``). ``sizes``: samples of every micro-batch;
    ``programs``: by size; ``statistics``: names of the buffers that every micro-batch writes.

    ``outputs``: results of calls without backward; ``remembered``: the tensors of the first micro-batch, if
    ``remembers``. Work done once per step runs before the first micro-batch of a size and in ``end``.
    """

    number: int
    is_last: bool
    programs: Mapping[int, StageProgram]
    sizes: tuple[int, ...]
    statistics: frozenset[str] = frozenset()
    step: StageInputs | None = None
    keeps: bool = True
    check: ReplicaCheck | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    remembers: bool = False
    remembered: list[Tensor] = field(default_factory=list)
    most_kept: int = 0  # micro-batches between forward and backward at once, at most
    _running: dict[int, GradAccumState] = field(default_factory=dict)  # by size
    _saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    _firsts: dict[int, Tensor] = field(default_factory=dict)  # index of a first sample -> as a tensor

    def __post_init__(self) -> None:
        largest = self.programs[max(self.sizes)]
        self.receives = tuple(crossing.example() for crossing in largest.received) or _TOKEN
        self.sends = tuple(crossing.example() for crossing in largest.sent) or _TOKEN

    def begin(self, step: StageInputs, *, keeps: bool, check: ReplicaCheck | None = None) -> None:
        """Begin a step. ``keeps``: backward follows; ``check``: compares forward among the ranks of the stage."""
        self.step, self.keeps, self.check = step, keeps, check
        self.outputs, self._running, self._saved, self.most_kept = {}, {}, {}, 0

    def release(self) -> None:
        """Drop what a step kept, also one that failed: its batch, saved tensors and sums."""
        self.step, self.check = None, None
        self.outputs, self._running, self._saved = {}, {}, {}

    def forward(self, micro_batch: int, received: Sequence[Tensor]) -> tuple[Tensor, ...] | Tensor:
        """Run forward of a micro-batch and return the tensors to send, or the loss."""
        stage = self.programs[self.sizes[micro_batch]]
        compiled = stage.compiled
        tensors = self._tensors(stage, micro_batch, received)
        if self.remembers and micro_batch == 0:
            self.remembered = [x if x.requires_grad else x.clone() for x in tensors]
        with torch.no_grad():
            if self.keeps:
                sources = list(tensors)
                for position in compiled.written:  # later micro-batches overwrite it before backward reads it
                    sources[position] = tensors[position].clone()
                size = self.sizes[micro_batch]
                if size not in self._running:
                    self._running[size] = compiled.in_passes.begin(tensors, observed=self.check is not None)
                running = self._running[size]
                if self.is_last and self.number == 0 and not any(running.emitted.program.cotangents):
                    what = "the loss depends on no parameter that requires a gradient"
                    raise ShardwiseError(what, fix="unfreeze a parameter")
                observed = None if self.check is None else self.check.observed(running.emitted, ())
                delivered, written, saved = running.forward(sources, observed)
                saved = _through_hooks(saved)
                self._saved[micro_batch] = dict(zip(running.emitted.program.saved, saved, strict=True))
                self.most_kept = max(self.most_kept, len(self._saved))
            else:
                delivered, written = compiled.step(tensors)
        self._write(compiled, tensors, written, micro_batch)
        results = {name: delivered[i] for name, i in stage.position.items()}
        if not self.keeps:
            self.outputs = results
        if self.is_last:
            loss = results.get(stage.part.loss or "")
            return tensors[0].new_zeros(()) if loss is None else loss.clone()
        sent = zip(stage.sent, self.sends, strict=False)
        packed = tuple(crossing.packed(results[crossing.value], example) for crossing, example in sent)
        return packed or (torch.zeros(1, device=self._inputs().arrivals.device),)

    def _inputs(self) -> StageInputs:
        assert self.step is not None, "a step has begun"
        return self.step

    def _tensors(self, stage: StageProgram, micro_batch: int, received: Sequence[Tensor]) -> list[Tensor]:
        step, compiled = self._inputs(), stage.compiled
        start, size = sum(self.sizes[:micro_batch]), self.sizes[micro_batch]
        arrived = {c.value: c.unpacked(wire) for c, wire in zip(stage.received, received, strict=False)}
        values = values_of_step(stage.part, step.whole, lambda: self._first_sample(start, step.arrivals.device))
        tensors: list[Tensor] = []
        for position, (source, tensor) in enumerate(zip(stage.part.sources, compiled.tensors, strict=True)):
            if source.kind == "activation":
                tensors.append(arrived[source.value])
            elif source.value in values:
                tensors.append(values[source.value])
            elif source.kind == "input":
                rows, layout = step.inputs[source.names[0]], compiled.spmd.layouts[source.value]
                if source.names[0] in step.with_samples and len(self.sizes) > 1:
                    rows = rows_of_pass(rows, start, size, sum(self.sizes))
                if layout.positions and not step.are_parts:
                    rows = shard(rows, layout, stage.ranks.coordinates)
                tensors.append(step.arrivals.bring(rows))
            else:
                source_tensor = step.seed if position == compiled.seed else tensor
                assert source_tensor is not None, f"this rank does not hold {source.names[0]}"
                tensors.append(source_tensor)
        return tensors

    def _first_sample(self, start: int, device: torch.device) -> Tensor:
        """Return the index of a micro-batch's first sample, which is copied to the device once."""
        if start not in self._firsts:
            self._firsts[start] = torch.tensor(start, dtype=torch.int64, device=device)
        return self._firsts[start]

    def _write(
        self, compiled: Executable, tensors: Sequence[Tensor], written: Sequence[Tensor], micro_batch: int
    ) -> None:
        """Write a micro-batch's new buffer values: running statistics always, all others after the last one."""
        is_last = micro_batch == len(self.sizes) - 1
        sources = compiled.captured.graph.sources
        for position, value in zip(compiled.written, written, strict=True):
            if is_last or sources[position].names[0] in self.statistics:
                write_buffers([tensors[position]], [value])

    def backward(self, micro_batch: int, kind: Kind, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run backward of a micro-batch, or a half of it, and return the cotangents of the received tensors."""
        size = self.sizes[micro_batch]
        stage = self.programs[size]
        running = self._running[size]
        if kind != "weight":
            self._saved[micro_batch].update(self._cotangents(stage, running.emitted.program, cotangents))
        whole = running.emitted.program, running.emitted.backward
        program, run = whole if kind == "backward" else stage.halves[kind == "weight"]
        values = self._saved[micro_batch] if kind == "input" else self._saved.pop(micro_batch)
        saved = [values[name] for name in program.saved]
        deltas = [values[name] for name in program.cotangents if name is not None]
        if kind == "backward":
            values.clear()
        with torch.no_grad():
            gradients_of = dict(zip(program.gradients, run.forward(saved, *deltas), strict=True))
        sources = stage.part.source_of
        if kind == "input":
            read = stage.halves[1][0].saved
            handed = {name: gradients_of[name] for name in gradients_of if name not in sources}
            self._saved[micro_batch] = {name: handed[name] if name in handed else values[name] for name in read}
        received = [gradients_of.get(crossing.value) for crossing in stage.received]
        gradients = {n: g for n, g in gradients_of.items() if n in sources and sources[n].kind != "activation"}
        kept = self._saved.get(micro_batch, {}).values() if kind == "input" else ()
        assert self.step is not None, "a step has begun"
        of_step = (*self.step.inputs.values(), *self.step.whole.values())
        in_use = (*stage.compiled.tensors, *of_step, *deltas, *kept, *received)
        running.add(gradients, (value for value in in_use if isinstance(value, Tensor)))
        if kind == "weight":
            return ()
        packed = zip(stage.received, received, self.receives, strict=False)
        back = [None if g is None or not c.returns else c.packed(g, example) for c, g, example in packed]
        return tuple(back) or (None,) * len(self.receives)

    def _cotangents(
        self, stage: StageProgram, program: RankProgram, cotangents: Sequence[Tensor | None]
    ) -> dict[str, Tensor]:
        """Return the cotangents of the values that a program of the stage returns, by their names in it."""
        arrived = {
            crossing.value: crossing.unpacked(wire)
            for crossing, wire in zip(stage.sent, cotangents, strict=False)
            if wire is not None
        }
        by_name: dict[str, Tensor] = {}
        for value, position in stage.position.items():
            name = program.cotangents[position]
            if name is None:
                continue
            if value in arrived:
                by_name[name] = arrived[value]
            else:
                form = program.forms[name]
                assert value == stage.part.loss, f"no cotangent of {value} has come"
                assert self.step is not None, "a step has begun"
                ones, scale = (
                    torch.ones(form.shape, dtype=form.dtype, device=self.step.arrivals.device),
                    self.step.scale,
                )
                by_name[name] = ones if scale is None else scale.to(form.dtype).expand_as(ones).clone()
        return by_name

    def end(self) -> dict[str, Tensor]:
        """Return the gradients accumulated over all micro-batches, by source."""
        gradients: dict[str, Tensor] = {}
        for running in self._running.values():
            for name, gradient in running.end().items():
                gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
        self._running = {}
        return gradients


@dataclass(frozen=True)
class StageCall:
    """One kind of call: the captured call, its micro-batches, their programs of all stages by size, this rank's stages
    and what runs their actions. ``prelude``: runs before the micro-batches of one stage, over the whole batch."""

    captured: Capture
    passes: Passes
    bounds: Mapping[int, BoundStages]
    workers: tuple[StageWorker, ...]
    runs: Scheduled | MicroBatchesInTurn
    prelude: StageWorker | None = None

    @cached_property
    def with_samples(self) -> frozenset[str]:
        return inputs_with_samples(self.captured.graph)

    @property
    def bound(self) -> BoundStages:
        """Return the cut of the largest micro-batch."""
        return self.bounds[max(self.bounds)]

    @property
    def executables(self) -> list[Executable]:
        """Return this rank's programs, those of the largest micro-batch first."""
        return [program.compiled for worker in self.workers for program in worker.programs.values()]

    @property
    def _all_workers(self) -> tuple[StageWorker, ...]:
        return self.workers if self.prelude is None else (*self.workers, self.prelude)

    @property
    def wanted(self) -> list[Wanted]:
        """Return the layouts and sample ranges in which the programs of all stages take the inputs."""
        programs = [
            (part, spmd, start, start + size)
            for start, size in zip(self.passes.starts, self.passes.sizes, strict=True)
            for part, spmd in zip(self.bounds[size].cut.parts, self.bounds[size].spmds, strict=True)
        ]
        for size, program in () if self.prelude is None else self.prelude.programs.items():
            programs.append((program.part, program.compiled.spmd, 0, size))
        return [
            ({s.names[0]: spmd.layouts[s.value] for s in part.sources if s.kind == "input"}, start, stop)
            for part, spmd, start, stop in programs
        ]

    @property
    def draws(self) -> bool:
        """Return whether this rank draws random numbers."""
        programs = (program for worker in self._all_workers for program in worker.programs.values())
        return any(program.compiled.seed is not None for program in programs)

    def with_state(self, state: Mapping[str, Tensor]) -> StageCall:
        """Replace the parameters and buffers by those of ``state``, by name, and return self."""
        for worker in self._all_workers:
            worker.programs = {
                size: replace(program, compiled=program.compiled.with_state(state))
                for size, program in worker.programs.items()
            }
        return self


@dataclass(frozen=True)
class MicroBatchesInTurn:
    """The schedule of a plan without stages: forward and backward of each micro-batch."""

    worker: StageWorker

    def step(self) -> list[Tensor]:
        """Run forward and backward of all micro-batches and return their losses."""
        losses: list[Tensor] = []
        for micro_batch in range(len(self.worker.sizes)):
            loss = self.worker.forward(micro_batch, ())
            assert isinstance(loss, Tensor), "the last stage returns the loss"
            losses.append(loss)
            self.worker.backward(micro_batch, "backward", ())
        return losses


def with_samples_in(plan: Plan) -> frozenset[str]:
    """Return the names of the inputs whose first dim is the samples of a micro-batch."""
    return frozenset(entry.name for entry in plan.inputs if entry.shape and entry.shape[0] == plan.micro_batch)


def rows_of_pass(tensor: Tensor, start: int, size: int, batch: int) -> Tensor:
    """Return the rows of an input (whole, or a rank's part of it) that belong to samples ``[start, start + size)``."""
    first, last = (tensor.shape[0] * number // batch for number in (start, start + size))
    return tensor.narrow(0, first, last - first)


def _through_hooks(saved: Sequence[Any]) -> Sequence[Any]:
    """Pack and unpack saved values with the saved-tensor hooks that are set (CPU offload, quantization)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return saved
    pack, unpack = hooks
    return [unpack(pack(value)) if isinstance(value, Tensor) else value for value in saved]


_TOKEN = (torch.empty(1, device="meta"),)  # a schedule needs a message even if nothing crosses


# ----------------------------------------------------------------------------------------------------------------------
# Parameters shared by stages on several pipeline ranks: each has all shards, on devices of the same numbers.


def sharing_pipeline_ranks(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Map each parameter that several pipeline ranks have to the global ranks of each of them."""
    places: dict[str, dict[tuple[int, ...], None]] = {}
    for stage in plan.stages:
        for entry in stage.parameters:
            places.setdefault(entry.name, {})[stage.placement.ranks] = None
    return {name: tuple(ranks) for name, ranks in places.items() if len(ranks) > 1}


@dataclass(frozen=True)
class PipelineRankGroups:
    """Process groups of a rank with the ranks of its device number in other pipeline ranks. ``every``: over all
    pipeline ranks; ``shared``: parameter -> the group over the pipeline ranks that have it."""

    every: Any
    shared: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineRankGroups:
        return self  # creating new ones needs all ranks

    def __getstate__(self) -> NoReturn:
        """Raise LaunchError: process groups cannot be pickled."""
        what = "a parallel module of stages cannot be pickled: its stages use process groups of this job"
        raise LaunchError(what, fix="store par.state_dict(), or sw.save_checkpoint(...), which any ranks can read")

    @staticmethod
    def of(plan: Plan, place: tuple[int, ...], host: frozenset[str]) -> PipelineRankGroups:
        """Create the groups of a rank of pipeline rank ``place``. ``host``: names of the tables on the CPU, whose
        groups use gloo. All ranks of the job call this."""
        everywhere = tuple(dict.fromkeys(stage.placement.ranks for stage in plan.stages))
        every = new_groups([sorted(ranks) for ranks in zip(*everywhere, strict=True)])
        groups: dict[tuple[tuple[tuple[int, ...], ...], bool], Any] = {}
        groups_of: dict[str, Any] = {}
        for name, places in sharing_pipeline_ranks(plan).items():
            key = places, name in host
            if key not in groups:
                groups[key] = new_groups(
                    [sorted(ranks) for ranks in zip(*places, strict=True)], "gloo" if name in host else None
                )
            if place in places:
                groups_of[name] = groups[key]
        return PipelineRankGroups(every, groups_of)
