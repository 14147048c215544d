"""A step on this rank as one autograd function whose halves run the instruction lists of a program
(``CallableStep``), or over micro-batches, whose gradients are summed locally (``GradAccumStep``).

Tensors saved for backward are kept here, not by autograd, so that they can be freed one by one while backward runs.
Only if saved-tensor hooks are set (``torch.utils.checkpoint``, saving on the CPU) autograd keeps them, and the hooks
see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, fx

from shardwise.costs.timeline import ONCE
from shardwise.errors import ShardwiseError
from shardwise.graph.autocast import check_ambient
from shardwise.programs.hoist_constants import fixed_sources
from shardwise.programs.instructions import Instruction, memories
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.compiled import CompiledVariant
from shardwise.runtime.emit import Emitted
from shardwise.runtime.faults import refuse_create_graph
from shardwise.runtime.guards.registry import memory_range

# tensors of the sources -> (delivered, mutations, saved)
Forward = Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Any, ...]]]
# Flags of the delivered values that get a cotangent -> the program whose backward takes these.
EmitFor = Callable[[tuple[bool, ...]], Emitted]


class Observed(NamedTuple):
    """What runs the halves of a call in place of the program's own: ``backward``: (emitted, saved, cotangents) ->
    gradients."""

    forward: Forward
    backward: Callable[[Emitted, list[Any], Sequence[Tensor]], Any] | None = None


@dataclass
class CallableStep:
    """A program called on this rank's tensors of the sources. ``emit_for``: emits it for cotangents of some of the
    returned values; ``forward_only``: emits it without backward, compiled if steps are; ``compiling``: the compiled
    variant that trains instead unless the call is observed; ``constants``: hoisted constants passed to all of these;
    ``whole``: the program that computes them itself, not emitted."""

    emitted: Emitted
    emit_for: EmitFor
    forward_only: Callable[[], Emitted]
    compiling: CompiledVariant[CallableStep] | None = None
    constants: Constants | None = None
    whole: RankProgram | None = None
    _backward: dict[tuple[bool, ...], Emitted] = field(default_factory=dict)
    _alone: Emitted | None = None

    def __post_init__(self) -> None:
        program = self.emitted.program
        position = {source.value: i for i, source in enumerate(program.spmd.graph.sources)}
        self.positions = {value: position[value] for value in program.gradients}
        self.num_delivered = len(program.delivered)
        self.differentiable = tuple(name is not None for name in program.cotangents)
        watched = _watched(program, None if self.constants is None else self.constants.program)
        written = {source for source, _ in program.mutations}
        self.watched = tuple((i, name) for i, name in watched if name not in written)
        self.overwritten = tuple(i for i, name in watched if name in written)
        self._backward[self.differentiable] = self.emitted

    def __call__(
        self, tensors: Sequence[Tensor], observed: Observed | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return (delivered, mutations). ``observed``: runs the call in place of the program's own halves."""
        needs = torch.is_grad_enabled() and any(tensors[i].requires_grad for i in self.positions.values())
        if not needs:
            if observed is None and self._alone is None:
                self._alone = self.forward_only()
            emitted = self.emitted if observed is not None else self._alone
            delivered, written, _ = self.forward(tensors, emitted, observed and observed.forward)
        else:
            # Within saved-tensor hooks backward may run the step again, eager if it is checked, and must save the same.
            compiles = self.compiling and observed is None and not (self.compiling.falls_back and _is_hooked())
            step = (self.compiling.get() if self.compiling and compiles else None) or self
            # Detach the others: autograd would call their hooks with None.
            reached = set(self.positions.values())
            tensors = [x if i in reached or not x.requires_grad else x.detach() for i, x in enumerate(tensors)]
            with torch.autograd.set_detect_anomaly(False):  # its traces are of this package; calls have their own
                results = _StepFunction.apply(step, observed, *tensors)  # type: ignore[no-untyped-call]
            delivered, written = results[: self.num_delivered], results[self.num_delivered :]
        return tuple(delivered), tuple(written)

    @property
    def program(self) -> RankProgram:
        """Return the program of the step including its constants."""
        return self.whole or self.emitted.program

    def forward(
        self, tensors: Sequence[Tensor], emitted: Emitted | None = None, observed: Forward | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Any, ...]]:
        """Run forward, as emitted for backward or as given, and return (delivered, mutations, saved)."""
        emitted = emitted or self.emitted
        constants = () if self.constants is None else self.constants.of(emitted.program, tensors)
        run: Forward = observed or emitted.forward.forward
        return run(*tensors, *constants)

    def backward_for(self, present: tuple[bool, ...]) -> Emitted:
        """Return the program for cotangents of some of the returned values."""
        if present not in self._backward:
            emitted = self.emit_for(present)
            missing = set(emitted.program.saved).difference(self.emitted.program.saved)
            if missing:
                raise ShardwiseError(
                    f"backward from some of the outputs needs {', '.join(sorted(missing))}, which is not saved "
                    "when all outputs get gradients",
                    fix="pass gradients for all outputs (zeros where there are none)",
                )
            self._backward[present] = emitted
        return self._backward[present]


