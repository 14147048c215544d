"""Cache of the programs of calls: captured for their inputs, sharded by the plan, and emitted for this rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from types import FunctionType
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from shardwise.errors import PlanError, ShardwiseError, listed, warn_user
from shardwise.graph.autocast import check_ambient, no_autocast
from shardwise.graph.capture import Capture, capture
from shardwise.graph.closure_guards import ClosureGuards
from shardwise.graph.code_reachability import reachable_code
from shardwise.graph.fakes import empty_copy
from shardwise.graph.ir import Graph, Ref
from shardwise.graph.segments import announce_kept
from shardwise.graph.trees import call_constants, flatten_with_path, leaf_name
from shardwise.graph.written_out import SEED
from shardwise.layouts.layout import Layout
from shardwise.plans.bind import input_faults, program_of
from shardwise.plans.plan import Plan
from shardwise.programs.differentiate import differentiate
from shardwise.programs.grad_accum_program import repeated
from shardwise.programs.hoist_constants import with_constants_apart
from shardwise.programs.program import localize
from shardwise.programs.rank_program import RankProgram, delivered_values
from shardwise.programs.spmd import SpmdProgram
from shardwise.programs.spmd_steps import Conversion
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.agree import from_rank_zero
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.compiled import CompiledVariant, compiled_program, with_every_cotangent
from shardwise.runtime.cpu_embedding import place_on_cpu, with_copies
from shardwise.runtime.cuda_graphs import GraphMemory, graph_program
from shardwise.runtime.emit import Emitted, emit
from shardwise.runtime.faults import failure_store, is_out_of_memory
from shardwise.runtime.gpu_watcher import gpu_watcher
from shardwise.runtime.lazy_gather import LEAST_BYTES, announce_copies, whole_buffers, with_outputs_split
from shardwise.runtime.memory_check import note_memory
from shardwise.runtime.signatures import in_other_mode
from shardwise.runtime.step import CallableStep, Constants, GradAccumStep
from shardwise.runtime.transit import find_symmetric_memory

Inputs = Literal["global", "local"]
Outputs = Literal["when read", "whole"]
Compile = bool | Literal["auto", "graphs"]


_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_plan_precision(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method of a parallel module to run without ambient autocast: the plan's is part of the program. Under
    a ``torch.compile`` around the module it runs outside Dynamo. Raises CaptureError under an autocast other than the
    plan's."""

    @wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            result: _R = torch.compiler.disable(called)(*args, **kwargs)
            return result
        module: Any = args[0]
        failure_store.begin()
        try:
            gpu_watcher.check()
            check_ambient(module.plan.precision.autocast, "around a call of a parallel module")
            with no_autocast():
                return method(*args, **kwargs)
        except BaseException as error:
            module._failed = True
            failure_store.leave(error)
            if module.device.type == "cuda" and is_out_of_memory(error):
                note_memory(error, module.device)
            raise

    return called


@dataclass(frozen=True)
class RunSettings:
    """How a module runs under its plan, the same on every rank; see ``parallelize``. ``compile``: always, never, where
    a program compiles (``"auto"``), or always and in CUDA graphs (``"graphs"``); ``check_replicas``, ``check_finite``:
    0 for never; ``host``: names of the tables that stay on the CPU; ``outputs``: when outputs other than the loss are
    gathered (None: large ones when they are read)."""

    loss: Callable[..., Any] | None
    inputs: Inputs
    device: torch.device
    compile: Compile
    check_replicas: int = 0
    check_finite: int = 0
    host: frozenset[str] = frozenset()
    outputs: Outputs | None = None


Mode = tuple[bool, bool, bool, tuple[str, ...]]  # of a call, as below


