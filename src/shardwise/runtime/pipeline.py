"""The module that a rank trains under a plan of stages: its stages' shards, and their programs on a torch schedule.

All ranks make the same calls with the whole batch. A rank works on the stages of its pipeline rank. Gradients of
parameters that several stages share are summed at the end of a step, so all copies get the same update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardwise.errors import PlanWarning, ShardwiseError, problem, warn_user
from shardwise.graph.batch import with_samples
from shardwise.graph.capture import Capture
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph
from shardwise.graph.normalize_random import SEED
from shardwise.graph.trees import flatten_with_path, leaf_name, unflatten
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.plans.bind_stages import bound, only_read, step_graph
from shardwise.plans.micro_batch_search import announce_statistics
from shardwise.plans.plan import Plan
from shardwise.plans.schedule import schedule_of
from shardwise.programs.micro_batches import Passes, whole_sources
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.cpu_optimizer import place_states
from shardwise.runtime.grad_accum import scale_of
from shardwise.runtime.guards.protect import protect
from shardwise.runtime.guards.registry import shard_records
from shardwise.runtime.holding import install_shards
from shardwise.runtime.hooks import gather_whole
from shardwise.runtime.initial.materialize import Init
from shardwise.runtime.initial.shards import ShardMaterializer
from shardwise.runtime.micro_batched_step import samples_of, with_samples_in
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.runtime.pipeline_profile import PipelineProfile, profile_pipeline
from shardwise.runtime.program_cache import (
    CallSpec,
    ProgramCache,
    RunSettings,
    check_frozen,
    in_plan_precision,
    refuse_input_gradients,
)
from shardwise.runtime.same_inputs import SameInputs
from shardwise.runtime.shared_parameters import PipelineRankGroups
from shardwise.runtime.signatures import Batch, LocalInputs, call_key, check_equal, in_other_mode, leaves_of
from shardwise.runtime.stage import StageInputs, StageProgram, StageWorker
from shardwise.runtime.stage_calls import StageCall
from shardwise.runtime.stage_faults import StageFaults
from shardwise.runtime.stage_outputs import gather_stage_outputs
from shardwise.runtime.stage_replicas import PipelineCheck
from shardwise.runtime.tensor_table import TensorTable
from shardwise.runtime.torch_schedules import Scheduled

LossOn = Literal["all", "last"]


class Pipeline(ParallelModule):
    """This rank's shards of the parameters of its stages, under their original names."""

    def __init__(
        self,
        module: torch.nn.Module,
        plan: Plan,
        settings: RunSettings,
        *,
        seed: int | None = None,
        init: Init | None = None,
        weights: str | Path | None = None,
    ) -> None:
        super().__init__()
        settings = replace(settings, outputs="whole")  # each call sends the outputs of all stages to all ranks
        self.plan, self.device, self.inputs = plan, settings.device, settings.inputs
        self.schedule = schedule_of(plan.schedule, plan.order)
        name, rank = type(module).__name__, dist.get_rank()
        self._everyone = Communicator(Placement.whole(Mesh(rank=dist.get_world_size())), name)
        self._places = tuple(dict.fromkeys(stage.placement.ranks for stage in plan.stages))
        own_place = next(ranks for ranks in self._places if rank in ranks)
        self._position = own_place.index(rank)
        self._stages = [number for number, stage in enumerate(plan.stages) if stage.placement.ranks == own_place]
        self._ranks = self._host_ranks = [Communicator(stage.placement, name) for stage in plan.stages]
        if settings.host and self.device.type != "cpu":
            self._host_ranks = [Communicator(stage.placement, name, backend="gloo") for stage in plan.stages]
        self._groups = PipelineRankGroups.of(plan, own_place, self._position, settings.host)
        self._faults = StageFaults(plan, self._stages, self._position, self._everyone)
        calls = ProgramCache(module, plan, settings, self._everyone, self._everyone)
        self._calls = calls
        self._calls_of = [
            calls.of_stage(plan.alone(i), *communicators)
            for i, communicators in enumerate(zip(self._ranks, self._host_ranks, strict=True))
        ]
        self._ready: dict[Any, StageCall] = {}
        self._latest: StageCall | None = None
        self._has_said_instead = False
        self._start_from(seed, self.device)
        numbers = Communicator(self._everyone.place, name, backend="gloo")
        self._parts: LocalInputs | None = None
        self._same: SameInputs | None = None
        if self.inputs == "global":
            self._same = SameInputs(self._everyone, numbers, self.device)
        else:
            self._parts = LocalInputs(plan, self._ranks[self._stages[0]], self._everyone, numbers, self.device)
        for ranks in dict.fromkeys((*self._ranks, *self._host_ranks)):
            ranks.create_groups([ranks.mesh.sub_axes])  # all ranks of a stage: hooks gather parameters over them
        first = self._stages[0]
        hosts = (settings.host, self._host_ranks[first])
        holder = ShardMaterializer(self.layouts, self._ranks[first], self._everyone, *hosts, self._names)
        install_shards(self, module, plan, holder, self.device, seed, init, weights)
        self._protect()
        self._state = TensorTable(self)
        own_ranks = {number: self._ranks[number] for number in self._stages}
        self._replicas = PipelineCheck(settings, plan, self._everyone, own_ranks) if settings.check_replicas else None
        self.stand_for(module)

    # -- state ---------------------------------------------------------------------------------------------------------

    @cached_property
    def layouts(self) -> Mapping[str, Any]:
        """Map each parameter, buffer or input of this rank's stages to its layout over the devices of its first stage.
        A tensor that several of these stages have, has the same layout in all."""
        layouts: dict[str, Any] = {}
        for number in self._stages:
            layouts = {**self.plan.stages[number].layouts, **layouts}
        return layouts

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Return this rank's coordinate on each mesh axis of its first stage."""
        return self._ranks[self._stages[0]].coordinates

    @property
    def device_number(self) -> int:
        return self._position

    @cached_property
    def _names(self) -> frozenset[str]:
        stages = [self.plan.stages[number] for number in self._stages]
        return frozenset(entry.name for stage in stages for entry in (*stage.parameters, *stage.buffers))

    @cached_property
    def _elsewhere(self) -> frozenset[str]:
        def names(module: torch.nn.Module) -> set[str]:
            tensors = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
            return {name for named in tensors for name, _ in named}

        return frozenset(names(self.original) - names(self))

    def _holders(self, name: str) -> list[int]:
        """Return the other ranks that have this rank's shard of a parameter of several stages."""
        have = [stage.placement.ranks for stage in self.plan.stages if name in stage.layouts]
        return sorted({ranks[self._position] for ranks in have} - {dist.get_rank()})

    def _protect(self) -> None:
        first = {
            entry.name: stage.placement.ranks for stage in reversed(self.plan.stages) for entry in stage.parameters
        }
        first_ranks = self.plan.stages[self._stages[0]].placement.ranks
        elsewhere = frozenset(name for name in self._groups.shared if first[name] != first_ranks)
        protect(self, shard_records(self, self.layouts, self._ranks[self._stages[0]], elsewhere), self._everyone)
        place_states(self, self.plan.optimizer, self._calls.settings.host)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": {}, "_latest": None, "_signatures": {}}  # a copy builds its own programs

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._protect()

    # -- calls ---------------------------------------------------------------------------------------------------------

    @in_plan_precision
    def step(self, *args: Any, loss: LossOn = "all", scaler: GradScaler | None = None, **kwargs: Any) -> Tensor | None:
        """Run forward and backward of the whole batch in micro-batches, add to ``.grad`` and return the detached loss.

        Args:
            args: Positional inputs of the module; the batch may have any number of samples.
            loss: ``"all"``: every rank gets the loss. ``"last"``: only ranks of the last stage do, and nothing is
                broadcast.
            scaler: Gradient scaler whose scaled loss is differentiated. The returned loss is not scaled; the caller
                still calls ``scaler.step`` and ``scaler.update``.
            kwargs: Keyword inputs of the module.

        Returns:
            The detached loss of the whole batch, a scalar; None on ranks that do not get it.

        Raises:
            ShardwiseError: If ``loss`` is invalid or an input requires a gradient.
        """
        if loss not in ("all", "last"):
            raise ShardwiseError(
                f'loss is "all" (every rank gets it) or "last" (those of the last stage), not {loss!r}'
            )
        flat, spec = self._begin(args, kwargs)
        tensors = _named(args, kwargs)
        refuse_input_gradients(tensors, "under a plan of stages", "plan without stages")
        check = self._replicas if self.training else None
        check = check if check is not None and check.is_due() else None
        ready, batch = self._for_step(flat, spec)
        if self._same is not None and check is None:
            self._same.begin(flat, spec)
        for worker in ready.workers:
            for program in worker.programs.values():
                check_frozen(program.compiled)
        losses = self._run(ready, tensors, batch, keeps=True, scale=scale_of(scaler, self.device), check=check)
        self._add_gradients(ready, check)
        last = self.plan.stages[-1].placement.ranks
        total = sum(losses[1:], losses[0]).detach() if losses else None
        if loss == "last":
            return total
        graph = ready.bound.cut.parts[-1]
        value = (
            torch.zeros((), dtype=graph.by_name[str(graph.loss)].dtype, device=self.device) if total is None else total
        )
        with (
            self._faults.exchange(f"the loss of stage {len(self.plan.stages) - 1}", last[:1]),
            trail.waiting(b"the loss"),
        ):
            dist.broadcast(value, last[0])
        return value

    @in_plan_precision
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for evaluation, in one micro-batch: every tensor whole on every rank, without
        gradients. Raises ShardwiseError in training, since the caller's own backward would not cross stages."""
        if self.training and torch.is_grad_enabled():
            raise ShardwiseError(
                problem(
                    "under a plan of stages a call is forward only, but this one needs gradients",
                    fix="train with loss = par.step(*batch); evaluate under torch.no_grad(), or after par.eval()",
                )
            )
        return self._evaluate(args, kwargs, predicts=False)

    @in_plan_precision
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own output, without the loss function given to ``parallelize``: pass no targets. Every
        tensor is whole on every rank, without gradients."""
        return self._evaluate(args, kwargs, predicts=self._calls.settings.loss is not None)

    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> PipelineProfile:
        """Measure a training step on this batch and compare it with the simulation: stage times, waits and operators.

        Every rank calls it. Gradients, buffers and random state are restored afterwards; optimizers are not run.

        Args:
            args: Positional inputs of the module.
            steps: Number of measured steps, at least 1; they are measured twice (the schedule, then each stage by
                itself).
            kwargs: Keyword inputs of the module.

        Raises:
            ShardwiseError: If ``steps`` is less than 1.
        """
        if steps < 1:
            raise ShardwiseError(f"steps is a number from 1, not {steps!r}")

        def step() -> None:
            self.zero_grad()
            self.step(*args, **kwargs)

        def latest_call() -> StageCall:
            assert self._latest is not None, "a step has run"
            return self._latest

        replicas, self._replicas = self._replicas, None  # a checked step runs another program
        ranks = {number: self._ranks[number] for number in self._stages}
        try:
            with self._unchanged():
                return profile_pipeline(step, latest_call, self.plan, ranks, self.device, steps)
        finally:
            self._replicas = replicas

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        self._everyone.calls += 1
        for ranks in self._ranks:
            ranks.calls += 1
        self._calls.check_surroundings()
        self._template.look()
        flat, spec = leaves_of(args, kwargs, self.device)
        if self._state.refresh():
            state = self._state.tensors
            self._ready = {key: ready.with_state(state) for key, ready in self._ready.items()}
        self._circumstances = self._state.circumstances()
        return flat, spec

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, predicts: bool) -> Any:
        flat, spec = self._begin(args, kwargs)
        if torch.is_grad_enabled():
            refuse_input_gradients(_named(args, kwargs), "under a plan of stages", "plan without stages")
        key, call, batch = self._call(flat, spec, loss_only=False, predicts=predicts)
        if key not in self._ready:
            captured = self._calls.captured(call)
            self._ready[key] = self._build_call(captured, Passes.single(captured.graph), call)
        ready = self._ready[key]
        self._run(ready, _named(args, kwargs), batch, keeps=False)
        outputs = gather_stage_outputs(ready, self.plan, self._ranks, self._faults, self.device)
        return unflatten(outputs, ready.captured.out_spec)

    # -- programs ------------------------------------------------------------------------------------------------------

    def _call(
        self, flat: Sequence[Any], spec: Any, *, loss_only: bool, predicts: bool = False
    ) -> tuple[Any, CallSpec, Batch | None]:
        """Return (key, call, batch) of a call; ranks compare it when it is new. ``key`` identifies its programs; the
        call has whole tensors on meta; ``batch`` is None unless ranks pass parts."""
        mode = (self.training, loss_only, predicts, in_other_mode(self._state.modules))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        shapes: list[tuple[int, ...]] = [tuple(x.shape) for x in tensors]
        own_key = key = call_key(flat, spec, mode, shapes)
        batch = None
        if self._parts is not None:
            batch = self._parts.batch(self._signature(own_key, flat, spec, mode), tensors)
            shapes = list(batch.shapes.values())
            key = call_key(flat, spec, mode, shapes)
        elif key not in self._ready or self._is_new(key):
            check_equal(
                self._signature(own_key, flat, spec, mode), tensors, self._everyone, self.device, self.plan.holds
            )
        elif self._is_changed():  # ranks of other stages may have nothing to freeze
            check_equal(self._signature(own_key, flat, spec, mode), tensors, self._ranks[self._stages[0]], self.device)
        self._compared(key)
        return key, CallSpec(self._examples(flat, spec, shapes), *mode), batch

    def _for_step(self, flat: Sequence[Any], spec: Any) -> tuple[StageCall, Batch | None]:
        key, call, batch = self._call(flat, spec, loss_only=True)
        if key not in self._ready:
            captured = self._calls.captured(call)
            graph = step_graph(captured.graph)
            samples, micro_batch = self._samples(call), self.plan.micro_batch
            passes = Passes.single(graph)
            if (
                micro_batch is not None
                and samples is not None
                and samples > micro_batch
                and self.plan.micro_batches > 1
            ):

                def alone(count: int) -> Graph:
                    return self._calls.captured(replace(call, arguments=with_samples(call.arguments, count))).graph

                passes = Passes.over(self._calls.model, graph, micro_batch, alone)
                if dist.get_rank() == 0:
                    announce_statistics(sorted(passes.statistics))
            self._ready[key] = self._build_call(captured, passes, call)
        ready = self._latest = self._ready[key]
        return ready, batch

    def _samples(self, call: CallSpec) -> int | None:
        named = {leaf_name(path): x for path, x in flatten_with_path(call.arguments)[0] if isinstance(x, Tensor)}
        if not with_samples_in(self.plan):
            return None
        return samples_of(self.plan, {name: tuple(x.shape) for name, x in named.items()})

    def _build_call(self, captured: Capture, passes: Passes, call: CallSpec) -> StageCall:
        """Build the programs of this rank's stages on a schedule; all ranks create the process groups of all stages."""
        # The plan names the operators of a micro-batch; other steps and calls with outputs have different ones.
        is_planned = call.loss_only and (self.plan.micro_batches == 1 or len(passes.sizes) > 1)
        training = self._calls.mode_of(call) if is_planned else None
        bounds = {
            size: bound(self.plan, graph, prelude=passes.prelude, training=training, constants=call.constants)
            for size, graph in passes.graphs.items()
        }
        state = {**self._state.tensors, SEED: self._seed}
        programs: dict[int, dict[int, StageProgram]] = {number: {} for number in self._stages}
        for size, of_size in bounds.items():
            for calls, spmd in zip(self._calls_of, of_size.spmds, strict=True):
                calls.check_hosted(spmd)  # on all ranks
            for number, (calls, spmd) in enumerate(zip(self._calls_of, of_size.spmds, strict=True)):
                calls.create_groups(spmd)
                if number in programs:
                    part = of_size.cut.parts[number]
                    compiled = calls.compiled_of(spmd, captured, part, call, state, repeats=call.loss_only)
                    returned = {
                        *(part.cotangents or ()),
                        *(of_size.cut.parts[number - 1].cotangents or () if number else ()),
                    }
                    sends = of_size.cut.sends(number)
                    programs[number][size] = StageProgram(compiled, self._ranks[number], sends, frozenset(returned))
        last = len(self.plan.stages) - 1
        workers = tuple(
            StageWorker(number, number == last, programs[number], passes.sizes, passes.statistics)
            for number in self._stages
        )
        schedule = self._schedule_for(len(passes.sizes)) if call.loss_only else schedule_of(self.schedule.instead)
        by_number = {worker.number: worker for worker in workers}
        scheduled = Scheduled(schedule, by_number, last + 1, len(passes.sizes), self.device, self._groups.every)
        return StageCall(captured, passes, bounds, workers, scheduled)

    def _schedule_for(self, num_micro_batches: int) -> Any:
        """Return the plan's schedule, or its substitute if it does not support so few micro-batches."""
        fault = self.schedule.fault(len(self._places), num_micro_batches)
        if not fault:
            return self.schedule
        if not self._has_said_instead and dist.get_rank() == 0:
            warn_user(f"{fault}: such a step runs as {self.schedule.instead}", PlanWarning)
        self._has_said_instead = True
        return schedule_of(self.schedule.instead)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _run(
        self,
        ready: StageCall,
        tensors: Mapping[str, Tensor],
        batch: Batch | None,
        *,
        keeps: bool,
        scale: Tensor | None = None,
        check: PipelineCheck | None = None,
    ) -> list[Tensor]:
        """Run the schedule and return the losses of the micro-batches on ranks of the last stage. ``tensors``: this
        rank's parts of a ``batch``, or all of it (None)."""
        if check is not None:
            check.begin(tensors if batch is None else {}, self._state.tensors)
        seed, split = self._seed_of_call(draws=ready.draws), with_samples_in(self.plan)
        if batch is not None and self._parts is not None:
            tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            if not self._parts.divides(batch, ready.passes, lambda _: ready.wanted, split):
                tensors = {name: self._parts.whole(name, tensor, batch) for name, tensor in tensors.items()}
                batch = None
        whole = self._whole(ready, tensors, batch)
        step = StageInputs(tensors, batch is not None, split, whole, seed, self.device, scale)
        for worker in ready.workers:
            worker.begin(step, keeps=keeps, check=None if check is None else check.stages[worker.number])
        try:
            losses = ready.scheduled.step() if keeps else ready.scheduled.forward()
        except RuntimeError as error:
            explanation = self._faults.explained(error, ready.scheduled)
            if explanation is None:
                raise
            raise explanation from error
        if check is not None:
            check.settle_forward()
        return losses

    def _whole(self, ready: StageCall, tensors: Mapping[str, Tensor], batch: Batch | None) -> dict[str, Tensor]:
        """Return the values of the prelude, which depends on the inputs of all micro-batches; every rank that needs
        them computes them. Parts of a ``batch`` are gathered for it."""
        prelude = None if ready.passes.prelude is None else only_read(ready.passes.prelude)
        is_needed = any(whole_sources(program.part) for worker in ready.workers for program in worker.programs.values())
        if prelude is None or not is_needed:
            return {}
        state = self._state.tensors
        values: dict[str, Tensor] = {}
        for source in prelude.sources:
            if source.kind == "input":
                tensor = tensors[source.names[0]]
                if batch is not None and self._parts is not None:
                    tensor = self._parts.whole(source.names[0], tensor, batch)
                values[source.value] = tensor.to(self.device, prelude.by_name[source.value].dtype)
            elif source.kind == "constant":
                values[source.value] = ready.captured.constants[source.value].to(self.device)
            else:
                name, ranks = source.names[0], self._ranks[self._stages[0]]
                layout = self.layouts[name]
                is_whole = not layout.positions
                values[source.value] = state[name] if is_whole else gather_whole(state[name], layout, name, ranks)
        with torch.no_grad(), self.device:
            results = interpret(prelude, values)
        return {name: results[name] for name in ready.passes.whole}

    def _add_gradients(self, ready: StageCall, check: PipelineCheck | None) -> None:
        """Add the step's gradients to ``.grad``, summed over stages for parameters that several stages share."""
        state = self._state.tensors
        totals: dict[str, Tensor] = {}
        updated: set[str] = set()
        for part in ready.bound.cut.parts:
            updated.update(name for s in part.sources if s.value in part.updated for name in s.names[:1])
        for worker in ready.workers:
            sources = ready.bound.cut.parts[worker.number].source_of
            ranks = self.plan.stages[worker.number].placement.ranks
            with self._faults.exchange(f"gradients of stage {worker.number}", ranks):
                gradients = worker.end()
            for value, gradient in gradients.items():
                name = sources[value].names[0]
                totals[name] = totals[name] + gradient if name in totals else gradient
        for name, group in self._groups.shared.items():
            if name in updated and state[name].requires_grad:
                parameter = state[name]
                total = totals[name].contiguous() if name in totals else torch.zeros_like(parameter)
                what = f"gradient of {name}, which several stages have"
                with self._faults.exchange(what, self._holders(name)), trail.waiting(what.encode()):
                    dist.all_reduce(total, group=group)
                totals[name] = total
        reached = [(state[name], gradient) for name, gradient in totals.items() if state[name].requires_grad]
        if check is not None:
            for worker in ready.workers:
                compiled = worker.programs[max(worker.sizes)].compiled
                check.watch(worker.number, compiled.spmd, compiled.tensors)
        torch.autograd.backward([parameter for parameter, _ in reached], [gradient for _, gradient in reached])
        if check is not None:
            check.settle()


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a call by the paths of their leaves."""
    return {leaf_name(path): x for path, x in flatten_with_path((args, kwargs))[0] if isinstance(x, Tensor)}


__all__ = ["Pipeline"]