def _add(source: str, total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


@dataclass
class GradAccumStep:
    """The emitted programs of a micro-batch and of once-per-step work (``grad_accum_program.GradAccumProgram``).
    ``program``: a self-contained micro-batch, not emitted; ``emitted``: the eager micro-batch; ``constants``: its
    hoisted constants; ``compiling``: runs instead if it compiles; ``add``: adds a source's gradient to its
    sum."""

    program: RankProgram
    ahead: Emitted
    emitted: Emitted
    behind: Emitted
    constants: Constants
    compiling: CompiledVariant[Emitted] | None = None
    add: Callable[[str, Tensor, Tensor], None] = _add

    def begin(self, tensors: Sequence[Tensor], *, observed: bool = False) -> GradAccumState:
        """Cast and gather the values that all micro-batches use. ``tensors``: of all sources, inputs are not read;
        ``observed``: micro-batches are observed per operator, so they run eager."""
        emitted = (self.compiling.get() if self.compiling and not observed else None) or self.emitted
        with torch.no_grad():
            ahead = self.ahead.forward.forward(*tensors)[0] if self.ahead.program.forward else ()
        return GradAccumState(self, emitted, (*ahead, *self.constants.of(emitted.program, tensors)))


@dataclass
class GradAccumState:
    """Micro-batches under way. ``emitted``: the program that runs them; ``sums``: source -> its gradient so far."""

    step: GradAccumStep
    emitted: Emitted
    prepared: tuple[Tensor, ...]
    sums: dict[str, Tensor] = field(default_factory=dict)

    def forward(self, tensors: Sequence[Tensor], observed: Forward | None = None) -> tuple[Any, Any, Any]:
        """Run forward of a micro-batch: return (delivered, mutations, saved)."""
        results: tuple[Any, Any, Any] = (observed or self.emitted.forward.forward)(*tensors, *self.prepared)
        return results

    def add(self, gradients: Mapping[str, Tensor], read: Iterable[Tensor]) -> None:
        """Add the gradients of a micro-batch. ``read``: tensors read later, whose memory must not be written."""
        in_use: list[tuple[int, int]] = []
        if not gradients.keys() <= self.sums.keys():
            in_use = [memory_range(tensor) for tensor in (*read, *self.prepared)]
        for source, gradient in gradients.items():
            if source in self.sums:
                self.step.add(source, self.sums[source], gradient)
                continue
            # A compiler may return one tensor for two gradients, so a sum needs memory of its own. Gradients of one
            # message are adjacent in one storage.
            first, last = memory_range(gradient)
            is_shared = any(first < end and start < last for start, end in in_use)
            self.sums[source] = gradient.clone() if is_shared else gradient
            in_use.append((first, last))

    def end(self) -> dict[str, Tensor]:
        """Finish the step: return source -> the gradient of the stored parameter, over all micro-batches."""
        behind = self.step.behind
        self.prepared = ()
        if behind.program.backward:
            with torch.no_grad():
                sums = [self.sums.pop(source) for source in behind.program.gradients]
                gradients = behind.backward.forward(sums)
            self.sums.update(zip(behind.program.gradients, gradients, strict=True))
        return self.sums


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: CallableStep, observed: Observed | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        delivered, written, saved = step.forward(tensors, observed=observed and observed.forward)
        if step.overwritten:  # the end of the call overwrites what backward reads
            saved = tuple(x.clone() if i in step.overwritten else x for i, x in enumerate(saved))
        ctx.step, ctx.num_tensors, ctx.observed = step, len(tensors), observed
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(value for value, flows in zip(delivered, step.differentiable, strict=True) if not flows), *written
        )
        ctx.hooked = _is_hooked()
        if ctx.hooked:
            ctx.save_for_backward(*(value for value in saved if isinstance(value, Tensor)))
            ctx.others = [None if isinstance(value, Tensor) else value for value in saved]
        else:
            ctx.kept = list(saved)
            ctx.versions = [saved[i]._version for i, _ in step.watched]
        return (*_separate(delivered), *written)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph()
        check_ambient(None, "around the backward of a parallel module")
        step: CallableStep = ctx.step
        saved = _take_saved(ctx)
        delivered = cotangents[: step.num_delivered]
        emitted = step.backward_for(tuple(cotangent is not None for cotangent in delivered))
        taken = _in_order(step.emitted, emitted, saved)
        present = [cotangent for cotangent in delivered if cotangent is not None]
        if ctx.observed is not None and ctx.observed.backward is not None:
            results = ctx.observed.backward(emitted, taken, present)
        else:
            results = emitted.backward.forward(taken, *present)
        gradients: list[Tensor | None] = [None] * ctx.num_tensors
        for value, gradient in zip(emitted.program.gradients, results, strict=True):
            if ctx.needs_input_grad[2 + step.positions[value]]:
                gradients[step.positions[value]] = gradient
        return (None, None, *gradients)


