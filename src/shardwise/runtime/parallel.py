"""The module that a rank trains: its shards under the original parameter names, and the program of its plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.errors import LaunchError, PlanError, PlanWarning, ShardwiseError, problem
from shardwise.graph.capture import Capture, capture, refuse_autocast
from shardwise.graph.ir import Ref
from shardwise.graph.normalize_random import SEED
from shardwise.graph.operators import STREAMS
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
from shardwise.plans.bind import input_faults, program_of
from shardwise.plans.file import format_ranks
from shardwise.plans.plan import Plan
from shardwise.plans.precision import not_executed
from shardwise.programs.differentiate import differentiate
from shardwise.programs.program import LocalOp, LocalProgram, localize
from shardwise.programs.rank_program import Program, delivered_values
from shardwise.programs.spmd import Spmd
from shardwise.programs.vjp import Kinds
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.compiled import compiled_program, with_every_cotangent
from shardwise.runtime.emit import Emitted, emit
from shardwise.runtime.guards.protect import protect
from shardwise.runtime.hooks import Shards, announce_hooks, carry_hooks
from shardwise.runtime.hosted import HOST, hosted, matching, with_copies
from shardwise.runtime.initial.materialize import Init, full_tensors
from shardwise.runtime.memory_of_outputs import announce_copies, live, taken_apart, whole_buffers, written_back
from shardwise.runtime.replicas import ReplicaCheck, checked_interval
from shardwise.runtime.shards import shard
from shardwise.runtime.step import Step

Inputs = Literal["global", "local"]
Randomness = Literal["same_as_one_device", "per_shard"]
MAX_RECOMPUTED = 4096  # calls whose backward may still recompute them


@dataclass(frozen=True)
class Compiled:
    """The program for one signature of inputs."""

    captured: Capture
    spmd: Spmd
    step: Step
    delivered: tuple[str, ...]  # the values that the step returns
    tensors: tuple[torch.Tensor | None, ...]  # per source: the parameter, buffer or constant; None for inputs
    inputs: tuple[Layout, ...]
    written: tuple[int, ...]  # per mutation: the position of its buffer among the sources
    seed: int | None  # the position of the seed of random numbers among the sources
    frozen: tuple[tuple[str, int], ...]  # parameters that had no gradient when the module was split: name, position

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The values of the sources."""
        return tuple(source.value for source in self.captured.graph.sources)

    @cached_property
    def whole_buffers(self) -> tuple[str, ...]:
        """The values of the buffers that this rank holds whole."""
        return whole_buffers(self.spmd)

    @property
    def program(self) -> torch.fx.GraphModule:
        """The forward half."""
        return self.step.emitted.forward

    def results(self, delivered: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, tuple[Any, ...]]:
        """(loss, flattened outputs) from what the step delivers."""
        of = dict(zip(self.delivered, delivered, strict=True))
        outputs = tuple(of.get(o.name) if isinstance(o, Ref) else o for o in self.spmd.outputs)
        return (of[self.spmd.loss] if self.spmd.loss is not None else None), outputs


