"""The module that a rank trains under a plan: its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, groupby
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from shardwise.errors import NotFiniteError, PlanWarning, ShardwiseError, warn_user
from shardwise.graph.batch import num_samples
from shardwise.graph.ir import Graph, Ref
from shardwise.graph.trees import unflatten
from shardwise.graph.written_out import SEED
from shardwise.layouts.layout import Layout
from shardwise.layouts.text import format_layout
from shardwise.plans.bind_stages import delivered_layouts
from shardwise.plans.quantities import format_bytes
from shardwise.plans.schedule import schedule_of
from shardwise.programs.micro_batches import Passes
from shardwise.runtime.agree import meet_all, show_progress_once
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.faults import refuse_create_graph
from shardwise.runtime.finite import FiniteWatch, NotFinite, all_finite, first_of
from shardwise.runtime.guards.registry import ShardRecord, tensors_of
from shardwise.runtime.heartbeat_file import trail
from shardwise.runtime.hooks import gather_whole
from shardwise.runtime.host_copies import Arrivals
from shardwise.runtime.lazy_gather import alias_buffers, deliver_outputs, separate_memory, write_buffers
from shardwise.runtime.local_shards import shard
from shardwise.runtime.parallel_module import ParallelModule, named_tensors, no_loss
from shardwise.runtime.program_cache import (
    CallSpec,
    Executable,
    check_frozen,
    in_plan_precision,
    refuse_input_gradients,
)
from shardwise.runtime.signatures import Batch
from shardwise.runtime.stage import BoundaryTensor, StageCall
from shardwise.runtime.step import CallableStep, GradAccumStep, Half, Observed, observed
from shardwise.runtime.step_profile import PipelineProfile, StepProfile, profile_pipeline, profile_step

_GRADIENTS_WERE_BAD = (
    "a gradient is not finite, although all values of this step are: the gradients to which the step was added were not"
)
CallResult = tuple[Executable, torch.Tensor | None, Sequence[Any]]  # program, loss, flattened outputs


class Parallel(ParallelModule):
    """This rank's shards of a module. ``named_parameters()`` yields them under the original names, so any element-wise
    ``torch.optim`` optimizer updates them as it would on one device.

    Under a plan of stages a rank holds the shards of its stages. Only ``step`` computes gradients there, since the
    caller's own backward would not cross stages."""

    _has_said_whole = False

    @in_plan_precision
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the whole batch in one pass, whatever the plan's micro-batch; differentiable, except under
        a plan of stages. Every output tensor is whole on every rank. If the module has a loss, other outputs are
        gathered when they are read (see ``parallelize(outputs=)``).

        Raises:
            ShardwiseError: Under a plan of stages, if gradients are needed.
        """
        needs_gradients = self.training and torch.is_grad_enabled()
        if self.plan.is_pipeline:
            if needs_gradients:
                what = "under a plan of stages a call is forward only, but this one needs gradients"
                fix = "train with loss = par.step(*batch); evaluate under torch.no_grad(), or after par.eval()"
                raise ShardwiseError(what, fix=fix)
            return self._evaluate(args, kwargs, predicts=False)
        if needs_gradients and self._is_in_passes(args, kwargs):
            self._say_whole()
        compiled, _, outputs = self._call(args, kwargs, loss_only=False, has_own_backward=True)
        return unflatten(outputs, compiled.captured.out_spec)

    @overload
    def step(
        self, *args: Any, loss: Literal["all"] = "all", scaler: GradScaler | None = None, **kwargs: Any
    ) -> torch.Tensor: ...

    @overload
    def step(
        self, *args: Any, loss: Literal["last"], scaler: GradScaler | None = None, **kwargs: Any
    ) -> torch.Tensor | None: ...

    @in_plan_precision
    def step(
        self, *args: Any, loss: Literal["all", "last"] = "all", scaler: GradScaler | None = None, **kwargs: Any
    ) -> torch.Tensor | None:
        """Run forward and backward of the whole batch, add to ``.grad`` and return the detached loss.

        Under a plan of several micro-batches it takes the batch of the optimizer step, with any number of samples. It
        runs in micro-batches of the planned size (the last may be smaller). The result is that of one pass over the
        whole batch. With ``inputs="local"`` every micro-batch takes its share of every rank's part.

        Args:
            args: Positional inputs of the module.
            loss: ``"all"``: every rank gets the loss. ``"last"``: under a plan of stages only ranks of the last stage
                do, and nothing is broadcast.
            scaler: Gradient scaler whose scaled loss is differentiated. The returned loss is not scaled; the caller
                still calls ``scaler.step`` and ``scaler.update``.
            kwargs: Keyword inputs of the module.

        Returns:
            The detached loss of the whole batch, a scalar; None on ranks that do not get it.

        Raises:
            ShardwiseError: If ``loss`` is invalid or, in several micro-batches, an input requires a gradient.
        """
        if loss not in ("all", "last"):
            raise ShardwiseError(
                f'loss is "all" (every rank gets it) or "last" (those of the last stage), not {loss!r}'
            )
        if not self._checks_finite():
            return self._run_step(args, kwargs, loss, scaler)
        restore = self._start()
        with torch.autograd.set_detect_anomaly(False):
            value = self._run_step(args, kwargs, loss, scaler)
            gradients = () if scaler is not None and scaler.is_enabled() else self.parameters()
            if all_finite(value, gradients, self.device):
                return value
            restore()
            raise NotFiniteError(str(self._find_not_finite(args, kwargs) or _GRADIENTS_WERE_BAD))

    @in_plan_precision
    def check_finite(self, *args: Any, **kwargs: Any) -> NotFinite | None:
        """Run forward and backward of a batch and return where values that are not finite begin, None if the loss and
        all gradients are finite. Every rank calls it.

        Infinities that do not reach the loss or a gradient, as those of a mask, are no fault. Gradients, buffers and
        random state are restored afterwards; optimizers are not run, hooks of parameters are. It takes
        a step, and a second one, operator by operator, if something is found.

        Args:
            args: Positional inputs of the module.
            kwargs: Keyword inputs of the module.

        Returns:
            The parameter, buffer or input that is not finite before the step, else the first operator, forward or
            backward, whose result is not, on any rank: its name, line, operands with their ranges, ranks. The same on
            every rank; ``print`` shows it.
        """
        with torch.autograd.set_detect_anomaly(False):
            with self._unchanged():
                self.zero_grad()
                loss = self._run_step(args, kwargs, "all", None)
                if all_finite(loss, self.parameters(), self.device):
                    return None
            return self._find_not_finite(args, kwargs)

    def _find_not_finite(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NotFinite | None:
        """Run a step that has run before again, operator by operator; None if its loss and gradients are finite by
        themselves. Collective."""
        with self._unchanged(), ExitStack() as stack:
            self.zero_grad()
            watches = []
            for number, step, others in self._steps_here():
                watches.append(FiniteWatch(number))
                stack.enter_context(observed(step, watches[-1], others))
            loss = self._run_step(args, kwargs, "all", None)
            first, is_finite = first_of(watches), all_finite(loss, self.parameters(), self.device)
        return None if first is None and is_finite else first or NotFinite((), "unknown", "", "", "", "", ())

    def _steps_here(self) -> Iterator[tuple[int, CallableStep | GradAccumStep, list[Half]]]:
        """Yield the programs of this rank's stages in the latest step: number of the stage, program, its halves of
        backward by themselves."""
        if isinstance(self._latest, Executable):
            yield 0, self._latest.runs, []
            return
        splits = self.plan.is_pipeline and schedule_of(self.plan.schedule, self.plan.order).splits_backward
        for worker in self._latest.workers:
            for program in worker.programs.values():
                split = []
                if splits:
                    split = [Half(module, own, own.backward, "backward", True) for own, module in program.halves]
                yield worker.number, program.compiled.in_passes, split

    def _checks_finite(self) -> bool:
        """Return whether this training call is checked. Call it once in every training call."""
        every = self._settings.check_finite
        self._calls_so_far += 1
        if torch.is_anomaly_enabled():
            meet_all("anomaly detection")
            return True
        return every > 0 and (self._calls_so_far - 1) % every == 0

    def _run_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: str, scaler: GradScaler | None
    ) -> torch.Tensor | None:
        if not (self.plan.is_pipeline or self._is_in_passes(args, kwargs)):
            result = self._loss(args, kwargs)
            (result if scaler is None else scaler.scale(result)).backward()
            return result.detach()
        ready, total = self._step(args, kwargs, scaler)
        if loss == "last" or not self.plan.is_pipeline:
            return total
        last, graph = self.plan.stages[-1].placement.ranks, ready.bound.cut.parts[-1]
        dtype = graph.by_name[str(graph.loss)].dtype
        value = torch.zeros((), dtype=dtype, device=self.device) if total is None else total
        what = f"the loss of stage {len(self.plan.stages) - 1}"
        with self._faults.exchange(what, last[:1]), trail.waiting(b"the loss"):
            dist.broadcast(value, last[0])
        return value

    @in_plan_precision
    def loss_of(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss alone, for a backward by the caller; other outputs are not gathered. Like a call it is one
        pass over the whole batch, whatever the plan's micro-batch. Raises PlanError under a plan of stages."""
        if not self.plan.is_pipeline and self.training and torch.is_grad_enabled() and self._is_in_passes(args, kwargs):
            self._say_whole()
        return self._loss(args, kwargs, has_own_backward=True)

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_own_backward: bool = False) -> torch.Tensor:
        _, loss, _ = self._call(args, kwargs, loss_only=True, has_own_backward=has_own_backward)
        if loss is None:
            raise no_loss()
        return loss

    @in_plan_precision
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own output, without the loss function given to ``parallelize``: pass no targets. Every
        tensor is whole on every rank; differentiable, except under a plan of stages."""
        predicts = self._settings.loss is not None
        if self.plan.is_pipeline:
            return self._evaluate(args, kwargs, predicts=predicts)
        compiled, _, outputs = self._call(args, kwargs, loss_only=False, predicts=predicts)
        return unflatten(outputs, compiled.captured.out_spec)

    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> StepProfile | PipelineProfile:
        """Measure a training step on this batch and compare it with the prediction, per operator and per message; under
        a plan of stages also the times and waits of stages with the simulation.

        Every rank calls it; ``print`` shows the largest disagreements first. Gradients, buffers and random state are
        restored afterwards; optimizers are not run.

        Args:
            args: Positional inputs of the module.
            steps: Number of measured steps, at least 1; they are measured twice (as a whole and node by node).
            kwargs: Keyword inputs of the module.

        Raises:
            ShardwiseError: If ``steps`` is less than 1.
        """
        if steps < 1:
            raise ShardwiseError(f"steps is a number from 1, not {steps!r}")

        def step() -> None:
            self.zero_grad()
            self._run_step(args, kwargs, "all", None)

        with self._unchanged():
            step()  # compiles and allocates memory
            if self.plan.is_pipeline:
                return profile_pipeline(step, self._latest, self.plan, self._stage_ranks, self.device, steps)
            state = [*self.parameters(), *self.buffers()]
            return profile_step(step, self.latest.runs, self.plan, state, self.device, steps)

    # -- a call under a plan without stages ----------------------------------------------------------------------------

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        loss_only: bool,
        predicts: bool = False,
        has_own_backward: bool = False,
    ) -> CallResult:
        """Run a call under a plan without stages. ``has_own_backward``: the caller runs backward, if any."""
        self.plan.only_stage  # noqa: B018 - raises PlanError for several
        flat, spec = self._begin(args, kwargs)
        mode = self._mode(loss_only=loss_only, predicts=predicts)
        check = self._due_check() if torch.is_grad_enabled() else None
        same = self._same if check is None and torch.is_grad_enabled() and (self.training or loss_only) else None
        compiled, local_batch = self._program(flat, spec, mode, self._compiled, self._compile)
        arrivals = Arrivals(self.device)
        inputs_here = self._inputs_here(flat, compiled, local_batch, arrivals)
        if same is not None:  # ranks make this call: one that they refuse leaves nothing to compare
            same.begin(flat, spec)
        self._latest = compiled
        inputs = iter(inputs_here)
        tensors = [next(inputs) if t is None else t for t in compiled.tensors]
        seed = self._seed_of_call(draws=compiled.seed is not None)
        if compiled.seed is not None:
            tensors[compiled.seed] = seed
        if check is None:
            is_watched = has_own_backward and self.training and torch.is_grad_enabled() and self._checks_finite()
            seen = FiniteWatch().observed(compiled.step.emitted) if is_watched else None
            delivered, written = compiled.step(tensors, seen)
        else:
            batch = [x.to(self.device) for x in flat if isinstance(x, torch.Tensor)] if self._parts is None else ()
            seen = Observed(check.observed(compiled.step.emitted, batch))
            delivered, written = compiled.step(tensors, seen)
            check.watch(compiled.spmd, tensors)
        arrivals.finish()
        loss, outputs = compiled.results(delivered)
        buffers = [tensors[position] for position in compiled.written]
        if loss_only:
            write_buffers(buffers, written)
            return compiled, loss, ()
        sources, memories = dict(zip(compiled.names, tensors, strict=True)), compiled.captured.memories
        separated = separate_memory(outputs, memories, sources)
        write_buffers(buffers, written)
        aliased = alias_buffers(separated, memories, {n: sources[n] for n in compiled.whole_buffers})
        if compiled.split:
            names, graph = compiled.spmd.outputs, compiled.spmd.graph
            aliased = deliver_outputs(aliased, names, compiled.split, graph, self._ranks)
        return compiled, loss, tuple(aliased)

    def _compile(self, call: CallSpec) -> Executable:
        with show_progress_once("writing the program of every rank"):
            return self._calls.compiled(call, {**self._state.tensors, SEED: self._seed})

    def _inputs_here(
        self, flat: Sequence[Any], compiled: Executable, batch: Batch | None, arrivals: Arrivals
    ) -> list[torch.Tensor]:
        """Return this rank's parts of the inputs of a call. ``batch``: as of ``_program``."""
        if torch.is_grad_enabled():
            check_frozen(compiled)
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        if batch is None:  # copy only this rank's part of a host batch to the device
            part: Callable[..., torch.Tensor] = _Part.apply
            with_layouts = zip(tensors, compiled.inputs, strict=False)
            parts = [part(x, layout, self._ranks) if layout.positions else x for x, layout in with_layouts]
            return [arrivals.bring(x) for x in parts]
        assert self._parts is not None
        named = zip(batch.shapes, tensors, compiled.inputs, strict=False)
        return [self._parts.own_part(name, arrivals.bring(x), layout, batch) for name, x, layout in named]

    def _is_in_passes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a batch has more samples than a micro-batch of the plan."""
        if self.plan.micro_batches == 1 or self.plan.micro_batch is None:
            return False
        if self._parts is not None:  # a rank's part does not tell the batch size
            return True
        count = num_samples((args, kwargs))
        return count is not None and count > self.plan.micro_batch

    def _say_whole(self) -> None:
        """Warn once that a call for the user's own backward is one pass over all samples."""
        if not self._has_said_whole and self._ranks.rank == 0:
            warn_user(
                f"the plan has micro-batches of {self.plan.micro_batch} samples, which only par.step uses; this "
                "call computes all of its samples at once and keeps the activations of all",
                PlanWarning,
            )
        self._has_said_whole = True

    # -- evaluation under a plan of stages -----------------------------------------------------------------------------

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, predicts: bool) -> Any:
        flat, spec = self._begin(args, kwargs)
        tensors = named_tensors(args, kwargs)
        if torch.is_grad_enabled():
            refuse_input_gradients(tensors, self.plan)

        def build(call: CallSpec) -> StageCall:
            captured = self._calls.captured(call)
            return self._build(captured, Passes.single(captured.graph), call)

        mode = self._mode(loss_only=False, predicts=predicts)
        ready, batch = self._program(flat, spec, mode, self._ready, build)
        self._run(ready, tensors, batch, keeps=False)
        return unflatten(self._outputs(ready), ready.captured.out_spec)

    def _outputs(self, ready: StageCall) -> list[Any]:
        """Return the flattened outputs of a finished call on all ranks, broadcast from the stages that compute them."""
        graph, bound = ready.captured.graph, ready.bound
        home = dict(bound.cut.output_parts)
        layouts = [delivered_layouts(part, spmd) for part, spmd in zip(bound.cut.parts, bound.spmds, strict=True)]
        outputs = {name: tensor for worker in ready.workers for name, tensor in worker.outputs.items()}
        whole: dict[str, torch.Tensor] = {}
        for out in graph.outputs:
            if not isinstance(out, Ref) or out.name in whole:
                continue
            value, number = graph.by_name[out.name], home[out.name]
            makers, what = self._stage_ranks[number].place.ranks, f"an output of stage {number}"
            crossing = BoundaryTensor(out.name, value.shape, value.dtype, returns=False)
            with self._faults.exchange(what, makers), trail.waiting(b"an output"):
                if dist.get_rank() in makers:
                    tensor = outputs[out.name].detach().clone()
                    layout = layouts[number][out.name]
                    if layout.positions:  # also sent to the next stage, which has it sharded
                        tensor = gather_whole(tensor, layout, what, self._stage_ranks[number])
                    wire = crossing.packed(tensor, crossing.example())
                else:
                    wire = torch.empty_like(crossing.example(), device=self.device)
                dist.broadcast(wire, makers[0])
            whole[out.name] = crossing.unpacked(wire)
        return [whole[out.name] if isinstance(out, Ref) else out for out in graph.outputs]

    def __repr__(self) -> str:
        """Return the modules as torch prints them, with the layouts of tensors and what this rank holds of them."""
        tensors = {id(tensor): tensor for _, tensor in tensors_of(self)}
        stages = f"stages {', '.join(map(str, self._stages))} of {len(self.plan.stages)}, " * self.plan.is_pipeline
        num_bytes = format_bytes(sum(tensor.nbytes for tensor in tensors.values()))
        head = f"{self._kind} on {self._ranks.mesh}, {stages}rank {dist.get_rank()} with {num_bytes}"
        return "\n".join([f"Parallel({head}", *(f"  {line}" for line in _module_lines(self, self._record_of())), ")"])

    # -- inspection ----------------------------------------------------------------------------------------------------

    @property
    def compiled(self) -> tuple[Executable, ...]:
        """Return this rank's programs compiled so far: of single calls, oldest first, then of micro-batches."""
        return (*self._compiled.values(), *(compiled for step in self._ready.values() for compiled in step.executables))

    @property
    def latest(self) -> Executable:
        """Return the program of the last call; under stages, of the last step. Raises ShardwiseError before it."""
        if self._latest is None:
            raise ShardwiseError("no program yet: the first call compiles it")
        return self._latest.executables[0] if isinstance(self._latest, StageCall) else self._latest

    @property
    def graphs(self) -> Iterator[tuple[Graph, int]]:
        """Yield the graphs of the last call on all ranks, each with the number of times that it ran: that of the
        module, or of every stage for every size of a micro-batch. None before the first call."""
        if isinstance(self._latest, StageCall):
            for size, count in Counter(self._latest.passes.sizes).items():
                yield from ((part, count) for part in self._latest.bounds[size].cut.parts)
        elif self._latest is not None:
            yield self._latest.spmd.graph, 1

    def output_layout(self, index: int) -> Layout:
        """Return the layout that the ``index``-th tensor of the last call's output had before it was gathered."""
        spmd = self.latest.spmd
        name = [output.name for output in spmd.outputs if isinstance(output, Ref)][index]
        before = {conversion.result: conversion.source for conversion in spmd.conversions}
        return before.get(name) or spmd.layouts[name]

    def program(self) -> torch.fx.GraphModule:
        """Return the FX graph module compiled last, for reading. Raises ShardwiseError before the first call."""
        if not self.compiled:
            raise ShardwiseError("no program yet: the first call compiles it")
        return self.compiled[-1].program


