"""The module that a rank trains under a plan: its shards, the programs of its stages, and a step over micro-batches.

All ranks make the same calls. A rank works on the stages of its pipeline rank; a plan without stages is a plan of one
stage. Random numbers come from one seed for all ranks that advances with every training call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from shardwise.errors import PlanWarning, ShardwiseError, warn_user
from shardwise.graph.batch import batch_size, with_samples
from shardwise.graph.capture import Capture
from shardwise.graph.custom_operators import splitmix64
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph
from shardwise.graph.trees import flatten_with_path, leaf_name, unflatten
from shardwise.graph.written_out import SEED
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement
from shardwise.plans.bind_stages import bound, only_read, step_graph
from shardwise.plans.micro_batch_search import announce_statistics
from shardwise.plans.plan import Plan
from shardwise.plans.schedule import Schedule, schedule_of
from shardwise.programs.micro_batches import Passes, whole_sources
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.cpu_optimizer import place_states
from shardwise.runtime.guards.protect import protect
from shardwise.runtime.guards.registry import KEY, ShardRecord, check_entries, shard_metadata, shard_records, tensors_of
from shardwise.runtime.heartbeat_file import trail
from shardwise.runtime.holding import ShardMaterializer, install_shards
from shardwise.runtime.hooks import ShardedModule, gather_whole
from shardwise.runtime.host_copies import Arrivals
from shardwise.runtime.initial.materialize import Init
from shardwise.runtime.program_cache import (
    CallSpec,
    Executable,
    Mode,
    ProgramCache,
    RunSettings,
    apart_from_caller,
    check_frozen,
    refuse_input_gradients,
)
from shardwise.runtime.replicas import PipelineCheck, ReplicaCheck
from shardwise.runtime.signatures import (
    Batch,
    LocalInputs,
    ParamFlags,
    SameInputs,
    Signature,
    call_key,
    check_equal,
    in_other_mode,
    leaves_of,
    mode_text,
    takes_gradient,
)
from shardwise.runtime.stage import (
    MicroBatchesInTurn,
    PipelineRankGroups,
    StageCall,
    StageInputs,
    StageProgram,
    StageWorker,
    sharing_pipeline_ranks,
)
from shardwise.runtime.stage_faults import StageFaults
from shardwise.runtime.tensor_table import OriginalModuleMonitor, TensorTable
from shardwise.runtime.torch_schedules import Scheduled

_Built = TypeVar("_Built", Executable, StageCall)
MAX_RECOMPUTED = 4096  # calls whose backward may still recompute them
_SET_BY_CALLS = frozenset(
    {"_seed", "_failed", "_draws", "_latest", "_last_kind", "_circumstances", "_last_circumstances"}
)  # no parameters, no modules


class ParallelModule(ShardedModule):
    """A module that holds this rank's parts of another module's tensors, under the same names. Its state contains the
    seed once its programs have drawn random numbers.

    ``_everyone``: communicator of all ranks; ``_stage_ranks``: of every stage; ``_ranks``: of this rank's first stage;
    ``_host_ranks``: as ``_ranks``, for tensors on the CPU; ``_compiled``: the programs of single calls so far, by the
    key of a call; ``_ready``: those of steps.
    """

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
        if plan.is_pipeline:
            settings = replace(settings, outputs="whole")  # each call sends the outputs of all stages to all ranks
        self.plan, self.device, self.inputs, self._settings = plan, settings.device, settings.inputs, settings
        name = type(module).__name__
        self._join(module, name)
        self._compiled: dict[Any, Executable] = {}
        self._ready: dict[Any, StageCall] = {}
        self._latest: Any = None
        self._has_said_instead = False
        self._start_from(seed, self.device)
        numbers = Communicator(self._everyone.place, name, backend="gloo")
        self._parts: LocalInputs | None = None
        self._same: SameInputs | None = None
        if self.inputs == "local":
            self._parts = LocalInputs(plan, self._ranks, self._everyone, numbers, self.device)
        elif dist.get_world_size() > 1:
            self._same = SameInputs(self._everyone, numbers, self.device)
        names = self._names if plan.is_pipeline else None
        holder = ShardMaterializer(self.layouts, self._ranks, self._everyone, settings.host, self._host_ranks, names)
        install_shards(self, module, plan, holder, self.device, seed, init, weights)
        self._protect()
        self._state = TensorTable(self)
        self._replicas: ReplicaCheck | None = None
        if (every := settings.check_replicas) and plan.is_pipeline:
            own = {number: self._stage_ranks[number] for number in self._stages}
            self._replicas = PipelineCheck(every, self.device, sharing_pipeline_ranks(plan), self._everyone, own)
        elif every:
            self._replicas = ReplicaCheck(every, self._ranks, self.device)
        self.stand_for(module)

    def _join(self, module: torch.nn.Module, name: str) -> None:
        """Create the communicators of this rank and the caches of its stages' programs."""
        plan, settings, rank = self.plan, self._settings, dist.get_rank()
        own_ranks = next(stage.placement.ranks for stage in plan.stages if rank in stage.placement.ranks)
        self._position = own_ranks.index(rank)
        self._stages = [number for number, stage in enumerate(plan.stages) if stage.placement.ranks == own_ranks]
        self._stage_ranks = host_ranks = [Communicator(stage.placement, name) for stage in plan.stages]
        if settings.host and self.device.type != "cpu":
            host_ranks = [Communicator(stage.placement, name, backend="gloo") for stage in plan.stages]
        self._everyone = self._ranks = self._stage_ranks[self._stages[0]]
        self._host_ranks = host_ranks[self._stages[0]]
        self._groups: PipelineRankGroups | None = None
        if plan.is_pipeline:
            self._everyone = Communicator(Placement.whole(Mesh(rank=dist.get_world_size())), name)
        self._faults = StageFaults(plan, self._stages, self._position, self._everyone)
        if not plan.is_pipeline:
            self._calls = ProgramCache(module, plan, settings, self._ranks, self._host_ranks)
            self._calls_of = [self._calls]
            return
        self._groups = PipelineRankGroups.of(plan, own_ranks, settings.host)
        for ranks in dict.fromkeys((*self._stage_ranks, *host_ranks)):
            ranks.create_groups([ranks.mesh.sub_axes])  # all ranks of a stage: hooks gather parameters over them
        self._calls = ProgramCache(module, plan, settings, self._everyone, self._everyone)
        pairs = enumerate(zip(self._stage_ranks, host_ranks, strict=True))
        self._calls_of = [self._calls.of_stage(plan.alone(i), *communicators) for i, communicators in pairs]

    @property
    def _shared(self) -> Mapping[str, Any]:
        """Map each parameter that several pipeline ranks have to the group of those that have this rank's shard."""
        return {} if self._groups is None else self._groups.shared

    def __getstate__(self) -> dict[str, Any]:
        programs: dict[str, Any] = {
            "_compiled": {},
            "_ready": {},
            "_latest": None,
            "_signatures": {},
        }  # a copy builds its own
        return {**self.__dict__, **programs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._protect()  # a deep copy also holds shards

    def _protect(self) -> None:
        protect(self, self.records, self._everyone if self.plan.is_pipeline else None)
        place_states(self, self.plan.optimizer, self._settings.host)

    @property
    def records(self) -> dict[str, ShardRecord]:
        """Map each parameter and buffer that the plan has on this rank to the part of it that this rank holds."""
        stages = reversed(self.plan.stages)
        first = {entry.name: stage.placement.ranks for stage in stages for entry in stage.parameters}
        elsewhere = frozenset(name for name in self._shared if first[name] != self._ranks.place.ranks)
        return shard_records(self, self.layouts, self._ranks, elsewhere if self.plan.is_pipeline else None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_BY_CALLS:  # skip torch's checks for parameters and modules
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Apply ``fn`` as ``nn.Module.apply`` does, with a warning: it sees stand-ins of the model's submodules."""
        warn_user(
            "apply visits stand-ins of the model's submodules, which hold this rank's shards: change the model before "
            "sw.parallelize",
            PlanWarning,
        )
        return super().apply(fn)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode by the model's own ``train``, which decides which parts follow and which are frozen."""
        twin = self.original
        for path, part in self._state.modules.items():
            twin.get_submodule(path).training = part.training
        parts = dict(self.named_parameters(remove_duplicate=False))
        parameters = [(p, parts[n]) for n, p in twin.named_parameters(remove_duplicate=False) if n in parts]
        for parameter, own_part in parameters:
            parameter.requires_grad_(own_part.requires_grad)
        twin.train(mode)
        for path, part in self._state.modules.items():
            part.training = twin.get_submodule(path).training
        for parameter, own_part in parameters:
            own_part.requires_grad_(parameter.requires_grad)
        return self

    # -- state ---------------------------------------------------------------------------------------------------------

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Map each parameter, buffer or input of this rank's stages to its layout over the devices of its first stage.
        A tensor that several of these stages have, has the same layout in all."""
        layouts: dict[str, Layout] = {}
        for number in self._stages:
            layouts = {**self.plan.stages[number].layouts, **layouts}
        return layouts

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Return this rank's coordinate on each mesh axis of its first stage."""
        return self._ranks.coordinates

    @property
    def device_number(self) -> int:
        """Return the number of this rank's device, the same on the mesh of every stage that it works on."""
        return self._position

    @cached_property
    def _names(self) -> frozenset[str]:
        stages = [self.plan.stages[number] for number in self._stages]
        return frozenset(entry.name for stage in stages for entry in (*stage.parameters, *stage.buffers))

    @property
    def original(self) -> torch.nn.Module:
        """Return the original module, on meta."""
        return self._calls.model

    def stand_for(self, module: torch.nn.Module) -> None:
        """Become the sharded form of ``module`` and monitor later changes to it."""
        super().stand_for(module)
        self._template = OriginalModuleMonitor(module, self)

    def _start_from(self, seed: int | None, device: torch.device) -> None:
        """Set the initial state. Hash the seed, since later calls count up from it: jobs with neighbouring seeds must
        not draw the same numbers one call later."""
        self._seed = splitmix64(torch.tensor(seed or 0, dtype=torch.int64, device=device))
        self._failed = False  # whether the last call failed on this rank: other ranks may still be in it
        self._calls_so_far = 0  # training calls of this process, for ``check_finite``
        self._draws = False  # whether a call has drawn random numbers, here or before a checkpoint was loaded
        self._signatures: dict[Any, Signature] = {}
        self._last_kind: tuple[object, ...] | None = None
        self._circumstances: ParamFlags = ()  # of this call
        self._last_circumstances: ParamFlags = ()
        self._seeds: dict[int, torch.Tensor] = {}  # of recent calls, by the number that identifies a recomputation

    def _start(self) -> Callable[[], None]:
        """Return a function that returns buffers and random state to what they are now."""
        buffers, seed, draws = [buffer.clone() for buffer in self.buffers()], self._seed.clone(), self._draws

        def restore() -> None:
            with torch.no_grad():
                for buffer, value in zip(self.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            self._seed, self._draws = seed, draws

        return restore

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore gradients, buffers and random state after trial steps. Replicas are not compared in these, since a
        checked step runs another program."""
        gradients, restore = [p.grad for p in self.parameters()], self._start()
        replicas, self._replicas = self._replicas, None
        try:
            yield
        finally:
            self._replicas = replicas
            for parameter, gradient in zip(self.parameters(), gradients, strict=True):
                parameter.grad = gradient
            restore()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._draws:
            destination[prefix + SEED] = self._seed.clone()
        metadata: dict[str, Any] = getattr(destination, "_metadata", {})
        metadata.setdefault(prefix[:-1], {})[KEY] = shard_metadata(self._shards, self.device_number)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        shards = {prefix + name: shard for name, shard in self._shards.items()}
        check_entries(local_metadata.get(KEY, {}), self._shards, self.device_number)
        state_dict |= {
            key: record.cut(state_dict[key]) for key, record in shards.items() if key in state_dict
        }  # a copy
        for name in self._elsewhere:
            state_dict.pop(prefix + name, None)
        seed = state_dict.get(prefix + SEED)
        if seed is not None:
            self._draws = True
            with torch.no_grad():
                self._seed.copy_(seed)
        rest = {k: v for k, v in state_dict.items() if k != prefix + SEED}
        super()._load_from_state_dict(rest, prefix, local_metadata, *others)

    @cached_property
    def _elsewhere(self) -> frozenset[str]:
        """Return the names of tensors that only ranks of other stages hold."""
        names, own = (frozenset(name for name, _ in tensors_of(module)) for module in (self.original, self))
        return names - own if self.plan.is_pipeline else frozenset()

    @property
    def _shards(self) -> dict[str, ShardRecord]:
        """Map every name of each sharded parameter or buffer to its record."""
        of = self._record_of()
        return {name: of[id(x)] for name, x in tensors_of(self) if id(x) in of and of[id(x)].layout.positions}

    def _record_of(self) -> dict[int, ShardRecord]:
        records = self.records
        return {id(tensor): records[name] for name, tensor in tensors_of(self) if name in records}

    def _seed_of_call(self, draws: bool) -> torch.Tensor:
        """Return the seed of the random numbers of this call; it advances with every training call.

        A call during backward is a recomputation (``torch.utils.checkpoint``) and must draw what the first call drew.
        It is recognized by a number from torch's generator, whose state the checkpoint restores. The seed is not
        derived from that number, since the generators of the ranks need not agree.
        """
        self._draws |= draws
        key = int(torch.randint(2**62, ())) if draws and self.training else None
        if key in self._seeds and torch._C._current_graph_task_id() != -1:
            return self._seeds[key]
        # Clone: backward draws the masks again after self._seed has advanced.
        seed = self._seed.clone() if draws else self._seed
        if key is not None:
            self._seeds[key] = seed
            if len(self._seeds) > MAX_RECOMPUTED:
                del self._seeds[next(iter(self._seeds))]
        if self.training:
            with torch.no_grad():
                self._seed += 1
        return seed

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        for ranks in dict.fromkeys((self._everyone, *self._stage_ranks)):
            ranks.calls += 1
        self._calls.check_surroundings()
        self._template.look()
        flat, spec = leaves_of(args, kwargs, self.device)
        if self._state.refresh():
            state = self._state.tensors
            self._compiled = {key: compiled.with_state(state) for key, compiled in self._compiled.items()}
            self._ready = {key: ready.with_state(state) for key, ready in self._ready.items()}
        self._circumstances = self._state.circumstances()
        return flat, spec

    def _mode(self, *, loss_only: bool, predicts: bool = False) -> Mode:
        return self.training, loss_only, predicts, in_other_mode(self._state.modules)

    def _signature(self, key: object, flat: Sequence[Any], spec: Any, mode: Mode) -> Signature:
        key = key, torch.is_grad_enabled(), self._circumstances
        if key not in self._signatures:
            named = [(leaf_name(path), x) for path, x in flatten_with_path(unflatten(flat, spec))[0]]
            words = mode_text(*mode) + ("" if torch.is_grad_enabled() else ", gradients off")
            self._signatures[key] = Signature.of(named, words, self._circumstances)
        return self._signatures[key]

    def _program(
        self, flat: Sequence[Any], spec: Any, mode: Mode, known: dict[Any, _Built], build: Callable[[CallSpec], _Built]
    ) -> tuple[_Built, Batch | None]:
        """Return the program of a call, of those that are ``known`` or built now, and the batch, None unless ranks pass
        parts. Ranks compare the call when it is new or other than the last."""
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        shapes: Sequence[tuple[int, ...]] = [tuple(x.shape) for x in tensors]
        own_key = key = call_key(flat, spec, mode, shapes)
        batch = None
        if self._parts is not None:
            batch = self._parts.batch(self._signature(own_key, flat, spec, mode), tensors)
            shapes = tuple(batch.shapes.values())
            key = call_key(flat, spec, mode, shapes)
        # One rank may make another call now, after the last one failed on it, or ended in another way.
        elif key not in known or self._failed or (key, torch.is_grad_enabled()) != self._last_kind:
            signature = self._signature(own_key, flat, spec, mode)
            check_equal(signature, tensors, self._everyone, self.device, self.plan.holds)
        elif self._circumstances != self._last_circumstances:  # ranks of other stages may have nothing to freeze
            check_equal(self._signature(own_key, flat, spec, mode), tensors, self._ranks, self.device)
        self._last_kind, self._last_circumstances = (key, torch.is_grad_enabled()), self._circumstances
        self._failed = False
        if key not in known:
            call = CallSpec(whole_arguments(flat, spec, shapes), *mode)
            with apart_from_caller():
                known[key] = build(call)
        return known[key], batch

    def _due_check(self) -> ReplicaCheck | None:
        return self._replicas if self.training and self._replicas is not None and self._replicas.is_due() else None

    # -- a step over micro-batches -------------------------------------------------------------------------------------

    def _step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], scaler: GradScaler | None
    ) -> tuple[StageCall, torch.Tensor | None]:
        """Run forward and backward of a whole batch and add to ``.grad``. Return what ran, and the loss on the ranks of
        the last stage."""
        flat, spec = self._begin(args, kwargs)
        leaves = (leaf for leaf in flat if isinstance(leaf, torch.Tensor))  # as the program takes them
        tensors = dict(zip(named_tensors(args, kwargs), leaves, strict=True))
        refuse_input_gradients(tensors, self.plan)
        if not (self.plan.is_pipeline or torch.is_grad_enabled()):
            what = "par.step computes gradients, but they are disabled here"
            raise ShardwiseError(what, fix="call par.step outside torch.no_grad() and torch.inference_mode()")
        check = self._due_check()
        ready, batch = self._for_step(flat, spec)
        if self._same is not None and check is None:
            self._same.begin(flat, spec)
        for compiled in ready.executables:
            check_frozen(compiled)
        scale = None
        if scaler is not None and scaler.is_enabled():
            scale = scaler.scale(torch.ones((), device=self.device))
        try:
            losses = self._run(ready, tensors, batch, keeps=True, scale=scale, check=check)
            self._add_gradients(ready, check)
        finally:
            for worker in (*ready.workers, *filter(None, (ready.prelude,))):
                worker.release()
        return ready, sum(losses[1:], losses[0]).detach() if losses else None

    def _for_step(self, flat: Sequence[Any], spec: Any) -> tuple[StageCall, Batch | None]:
        self._latest, batch = self._program(flat, spec, self._mode(loss_only=True), self._ready, self._build_step)
        return self._latest, batch

    def _build_step(self, call: CallSpec) -> StageCall:
        captured = self._calls.captured(call)
        graph, micro_batch, is_pipeline = captured.graph, self.plan.micro_batch, self.plan.is_pipeline
        if graph.loss is None and not is_pipeline:
            raise no_loss()
        if is_pipeline:
            graph = step_graph(graph)
        passes = Passes.single(graph)
        samples = batch_size(graph) or 0
        divides = self.plan.micro_batches > 1 and samples != 1  # a last batch may be one sample
        if micro_batch is not None and divides and (samples > micro_batch or not is_pipeline):

            def alone(count: int) -> Graph:
                return self._calls.captured(replace(call, arguments=with_samples(call.arguments, count))).graph

            passes = Passes.over(self._calls.model, graph, micro_batch, alone)
            if dist.get_rank() == 0:
                announce_statistics(sorted(passes.statistics))
        return self._build(captured, passes, call)

    def _build(self, captured: Capture, passes: Passes, call: CallSpec) -> StageCall:
        """Build the programs of this rank's stages on a schedule; all ranks create the process groups of all stages."""
        # The plan names the operators of a micro-batch; other steps and calls with outputs have different ones.
        plan = self.plan
        is_planned = call.loss_only and (not plan.is_pipeline or plan.micro_batches == 1 or len(passes.sizes) > 1)
        training = self._calls.mode_of(call) if is_planned else None
        bounds = {
            size: bound(plan, graph, prelude=passes.prelude, training=training, constants=call.constants)
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
                    ranks = self._stage_ranks[number]
                    programs[number][size] = StageProgram(compiled, ranks, sends, frozenset(returned))
        prelude = None
        if passes.prelude is not None and not plan.is_pipeline:
            compiled = self._calls.compiled_for(captured, passes.prelude, call, state, None)
            size = sum(passes.sizes)
            prelude = StageWorker(0, True, {size: StageProgram(compiled, self._ranks)}, (size,))
        last = len(plan.stages) - 1
        workers = tuple(
            StageWorker(number, number == last, programs[number], passes.sizes, passes.statistics)
            for number in self._stages
        )
        runs: Scheduled | MicroBatchesInTurn = MicroBatchesInTurn(workers[0])
        if self._groups is not None:
            schedule = self._schedule_for(len(passes.sizes), call)
            by_number = {worker.number: worker for worker in workers}
            runs = Scheduled(schedule, by_number, last + 1, len(passes.sizes), self.device, self._groups.every)
        return StageCall(captured, passes, bounds, workers, runs, prelude)

    def _schedule_for(self, num_micro_batches: int, call: CallSpec) -> Schedule:
        """Return the plan's schedule, or its substitute for evaluation and if it does not support so few
        micro-batches."""
        schedule = schedule_of(self.plan.schedule, self.plan.order)
        places = dict.fromkeys(stage.placement.ranks for stage in self.plan.stages)
        fault = schedule.fault(len(places), num_micro_batches)
        if call.loss_only and not fault:
            return schedule
        if call.loss_only and not self._has_said_instead and dist.get_rank() == 0:
            warn_user(f"{fault}: such a step runs as {schedule.instead}", PlanWarning)
        self._has_said_instead |= call.loss_only
        return schedule_of(schedule.instead)

    def _run(
        self,
        ready: StageCall,
        tensors: Mapping[str, torch.Tensor],
        batch: Batch | None,
        *,
        keeps: bool,
        scale: torch.Tensor | None = None,
        check: ReplicaCheck | None = None,
    ) -> list[torch.Tensor]:
        """Run the schedule and return the losses of the micro-batches on ranks of the last stage. ``tensors``: this
        rank's parts of a ``batch``, or all of it (None)."""
        if check is not None:
            check.begin(tensors if batch is None else {}, self._state.tensors)
        seed, split = self._seed_of_call(draws=ready.draws), ready.with_samples
        arrivals = Arrivals(self.device)
        if batch is not None and self._parts is not None:
            tensors = {name: arrivals.bring(tensor) for name, tensor in tensors.items()}
            if not self._parts.divides(batch, ready.passes, lambda _: ready.wanted, split):
                tensors = {name: self._parts.whole(name, tensor, batch) for name, tensor in tensors.items()}
                batch = None
        step = StageInputs(tensors, batch is not None, split, {}, seed, arrivals, scale)
        step.whole = self._whole(ready, step, batch)
        checks = {} if check is None else check.stages
        for worker in ready.workers:
            worker.begin(step, keeps=keeps, check=checks.get(worker.number))
        scheduled = ready.runs if isinstance(ready.runs, Scheduled) else None
        try:
            if scheduled is not None:
                self._faults.watch(scheduled)
            if keeps:
                losses = ready.runs.step()
            else:
                assert scheduled is not None, "calls of one stage run its program"
                losses = scheduled.forward()
        except RuntimeError as error:
            if scheduled is None:
                raise
            explanation = self._faults.explained(error, scheduled.next_action, self._everyone.calls)
            if explanation is None:
                raise
            raise explanation from error
        arrivals.finish()
        if check is not None:
            check.settle()
        return losses

    def _whole(self, ready: StageCall, step: StageInputs, batch: Batch | None) -> dict[str, torch.Tensor]:
        """Return the values of the prelude, which depends on the inputs of all micro-batches. Parts of a ``batch`` are
        gathered for it under stages, where every rank that needs the values computes them."""
        if ready.prelude is not None:
            ready.prelude.begin(step, keeps=False)
            ready.prelude.forward(0, ())
            return {name: ready.prelude.outputs[name] for name in ready.passes.whole}
        is_read = any(whole_sources(compiled.captured.graph) for compiled in ready.executables)
        if ready.passes.prelude is None or not is_read:
            return {}
        prelude = only_read(ready.passes.prelude)
        state = self._state.tensors
        values: dict[str, torch.Tensor] = {}
        for source in prelude.sources:
            name = source.names[0]
            if source.kind == "input":
                tensor = step.inputs[name]
                if batch is not None and self._parts is not None:
                    tensor = self._parts.whole(name, tensor, batch)
                values[source.value] = tensor.to(self.device, prelude.by_name[source.value].dtype)
            elif source.kind == "constant":
                values[source.value] = ready.captured.constants[source.value].to(self.device)
            else:
                layout = self.layouts[name]
                is_whole = not layout.positions
                values[source.value] = state[name] if is_whole else gather_whole(state[name], layout, name, self._ranks)
        with torch.no_grad(), self.device:
            results = interpret(prelude, values)
        return {name: results[name] for name in ready.passes.whole}

    def _add_gradients(self, ready: StageCall, check: ReplicaCheck | None) -> None:
        """Add the step's gradients to ``.grad``, summed over stages for parameters that several pipeline ranks have."""
        state = self._state.tensors
        totals: dict[str, torch.Tensor] = {}
        for worker in ready.workers:
            sources = ready.bound.cut.parts[worker.number].source_of
            with self._faults.exchange(
                f"gradients of stage {worker.number}", self._stage_ranks[worker.number].place.ranks
            ):
                gradients = worker.end()
            for value, gradient in gradients.items():
                name = sources[value].names[0]
                totals[name] = totals[name] + gradient if name in totals else gradient
        self._sum_shared(ready, totals)
        reached = [(state[name], gradient) for name, gradient in totals.items() if state[name].requires_grad]
        for worker in ready.workers:
            compiled = worker.programs[max(worker.sizes)].compiled
            if check is not None:
                check.stages[worker.number].watch(compiled.spmd, compiled.tensors)
        torch.autograd.backward([parameter for parameter, _ in reached], [gradient for _, gradient in reached])
        if check is not None:
            check.settle()

    def _sum_shared(self, ready: StageCall, totals: dict[str, torch.Tensor]) -> None:
        state = self._state.tensors
        updated: set[str] = set()
        for part in ready.bound.cut.parts if self._shared else ():
            updated.update(name for s in part.sources if s.value in part.updated for name in s.names[:1])
        for name, group in self._shared.items():
            if name in updated and state[name].requires_grad:
                total = totals[name].contiguous() if name in totals else torch.zeros_like(state[name])
                what = f"gradient of {name}, which several stages have"
                have = {stage.placement.ranks for stage in self.plan.stages if name in stage.layouts}
                others = sorted({ranks[self._position] for ranks in have} - {dist.get_rank()})
                with self._faults.exchange(what, others), trail.waiting(what.encode()):
                    dist.all_reduce(total, group=group)
                totals[name] = total


def no_loss() -> ShardwiseError:
    return ShardwiseError(
        "the module returns no loss to differentiate",
        fix="return the loss first, or pass loss= to plan and parallelize",
    )


def named_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a call by the paths of their leaves."""
    return {leaf_name(path): x for path, x in flatten_with_path((args, kwargs))[0] if isinstance(x, torch.Tensor)}


def whole_arguments(flat: Sequence[Any], spec: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Return the arguments of a call with meta tensors of the given shapes."""
    whole = iter(shapes)
    examples = [
        torch.empty(next(whole), dtype=x.dtype, device="meta", requires_grad=takes_gradient(x))
        if isinstance(x, torch.Tensor)
        else x
        for x in flat
    ]
    return unflatten(examples, spec)