def parallelize(
    module: torch.nn.Module,
    plan: Plan | str | Path | None,
    *,
    loss: Callable[..., Any] | None = None,
    inputs: Inputs = "global",
    seed: int | None = None,
    init: Init | None = None,
    device: torch.device | str | None = None,
    compile: bool | None = None,
    check_replicas: int | None = None,
    randomness: Randomness = "same_as_one_device",
    host: Sequence[str] = (),
) -> Parallel:
    """This rank's part of ``module`` under ``plan``; called on every rank.

    ``plan``: a Plan or the path of one. It is made once: ranks other than 0 may pass None and receive rank 0's; where
    several ranks give one, all must be equal. ``loss``: the callable given to ``sw.plan``, if any. ``inputs``: whether
    calls pass the whole batch on every rank or this rank's part of it. ``seed``, ``init``: how parameters and buffers
    of a module without values (built under ``sw.deferred`` or on meta) get them (``runtime.initial``; by default from
    the seed given to ``sw.deferred``); those that have values keep them. ``init(name, tensor)`` fills the whole tensor,
    or returns one of its shape and dtype, or NotImplemented: then it gets the value that the module's own code gives
    it. ``seed`` also starts dropout. ``compile``: whether ``torch.compile`` runs over the
    programs (by default on CUDA only: on CPUs it takes longer to compile than most runs there gain).
    ``check_replicas``: in every so many training calls, the first included, what ranks must hold alike is compared
    (``runtime.replicas``), and a ReplicaError names the first operator, parameter or input that differs; such a call is
    not compiled. Rank 0's setting counts. ``randomness``: dropout and other random numbers are by default those of one
    device, whatever the plan; with ``"per_shard"`` every shard draws from a generator of its own, which is faster:
    replicas still agree, shards differ and a seed gives the same again, but under this plan only. ``host``: names of
    tables, or patterns (``"embed.weight"``, ``"fields.*.weight"``), that are kept on the CPU with their gradients and
    optimizer states: indices go there and the rows that were looked up come back (``runtime.hosted``). Prices and
    ``memory_bytes`` of the plan still count them on the device.

    Raises LaunchError without process group, or when ranks disagree; PlanError when the plan does not fit the module or
    the ranks.
    """
    if not dist.is_initialized():
        raise LaunchError(
            problem(
                "parallelize needs a process group, and torch.distributed is not initialised",
                fix="call sw.init_ranks() first and start the script with: shardwise run -n 8 train.py (or torchrun)",
            )
        )
    if inputs not in ("global", "local"):
        raise ShardwiseError(
            f'inputs is "global" (the whole batch on every rank) or "local" (its part), not {inputs!r}'
        )
    if randomness not in ("same_as_one_device", "per_shard"):
        raise ShardwiseError(f'randomness is "same_as_one_device" or "per_shard", not {randomness!r}')
    agreed = agree_on_plan(plan)
    size = dist.get_world_size()
    if size != agreed.mesh.num_devices:
        raise PlanError(
            problem(
                f"the plan is for {agreed.mesh.num_devices} devices ({agreed.mesh}); {size} ranks are running",
                fix=f"start {agreed.mesh.num_devices} ranks, or plan for {size}",
            )
        )
    ranks = agreed.only_stage.placement.ranks
    if ranks != Placement.whole(agreed.mesh).ranks:
        raise PlanError(
            problem(
                f"the plan puts the devices of {agreed.mesh} on ranks {format_ranks(ranks)}; a plan of one stage runs "
                "on all ranks in their order",
                fix=f'write "ranks": "0-{size - 1}" in the file, and name the mesh axes in the order that is meant',
            )
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    device = torch.device(device)
    compile = device.type == "cuda" if compile is None else compile
    every = from_rank_zero(lambda: checked_interval(check_replicas))
    streams = from_rank_zero(lambda: randomness == "per_shard")
    on_host = from_rank_zero(lambda: matching(module, host))
    announce_hooks(module)
    if dist.get_rank() == 0 and (sentence := not_executed(agreed)):
        warnings.warn(f"the plan was {sentence}", PlanWarning, stacklevel=2)
    return Parallel(module, agreed, loss, inputs, seed, init, device, compile, every, streams, on_host)


def agree_on_plan(plan: Plan | str | Path | None) -> Plan:
    """Rank 0's plan on every rank. Raises LaunchError where another rank brought a different one, or rank 0 none."""
    failure: ShardwiseError | None = None
    own: Plan | None = None
    try:
        own = Plan.load(plan) if isinstance(plan, str | Path) else plan
    except ShardwiseError as error:
        failure = error
    rank, size = dist.get_rank(), dist.get_world_size()
    states: list[Any] = [None] * size
    dist.all_gather_object(states, own.digest if own else ("failed" if failure else None))
    if failure is not None:
        raise failure
    broken = [i for i, state in enumerate(states) if state == "failed"]
    if broken:
        raise LaunchError(f"rank {', '.join(map(str, broken))} could not load its plan")
    if states[0] is None:
        raise LaunchError(
            problem("rank 0 has no plan", fix="make or load the plan on rank 0; other ranks may pass None")
        )
    others = [i for i, state in enumerate(states) if state not in (None, states[0])]
    if others:
        shown = ", ".join(f"rank {i} has {states[i][:12]}" for i in others[:4])
        raise LaunchError(
            problem(
                f"ranks disagree on the plan: rank 0 has {states[0][:12]}, {shown}",
                fix="plan on rank 0 and pass None elsewhere, or load the same file on every rank",
            )
        )
    if None in states:
        box = [own.to_json() if rank == 0 and own else None]
        dist.broadcast_object_list(box, src=0)
        received = Plan.from_json(str(box[0]), name="the plan of rank 0")
        own = own or received
    assert own is not None, "a plan is known on every rank by now"
    assert own.digest == states[0], "the broadcast changed the plan"
    return own


class Parallel(torch.nn.Module):
    """This rank's shards of a module. ``named_parameters()`` gives them under the original names, so any element-wise
    ``torch.optim`` optimizer updates them as one device would."""

    def __init__(
        self,
        module: torch.nn.Module,
        plan: Plan,
        loss: Callable[..., Any] | None,
        inputs: Inputs,
        seed: int | None,
        init: Init | None,
        device: torch.device,
        compile: bool,
        check_replicas: int = 0,
        streams: bool = False,
        host: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.plan, self.device, self.inputs = plan, device, inputs
        self._loss, self._compile_programs, self._streams = loss, compile, streams
        self._ranks = self._host_ranks = Communicator(Placement.whole(plan.mesh), type(module).__name__)
        self._host = host
        if host and device.type != "cpu":
            self._host_ranks = Communicator(Placement.whole(plan.mesh), type(module).__name__, backend="gloo")
        self._replicas = ReplicaCheck(check_replicas, self._ranks, device) if check_replicas else None
        self._announced: set[str] = set()
        self._compiled: dict[Any, Compiled] = {}
        self._latest: Compiled | None = None
        self._model = (meta_copy(module),)  # in a tuple: not a submodule, its parameters are not ours
        self._seed = torch.tensor(seed or 0, dtype=torch.int64, device=device)
        self._seeds: dict[int, torch.Tensor] = {}  # of the last calls, by the number that tells a recomputation
        self._hold(module, seed, init)
        self.train(module.training)

    def _hold(self, module: torch.nn.Module, seed: int | None, init: Init | None) -> None:
        """Register this rank's shard of every parameter and buffer, one full tensor at a time."""
        _check_module(module, self.plan)
        held: dict[str, torch.Tensor] = {}
        for name, full in full_tensors(module, seed, init):
            layout = self.plan.layouts.get(name) or Layout.whole(self.plan.mesh, tuple(full.shape))
            device = HOST if name in self._host else self.device
            held[name] = shard(full, layout, self._ranks.coordinates).detach().to(device).clone()
        shards: dict[int, torch.Tensor] = {}  # by the identity of the original: tied tensors stay tied
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            if id(parameter) not in shards:
                shards[id(parameter)] = torch.nn.Parameter(held[name], requires_grad=parameter.requires_grad)
                layout = self.plan.layouts.get(name) or Layout.whole(self.plan.mesh, tuple(parameter.shape))
                ranks = self._host_ranks if name in self._host else self._ranks
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

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_compiled": {},
            "_latest": None,
        }  # programs hold tensors and process groups: a copy makes its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        protect(self)  # a deep copy holds shards, too

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, every tensor whole on every rank; differentiable."""
        compiled, _, outputs = self._call(args, kwargs, loss_only=False)
        return unflatten(outputs, compiled.captured.out_spec)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of the whole batch: adds to ``.grad`` and returns the loss (detached)."""
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

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, loss_only: bool
    ) -> tuple[Compiled, torch.Tensor | None, Sequence[Any]]:
        """(program, loss, flattened outputs) for one batch."""
        refuse_autocast("around a call of a parallel module")
        flat, spec = flatten((args, kwargs))
        if not all(isinstance(x, torch.Tensor) or is_constant(x) for x in flat):
            check_constants((leaf_name(path), x) for path, x in flatten_with_path((args, kwargs))[0])
        signature = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else constant_key(x) for x in flat)
        key = (self.training, loss_only, spec, signature)
        compiled = self._compiled.get(key)
        self._ranks.calls += 1
        if compiled is None:
            compiled = self._compiled[key] = self._compile(flat, spec, loss_only)
        self._latest = compiled
        given = [x.to(self.device) for x in flat if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled():
            _check_gradients(compiled, given)
        parts = map(self._own_part, given, compiled.inputs)
        tensors = [next(parts) if t is None else t for t in compiled.tensors]
        seed = self._seed_of_call(draws=compiled.seed is not None)
        if compiled.seed is not None:
            tensors[compiled.seed] = seed
        check = self._replicas if self.training and torch.is_grad_enabled() else None
        if check is not None and check.is_due():
            batch = () if self.inputs == "local" else given
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

    def _seed_of_call(self, draws: bool) -> torch.Tensor:
        """The seed of the random numbers of this call: another one for every call in training.

        A call during backward is a recomputation (``torch.utils.checkpoint``) and must draw what the first call drew.
        It is known by a number from torch's generator, whose state the checkpoint restores; the seed is not made of
        that number, since the generators of the ranks need not agree.
        """
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

    def _own_part(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        """This rank's part of an input."""
        if self.inputs == "local" or not layout.positions:
            return tensor
        return shard(tensor, layout, self._ranks.coordinates)

    def _compile(self, flat: list[Any], spec: Any, loss_only: bool) -> Compiled:
        # Rank 0 captures and the others do not: nothing of it may reach the hooks that the caller has set for tensors
        # which are saved (torch.utils.checkpoint counts them), and no constant may be an inference tensor.
        with torch.inference_mode(False), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            return self._compiled_for(flat, spec, loss_only)

    def _compiled_for(self, flat: list[Any], spec: Any, loss_only: bool) -> Compiled:
        named = [(leaf_name(path), x) for path, x in flatten_with_path(unflatten(flat, spec))[0]]
        given = {name: (x.dtype, tuple(x.shape)) for name, x in named if isinstance(x, torch.Tensor)}
        faults = input_faults(self.plan, given)
        if faults:
            raise PlanError("\n".join(["the inputs are not those of the plan:", *(f"  {fault}" for fault in faults)]))
        leaves = [self._example(i, x) if isinstance(x, torch.Tensor) else x for i, x in _numbered(flat)]
        args, kwargs = unflatten(leaves, spec)
        model = self._model[0].train(self.training)
        captured = from_rank_zero(lambda: capture(model, args, kwargs, loss=self._loss))
        spmd = program_of(self.plan, captured.graph, training=self.training)
        self._ranks.create_groups(move.axes for c in spmd.conversions for move in c.moves)
        step = self._step_of(spmd, loss_only)
        tensors: list[torch.Tensor | None] = []
        layouts: list[Layout] = []
        for source in captured.graph.sources:
            if source.kind == "input":
                tensors.append(None)
                layouts.append(spmd.layouts[source.value])
            elif source.kind == "constant":
                tensors.append(captured.constants[source.value].to(self.device))
            elif source.names[0] == SEED:
                tensors.append(self._seed)
            else:
                tensors.append(_attribute(self, source.names[0]))
        position = {source.value: i for i, source in enumerate(captured.graph.sources)}
        written = tuple(position[buffer] for buffer, _ in spmd.mutations)
        seed = position.get(SEED)
        frozen = tuple(
            (source.names[0], i)
            for i, source in enumerate(captured.graph.sources)
            if source.kind == "parameter" and not captured.graph.by_name[source.value].requires_grad
        )
        delivered = delivered_values(spmd, loss_only=loss_only)
        if not loss_only:
            announce_copies(spmd, captured.memories)
        return Compiled(captured, spmd, step, delivered, tuple(tensors), tuple(layouts), written, seed, frozen)

    def _step_of(self, spmd: Spmd, loss_only: bool) -> Step:
        """This rank's step of a program, emitted."""
        local = localize(spmd, self._ranks.rank)
        if self._streams:
            local = _with_streams(local)
        placed = hosted(local, self._host)
        if self._host_ranks is not self._ranks:
            on_host = (c for c in spmd.conversions if c.value in placed.values)
            self._host_ranks.create_groups(move.axes for c in on_host for move in c.moves)
        kinds = Kinds(self.device.type if self.device.type != "meta" else "cpu")

        def written(**settings: Any) -> tuple[Program, frozenset[str]]:
            program = differentiate(placed.program, kinds, loss_only=loss_only, **settings)
            return with_copies(program, placed.values)

        def emitted(program: Program, on_host: frozenset[str]) -> Emitted:
            return emit(program, self._ranks, device=self.device, on_host=on_host, host_ranks=self._host_ranks)

        def compiled(**settings: Any) -> tuple[Program, frozenset[str]]:
            program, on_host = written(**settings)
            if self._compile_programs:
                program = compiled_program(program, self._ranks, self.device, on_host)
            return program, on_host

        def compiled_step() -> Step:
            program, on_host = compiled()

            def for_some(given: tuple[bool, ...]) -> Emitted:
                reached, _ = written(reached=given)
                return emitted(with_every_cotangent(program, given, reached.gradients), on_host)

            return Step(emitted(program, on_host), for_some, lambda: emitted(*compiled(with_gradients=False)))

        whole = emitted(*written())
        self._announce(whole.program.untraceable)
        return Step(
            whole,
            lambda given: emitted(*written(reached=given)),
            lambda: emitted(*compiled(with_gradients=False)),
            compiled_step if self._compile_programs else None,
        )

    def _announce(self, untraceable: Mapping[str, str]) -> None:
        """Say once, on rank 0, which operators' backward autograd performs."""
        new = {name: why for name, why in untraceable.items() if name not in self._announced}
        self._announced.update(new)
        if new and self._ranks.rank == 0:
            said = "; ".join(f"{name} ({why})" for name, why in new.items())
            warnings.warn(
                f"the backward of these operators cannot be traced and stays with autograd, which keeps what it wants "
                f"and computes all gradients at once: {said}",
                stacklevel=2,
            )

    def _example(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor of the global shape of an input."""
        shape = list(tensor.shape)
        if self.inputs == "local" and index < len(self.plan.inputs):
            layout = self.plan.layouts[self.plan.inputs[index].name]
            if len(layout.shape) == len(shape):
                for dim, atoms in enumerate(layout.dims):
                    shape[dim] *= self.plan.mesh.size_of(axis for atom in atoms for axis in atom.axes)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        """What was compiled so far, one for each signature of inputs, oldest first."""
        return tuple(self._compiled.values())

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
        if not self._compiled:
            raise ShardwiseError("no program yet: it is made for the first inputs")
        return next(reversed(self._compiled.values())).program


def _with_streams(program: LocalProgram) -> LocalProgram:
    """The program with random numbers from generators of the shards' own."""

    def streamed(instruction: Any) -> Any:
        if isinstance(instruction, LocalOp) and instruction.call.target in STREAMS:
            return replace(instruction, call=replace(instruction.call, target=STREAMS[instruction.call.target]))
        return instruction

    return replace(program, instructions=tuple(map(streamed, program.instructions)))


def _check_gradients(compiled: Compiled, given: list[torch.Tensor]) -> None:
    """Raise ShardwiseError for gradients that the program has no collectives for, and that would be one rank's part."""
    names = [source.names[0] for source in compiled.captured.graph.sources if source.kind == "input"]
    wanted = [name for name, tensor in zip(names, given, strict=False) if tensor.requires_grad]
    if wanted:
        raise ShardwiseError(
            problem(
                f"gradients of inputs are not computed under a plan, and {_listed(wanted)} requires one",
                fix="pass input.detach(), or make what computes the input a part of the module that is split",
            )
        )
    thawed = [name for name, position in compiled.frozen if _requires_grad(compiled.tensors[position])]
    if thawed:
        raise ShardwiseError(
            problem(
                f"{_listed(thawed)} was frozen when the module was split and requires a gradient now, which no "
                "collective would reduce",
                fix="set requires_grad_(True) before sw.plan and sw.parallelize; freezing later is possible",
            )
        )


def _requires_grad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def meta_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy without values, for capturing the module again; tied tensors stay tied."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def _numbered(flat: list[Any]) -> Iterator[tuple[int, Any]]:
    """Leaves with the number of tensors before them."""
    count = 0
    for leaf in flat:
        yield count, leaf
        count += isinstance(leaf, torch.Tensor)


def _container(root: torch.nn.Module, path: str) -> torch.nn.Module:
    """The submodule at ``path``, created empty where it is missing."""
    for name in filter(None, path.split(".")):
        if name not in root._modules:
            root.add_module(name, Shards())
        child = root._modules[name]
        assert child is not None
        root = child
    return root


def _attribute(root: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor = getattr(root.get_submodule(owner), leaf)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _check_module(module: torch.nn.Module, plan: Plan) -> None:
    """Raise PlanError listing the parameters that are not those of the plan."""
    have = dict(module.named_parameters())
    want = {entry.name: entry for entry in plan.parameters}
    faults = [f"{name} is in the plan and not in the module" for name in sorted(want.keys() - have.keys())]
    faults += [f"{name} is in the module and not in the plan" for name in sorted(have.keys() - want.keys())]
    for name in sorted(have.keys() & want.keys()):
        own = f"{format_dtype(have[name].dtype)}{list(have[name].shape)}"
        planned = f"{want[name].dtype}{list(want[name].shape)}"
        if own != planned:
            faults.append(f"{name} is {own} in the module and {planned} in the plan")
    if faults:
        more = [f"  and {len(faults) - 8} more"] if len(faults) > 8 else []
        raise PlanError("\n".join(["the plan is for another model:", *(f"  {f}" for f in faults[:8]), *more]))


__all__ = ["Parallel", "agree_on_plan", "parallelize"]