@dataclass(frozen=True)
class CallSpec:
    """A call for which a program is built. ``arguments``: (args, kwargs) with whole tensors on meta; ``loss_only``:
    only the loss is returned; ``predicts``: the module's output without the loss function; ``in_other_mode``:
    submodules in eval() while the module is in train(), or vice versa."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    training: bool
    loss_only: bool
    predicts: bool = False
    in_other_mode: tuple[str, ...] = ()

    @property
    def constants(self) -> tuple[str, ...]:
        """Return the constants that distinguish it from other calls with the same shapes."""
        return call_constants(self.arguments)


@dataclass(frozen=True)
class Executable:
    """The program for one kind of call.

    ``delivered``: the values that the step returns; ``tensors``: per source the parameter, buffer or constant, None for
    inputs; ``inputs``: their layouts; ``written``: per mutation the position of its buffer among the sources; ``seed``:
    the position of the random seed among them; ``frozen``: name and position of parameters without gradient when the
    module was captured; ``runs``: a single step, or the micro-batches of one; ``split``: value -> the conversion that
    gathers an output that stays sharded.
    """

    captured: Capture
    spmd: SpmdProgram
    runs: CallableStep | GradAccumStep
    delivered: tuple[str, ...]
    tensors: tuple[torch.Tensor | None, ...]
    inputs: tuple[Layout, ...]
    written: tuple[int, ...]
    seed: int | None
    frozen: tuple[tuple[str, int], ...]
    split: Mapping[str, Conversion]

    @property
    def step(self) -> CallableStep:
        """Return the single step."""
        assert isinstance(self.runs, CallableStep), "a program of micro-batches is run by its stage"
        return self.runs

    @property
    def in_passes(self) -> GradAccumStep:
        """Return the step over micro-batches."""
        assert isinstance(self.runs, GradAccumStep), "the program of a step by itself"
        return self.runs

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(source.value for source in self.captured.graph.sources)

    @cached_property
    def whole_buffers(self) -> tuple[str, ...]:
        """Return the value names of the buffers that this rank holds whole."""
        return whole_buffers(self.spmd)

    @property
    def program(self) -> torch.fx.GraphModule:
        """Return the FX graph module of the forward half."""
        return self.runs.emitted.forward

    def results(self, delivered: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, tuple[Any, ...]]:
        """Return (loss, flattened outputs) from the values that the step returns."""
        of = dict(zip(self.delivered, delivered, strict=True))
        outputs = tuple(of.get(o.name) if isinstance(o, Ref) else o for o in self.spmd.outputs)
        return (of[self.spmd.loss] if self.spmd.loss is not None else None), outputs

    def with_state(self, state: Mapping[str, torch.Tensor]) -> Executable:
        """Return the same program with the parameters and buffers of ``state``, by name."""
        sources = zip(self.captured.graph.sources, self.tensors, strict=True)
        return replace(self, tensors=tuple(state.get(source.names[0], tensor) for source, tensor in sources))


class ProgramCache:
    """Builds the programs of a module under its plan, on this rank."""

    def __init__(
        self, module: torch.nn.Module, plan: Plan, settings: RunSettings, ranks: Communicator, host_ranks: Communicator
    ) -> None:
        self.plan, self.settings, self.ranks, self.host_ranks = plan, settings, ranks, host_ranks
        self.model = empty_copy(module, "meta")  # to capture it again
        self._settings_of_model: ClosureGuards | None
        self._settings_of_model = ClosureGuards.of_settings(module, reachable_code(self.model, settings.loss))
        self._surroundings: ClosureGuards | None = None  # when the model was captured last
        self._given: dict[FunctionType, None] = {}  # functions among the arguments of the calls so far
        self._in_other_mode = in_other_mode(dict(module.named_modules()))
        self._announced: set[str] = set()
        self._graphs: GraphMemory | None = None

    def __getstate__(self) -> dict[str, Any]:
        of_this_process: dict[str, Any] = {
            "_settings_of_model": None,
            "_surroundings": None,
            "_given": {},
            "_graphs": None,
        }
        return {**self.__dict__, **of_this_process}

    def check_surroundings(self) -> None:
        """Raise ShardwiseError if globals or closures read by captured code have changed."""
        for snapshot in filter(None, (self._settings_of_model, self._surroundings)):
            snapshot.check()

    def compiled(self, call: CallSpec, state: Mapping[str, torch.Tensor]) -> Executable:
        """Return the program of a call over this rank's parameters and buffers. Every rank calls it."""
        captured = self.captured(call)
        # Without its loss function the model has fewer operators than the plan, which lists those of a micro-batch.
        is_whole = call.predicts or self.plan.micro_batches > 1
        return self.compiled_for(captured, captured.graph, call, state, None if is_whole else self.mode_of(call))

    def mode_of(self, call: CallSpec) -> bool | None:
        """Return whether a call is in training. Returns None if submodules are in another mode than when the module was
        parallelized, since its operators then differ from the plan's."""
        return call.training if call.in_other_mode == self._in_other_mode else None

    def of_stage(self, plan: Plan, ranks: Communicator, host_ranks: Communicator) -> ProgramCache:
        """Return a copy for the plan of one stage, on its ranks."""
        other = copy.copy(self)
        other.plan, other.ranks, other.host_ranks = plan, ranks, host_ranks
        return other

    def captured(self, call: CallSpec) -> Capture:
        """Return the call as captured by rank 0. Every rank calls it. Raises PlanError if the inputs do not match the
        plan."""
        leaves, _ = flatten_with_path(call.arguments)
        shapes = {leaf_name(p): (x.dtype, tuple(x.shape)) for p, x in leaves if isinstance(x, torch.Tensor)}
        faults = input_faults(self.plan, shapes)
        if faults:
            raise PlanError("\n".join(["the inputs are not those of the plan:", *(f"  {fault}" for fault in faults)]))
        args, kwargs = call.arguments
        model = self.model
        for path, part in model.named_modules():
            part.training = call.training != (path in call.in_other_mode)
        loss = None if call.predicts else self.settings.loss
        captured = from_rank_zero(
            lambda: capture(
                model,
                args,
                kwargs,
                loss=loss,
                precision=self.plan.precision,
                input_gradients=True,
                heads=self.plan.fused_heads,
            ).with_terms(self.plan.terms if call.loss_only else ())
        )
        self._given |= {leaf: None for _, leaf in leaves if isinstance(leaf, FunctionType)}
        self._surroundings = ClosureGuards.of_code(reachable_code(model, self.settings.loss, self._given))
        return captured

    def compiled_for(
        self, captured: Capture, graph: Graph, call: CallSpec, state: Mapping[str, torch.Tensor], training: bool | None
    ) -> Executable:
        """Return the program of a graph: a captured call, or what runs before its micro-batches."""
        spmd = program_of(self.plan, graph, training=training, constants=call.constants)
        self.create_groups(spmd)
        return self.compiled_of(spmd, captured, graph, call, state)

    def create_groups(self, spmd: SpmdProgram) -> None:
        """Create the process groups of a program; every rank of the job calls it."""
        self.ranks.create_groups((move.axes for c in spmd.conversions for move in c.moves), spmd.urgent_axes)
        if spmd.is_fused:
            find_symmetric_memory(self.ranks, spmd.fused_axes)
        if self.host_ranks is not self.ranks:
            values = place_on_cpu(localize(spmd, 0), self.settings.host)[1]
            self.host_ranks.create_groups(m.axes for c in spmd.conversions if c.value in values for m in c.moves)

    def compiled_of(
        self,
        spmd: SpmdProgram,
        captured: Capture,
        graph: Graph,
        call: CallSpec,
        state: Mapping[str, torch.Tensor],
        *,
        repeats: bool = False,
    ) -> Executable:
        """Return this rank's program of a graph whose process groups exist. ``repeats``: for many micro-batches."""
        captured = replace(captured, graph=graph)
        split: Mapping[str, Conversion] = {}
        if not call.loss_only and spmd.loss is not None and self.settings.outputs != "whole":
            least = LEAST_BYTES if self.settings.outputs is None else 0
            spmd, split = with_outputs_split(spmd, captured.memories, least)
        if split:
            self.ranks.create_reading_group()
        if call.training and self.ranks.rank == 0:
            announce_kept(captured.segments, [op.name for op in graph.ops], spmd.lifetimes.operators)
        runs = self.step_of(spmd, call.loss_only, repeats=repeats)
        sources = graph.sources
        constants = {name: data.to(self.settings.device) for name, data in captured.constants.items()}
        position = {source.value: i for i, source in enumerate(sources)}
        if not call.loss_only:
            announce_copies(spmd, captured.memories)
        return Executable(
            captured,
            spmd,
            runs,
            delivered=delivered_values(spmd, loss_only=call.loss_only),
            tensors=tuple(constants.get(source.value, state.get(source.names[0])) for source in sources),
            inputs=tuple(spmd.layouts[source.value] for source in sources if source.kind == "input"),
            written=tuple(position[buffer] for buffer, _ in spmd.mutations),
            seed=position.get(SEED),
            frozen=tuple(
                (source.names[0], i)
                for i, source in enumerate(sources)
                if source.kind == "parameter" and not captured.graph.by_name[source.value].requires_grad
            ),
            split=split,
        )

    def check_hosted(self, spmd: SpmdProgram) -> None:
        """Raise ShardwiseError if a program reads a table on the host other than by row lookup."""
        if self.settings.host:
            place_on_cpu(localize(spmd, 0), self.settings.host)

    def step_of(self, spmd: SpmdProgram, loss_only: bool, *, repeats: bool) -> CallableStep | GradAccumStep:
        """Emit this rank's step of a program. ``repeats``: as a step over micro-batches."""
        device, compiles = self.settings.device, self.settings.compile is not False
        local = localize(spmd, self.ranks.place.device_of(self.ranks.rank))
        placed, host_values = place_on_cpu(local, self.settings.host)
        vjp_cache = VjpCache(device.type if device.type != "meta" else "cpu")

        def written(**settings: Any) -> tuple[RankProgram, frozenset[str]]:
            program = differentiate(placed, vjp_cache, loss_only=loss_only, **settings)
            return with_copies(program, host_values)

        def emitted(program: RankProgram, on_host: frozenset[str]) -> Emitted:
            return emit(program, self.ranks, device=device, on_host=on_host, host_ranks=self.host_ranks)

        def variant(**settings: Any) -> tuple[RankProgram, frozenset[str]]:
            program, on_host = written(**settings)
            return with_constants_apart(program, divided.constants.delivered).step, on_host

        def compiled(program: RankProgram, on_host: frozenset[str]) -> tuple[RankProgram, frozenset[str]]:
            program = compiled_program(program, self.ranks, device, on_host)
            if self.settings.compile == "graphs":
                self._graphs = self._graphs or GraphMemory(self.ranks.rank, device)
                program = graph_program(program, self.ranks, device, self._graphs)
            return program, on_host

        def compiling(make: Callable[[], _R]) -> CompiledVariant[_R] | None:
            return CompiledVariant(make, self.settings.compile == "auto", self.ranks) if compiles else None

        def forward_only() -> Emitted:
            inference = variant(with_gradients=False)
            compiles = compiling(lambda: emitted(*compiled(*inference)))
            return (compiles.get() if compiles else None) or emitted(*inference)

        def compiled_step() -> CallableStep:
            program, on_host = compiled(*variant())

            def for_some(differentiated: tuple[bool, ...]) -> Emitted:
                reached, _ = variant(reached=differentiated)
                return emitted(with_every_cotangent(program, differentiated, reached.gradients), on_host)

            return CallableStep(emitted(program, on_host), for_some, forward_only, constants=constants)

        program, on_host = written()
        self._announce(program.untraceable)
        parts = repeated(program) if repeats else None
        divided = with_constants_apart(program if parts is None else parts.each)
        constants = Constants(divided.constants, lambda constant_program: emitted(constant_program, on_host))
        plain = emitted(divided.step, on_host)
        if parts is not None:
            ahead, behind = emitted(parts.ahead, on_host), emitted(parts.behind, on_host)
            passes = compiling(lambda: emitted(*compiled(divided.step, on_host)))
            return GradAccumStep(program, ahead, plain, behind, constants, passes)
        return CallableStep(
            plain,
            lambda differentiated: emitted(*variant(reached=differentiated)),
            forward_only,
            compiling(compiled_step),
            constants,
            program,
        )

    def _announce(self, untraceable: Mapping[str, str]) -> None:
        """Warn once, on rank 0, about operators whose backward is left to autograd."""
        new = {name: why for name, why in untraceable.items() if name not in self._announced}
        self._announced.update(new)
        if new and self.ranks.rank == 0:
            reasons = "; ".join(f"{name} ({why})" for name, why in new.items())
            warn_user(
                "the backward of these operators cannot be traced; autograd runs it, saves its own tensors and "
                f"computes all gradients at once: {reasons}",
                UserWarning,
            )


