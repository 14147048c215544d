"""The module that a rank trains under a plan without stages: its shards and the program of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from shardwise.errors import PlanWarning, ShardwiseError, problem, warn_user
from shardwise.graph.batch import num_samples
from shardwise.graph.ir import Ref
from shardwise.graph.normalize_random import SEED
from shardwise.graph.trees import flatten_with_path, leaf_name, unflatten
from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.plans.micro_batch_search import announce_statistics
from shardwise.plans.plan import Plan
from shardwise.runtime.agree import show_progress_once
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.cpu_optimizer import place_states
from shardwise.runtime.faults import refuse_create_graph
from shardwise.runtime.grad_accum import GradAccumStep, scale_of
from shardwise.runtime.guards.protect import protect
from shardwise.runtime.guards.registry import shard_records
from shardwise.runtime.holding import install_shards
from shardwise.runtime.hooks import gather_whole
from shardwise.runtime.initial.materialize import Init
from shardwise.runtime.initial.shards import ShardMaterializer
from shardwise.runtime.lazy_gather import deliver_outputs
from shardwise.runtime.local_shards import shard
from shardwise.runtime.memory_of_outputs import alias_buffers, separate_memory, write_buffers
from shardwise.runtime.micro_batched_step import MicroBatchedStep, rows_of_pass, samples_of, with_samples_in
from shardwise.runtime.parallel_module import ParallelModule
from shardwise.runtime.program_cache import (
    CallSpec,
    Executable,
    Mode,
    ProgramCache,
    RunSettings,
    check_frozen,
    in_plan_precision,
    refuse_input_gradients,
)
from shardwise.runtime.replicas import ReplicaCheck
from shardwise.runtime.same_inputs import SameInputs
from shardwise.runtime.signatures import Batch, LocalInputs, Wanted, call_key, check_equal, in_other_mode, leaves_of
from shardwise.runtime.step import CallableStep
from shardwise.runtime.step_profile import StepProfile, profile_step
from shardwise.runtime.tensor_table import TensorTable

CallResult = tuple[Executable, torch.Tensor | None, Sequence[Any]]  # program, loss, flattened outputs


class Parallel(ParallelModule):
    """This rank's shards of a module. ``named_parameters()`` yields them under the original names, so any element-wise
    ``torch.optim`` optimizer updates them as it would on one device."""

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
        self.plan, self.device, self.inputs, self._settings = plan, settings.device, settings.inputs, settings
        name, everywhere = type(module).__name__, Placement.whole(plan.mesh)
        self._ranks = self._host_ranks = Communicator(everywhere, name)
        if settings.host and self.device.type != "cpu":
            self._host_ranks = Communicator(everywhere, name, backend="gloo")
        every = settings.check_replicas
        self._replicas = ReplicaCheck(every, self._ranks, self.device) if every else None
        numbers = Communicator(everywhere, name, backend="gloo")
        self._parts: LocalInputs | None = None
        self._same: SameInputs | None = None
        if self.inputs == "local":
            self._parts = LocalInputs(plan, self._ranks, self._ranks, numbers, self.device)
        elif plan.mesh.num_devices > 1:
            self._same = SameInputs(self._ranks, numbers, self.device)
        self._calls = ProgramCache(module, plan, settings, self._ranks, self._host_ranks)
        self._compiled: dict[Any, Executable] = {}
        self._in_passes: dict[Any, MicroBatchedStep] = {}
        self._has_said_whole = False
        self._latest: Executable | None = None
        self._start_from(seed, self.device)
        hosts = (settings.host, self._host_ranks)
        install_shards(
            self,
            module,
            plan,
            ShardMaterializer(plan.layouts, self._ranks, self._ranks, *hosts),
            self.device,
            seed,
            init,
            weights,
        )
        self._protect()
        self._state = TensorTable(self)
        self.stand_for(module)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_compiled": {},
            "_in_passes": {},
            "_signatures": {},
            "_latest": None,
        }  # a copy builds its own programs

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._protect()  # a deep copy also holds shards

    def _protect(self) -> None:
        protect(self, shard_records(self, self.plan.layouts, self._ranks))
        place_states(self, self.plan.optimizer, self._settings.host)

    @in_plan_precision
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the whole batch in one pass, whatever the plan's micro-batch; differentiable. Every output
        tensor is whole on every rank. If the module has a loss, other outputs are gathered when they are read (see
        ``parallelize(outputs=)``)."""
        if self.training and torch.is_grad_enabled() and self._is_in_passes(args, kwargs):
            self._say_whole()
        compiled, _, outputs = self._call(args, kwargs, loss_only=False)
        return unflatten(outputs, compiled.captured.out_spec)

    @in_plan_precision
    def step(self, *args: Any, scaler: GradScaler | None = None, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of the whole batch, add to ``.grad`` and return the detached loss.

        Under a plan of several micro-batches it takes the batch of the optimizer step, with any number of samples. It
        runs in micro-batches of the planned size (the last may be smaller). The result is that of one pass over the
        whole batch. With ``inputs="local"`` every micro-batch takes its share of every rank's part.

        Args:
            args: Positional inputs of the module.
            scaler: Gradient scaler whose scaled loss is differentiated. The returned loss is not scaled; the caller
                still calls ``scaler.step`` and ``scaler.update``.
            kwargs: Keyword inputs of the module.

        Returns:
            The detached loss of the whole batch, a scalar.
        """
        if self._is_in_passes(args, kwargs):
            return self._step_in_passes(args, kwargs, scale_of(scaler, self.device))
        loss = self._loss(args, kwargs)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()

    @in_plan_precision
    def loss_of(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss alone, for a backward by the caller; other outputs are not gathered. Like a call it is one
        pass over the whole batch, whatever the plan's micro-batch."""
        if self.training and torch.is_grad_enabled() and self._is_in_passes(args, kwargs):
            self._say_whole()
        return self._loss(args, kwargs)

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        _, loss, _ = self._call(args, kwargs, loss_only=True)
        if loss is None:
            raise ShardwiseError(
                problem(
                    "the module returns no loss to differentiate",
                    fix="return the loss first, or pass loss= to plan and parallelize",
                )
            )
        return loss

    @in_plan_precision
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own output, without the loss function given to ``parallelize``: pass no targets. Every
        tensor is whole on every rank; differentiable."""
        compiled, _, outputs = self._call(args, kwargs, loss_only=False, predicts=self._settings.loss is not None)
        return unflatten(outputs, compiled.captured.out_spec)

    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> StepProfile:
        """Measure a training step on this batch and compare it with the prediction, per operator and per message.

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
            self.step(*args, **kwargs)

        def latest_call() -> CallableStep | GradAccumStep:
            assert self._latest is not None, "a step has run"
            return self._latest.runs

        replicas, self._replicas = self._replicas, None  # a checked step runs another program
        state = [*self.parameters(), *self.buffers()]
        try:
            with self._unchanged():
                return profile_step(step, latest_call, self.plan, state, self.device, steps)
        finally:
            self._replicas = replicas

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, loss_only: bool, predicts: bool = False
    ) -> CallResult:
        """Return (program, loss, flattened outputs) for one batch."""
        if torch.compiler.is_compiling():  # a torch.compile around this module: its programs are not for Dynamo
            called: CallResult = torch.compiler.disable(self._call)(
                args, kwargs, loss_only=loss_only, predicts=predicts
            )
            return called
        flat, spec = self._flattened(args, kwargs)
        mode = (self.training, loss_only, predicts, in_other_mode(self._state.modules))
        check = self._replicas if self.training and torch.is_grad_enabled() else None
        check = check if check is not None and check.is_due() else None
        same = self._same if check is None and torch.is_grad_enabled() and (self.training or loss_only) else None
        compiled, inputs_here = self._program(flat, spec, mode)
        if same is not None:  # ranks make this call: one that they refuse leaves nothing to compare
            same.begin(flat, spec)
        self._latest = compiled
        inputs = iter(inputs_here)
        tensors = [next(inputs) if t is None else t for t in compiled.tensors]
        seed = self._seed_of_call(draws=compiled.seed is not None)
        if compiled.seed is not None:
            tensors[compiled.seed] = seed
        if check is None:
            delivered, written = compiled.step(tensors)
        else:
            batch = [x.to(self.device) for x in flat if isinstance(x, torch.Tensor)] if self._parts is None else ()
            delivered, written = check.run(compiled.step, tensors, batch)
        loss, flat_outputs = compiled.results(delivered)
        outputs: Sequence[Any] = flat_outputs
        sources = {} if loss_only else dict(zip(compiled.names, tensors, strict=True))
        if not loss_only:
            outputs = separate_memory(outputs, compiled.captured.memories, sources)
        write_buffers([tensors[position] for position in compiled.written], written)
        if not loss_only:
            outputs = alias_buffers(
                outputs, compiled.captured.memories, {n: sources[n] for n in compiled.whole_buffers}
            )
            names, graph = compiled.spmd.outputs, compiled.spmd.graph
            outputs = deliver_outputs(outputs, names, compiled.split, graph, self._ranks) if compiled.split else outputs
        return compiled, loss, tuple(outputs)

    # -- a step over micro-batches -------------------------------------------------------------------------------------

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

    def _step_in_passes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Run forward and backward of a whole batch, one micro-batch at a time."""
        if torch.compiler.is_compiling():
            loss: torch.Tensor = torch.compiler.disable(self._step_in_passes)(args, kwargs, scale)
            return loss
        flat, spec = self._flattened(args, kwargs)
        named = [leaf_name(path) for path, x in flatten_with_path((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        refuse_input_gradients(dict(zip(named, tensors, strict=True)), "in several micro-batches", "make one pass")
        check = self._replicas if self.training and self._replicas is not None and self._replicas.is_due() else None
        mode = (self.training, True, False, in_other_mode(self._state.modules))
        own_key = key = call_key(flat, spec, mode, [x.shape for x in tensors])
        batch = None
        if self._parts is not None:
            batch = self._parts.batch(self._signature(own_key, flat, spec, mode), tensors)
        shapes = dict(zip(named, (tuple(x.shape) for x in tensors), strict=True)) if batch is None else batch.shapes
        samples = samples_of(self.plan, shapes)
        if batch is not None:
            key = call_key(flat, spec, mode, list(shapes.values()))
        step = self._in_passes.get(key)
        if batch is None and (step is None or self._is_new(key) or self._is_changed()):
            check_equal(self._signature(own_key, flat, spec, mode), tensors, self._ranks, self.device)
        self._compared(key)
        if self._same is not None and check is None:
            self._same.begin(flat, spec)
        if step is None:
            call = CallSpec(self._examples(flat, spec, list(shapes.values())), *mode)
            step = MicroBatchedStep(*self._calls.in_passes(call, {**self._state.tensors, SEED: self._seed}))
            self._in_passes[key] = step
            if self._ranks.rank == 0:
                announce_statistics(sorted(step.passes.statistics))
        self._latest = next(iter(step.programs.values()))
        check_frozen(self._latest)
        named_inputs = dict(zip(named, (x.to(self.device) for x in tensors), strict=True))
        split = with_samples_in(self.plan)
        cut_by = samples
        if (
            self._parts is not None
            and batch is not None
            and not self._parts.divides(batch, step.passes, lambda whole: self._input_layouts(step, whole), split)
        ):
            named_inputs = {name: self._parts.whole(name, x, batch) for name, x in named_inputs.items()}
            batch = None

        def parts(compiled: Executable, start: int | None, size: int) -> list[torch.Tensor]:
            tensors_here = []
            for (name, x), layout in zip(named_inputs.items(), compiled.inputs, strict=False):
                rows = x if start is None or name not in split else rows_of_pass(x, start, size, cut_by)
                tensors_here.append(self._own_part(rows, layout) if batch is None else rows)
            return tensors_here

        return step.run(parts, self._seed_of_call(draws=step.draws), self.device, check, scale)

    @staticmethod
    def _input_layouts(step: MicroBatchedStep, batch: Batch) -> list[Wanted]:
        """Return the layouts and sample ranges in which the programs of a step take its inputs."""
        spans = [(step.programs[n], a, a + n) for a, n in zip(step.passes.starts, step.passes.sizes, strict=True)]
        spans += [] if step.prelude is None else [(step.prelude, 0, sum(step.passes.sizes))]
        return [(dict(zip(batch.shapes, program.inputs, strict=False)), start, stop) for program, start, stop in spans]

    def _flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """Begin a call and return its leaves and their tree."""
        self._ranks.calls += 1
        self._calls.check_surroundings()
        self._template.look()
        flat, spec = leaves_of(args, kwargs, self.device)
        if self._state.refresh():
            state = self._state.tensors
            self._compiled = {key: compiled.with_state(state) for key, compiled in self._compiled.items()}
            self._in_passes = {key: step.with_state(state) for key, step in self._in_passes.items()}
        self._circumstances = self._state.circumstances()
        return flat, spec

    # -- programs ------------------------------------------------------------------------------------------------------

    def _program(self, flat: Sequence[Any], spec: Any, mode: Mode) -> tuple[Executable, list[torch.Tensor]]:
        """Return the program of a call in a mode (training, the loss only, without the loss function) and this rank's
        part of its inputs."""
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        shapes: Sequence[tuple[int, ...]] = [x.shape for x in tensors]
        own_key = key = call_key(flat, spec, mode, shapes)
        batch = None
        if self._parts is not None:
            batch = self._parts.batch(self._signature(own_key, flat, spec, mode), tensors)
            shapes = tuple(batch.shapes.values())
            key = call_key(flat, spec, mode, shapes)
        compiled = self._compiled.get(key)
        # A program for this kind of call may exist while one rank makes another call now.
        if batch is None and (compiled is None or self._is_new(key) or self._is_changed()):
            check_equal(self._signature(own_key, flat, spec, mode), tensors, self._ranks, self.device)
        self._compared(key)
        if compiled is None:
            call = CallSpec(self._examples(flat, spec, shapes), *mode)
            with show_progress_once("writing the program of every rank"):
                compiled = self._calls.compiled(call, {**self._state.tensors, SEED: self._seed})
            self._compiled[key] = compiled
        if torch.is_grad_enabled():
            check_frozen(compiled)
        if batch is None:  # copy only this rank's part of a host batch to the device
            with_layouts = zip(tensors, compiled.inputs, strict=False)
            return compiled, [self._own_part(x, layout).to(self.device) for x, layout in with_layouts]
        with_layouts = zip([x.to(self.device) for x in tensors], compiled.inputs, strict=False)
        assert self._parts is not None
        named = zip(batch.shapes, with_layouts, strict=False)
        return compiled, [self._parts.own_part(name, x, layout, batch) for name, (x, layout) in named]

    def _own_part(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return this rank's part of a whole input."""
        if not layout.positions:
            return tensor
        part: torch.Tensor = _Part.apply(tensor, layout, self._ranks)  # type: ignore[no-untyped-call]
        return part

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Return this rank's coordinate on each mesh axis."""
        return self._ranks.coordinates

    @property
    def device_number(self) -> int:
        return self._ranks.rank

    @property
    def compiled(self) -> tuple[Executable, ...]:
        """Return the programs compiled so far, one per input signature, oldest first."""
        in_passes = (compiled for step in self._in_passes.values() for compiled in step.programs.values())
        return (*self._compiled.values(), *in_passes)

    @property
    def latest(self) -> Executable:
        """Return the program of the last call. Raises ShardwiseError before the first call."""
        if self._latest is None:
            raise ShardwiseError("no program yet: the first call compiles it")
        return self._latest

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


__all__ = ["Parallel"]
