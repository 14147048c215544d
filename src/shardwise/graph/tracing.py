"""From a live module to an exported program, without touching the module and without memory.

The module is copied with a *fake* tensor (shape, dtype, strides, no data) in place of every parameter and buffer, and
the copy is exported by ``torch.export`` in non-strict mode: its Python runs once, on fake tensors. Fake tensors claim
to be on the CPU, so small tensors that the model makes from Python numbers keep their data (on meta they would lose
it).

Two things that export does not keep are noted while the Python runs: the user's line of every operator (``UserLines``),
and the region of an annotation (``regions``). Both travel as custom metadata of the traced nodes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from shardwise.errors import CaptureError, ShardwiseError, problem
from shardwise.graph.annotate import Region, recording
from shardwise.graph.fakes import fake_copy, fake_like
from shardwise.graph.functions import functions_as_operators
from shardwise.graph.host_random import host_random_state, reject_host_random
from shardwise.graph.origins import INITIAL, LINE, NOT_USER_CODE
from shardwise.graph.precision import MODELS_OWN, Precision
from shardwise.graph.quiet import quiet
from shardwise.graph.reachable import Reached
from shardwise.graph.reads import Read, reads_of
from shardwise.graph.rejected import CONSTRUCTS, TRANSFORMS
from shardwise.graph.repeats import Repeats, repeated_calls
from shardwise.graph.segments import segments_opened
from shardwise.graph.stand_ins import STAND_INS, cumulative_averages
from shardwise.graph.state import BETWEEN_CALLS, snapshot
from shardwise.graph.trees import constant_key, flatten_output
from shardwise.graph.watching import Watching, watching

_TORCH_MODULES = str(Path(torch.__file__).parent / "nn" / "modules")
_TENSOR_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad)


@dataclass(frozen=True)
class Outcome:
    """What the traced call returned.

    ``spec`` and ``leaves`` describe the user's output: a leaf is ``None`` if it is a tensor (they follow in order),
    else ``(constant,)``. The traced tensors are the tensor leaves, then the loss if ``has_loss`` and it is none of them
    (``loss_position`` says which), then the new values of ``replaced_buffers``. ``changed``: the Python state that the
    call changed.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[Any] | None, ...]
    loss_position: int | None
    replaced_buffers: tuple[str, ...]
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class TwoCalls:
    """What a traced pair of calls returned: tensors and constants of the first, the mark, those of the second.

    ``num_tensors``: of one call. ``same_constants``: whether both returned the same tree with the same constants.
    ``changed``, ``kept_changing``: the Python state that the first call changed, and the second again, as a reader sees
    it; ``of_training``: of the former, parameters and backward hooks.
    """

    num_tensors: int
    same_constants: bool
    changed: str
    kept_changing: str
    of_training: str


@dataclass(frozen=True)
class Traced:
    """An exported call: the program, what it returned, and the annotated regions in order of their numbers.

    ``transformed``: the first line of the model under a transform of torch.func, or ""; ``repeats``: the layers that
    were traced once for several; ``reads``: what the model reads from outside.
    """

    program: ExportedProgram
    outcome: Outcome
    regions: tuple[Region, ...]
    transformed: str
    repeats: Repeats
    reads: tuple[Read, ...] = ()


# (the module's copy, the tensor leaves of the call) -> (output, loss)
Call = Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[Any, torch.Tensor | None]]


class TracedCall(nn.Module):
    """Calls a module with the tensor leaves of its arguments and flattens what it returns."""

    def __init__(self, module: nn.Module, call: Call, report: Callable[[Any], None]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._call = call
        self._report = report  # export resets attributes that change during the call, so the outcome is kept elsewhere

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before, state = _buffers_by_owner(self.module), snapshot(self.module)
        leaves, spec, loss = self._leaves(tensors)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        position = None
        if loss is not None:
            position = next((i for i, leaf in enumerate(outputs) if leaf is loss), None)
            if position is None:
                position = len(outputs)
                outputs.append(loss)
        replaced = []
        for (name, owner, attribute), buffer in before.items():
            now = owner._buffers[attribute]
            if now is not buffer and now is not None:
                replaced.append(name)
                outputs.append(now)
                owner._buffers[attribute] = buffer
        kept = tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves)
        changed = state.changed(snapshot(self.module))
        self._report(Outcome(spec, kept, position, tuple(replaced), changed))
        return tuple(outputs)

    def _leaves(self, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Any], pytree.TreeSpec, torch.Tensor | None]:
        """What a call returns, flattened, and its loss."""
        try:
            output, loss = self._call(self.module, tensors)
        except ShardwiseError:
            raise
        except Exception as error:  # whatever the model raises becomes an error with the model's line
            raise _explained(error) from error
        leaves, spec = flatten_output(output)
        return leaves, spec, loss


