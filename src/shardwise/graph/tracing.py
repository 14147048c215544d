"""Export of a live module as a program, without changing the module and without memory for data.

The module is copied with a *fake* tensor (shape, dtype, strides, no data) in place of every parameter and buffer, and
the copy is exported by ``torch.export`` in non-strict mode: its Python runs once, on fake tensors. Fake tensors claim
to be on the CPU, so small tensors that the model makes from Python numbers keep their data (on meta they would lose
it).

Two things that export drops are recorded while the Python runs: the user's line of every operator (``UserLines``), and
the region of an annotation (``regions``). Both travel as custom metadata of the traced nodes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx.config
import torch.fx.traceback
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError, CaptureWarning, ShardwiseError, warn_user
from shardwise.graph.annotate import AnnotatedRegion, record_annotations
from shardwise.graph.code_reachability import ReachableCode
from shardwise.graph.composites import composites_written_out
from shardwise.graph.explained import explain_export_error, flex_attention_error
from shardwise.graph.fakes import fake_copy, fake_like
from shardwise.graph.function_operator import functions_as_operators
from shardwise.graph.impure_reads import ImpureRead, host_random_state, reads_of, reject_host_random
from shardwise.graph.inner_gradients import transforms_as_operators
from shardwise.graph.module_state import BETWEEN_CALLS, snapshot_state
from shardwise.graph.rejected import CONSTRUCTS, TRANSFORMS
from shardwise.graph.repeats import TracedRepeats, trace_repeats_once
from shardwise.graph.segments import open_segments
from shardwise.graph.stand_ins import cumulative_averages, grouped_experts
from shardwise.graph.step_precision import MODELS_OWN, Precision
from shardwise.graph.trees import constant_key, flatten_output, output_names
from shardwise.graph.user_lines import UserLines, Watching, run_model, user_line, watch_changes

_STACKS = "do_not_emit_stack_traces"
_NOISY_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export")


@dataclass(frozen=True)
class CallOutcome:
    """The results of the traced call.

    ``spec``, ``names`` and ``leaves`` describe the user's output: a leaf is ``None`` if it is a tensor (they follow in
    order), else ``(constant,)``. The traced tensors are the tensor leaves, then the loss if ``has_loss`` and it is none
    of them (``loss_position`` is its index), then the new values of ``replaced_buffers``. ``changed``: the Python state
    that the call changed; ``registered``: parameters, buffers and backward hooks among it, as text.
    """

    spec: pytree.TreeSpec
    names: tuple[str, ...]
    leaves: tuple[tuple[Any] | None, ...]
    loss_position: int | None
    replaced_buffers: tuple[str, ...]
    changed: tuple[str, ...] = ()
    registered: str = ""


@dataclass(frozen=True)
class TwoCalls:
    """The results of a traced pair of calls: tensors and constants of the first, the mark, those of the second.

    ``num_tensors``: of one call. ``same_constants``: whether both returned the same tree with the same constants.
    ``changed``, ``kept_changing``: the Python state that the first call changed, and the second again, as text.
    """

    num_tensors: int
    same_constants: bool
    changed: str
    kept_changing: str


@dataclass(frozen=True)
class ExportedCall:
    """An exported call: the program, what it returned (``CallOutcome``, ``TwoCalls``), the annotated regions by number.

    ``transformed``: the first line of the model under a transform of torch.func, or ""; ``repeats``: the layers that
    were traced once for several; ``reads``: what the model reads from outside.
    """

    program: ExportedProgram
    outcome: Any
    regions: tuple[AnnotatedRegion, ...]
    transformed: str
    repeats: TracedRepeats
    reads: tuple[ImpureRead, ...] = ()


# (the module's copy, the tensor leaves of the call) -> (output, loss)
Call = Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[Any, torch.Tensor | None]]


@dataclass(frozen=True)
class ModuleCall:
    """A module and its call: the tensors, the calling function, the precision of its parameters; ``code``: the code it
    may run."""

    module: nn.Module
    examples: tuple[torch.Tensor, ...]
    call: Call
    precision: Precision = MODELS_OWN
    code: ReachableCode = field(default_factory=ReachableCode)

    def inside(self, context: Callable[[], AbstractContextManager[None]]) -> ModuleCall:
        """Return the same call inside a context."""

        def run(module: nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor | None]:
            with context():
                return self.call(module, tensors)

        return replace(self, call=run)


class TracedCall(nn.Module):
    """Calls a module with the tensor leaves of its arguments and flattens what it returns."""

    def __init__(self, module: nn.Module, called: ModuleCall, report: Callable[[Any], None]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._called = called
        self._report = report  # export resets attributes that change during the call, so the outcome is kept elsewhere

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before, state = _buffers_by_owner(self.module), snapshot_state(self.module, self._called.code.values)
        leaves, spec, names, loss = self._leaves(tensors)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        position = None
        if loss is not None:
            position = next((i for i, leaf in enumerate(outputs) if leaf is loss), None)
            if position is None:
                position = len(outputs)
                outputs.append(loss)
        replaced = []
        after = snapshot_state(self.module, self._called.code.values)
        changed = state.changed(after)
        for (name, owner, attribute), buffer in before.items():
            now = owner._buffers.get(attribute)
            if now is not buffer and now is not None:
                replaced.append(name)
                outputs.append(now)
                owner._buffers[attribute] = buffer
        kept = tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves)
        registered = state.described(state.registered(changed, after), after)
        self._report(CallOutcome(spec, names, kept, position, tuple(replaced), changed, registered))
        return tuple(outputs)

    def _leaves(
        self, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[list[Any], pytree.TreeSpec, tuple[str, ...], torch.Tensor | None]:
        try:
            with composites_written_out():
                output, loss = run_model(self._called.call, self.module, tensors)
        except ShardwiseError as error:
            if (instead := flex_attention_error(error)) is not None:
                raise instead from error
            raise
        except Exception as error:  # whatever the model raises becomes an error with the model's line
            raise explain_export_error(error) from error
        leaves, spec = flatten_output(output)
        return leaves, spec, output_names(output), loss


class TracedPair(TracedCall):
    """Calls a module twice. Buffers are restored in between; all other state of the first call stays."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = _buffers_by_owner(self.module)
        saved = [buffer.clone() for buffer in before.values()]
        states, trees, results = [snapshot_state(self.module, self._called.code.values)], [], []
        for call in range(2):
            leaves, spec, *_ = self._leaves(tensors)
            outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            with torch.no_grad():
                for ((_, owner, attribute), buffer), value in zip(before.items(), saved, strict=True):
                    now = owner._buffers[attribute]
                    outputs.append(buffer.clone() if now is None else now.clone())
                    owner._buffers[attribute] = buffer
                    buffer.copy_(value)
            states.append(snapshot_state(self.module, self._called.code.values))
            trees.append((spec, [None if isinstance(leaf, torch.Tensor) else constant_key(leaf) for leaf in leaves]))
            results += outputs
            if call == 0:
                num_tensors = len(outputs)
                results.append(torch.ops.shardwise.mark(torch.zeros(()), BETWEEN_CALLS))
        first, second = states[0].changed(states[1]), states[1].changed(states[2])
        self._report(
            TwoCalls(
                num_tensors,
                trees[0] == trees[1],
                states[0].described(first, states[1]),
                states[1].described(states[1].without_tensors(second, states[2]), states[2]),
            )
        )
        return tuple(results)


