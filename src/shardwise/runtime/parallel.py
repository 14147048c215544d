"""The module that a rank trains: its shards under the original parameter names, and the program of its plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import PlanError, PlanWarning, ShardwiseError, listed, problem
from shardwise.graph.batch import num_samples
from shardwise.graph.capture import refuse_autocast
from shardwise.graph.ir import Ref
from shardwise.graph.normalize_random import SEED
from shardwise.graph.operators import splitmix64
from shardwise.graph.trees import (
    check_constants,
    constant_key,
    flatten,
    flatten_with_path,
    is_constant,
    leaf_name,
    unflatten,
)
from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import format_dtype
from shardwise.plans.example import announce_statistics
from shardwise.plans.plan import Plan
from shardwise.runtime.calls import Call, Calls, Compiled, Settings
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.guards.protect import protect
from shardwise.runtime.hooks import Shards, carry_hooks
from shardwise.runtime.initial.materialize import Init
from shardwise.runtime.initial.shards import InitialShards
from shardwise.runtime.memory_of_outputs import live, taken_apart, written_back
from shardwise.runtime.passes import StepInPasses, rows_of_pass, samples_of, with_samples_in
from shardwise.runtime.replicas import ReplicaCheck
from shardwise.runtime.shards import shard
from shardwise.runtime.signatures import Batch, LocalInputs, Signature, check_equal
from shardwise.runtime.state import State, check_initial_values

Called = tuple[Compiled, torch.Tensor | None, Sequence[Any]]  # program, loss, flattened outputs
MAX_RECOMPUTED = 4096  # calls whose backward may still recompute them


class Parallel(torch.nn.Module):
    """This rank's shards of a module. ``named_parameters()`` gives them under the original names, so any element-wise
    ``torch.optim`` optimizer updates them as one device would."""

    def __init__(
        self,
        module: torch.nn.Module,
        plan: Plan,
        settings: Settings,
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
        self._parts = LocalInputs(plan, self._ranks, self.device) if self.inputs == "local" else None
        self._calls = Calls(module, plan, settings, self._ranks, self._host_ranks)
        self._compiled: dict[Any, Compiled] = {}
        self._in_passes: dict[Any, StepInPasses] = {}
        self._has_said_whole = self._has_said_gathered = False
        self._signatures: dict[Any, Signature] = {}
        self._latest: Compiled | None = None
        # Calls count on from it: jobs with neighbouring seeds must not draw the same numbers one call later.
        self._seed = splitmix64(torch.tensor(seed or 0, dtype=torch.int64, device=self.device))
        self._draws = False  # whether a call has drawn random numbers, here or before a checkpoint was loaded
        self._seeds: dict[int, torch.Tensor] = {}  # of the last calls, by the number that tells a recomputation
        self._hold(module, seed, init, weights)
        self._state = State(self)
        self.train(module.training)

    def _hold(self, module: torch.nn.Module, seed: int | None, init: Init | None, weights: str | Path | None) -> None:
        """Register this rank's shard of every parameter and buffer, one full tensor at a time."""
        found = InitialShards(self.plan, self._ranks, self.device, self._settings.host)
        fault: ShardwiseError | None = None
        try:
            _check_module(module, self.plan)
            found.fill(module, seed, init, weights)
        except ShardwiseError as error:
            fault = error
        check_initial_values(found.prints, fault, self._ranks, self.device)
        held = found.held
        shards: dict[int, torch.Tensor] = {}  # by the identity of the original: tied tensors stay tied
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            if id(parameter) not in shards:
                shards[id(parameter)] = torch.nn.Parameter(held[name], requires_grad=parameter.requires_grad)
                layout = found.layout(name, parameter)
                ranks = self._host_ranks if name in self._settings.host else self._ranks
                carry_hooks(parameter, shards[id(parameter)], layout, name, ranks)
            own = shards[id(parameter)]
            assert isinstance(own, torch.nn.Parameter)
            _container(self, owner).register_parameter(leaf, own)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            own = shards.setdefault(id(buffer), held.get(name, buffer))
            persistent = leaf not in module.get_submodule(owner)._non_persistent_buffers_set
            _container(self, owner).register_buffer(leaf, own, persistent=persistent)
        protect(self)

    @property
    def original(self) -> torch.nn.Module:
        """The module that was split, on meta."""
        return self._calls.model

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_compiled": {},
            "_in_passes": {},
            "_signatures": {},
            "_latest": None,
        }  # a copy makes its own programs

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        protect(self)  # a deep copy holds shards, too

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, every tensor whole on every rank; differentiable. It is one pass over the whole batch,
        whatever the plan's micro-batch."""
        if self.training and torch.is_grad_enabled() and self._is_in_passes(args, kwargs):
            self._say_whole()
        compiled, _, outputs = self._call(args, kwargs, loss_only=False)
        return unflatten(outputs, compiled.captured.out_spec)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of the whole batch: adds to ``.grad`` and returns the loss (detached).

        Under a plan of several micro-batches it takes the batch of the optimizer step, of any number of samples, in
        passes over as many as a micro-batch has (the last may have fewer); what comes out is that of one pass over the
        whole. With ``inputs="local"`` every pass takes its share of every rank's part."""
        if self._is_in_passes(args, kwargs):
            return self._step_in_passes(args, kwargs)
        _, loss, _ = self._call(args, kwargs, loss_only=True)
        if loss is None:
            raise ShardwiseError(
                problem(
                    "the module returns no loss to differentiate",
                    fix="return the loss first, or give loss= to plan and parallelize",
                )
            )
        loss.backward()
        return loss.detach()

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own output, without the loss function that was given to ``parallelize``: no targets are passed.
        Every tensor is whole on every rank; differentiable."""
        compiled, _, outputs = self._call(args, kwargs, loss_only=False, predicts=self._settings.loss is not None)
        return unflatten(outputs, compiled.captured.out_spec)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, loss_only: bool, predicts: bool = False
    ) -> Called:
        """(program, loss, flattened outputs) for one batch."""
        if torch.compiler.is_compiling():  # a torch.compile around this module: its programs are not for Dynamo
            called: Called = torch.compiler.disable(self._call)(args, kwargs, loss_only=loss_only, predicts=predicts)
            return called
        flat, spec = self._flattened(args, kwargs)
        compiled, given = self._program(flat, spec, (self.training, loss_only, predicts))
        self._latest = compiled
        inputs = iter(given)
        tensors = [next(inputs) if t is None else t for t in compiled.tensors]
        seed = self._seed_of_call(draws=compiled.seed is not None)
        if compiled.seed is not None:
            tensors[compiled.seed] = seed
        check = self._replicas if self.training and torch.is_grad_enabled() else None
        if check is not None and check.is_due():
            batch = [x.to(self.device) for x in flat if isinstance(x, torch.Tensor)] if self._parts is None else ()
            delivered, written = check.run(compiled.step, tensors, batch)
        else:
            delivered, written = compiled.step(tensors)
        loss, flat_outputs = compiled.results(delivered)
        outputs: Sequence[Any] = flat_outputs
        sources = {} if loss_only else dict(zip(compiled.names, tensors, strict=True))
        if not loss_only:
            outputs = taken_apart(outputs, compiled.captured.memories, sources)
        written_back([tensors[position] for position in compiled.written], written)
        if not loss_only:
            outputs = live(outputs, compiled.captured.memories, {n: sources[n] for n in compiled.whole_buffers})
        return compiled, loss, tuple(outputs)

    # -- a step in passes ----------------------------------------------------------------------------------------------

    def _is_in_passes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a batch has more samples than a micro-batch of the plan."""
        if self.plan.micro_batches == 1 or self.plan.micro_batch is None:
            return False
        if self._parts is not None:  # a rank's part of them says little
            return True
        count = num_samples((args, kwargs))
        return count is not None and count > self.plan.micro_batch

    def _say_whole(self) -> None:
        """Once: a call for the user's own backward is one pass."""
        if not self._has_said_whole and self._ranks.rank == 0:
            warnings.warn(
                f"the plan is for passes over {self.plan.micro_batch} samples, which par.step makes; this call, for a "
                "backward of your own, is one pass over all of its samples and keeps what their backward needs",
                PlanWarning,
                stacklevel=5,
            )
        self._has_said_whole = True

    def _step_in_passes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Forward and backward of a whole batch, micro-batch by micro-batch."""
        if torch.compiler.is_compiling():
            loss: torch.Tensor = torch.compiler.disable(self._step_in_passes)(args, kwargs)
            return loss
        flat, spec = self._flattened(args, kwargs)
        named = [leaf_name(path) for path, x in flatten_with_path((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        mode = (self.training, True, False)
        own = key = _key(flat, spec, mode, [x.shape for x in tensors])
        batch = None if self._parts is None else self._parts.batch(self._signature(own, flat, spec, mode), tensors)
        shapes = dict(zip(named, (tuple(x.shape) for x in tensors), strict=True)) if batch is None else batch.shapes
        samples = samples_of(self.plan, shapes)
        if batch is not None:
            key = _key(flat, spec, mode, list(shapes.values()))
        step = self._in_passes.get(key)
        if step is None:
            if batch is None:
                check_equal(self._signature(own, flat, spec, mode), self._ranks, self.device)
            call = Call(self._examples(flat, spec, list(shapes.values())), *mode)
            step = StepInPasses(*self._calls.in_passes(call, {**self._state.tensors, SEED: self._seed}))
            self._in_passes[key] = step
            if self._ranks.rank == 0:
                announce_statistics(sorted(step.passes.statistics), stacklevel=4)
        self._latest = next(iter(step.programs.values()))
        _check_gradients(self._latest, tensors)
        given = dict(zip(named, (x.to(self.device) for x in tensors), strict=True))
        split = with_samples_in(self.plan)
        cut_by = samples
        if self._parts is not None and batch is not None and not self._cuts_parts(step, batch, split):
            given = {name: self._parts.whole(name, x, batch) for name, x in given.items()}
            batch = None

        def parts(compiled: Compiled, start: int | None, size: int) -> list[torch.Tensor]:
            found = []
            for (name, x), layout in zip(given.items(), compiled.inputs, strict=False):
                rows = x if start is None or name not in split else rows_of_pass(x, start, size, cut_by)
                found.append(self._own_part(rows, layout) if batch is None else rows)
            return found

        check = self._replicas if self.training else None
        is_checked = check is not None and check.is_due()

        def run(compiled: Compiled, sources: Sequence[torch.Tensor]) -> Any:
            return check.run(compiled.step, sources, ()) if check is not None and is_checked else compiled.step(sources)

        return step.run(parts, self._seed_of_call(draws=step.draws), self.device, run)

    def _cuts_parts(self, step: StepInPasses, batch: Batch, split: frozenset[str]) -> bool:
        """Whether a pass takes the same share of every rank's part of a batch, as its program wants it; else the parts
        are gathered. Once, rank 0 says so."""
        assert self._parts is not None, "ranks pass their parts"
        samples = sum(step.passes.sizes)
        wanted = [(step.programs[n], a, a + n) for a, n in zip(step.passes.starts, step.passes.sizes, strict=True)]
        wanted += [] if step.prelude is None else [(step.prelude, 0, samples)]
        fits = all(
            self._parts.is_part(name, layout, batch, *((start, stop) if name in split else (0, samples)), samples)
            for compiled, start, stop in wanted
            for name, layout in zip(batch.shapes, compiled.inputs, strict=False)
        )
        if not fits and not self._has_said_gathered and self._ranks.rank == 0:
            warnings.warn(
                f"the ranks' parts of {samples} samples do not divide into passes over {step.passes.sizes[0]}: they "
                "are gathered and divided anew in every such step",
                stacklevel=5,
            )
        self._has_said_gathered |= not fits
        return fits

    def _flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """The leaves of a call and their tree, when a call begins."""
        refuse_autocast("around a call of a parallel module")
        self._ranks.calls += 1
        flat, spec = flatten((args, kwargs))
        if not all(isinstance(x, torch.Tensor) or is_constant(x) for x in flat):
            check_constants((leaf_name(path), x) for path, x in flatten_with_path((args, kwargs))[0])
        if self._state.refresh():
            state = self._state.tensors
            self._compiled = {key: compiled.with_state(state) for key, compiled in self._compiled.items()}
            self._in_passes = {key: step.with_state(state) for key, step in self._in_passes.items()}
        return flat, spec

    @staticmethod
    def _examples(flat: Sequence[Any], spec: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
        """The arguments of a call with tensors of some shapes, on meta."""
        whole = iter(shapes)
        examples = [
            torch.empty(next(whole), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x for x in flat
        ]
        return unflatten(examples, spec)

    # -- programs ------------------------------------------------------------------------------------------------------

    def _program(
        self, flat: Sequence[Any], spec: Any, mode: tuple[bool, bool, bool]
    ) -> tuple[Compiled, list[torch.Tensor]]:
        """The program of a call in a mode (training, the loss only, without the loss function), and this rank's part of
        its inputs."""
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        shapes: Sequence[tuple[int, ...]] = [x.shape for x in tensors]
        own = key = _key(flat, spec, mode, shapes)
        batch = None
        if self._parts is not None:
            batch = self._parts.batch(self._signature(own, flat, spec, mode), tensors)
            shapes = tuple(batch.shapes.values())
            key = _key(flat, spec, mode, shapes)
        compiled = self._compiled.get(key)
        if compiled is None:
            if batch is None:
                check_equal(self._signature(own, flat, spec, mode), self._ranks, self.device)
            call = Call(self._examples(flat, spec, shapes), *mode)
            compiled = self._compiled[key] = self._calls.compiled(call, {**self._state.tensors, SEED: self._seed})
        if torch.is_grad_enabled():
            _check_gradients(compiled, tensors)
        if batch is None:  # of a batch on the host only this rank's part comes to the device
            given = zip(tensors, compiled.inputs, strict=False)
            return compiled, [self._own_part(x, layout).to(self.device) for x, layout in given]
        given = zip([x.to(self.device) for x in tensors], compiled.inputs, strict=False)
        assert self._parts is not None
        named = zip(batch.shapes, given, strict=False)
        return compiled, [self._parts.own_part(name, x, layout, batch) for name, (x, layout) in named]

    def _signature(self, key: object, flat: Sequence[Any], spec: Any, mode: tuple[bool, bool, bool]) -> Signature:
        """A call in words, for the other ranks."""
        if key not in self._signatures:
            named = [(leaf_name(path), x) for path, x in flatten_with_path(unflatten(flat, spec))[0]]
            self._signatures[key] = Signature.of(named, _mode_text(*mode))
        return self._signatures[key]

    def _own_part(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's part of a whole input."""
        return shard(tensor, layout, self._ranks.coordinates) if layout.positions else tensor

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._draws:
            destination[prefix + SEED] = self._seed.clone()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        seed = state_dict.get(prefix + SEED)
        if seed is not None:
            self._draws = True
            with torch.no_grad():
                self._seed.copy_(seed)
        super()._load_from_state_dict({k: v for k, v in state_dict.items() if k != prefix + SEED}, prefix, *others)

    def _seed_of_call(self, draws: bool) -> torch.Tensor:
        """The seed of the random numbers of this call: another one for every call in training.

        A call during backward is a recomputation (``torch.utils.checkpoint``) and must draw what the first call drew.
        It is known by a number from torch's generator, whose state the checkpoint restores; the seed is not made of
        that number, since the generators of the ranks need not agree.
        """
        self._draws |= draws
        key = int(torch.randint(2**62, ())) if draws and self.training else None
        if key in self._seeds and torch._C._current_graph_task_id() != -1:
            return self._seeds[key]
        seed = self._seed.clone()  # backward draws the masks again, when self._seed is that of the next call
        if key is not None:
            self._seeds[key] = seed
            if len(self._seeds) > MAX_RECOMPUTED:
                del self._seeds[next(iter(self._seeds))]
        if self.training:
            with torch.no_grad():
                self._seed += 1
        return seed

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Where this rank is on the mesh."""
        return self._ranks.coordinates

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """What was compiled so far, one for each signature of inputs, oldest first."""
        in_passes = (compiled for step in self._in_passes.values() for compiled in step.programs.values())
        return (*self._compiled.values(), *in_passes)

    @property
    def latest(self) -> Compiled:
        """What the last call ran. Raises ShardwiseError before the first one."""
        if self._latest is None:
            raise ShardwiseError("no program yet: it is made for the first inputs")
        return self._latest

    def output_layout(self, index: int) -> Layout:
        """The layout that the ``index``-th tensor of the last call's output had before it was gathered."""
        spmd = self.latest.spmd
        name = [output.name for output in spmd.outputs if isinstance(output, Ref)][index]
        before = {conversion.result: conversion.source for conversion in spmd.conversions}
        return before.get(name) or spmd.layouts[name]

    def program(self) -> torch.fx.GraphModule:
        """The program compiled last, for reading."""
        if not self.compiled:
            raise ShardwiseError("no program yet: it is made for the first inputs")
        return self.compiled[-1].program