class TracedPair(TracedCall):
    """Calls a module twice, with its buffers put back in between: whatever else the first call leaves stays."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = _buffers_by_owner(self.module)
        saved = [buffer.clone() for buffer in before.values()]
        states, trees, results = [snapshot(self.module)], [], []
        for call in range(2):
            leaves, spec, _ = self._leaves(tensors)
            outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            with torch.no_grad():
                for ((_, owner, attribute), buffer), value in zip(before.items(), saved, strict=True):
                    now = owner._buffers[attribute]
                    outputs.append(buffer.clone() if now is None else now.clone())
                    owner._buffers[attribute] = buffer
                    buffer.copy_(value)
            states.append(snapshot(self.module))
            trees.append((spec, [None if isinstance(leaf, torch.Tensor) else constant_key(leaf) for leaf in leaves]))
            results += outputs
            if call == 0:
                num_tensors = len(outputs)
                results.append(torch.ops.shardwise.mark(torch.zeros(()), BETWEEN_CALLS))
        first, again = states[0].changed(states[1]), states[1].changed(states[2])
        self._report(
            TwoCalls(
                num_tensors,
                trees[0] == trees[1],
                states[0].described(first, states[1]),
                states[1].described(states[1].without_tensors(again, states[2]), states[2]),
                states[0].described(states[0].of_training(first, states[1]), states[1]),
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


class UserLines(TorchFunctionMode):
    """Notes the user's line with every operator that is traced while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.transformed = ""  # the first line under a transform of torch.func
        self._saving = saved_tensors_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = user_line(sys._getframe(1))
        if line and not self.transformed and torch._C._functorch.maybe_current_level() is not None:
            self.transformed = line
        if torch.is_inference_mode_enabled():
            raise CaptureError(problem("torch.inference_mode hides its region", source=line, fix="use torch.no_grad"))
        if func is torch.autograd.grad and not (kwargs or {}).get("create_graph"):
            raise CaptureError(
                problem(
                    "torch.autograd.grad inside the model gives a result that its own gradient must not pass",
                    source=line,
                    fix="pass create_graph=True, or take the gradient outside the model",
                )
            )
        if func in _TENSOR_HOOKS and line:
            raise CaptureError(
                problem(
                    f"{func.__name__} in forward: hooks of tensors do not fire under a plan",
                    source=line,
                    fix="write what it does to the gradient as a torch.autograd.Function; hooks of parameters are "
                    "registered before sw.parallelize, outside of forward",
                )
            )
        if saved_tensors_hooks() not in (self._saving, None) and line:
            self._check_saving(line)
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad and not is_fake(arg):
                raise CaptureError(
                    problem(
                        f"a tensor {list(arg.shape)} that requires grad is no parameter of the captured module",
                        source=line,
                        fix="register it as an nn.Parameter of the module; closures and hooks must not hold weights",
                    )
                )
        initial = {INITIAL: True} if getattr(func, "__module__", "") == nn.init.__name__ else {}
        with torch.fx.traceback.annotate({LINE: line, **initial}):
            return STAND_INS.get(func, func)(*args, **(kwargs or {}))

    def _check_saving(self, line: str) -> None:
        """Raises CaptureError for hooks for saved tensors that the model sets; those of torch change no number."""
        pack = saved_tensors_hooks()
        if pack is None or pack.__module__.partition(".")[0] in ("torch", "shardwise"):
            return
        raise CaptureError(
            problem(
                "torch.autograd.graph.saved_tensors_hooks in forward: under a plan they do not see what backward keeps",
                source=line,
                fix="set them around the call of the parallel module, or write a torch.autograd.Function",
            )
        )