def _buffers_by_owner(module: nn.Module) -> dict[tuple[str, nn.Module, str], torch.Tensor]:
    return {
        (f"{path}.{attribute}" if path else attribute, owner, attribute): buffer
        for path, owner in module.named_modules()
        for attribute, buffer in owner._buffers.items()
        if buffer is not None
    }


def trace(called: ModuleCall, annotated: dict[str, AnnotatedRegion], *, repeats: bool = True) -> ExportedCall:
    """Export a call. ``annotated``: module path -> region; ``repeats``: trace equal layers once.

    Raises CaptureError with the user's line for whatever export rejects, and for random numbers drawn outside torch.
    """
    before = host_random_state()
    export = partial(_export, called, annotated)

    def retrace(watching: Watching) -> ExportedCall:
        return _export(called.inside(watching), annotated)

    try:
        traced = (_with_repeats(export) if repeats else None) or export()
        reject_host_random(before, retrace)
        return replace(traced, reads=reads_of(called.code, retrace))
    except ShardwiseError:
        raise
    except Exception as error:  # whatever a model or export raises becomes an error with the model's line
        raise explain_export_error(error) from error


def trace_pair(called: ModuleCall) -> tuple[ExportedProgram, TwoCalls]:
    """Export two consecutive calls. Raises CaptureError for what the second call rejects."""
    try:
        traced = _export(called, {}, kind=TracedPair)
    except ShardwiseError:
        raise
    except Exception as error:  # whatever a model or export raises becomes an error with the model's line
        raise explain_export_error(error) from error
    assert isinstance(traced.outcome, TwoCalls)
    return traced.program, traced.outcome


