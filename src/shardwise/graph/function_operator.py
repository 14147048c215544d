"""``torch.autograd.Function`` as one operator: ``shardwise::function`` applies the class that it names.

While a model is traced, the forward of every function is replaced by a call of this operator, so that neither its
forward nor its backward is traced through. Running the operator runs the class itself: autograd records its backward,
and tracing below autograd (``programs.vjp``) sees the kernels of both. A graph names a class by module and qualified
name, which every process with the model can resolve.

A function that cannot be one operator is refused by the name of its class. The call is tried on fake tensors, forward
and backward, and must neither write into its operands, nor draw random numbers, nor depend on data.
"""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.traceback
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from shardwise.dispatch_mode import OpRecorder
from shardwise.errors import CaptureError, ShardwiseError
from shardwise.graph.operator_library import composite
from shardwise.graph.origins import LINE
from shardwise.graph.schema import is_random
from shardwise.graph.to_float64 import call_in_float64
from shardwise.graph.trees import constant_key, is_constant, type_name

_SLOT = ...  # stands for a tensor in a function's results
_KNOWN: dict[str, type[Function]] = {}
_FIX = (
    "write its forward with ordinary operators, or call it inside a torch.library.custom_op that register_autograd "
    "gives the same backward; sw.rule says how that operator may be split"
)


def _function(operands: Sequence[Tensor], function: str, arguments: str, lowest: torch.dtype) -> list[Tensor]:
    """Return the tensors that a function returns. ``lowest``: float64 if casts to lower precision are widened."""
    call_args = fill_operands(arguments, operands)
    if lowest == torch.float64:
        with _Widened():
            results = function_class(function).apply(*call_args)
    else:
        results = function_class(function).apply(*call_args)
    return [r for r in (results if isinstance(results, tuple) else (results,)) if isinstance(r, Tensor)]


FUNCTION = composite(_function)