def saved_tensors_hooks() -> Any:
    """The function that packs what is saved for backward, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def user_line(frame: FrameType | None) -> str:
    """``"model.py:41"`` of the innermost frame of the user's model, or "".

    Raises CaptureError inside a re-entrant checkpoint.
    """
    line, reentrant = "", False
    while frame is not None and frame.f_code is not TracedCall._leaves.__code__:
        name = frame.f_code.co_filename
        if not line and not name.startswith(NOT_USER_CODE):
            line = f"{Path(name).name}:{frame.f_lineno}"
        reentrant |= frame.f_code is CheckpointFunction.forward.__code__
        frame = frame.f_back
    if frame is not None and reentrant:
        what = "re-entrant activation checkpointing hides its gradients"
        raise CaptureError(problem(what, source=line, fix="checkpoint(..., use_reentrant=False)"))
    return "" if frame is None else line  # outside the model: export itself


def trace(
    module: nn.Module,
    examples: tuple[torch.Tensor, ...],
    call: Call,
    annotated: dict[str, Region],
    precision: Precision = MODELS_OWN,
    *,
    repeats: bool = True,
    code: Reached | None = None,
) -> Traced:
    """Exports ``call(copy of module, examples)``, which returns (output, loss). ``annotated``: module path -> region;
    ``precision``: that of the copy's parameters; ``repeats``: equal layers are traced once; ``code``: what may run.

    Raises CaptureError with the user's line for whatever export rejects, and for random numbers drawn outside torch.
    """
    before = host_random_state()
    export = partial(_export, module, examples, call, annotated, precision)

    def again(watching: Watching) -> Traced:
        return _export(module, examples, _inside(watching, call), annotated, precision)

    try:
        traced = (_with_repeats(export) if repeats else None) or export()
        reject_host_random(before, again)
        if code is not None:
            traced = replace(traced, reads=reads_of(code, again))
    except ShardwiseError:
        raise
    except Exception as error:  # whatever a model or export raises becomes an error with the model's line
        raise _explained(error) from error
    return traced


def _inside(context: Callable[[], AbstractContextManager[None]], call: Call) -> Call:
    def run(module: nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor | None]:
        with context():
            return call(module, tensors)

    return run


def trace_pair(
    module: nn.Module, examples: tuple[torch.Tensor, ...], call: Call, precision: Precision
) -> tuple[ExportedProgram, TwoCalls]:
    """Exports two calls after each other. Raises CaptureError for what the second call rejects."""
    try:
        program, outcome, *_ = _export_as(TracedPair, module, examples, call, {}, precision)
    except ShardwiseError:
        raise
    except Exception as error:  # whatever a model or export raises becomes an error with the model's line
        raise _explained(error) from error
    assert isinstance(outcome, TwoCalls)
    return program, outcome


def line_of_change(
    module: nn.Module,
    examples: tuple[torch.Tensor, ...],
    call: Call,
    changed: tuple[str, ...],
    precision: Precision,
) -> str:
    """The first line of the model after which one of these places of its Python state is another."""
    lines: list[str] = []

    def watched(copy: nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, torch.Tensor | None]:
        def state() -> object:
            leaves = snapshot(copy).leaves
            return [leaves.get(place) for place in changed]

        with watching(lines, state):
            return call(copy, tensors)

    _export(module, examples, watched, {}, precision)
    return lines[0] if lines else ""


def _with_repeats(export: Callable[[Repeats], Traced]) -> Traced | None:
    """The export in which repeated layers are traced once; None where they are not what they look like, or where that
    alone may be what fails."""
    found = Repeats()
    try:
        traced = export(found)
    except Exception:  # whatever it raises: the plain export raises it, too, or shows that the repeats were the cause
        if not found.paths:
            raise
        return None
    return None if found.failed else traced


def _export(
    module: nn.Module,
    examples: tuple[torch.Tensor, ...],
    call: Call,
    annotated: dict[str, Region],
    precision: Precision,
    repeats: Repeats | None = None,
) -> Traced:
    program, outcome, regions, line = _export_as(TracedCall, module, examples, call, annotated, precision, repeats)
    return Traced(program, outcome, regions, line, repeats or Repeats())


def _export_as(
    kind: type[TracedCall],
    module: nn.Module,
    examples: tuple[torch.Tensor, ...],
    call: Call,
    annotated: dict[str, Region],
    precision: Precision,
    repeats: Repeats | None = None,
) -> tuple[ExportedProgram, Any, tuple[Region, ...], str]:
    mode = FakeTensorMode()
    outcomes: list[Any] = []
    traced = kind(fake_copy(module, mode, precision), call, outcomes.append)
    inputs = tuple(fake_like(example, mode) for example in examples)
    lines = UserLines()
    repeating = nullcontext() if repeats is None else repeated_calls(traced.module, repeats, annotated, user_line)
    with quiet(), recording() as recorder, torch.device("cpu"), cumulative_averages(), repeating:
        for path, region in annotated.items():
            recorder.cover(traced.module.get_submodule(path), region)
        replaced, segments = functions_as_operators(user_line), segments_opened(traced.module)
        called = torch.enable_grad(), precision.around_call()
        with torch.fx.traceback.preserve_node_meta(), lines, replaced, segments, called[0], called[1]:
            try:
                program = torch.export.export(traced, inputs, strict=False)
            except AssertionError as error:  # torch 2.11, of what a transform left behind
                if not lines.transformed:
                    raise
                what = f"{TRANSFORMS} in forward can not be captured"
                raise CaptureError(problem(what, source=lines.transformed, fix=CONSTRUCTS[TRANSFORMS])) from error
    return program, outcomes[-1], tuple(recorder.regions), lines.transformed


_DATA_DEPENDENT = {
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "UserError",
}


def _explained(error: Exception) -> CaptureError:
    """The error as the user should see it: the innermost line of the model, and the mend."""
    source = _line_of(error)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if type(error).__name__ in _DATA_DEPENDENT or isinstance(
        error.__cause__, torch._subclasses.fake_tensor.DataDependentOutputException
    ):
        fix = "compute with tensors: torch.where for a choice, a mask for an index; or decide by Python numbers"
        if any(
            Path(frame.filename).parent.name == "distributions" for frame in traceback.extract_tb(error.__traceback__)
        ):
            fix = "a distribution checks the data of its parameters: pass it validate_args=False"
        return CaptureError(
            problem(
                f"the model's control flow, or a size, depends on the data of a tensor ({first})",
                source=source,
                fix=fix,
            )
        )
    fix = "the call must run on fake (data-free) CPU tensors, without choosing a device (.cuda())"
    if "Disabling autocast" in first:
        what = "the model calls torch.autocast for a device that is not here, where it does nothing"
        fix = "name the device of the tensors, torch.autocast(x.device.type, ...), or plan where that device is"
        return CaptureError(problem(what, source=source, fix=fix))
    used = next((name for name in map(_construct, _files_of(error)) if name), "")
    if used:
        return CaptureError(
            problem(f"{used} in forward can not be captured ({first})", source=source, fix=CONSTRUCTS[used])
        )
    return CaptureError(
        problem(f"the model can not be captured: {type(error).__name__}: {first}", source=source, fix=fix)
    )


def _files_of(error: BaseException | None) -> list[str]:
    """The files that an error, and those that it came from, passed through."""
    files: list[str] = []
    while error is not None:
        files += [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__ or error.__context__
    return files


def _construct(filename: str) -> str:
    """Which of ``CONSTRUCTS`` a file of torch belongs to, or ""."""
    path = Path(filename)
    if path.parent.name == "_higher_order_ops":
        return next((name for name in CONSTRUCTS if name.rpartition(".")[2] == path.stem), "")
    return TRANSFORMS if path.parent.name == "_functorch" and path.stem in ("vmap", "eager_transforms", "apis") else ""


def _line_of(error: BaseException) -> str:
    """The innermost user line of a traceback; that of a torch module if the user called it from outside the model."""
    line = module_line = ""
    inside = False
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        here = f"{Path(code.co_filename).name}:{step.tb_lineno}"
        if code is TracedCall._leaves.__code__:
            inside = True
        elif inside and not code.co_filename.startswith(NOT_USER_CODE):
            line = here
        elif inside and code.co_filename.startswith(_TORCH_MODULES):
            module_line = here
        step = step.tb_next
    return line or module_line