def _is_hooked() -> bool:
    """Return whether saved-tensor hooks are set, so that autograd keeps the saved tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _take_saved(ctx: Any) -> list[Any]:
    """Return the values saved by forward and drop them unless autograd retains the graph."""
    if ctx.hooked:
        tensors = iter(ctx.saved_tensors)
        return [next(tensors) if other is None else other for other in ctx.others]
    if ctx.kept is None:
        what = "this step was differentiated already, and its saved tensors were freed"
        fix = "call the module again before the second backward, or pass retain_graph=True to the first"
        raise ShardwiseError(what, fix=fix)
    for (index, name), version in zip(ctx.step.watched, ctx.versions, strict=True):
        if ctx.kept[index]._version != version:
            raise _changed(ctx.step.emitted.program, name)
    kept: list[Any] = ctx.kept
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return list(kept)
    ctx.kept = None
    return kept


def _watched(program: RankProgram, constants: RankProgram | None) -> tuple[tuple[int, str], ...]:
    """Return (position, source or delivered value) of saved values in memory that a caller can change."""
    sources = program.spmd.graph.source_of
    ahead = () if constants is None else constants.forward
    root = memories((*ahead, *program.forward), program.taken if constants is None else sources)
    reachable = {name: name for name in sources} | {root[name]: name for name in reversed(program.delivered)}
    return tuple((i, reachable[root[name]]) for i, name in enumerate(program.saved) if root[name] in reachable)


def _changed(program: RankProgram, name: str) -> ShardwiseError:
    source = program.spmd.graph.source_of.get(name)
    if source is not None:
        return ShardwiseError(
            f"{source.names[0]} was changed in place after forward, but backward needs its earlier values",
            fix="run backward before optimizer.step() or any other change of parameters and buffers",
        )
    op = program.spmd.graph.producer.get(name)  # it may be converted
    maker = f"the output of {op.name} ({op.source})" if op else "an output of the call"
    return ShardwiseError(
        f"{maker} was changed in place after the call, but backward needs its earlier values",
        fix="write out.mul(2) instead of out.mul_(2), or change a copy: out.clone()",
    )


def _in_order(all_saved: Emitted, order: Emitted, saved: list[Any]) -> list[Any]:
    """Return the saved values that a variant of the backward takes, in its order."""
    if all_saved is order:
        return saved
    by_name = dict(zip(all_saved.program.saved, saved, strict=True))
    saved.clear()
    return [by_name[name] for name in order.program.saved]


def _separate(delivered: Sequence[Tensor]) -> list[Tensor]:
    """Return the delivered tensors with duplicates and views detached. Autograd identifies tensors by identity, and
    outputs may be changed in place (``_watched`` detects it, since versions belong to the memory)."""
    seen: set[int] = set()
    separated = []
    for tensor in delivered:
        separated.append(tensor.detach() if id(tensor) in seen or tensor._is_view() else tensor)
        seen.add(id(tensor))
    return separated


# ----------------------------------------------------------------------------------------------------------------------
# Cache a program's hoisted constants (``programs.hoist_constants``) between steps, on this rank. They are computed at
# the first call, and again when a buffer they depend on is another tensor, has other memory, or was written: PyTorch
# counts writes to a tensor and its views. Uncounted writes go unnoticed: those through ``.data``, NumPy or a pointer.
# Use ``buffer.copy_(...)`` under ``torch.no_grad()`` instead.


@dataclass(frozen=True, slots=True)
class _SourceVersion:
    """A source as it was read. Holds the tensor and its memory, so that no other can get the same id or address."""

    tensor: Tensor
    version: int
    memory: UntypedStorage
    place: int

    @staticmethod
    def of(tensor: Tensor) -> _SourceVersion:
        return _SourceVersion(tensor, tensor._version, tensor.untyped_storage(), tensor.data_ptr())

    def is_still(self, tensor: Tensor) -> bool:
        return self.tensor is tensor and self.version == tensor._version and self.place == tensor.data_ptr()


@dataclass
class Constants:
    """The constants of a program. ``program``: computes them, emitted by ``emit`` on first use. ``tensors``: by
    name."""

    program: RankProgram
    emit: Callable[[RankProgram], Emitted]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _run: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]] | None = None
    _seen: tuple[_SourceVersion, ...] = ()

    def __post_init__(self) -> None:
        read = {name for instruction in self.program.forward for name in instruction.operands} & fixed_sources(
            self.program.spmd
        )
        self.positions = [i for i, source in enumerate(self.program.spmd.graph.sources) if source.value in read]

    def of(self, program: RankProgram, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the constants that a variant of the program takes. ``tensors``: of all sources."""
        if not self.program.delivered:
            return ()
        read = [tensors[i] for i in self.positions]
        if any(tensor.is_inference() for tensor in read):  # PyTorch counts no writes to these
            self.forget()
            tensors_of = self._make(tensors)
        else:
            same = len(self._seen) == len(read) and all(map(_SourceVersion.is_still, self._seen, read))
            if not self.tensors or not same:
                self.forget()  # free them before the new ones are allocated
                self.tensors = self._make(tensors)
                self._seen = tuple(map(_SourceVersion.of, read))
            tensors_of = self.tensors
        return tuple(tensors_of[name] for name in program.given if name in tensors_of)

    def forget(self) -> None:
        self.tensors, self._seen = {}, ()

    def _make(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        if self._run is None:
            self._run = self.emit(self.program).forward.forward
        with torch.inference_mode(False), torch.no_grad():
            delivered, _, _ = self._run(*tensors)
        return dict(zip(self.program.delivered, delivered, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Run the halves of a step node by node, each node through an observer: for profiles and checks of values.


@dataclass(frozen=True)
class Half:
    """An emitted instruction list. ``part``: ``"forward"``, ``"backward"``, or ``ONCE`` for work of a whole step."""

    module: fx.GraphModule
    program: RankProgram
    instructions: Sequence[Instruction]
    part: str
    is_backward: bool

    def target(self, node: fx.Node) -> Any:
        """Return the module that a node calls, or None."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def run(self, observer: Observer, *args: Any) -> Any:
        """Run the list with ``args``, as the module's ``forward`` does."""
        observer.begin(self)
        return _Interpreter(self, observer).run(*args)


class Observer:
    """Sees every node of the halves that it observes."""

    def begin(self, half: Half) -> None:
        """Note that a half starts."""

    def run(self, node: fx.Node, half: Half, values: Mapping[fx.Node, Any], call: Callable[[], Any]) -> Any:
        """Call ``call`` once and return its result. ``values``: those that later nodes still need."""
        return call()

    def add(self, source: str, total: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of a micro-batch to the sum of a source."""
        total.add_(gradient)


class _Interpreter(fx.Interpreter):
    def __init__(self, half: Half, observer: Observer) -> None:
        super().__init__(half.module)
        self.extra_traceback = False  # fx would add nodes of its own to the errors of operators
        self.half, self.observer = half, observer

    def run_node(self, n: fx.Node) -> Any:
        return self.observer.run(n, self.half, self.env, partial(super().run_node, n))


def halves_of(emitted: Emitted) -> tuple[Half, Half]:
    """Return forward and backward of an emitted program."""
    program = emitted.program
    return (
        Half(emitted.forward, program, program.forward, "forward", False),
        Half(emitted.backward, program, program.backward, "backward", True),
    )


@contextmanager
def observed(step: CallableStep | GradAccumStep, observer: Observer, others: Iterable[Half] = ()) -> Iterator[None]:
    """Within the context run all halves of a step, and ``others``, through an observer, uncompiled."""
    halves = [*halves_of(step.emitted), *others]
    if isinstance(step, GradAccumStep):
        ahead, behind = step.ahead, step.behind
        halves.append(Half(ahead.forward, ahead.program, ahead.program.forward, ONCE, False))
        halves.append(Half(behind.backward, behind.program, behind.program.backward, ONCE, True))
    for half in halves:
        vars(half.module)["forward"] = partial(half.run, observer)
    compiling, step.compiling = step.compiling, None
    if isinstance(step, GradAccumStep):
        add, step.add = step.add, observer.add
    try:
        yield
    finally:
        for half in halves:
            vars(half.module).pop("forward", None)
        step.compiling = compiling
        if isinstance(step, GradAccumStep):
            step.add = add
