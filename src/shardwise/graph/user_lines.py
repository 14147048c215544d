"""Recording of the user's line of every operator while the model runs, and checks of what it does between operators.

A model that catches an error of capture would take another path than on one device, where nothing is raised. So such
errors are recorded (``UserLines.caught``) even if caught.

``watch_changes`` finds the line that changes some state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from shardwise.errors import CaptureError
from shardwise.garbage_collector import without_gc
from shardwise.graph.inner_gradients import (
    LEAF,
    NO_GRAD,
    called_by_transform,
    check_forward_mode,
    is_in_transform,
    traced_gradient,
)
from shardwise.graph.origins import INITIAL, LINE, NOT_USER_CODE, is_of_models
from shardwise.graph.rejected import READ_A_NUMBER
from shardwise.graph.stand_ins import STAND_INS

_TENSOR_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad)
_ASK_FOR_STRIDES = (torch.Tensor.is_contiguous, torch.Tensor.stride)
# The descriptors.
_SHAPE, _GRAD_FN, _REQUIRES_GRAD = torch.Tensor.shape, torch.Tensor.grad_fn, torch.Tensor.requires_grad
# What Python, numpy and others read the data of a tensor by: a tensor without data refuses it, each in its own way.
_READS = frozenset(
    {
        *("__array__", "__complex__", "__deepcopy__", "__dlpack__", "__float__", "__format__", "__index__", "__int__"),
        *("__reduce_ex__", "allclose", "data_ptr", "numpy", "storage", "untyped_storage"),
    }
)
_OWN = ("torch", "shardwise")  # packages whose hooks of saved tensors change no number
DATA_DEPENDENT = frozenset(
    {"GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException", "UserError"}
)


def run_model(call: Callable[..., Any], module: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Call ``call(module, tensors)``. Its frame is the outermost one of the model's."""
    _running.append(tensors)
    try:
        return call(module, tensors)
    finally:
        _running.pop()


# The inputs of the models running now; without any, no frame needs to be inspected.
_running: list[tuple[torch.Tensor, ...]] = []