def _key(
    flat: Sequence[Any], spec: Any, mode: tuple[bool, bool, bool], shapes: Sequence[tuple[int, ...]]
) -> tuple[Any, ...]:
    """What tells calls apart that have programs of their own. ``shapes``: of the tensors."""
    whole = iter(shapes)
    return *mode, spec, *((next(whole), x.dtype) if isinstance(x, torch.Tensor) else constant_key(x) for x in flat)


def _mode_text(training: bool, loss_only: bool, predicts: bool) -> str:
    what = "step()" if loss_only else "predict()" if predicts else "a call"
    return f"{'train()' if training else 'eval()'}, {what}"


def _check_gradients(compiled: Compiled, given: list[torch.Tensor]) -> None:
    """Raise ShardwiseError for gradients that the program has no collectives for, and that would be one rank's part."""
    names = [source.names[0] for source in compiled.captured.graph.sources if source.kind == "input"]
    wanted = [name for name, tensor in zip(names, given, strict=False) if tensor.requires_grad]
    if wanted:
        raise ShardwiseError(
            problem(
                f"gradients of inputs are not computed under a plan, and {listed(wanted)} requires one",
                fix="pass input.detach(), or make what computes the input a part of the module that is split",
            )
        )
    thawed = [name for name, position in compiled.frozen if _requires_grad(compiled.tensors[position])]
    if thawed:
        raise ShardwiseError(
            problem(
                f"{listed(thawed)} was frozen when the module was split and requires a gradient now, which no "
                "collective would reduce",
                fix="set requires_grad_(True) before sw.plan and sw.parallelize; freezing later is possible",
            )
        )