@contextmanager
def apart_from_caller() -> Iterator[None]:
    """Capture calls and build programs apart from the caller's modes. Only rank 0 captures, so it must not trigger the
    caller's saved-tensor hooks (torch.utils.checkpoint counts them). Constants must not be inference tensors."""
    hooks, of_autograd = [], torch._C._autograd
    while (top := of_autograd._top_saved_tensors_default_hooks(True)) is not None:  # torch.func allows none
        hooks.append(top)
        of_autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.inference_mode(False):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            of_autograd._push_saved_tensors_default_hooks(pack, unpack)


def refuse_input_gradients(named: Mapping[str, torch.Tensor], plan: Plan) -> None:
    """Raise ShardwiseError for inputs that require a gradient, which steps over micro-batches do not compute."""
    names = [name for name, tensor in named.items() if tensor.requires_grad]
    where, instead = "in several micro-batches", "make one pass"
    if plan.is_pipeline:
        where, instead = "under a plan of stages", "plan without stages"
    if names:
        raise ShardwiseError(
            f"{listed(names)} requires a gradient, which no step computes {where}",
            fix=f"{instead} and differentiate the result of par(*batch), or move the computation of the input "
            "into the module",
        )


def check_frozen(compiled: Executable) -> None:
    """Raise ShardwiseError for parameters unfrozen after ``sw.parallelize``: no collective reduces their gradients."""
    frozen = ((name, compiled.tensors[position]) for name, position in compiled.frozen)
    thawed = [name for name, tensor in frozen if tensor is not None and tensor.requires_grad]
    if thawed:
        raise ShardwiseError(
            f"{listed(thawed)} was frozen at sw.parallelize and requires a gradient now, which no collective "
            "would reduce",
            fix="plan and parallelize with requires_grad_(True), then freeze and unfreeze at any time. To "
            "continue from here: sw.save_checkpoint, then sw.plan, sw.parallelize and sw.load_checkpoint",
        )