def _module_lines(module: torch.nn.Module, records: Mapping[int, ShardRecord]) -> list[str]:
    """Return the lines on what is in a module; neighbours that print alike share one."""
    lines = []
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        record = records.get(id(tensor))
        if tensor is not None:
            layout = format_layout(record.layout, tensor.dtype) if record is not None else str(list(tensor.shape))
            lines.append(
                f"{name}: {layout}" + f", here {list(tensor.shape)}" * bool(record and record.layout.positions)
            )
    children = [(name, f"{child._kind}(", _module_lines(child, records)) for name, child in module.named_children()]
    for (kind, inside), alike in groupby(children, key=lambda child: child[1:]):
        names = [name for name, _, _ in alike]
        head = f"({names[0]}): {kind}" if len(names) == 1 else f"({names[0]}-{names[-1]}): {len(names)} x {kind}"
        lines += [head, *(f"  {line}" for line in inside), ")"] if inside else [f"{head})"]
    return lines


class _Part(torch.autograd.Function):
    """Slices this rank's part out of a whole input; backward gathers the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: Layout, ranks: Communicator) -> torch.Tensor:
        ctx.layout, ctx.ranks = layout, ranks
        return shard(tensor, layout, ranks.coordinates)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        refuse_create_graph()
        return gather_whole(gradient, ctx.layout, "the gradient of an input", ctx.ranks), None, None