class UserLines(TorchFunctionMode):
    """Function mode that records the user's line with every operator that is traced while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.transformed = ""  # the first line under a transform of torch.func
        self.has_gradients = False  # whether the model calls torch.autograd.grad
        self.caught: list[CaptureError] = []  # if the model continues, it caught them
        self.asked: dict[str, None] = {}  # what the model asks of its inputs that programs do not look at
        self._saving = saved_tensors_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _running:  # export looks at every parameter, through all function modes
            return func(*args, **(kwargs or {}))
        line = user_line(sys._getframe(1))
        try:
            return self._called(func, args, kwargs, line)
        except Exception as error:
            self._raised(func, error, line)
            raise

    def _called(self, func: Any, args: Any, kwargs: Any, line: str) -> Any:
        if line and not self.transformed and is_in_transform():
            self.transformed = line
        if refusal := self._refusal(func, args, kwargs or {}, line):
            what, fix = refusal
            raise CaptureError(what, source=line, fix=fix)
        if func in _ASK_FOR_STRIDES and line and any(args[0] is x for x in _running[-1]):
            self.asked[f"{line} asks for the memory layout of an input ({func.__name__})"] = None
        marks: dict[str, Any] = {LINE: line}
        if getattr(func, "__module__", "") == nn.init.__name__:
            marks[INITIAL] = True
        if is_in_transform() and not torch.is_grad_enabled():
            marks[NO_GRAD] = True
        with torch.fx.traceback.annotate(marks):
            if func is torch.autograd.grad and not called_by_transform():
                self.has_gradients = True
                return traced_gradient(*args, **(kwargs or {}))
            if (sets := _sets_requires_grad(func, args, kwargs or {})) is not None:
                LEAF(args[0], sets)
                return args[0]
            result = STAND_INS.get(func, func)(*args, **(kwargs or {}))
            if func is not torch.Tensor.detach:
                check_forward_mode((args, kwargs), result, line)
            # Of factories, torch.zeros(..., requires_grad=True).
            is_variable = isinstance(result, torch.Tensor) and bool(kwargs) and kwargs.get("requires_grad") is True
            return LEAF(result, True) if is_variable and is_fake(result) and not is_in_transform() else result

    def _refusal(self, func: Any, args: Any, kwargs: Any, line: str) -> tuple[str, str] | None:
        """Return what cannot be captured about a call and a fix, or None."""
        if torch.is_inference_mode_enabled():
            return "torch.inference_mode hides its region", "use torch.no_grad"
        if func is torch.autograd.grad and is_in_transform() and not called_by_transform():
            what = "torch.autograd.grad inside of a function that torch.func.vmap transforms"
            return (
                what,
                "use torch.func.grad there (or jacrev, vjp); hand the function that vjp returned to vmap itself",
            )
        if func is torch.Tensor.backward and line:
            fix = "return the loss (a sum of several), or use torch.autograd.grad(..., create_graph=True)"
            return "backward in forward: a plan differentiates the loss once, after forward", fix
        if func in _TENSOR_HOOKS and line:
            return (
                f"{func.__name__} in forward: hooks of tensors do not fire under a plan",
                "write the change of the gradient as a torch.autograd.Function; register hooks of parameters before "
                "sw.parallelize, outside of forward",
            )
        if getattr(func, "__self__", None) is _GRAD_FN and line and _asks_for_nodes(sys._getframe(2)):
            fix = "use a torch.autograd.Function to change gradients; check requires_grad, not grad_fn"
            return "grad_fn in forward: hooks of autograd nodes do not fire under a plan", fix
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            return (
                "a packed sequence (pack_padded_sequence, pack_sequence) has sizes that depend on the values of its "
                "lengths",
                "call the layer on the padded batch (pad_sequence), whose outputs up to a length are the same in a "
                "layer of one direction; mask the rest: out * (torch.arange(out.shape[1]) < lengths[:, None])[..., "
                "None]; and gather the last states: out[torch.arange(len(out)), lengths - 1]. Read backward, a "
                "sequence is flipped within its length by gather first",
            )
        pack = saved_tensors_hooks()
        if pack not in (self._saving, None) and line and pack.__module__.partition(".")[0] not in _OWN:
            fix = "set them around the call of the parallel module, or write a torch.autograd.Function"
            return "torch.autograd.graph.saved_tensors_hooks in forward: they do not work under a plan", fix
        for arg in () if getattr(func, "__self__", None) is _SHAPE else args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad and not is_fake(arg):
                return (
                    f"a tensor {list(arg.shape)} that requires grad is not a parameter of the captured module",
                    "register it as an nn.Parameter of the module, or compute it in forward; do not keep weights, or "
                    "methods of modules (m.forward = around(m.forward)), in closures or hooks",
                )
        return None

    def _raised(self, func: Any, error: Exception, line: str) -> None:
        """Record an error that one device would not raise."""
        name = getattr(func, "__name__", "")
        if isinstance(error, CaptureError):
            self.caught.append(error)
        elif line and (name in _READS or type(error).__name__ in DATA_DEPENDENT):
            what = f"{name.strip('_')} reads the data of a tensor, which does not exist during capture"
            self.caught.append(CaptureError(what, source=line, fix=READ_A_NUMBER, section="tensor-values"))


def _sets_requires_grad(func: Any, args: Any, kwargs: Any) -> bool | None:
    """Return what a call sets ``requires_grad`` of a value to, or None if it sets nothing."""
    is_setter = getattr(func, "__self__", None) is _REQUIRES_GRAD and func.__name__ == "__set__"
    if not (is_setter or func is torch.Tensor.requires_grad_) or isinstance(args[0], nn.Parameter):
        return None
    value = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    changes = value != args[0].requires_grad and args[0].is_floating_point() and is_fake(args[0])
    return value if changes and not is_in_transform() else None


def saved_tensors_hooks() -> Any:
    """Return the function that packs what is saved for backward, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _asks_for_nodes(frame: FrameType | None) -> bool:
    """Return whether the model itself asks for an autograd node, rather than torch (to print a tensor, say). Frames of
    modes are skipped."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return bool(_user_file(file)) or file == torch.autograd.graph.__file__


@cache
def _user_file(filename: str) -> str:
    return "" if filename.startswith(NOT_USER_CODE) else Path(filename).name


def user_line(frame: FrameType | None) -> str:
    """Return ``"model.py:41"`` for the innermost frame of the user's model, or "".

    Raises CaptureError inside a re-entrant checkpoint.
    """
    if not _running:
        return ""
    line, reentrant, outermost, checkpoint = "", False, run_model.__code__, CheckpointFunction.forward.__code__
    while frame is not None and (code := frame.f_code) is not outermost:
        if not line and (name := _user_file(code.co_filename)):
            line = f"{name}:{frame.f_lineno}"
        reentrant |= code is checkpoint
        frame = frame.f_back
    if frame is not None and reentrant:
        what = "re-entrant activation checkpointing hides gradients from capture"
        raise CaptureError(what, source=line, fix="checkpoint(..., use_reentrant=False)")
    return "" if frame is None else line  # outside the model: export itself


Watching = Callable[[], AbstractContextManager[None]]  # the context in which a watched model runs


@contextmanager
def watch_changes(lines: list[str], state: Callable[[], object]) -> Iterator[None]:
    """Appends the ``"model.py:41"`` after which the state differs from before it. Slow: for what is refused."""
    last, here = state(), ""

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last, here
        if not is_of_models(frame.f_code.co_filename):
            return None
        now = state()
        if now != last and here:
            lines.append(here)
        last, here = now, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return watch

    before = sys.gettrace()
    with without_gc():
        sys.settrace(watch)
        try:
            yield
        finally:
            sys.settrace(before)
    if state() != last and here:  # by the last line that ran
        lines.append(here)