def line_of_change(called: ModuleCall, changed: tuple[str, ...]) -> str:
    """Return the first line of the model after which one of these places of its Python state differs."""
    lines: list[str] = []

    def watched(copy: nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor | None]:
        def state() -> object:
            leaves = snapshot_state(copy, called.code.values).leaves
            return [leaves.get(place) for place in changed]

        with watch_changes(lines, state):
            return called.call(copy, tensors)

    _export(replace(called, call=watched), {})
    return lines[0] if lines else ""


def _with_repeats(export: Callable[[TracedRepeats], ExportedCall]) -> ExportedCall | None:
    """Export with repeated layers traced once. None if layers differ after all, or if the export fails and the repeats
    may be the cause."""
    repeats = TracedRepeats()
    try:
        traced = export(repeats)
    except Exception:  # whatever it raises: the plain export raises it, too, or shows that the repeats were the cause
        if not repeats.paths:
            raise
        return None
    return None if repeats.failed else traced


def _export(
    called: ModuleCall,
    annotated: dict[str, AnnotatedRegion],
    repeats: TracedRepeats | None = None,
    kind: type[TracedCall] = TracedCall,
) -> ExportedCall:
    mode = FakeTensorMode()
    outcomes: list[Any] = []
    traced = kind(fake_copy(called.module, mode, called.precision), called, outcomes.append)
    inputs = tuple(fake_like(example, mode) for example in called.examples)
    lines = UserLines()
    repeating = nullcontext() if repeats is None else trace_repeats_once(traced.module, repeats, annotated, user_line)
    with (
        quiet_export(),
        record_annotations() as recorder,
        torch.device("cpu"),
        cumulative_averages(),
        grouped_experts(),
        transforms_as_operators(),
        repeating,
    ):
        for path, region in annotated.items():
            recorder.cover(traced.module.get_submodule(path), region)
        replaced, segments = functions_as_operators(user_line), open_segments(traced.module)
        around = torch.enable_grad(), called.precision.around_call()
        with torch.fx.traceback.preserve_node_meta(), lines, replaced, segments, around[0], around[1]:
            try:
                program = torch.export.export(traced, inputs, strict=False)
            except AssertionError as error:  # torch 2.11, of what a transform left behind
                if not lines.transformed:
                    raise
                what = f"{TRANSFORMS} in forward cannot be captured"
                raise CaptureError(what, source=lines.transformed, fix=CONSTRUCTS[TRANSFORMS]) from error
    if lines.caught:
        raise lines.caught[0]
    repeats = repeats or TracedRepeats()
    repeats.failed |= lines.has_gradients and bool(
        repeats.paths
    )  # gradients do not flow through the results of a repeat
    for question in lines.asked:
        what = f"{question}: the program uses the answer of the captured call"
        fix = "pass inputs with the same strides in every call, or remove the check"
        warn_user(f"{what}, whatever the strides of later inputs; {fix}", CaptureWarning)
    return ExportedCall(
        program,
        outcomes[-1],
        tuple(recorder.regions),
        lines.transformed,
        repeats,
    )


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence logs of errors that export also raises, and warnings about what shardwise handles. Export without a stack
    per node, which takes time; ``user_lines`` records the relevant line. A torch without this setting still collects
    them."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    disabled = [logger.disabled for logger in loggers]
    config: Any = torch.fx.config
    before = getattr(config, _STACKS, False)
    setattr(config, _STACKS, True)
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch(\.|$)")
            warnings.filterwarnings("ignore", message=r".*(attribute|assigned) .*export.*")
            warnings.filterwarnings("error", message=r".*Disabling autocast.*")  # CUDA's, where there is no CUDA
            yield
    finally:
        for logger, was in zip(loggers, disabled, strict=True):
            logger.disabled = was
        setattr(config, _STACKS, before)