class _Widened(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_in_float64(func, args, kwargs or {})


def function_class(name: str) -> type[Function]:
    """Return the class of this name in this process. Raises ShardwiseError if there is none, or several."""
    if name not in _KNOWN:
        kinds = [kind for kind in _subclasses(Function) if _name(kind) == name]
        if not kinds:
            raise ShardwiseError(
                f"this process has no torch.autograd.Function {name}", fix="import its module on every rank"
            )
        _check_alike(name, kinds, "")
        _KNOWN[name] = kinds[-1]
    return _KNOWN[name]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return [sub for subclass in direct for sub in (subclass, *_subclasses(subclass))]


def _check_alike(name: str, kinds: Sequence[type], line: str) -> None:
    """Raise CaptureError for classes that share a name but differ: a graph could not tell them apart."""
    if len({_content(kind) for kind in kinds}) > 1:
        raise CaptureError(
            f"several different torch.autograd.Functions are called {name}",
            source=line,
            fix="give them different names",
        )


def _content(kind: type) -> object:
    def of(method: Any) -> object:
        cells = getattr(method, "__closure__", None) or ()
        return getattr(method, "__code__", method), tuple(_cell(cell.cell_contents) for cell in cells)

    original = _ORIGINALS.get(kind, {})
    return tuple(of(original.get(n) or getattr(kind, n)) for n in ("forward", "backward", "vjp", "setup_context"))


def _cell(value: Any) -> object:
    return constant_key(value) if is_constant(value) else id(value)


# ----------------------------------------------------------------------------------------------------- arguments


def encode_arguments(call_args: Sequence[Any], name: str, line: str) -> str:
    """Encode the arguments as a literal, in which ``{"operand"}`` stands for every tensor.

    Raises CaptureError for an argument that is neither a tensor nor a constant.
    """

    def literal(arg: Any) -> Any:
        return {"operand"} if isinstance(arg, Tensor) else constant(arg)

    def constant(arg: Any) -> Any:
        if type(arg) in (bool, int, str, type(None)) or (type(arg) is float and arg - arg == 0):
            return arg
        if isinstance(arg, (list, tuple)) and type(arg) in (list, tuple):
            return type(arg)(map(constant, arg))
        try:
            if is_constant(arg):
                return {"pickled": pickle.dumps(arg)}
        except Exception as error:  # any exception of an object that cannot be pickled
            raise _refusal(name, line, f"it takes a {type_name(arg)}: {error}") from error
        raise _refusal(name, line, f"it takes a {type_name(arg)} among its arguments")

    return repr(tuple(map(literal, call_args)))


def fill_operands(arguments: str, operands: Sequence[Tensor]) -> list[Any]:
    """Decode the arguments, with the operands in place of tensors."""
    tensors = iter(operands)

    def fill(arg: Any) -> Any:
        if isinstance(arg, set):
            return next(tensors)
        if isinstance(arg, dict):
            return pickle.loads(arg["pickled"])
        return type(arg)(map(fill, arg)) if isinstance(arg, (list, tuple)) else arg

    return [fill(arg) for arg in ast.literal_eval(arguments)]


# ------------------------------------------------------------------------------------------------------- tracing

_ORIGINALS: dict[type, dict[str, Any]] = {}  # of the classes whose forward is replaced at the moment
# Identities that call backward hooks of modules, which are announced; re-entrant checkpoints, which are refused.
_TRACED_THROUGH = (BackwardHookFunction, CheckpointFunction)


@dataclass
class _Replacing:
    """Replaces the forward of functions when they are first applied. ``inside``: whether the operator is running."""

    line_of: Callable[[FrameType | None], str]
    inside: bool = False
    kinds: dict[str, list[type]] = field(default_factory=dict)
    structures: dict[object, tuple[Any, ...]] = field(default_factory=dict)

    def meet(self, kind: Any) -> None:
        if kind in _ORIGINALS or self.inside or kind in _TRACED_THROUGH:
            return
        # Of a registered operator, or within one of this package: those are captured themselves.
        if kind.__module__.startswith(("torch._library.autograd", "shardwise.rules.", "shardwise.graph.")):
            return
        name = _name(kind)
        self.kinds.setdefault(name, []).append(kind)
        _check_alike(name, self.kinds[name], self.line_of(sys._getframe(2)))
        _KNOWN[name] = kind
        has_setup = kind.setup_context is not Function.setup_context
        _ORIGINALS[kind] = {n: vars(kind).get(n) for n in ("forward", "setup_context")}
        forward, setup = kind.forward, kind.setup_context

        def replaced(*call_args: Any) -> Any:
            if self.inside:
                return forward(*call_args)
            return self.call(kind, call_args if has_setup else call_args[1:])

        def replaced_setup(*call_args: Any) -> Any:
            return setup(*call_args) if self.inside else None

        kind.forward = staticmethod(replaced)
        if has_setup:
            kind.setup_context = staticmethod(replaced_setup)

    def call(self, kind: type, call_args: Sequence[Any]) -> Any:
        name, line = _name(kind), self.line_of(sys._getframe(2))
        arguments = encode_arguments(call_args, name, line)
        tensors = [arg for arg in call_args if isinstance(arg, Tensor)]
        key = name, arguments, tuple((t.shape, t.dtype, t.requires_grad) for t in tensors)
        before, self.inside = self.inside, True
        try:
            if key not in self.structures:
                self.structures[key] = _tried(kind, arguments, tensors, name, line)
            with torch.fx.traceback.annotate({LINE: line}):
                outputs = iter(FUNCTION(tensors, name, arguments, torch.float32))
        finally:
            self.inside = before
        single, leaves = self.structures[key]
        results = tuple(next(outputs) if leaf is _SLOT else leaf for leaf in leaves)
        return results[0] if single else results

    def restore(self) -> None:
        for kinds in self.kinds.values():
            for kind in kinds:
                for name, original in _ORIGINALS.pop(kind, {}).items():
                    if original is not None:
                        setattr(kind, name, original)
                    elif name in vars(kind):
                        delattr(kind, name)


@contextmanager
def functions_as_operators(line_of: Callable[[FrameType | None], str]) -> Iterator[None]:
    """Trace functions as operators while a model is traced. ``line_of``: returns the user's line of a frame."""
    replacing = _Replacing(line_of)
    unwrap = torch._functorch.utils.unwrap_dead_wrappers

    def met(call_args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note a function. ``Function.apply`` calls this just before forward; ``apply`` itself may have been bound long
        ago, so it cannot be replaced."""
        kind = sys._getframe(1).f_locals.get("cls")
        if isinstance(kind, type) and issubclass(kind, Function):
            replacing.meet(kind)
        unwrapped: tuple[Any, ...] = unwrap(call_args)
        return unwrapped

    with patch.object(torch._functorch.utils, "unwrap_dead_wrappers", met):
        try:
            yield
        finally:
            replacing.restore()


class _RandomCalls(OpRecorder):
    """Records the last operator that drew random numbers."""

    random = ""

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        if is_random(func):
            self.random = str(func)


def _tried(kind: type, arguments: str, tensors: Sequence[Tensor], name: str, line: str) -> tuple[bool, tuple[Any, ...]]:
    """Return whether the function returns one tensor, and its results, with ``...`` for every tensor."""
    watched = _RandomCalls()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), FakeTensorMode(), torch.enable_grad():
        operands = [
            torch.empty(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad and t.is_floating_point())
            for t in tensors
        ]
        inputs = [t.clone() for t in operands]
        versions = [t._version for t in inputs]
        try:
            with watched:
                returned = kind.apply(*fill_operands(arguments, inputs))  # type: ignore[attr-defined]
                leaves = returned if isinstance(returned, tuple) else (returned,)
                results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                differentiable = [t for t in operands if t.requires_grad]
                flowing = [result for result in results if result.requires_grad]
                if differentiable and flowing:
                    cotangents = [torch.empty_like(result) for result in flowing]
                    torch.autograd.grad(flowing, differentiable, cotangents, allow_unused=True)
        except Exception as error:  # whatever its Python raises on tensors without data
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                first = f"it depends on the data of a tensor, by {error.func}"
            what = f"its forward or backward cannot be traced ({type(error).__name__}: {first})"
            raise _refusal(name, line, what) from error
    if [t._version for t in inputs] != versions:
        raise _refusal(name, line, "it writes into its operands (mark_dirty)")
    if watched.random:
        raise _refusal(name, line, f"it draws random numbers ({watched.random}), different ones on every rank")
    other = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_constant(leaf)]
    if other:
        raise _refusal(name, line, f"it returns a {type_name(other[0])}")
    shown = tuple(_SLOT if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return not isinstance(returned, tuple), shown


def _refusal(name: str, line: str, what: str) -> CaptureError:
    return CaptureError(f"the torch.autograd.Function {name} cannot be captured: {what}", source=line, fix=_FIX)