def _requires_grad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _container(root: torch.nn.Module, path: str) -> torch.nn.Module:
    """The submodule at ``path``, created empty where it is missing."""
    for name in filter(None, path.split(".")):
        if name not in root._modules:
            root.add_module(name, Shards())
        child = root._modules[name]
        assert child is not None
        root = child
    return root


def _check_module(module: torch.nn.Module, plan: Plan) -> None:
    """Raise PlanError listing the parameters that are not those of the plan."""
    have = dict(module.named_parameters())
    want = {entry.name: entry for entry in plan.parameters}
    faults = [f"{name} is in the plan and not in the module" for name in sorted(want.keys() - have.keys())]
    faults += [f"{name} is in the module and not in the plan" for name in sorted(have.keys() - want.keys())]
    for name in sorted(have.keys() & want.keys()):
        own = f"{format_dtype(plan.precision.stored(have[name].dtype))}{list(have[name].shape)}"
        planned = f"{want[name].dtype}{list(want[name].shape)}"
        if own != planned:
            faults.append(f"{name} is {own} in the module and {planned} in the plan")
    if faults:
        more = [f"  and {len(faults) - 8} more"] if len(faults) > 8 else []
        raise PlanError("\n".join(["the plan is for another model:", *(f"  {f}" for f in faults[:8]), *more]))


__all__ = ["Parallel"]
