"""``Cell.bprop``: user-defined backward of a cell.

``bprop(self, *inputs, out, dout)`` takes the inputs of ``construct``, its result and the gradient of the result. It
returns a tuple with a gradient per input. Every class of cells with a ``bprop`` gets a ``torch.autograd.Function`` with
the name of the class, so that a captured program can refer to it. Capture stores the attributes that the cell has at
that time with the operator.
"""

from __future__ import annotations

import base64
import inspect
import pickle
from typing import Any

import torch
from torch import nn

from shardwise.errors import CaptureError, problem
from shardwise.mindspore import calls, context, planning
from shardwise.mindspore.ops.primitive import unsplit_operators
from shardwise.mindspore.tensor_methods import in_words

_HOOKS = ("_backward_hooks", "_forward_hooks", "_forward_pre_hooks")  # torch runs them around the operator


def function_of(kind: type[Any]) -> type[torch.autograd.Function]:
    """Return the autograd function of a class of cells that defines ``bprop``."""

    def forward(ctx: Any, cell: Any, *inputs: Any) -> Any:
        ctx.cell = _restored(kind, cell) if isinstance(cell, str) else cell
        with calls.inside(), unsplit_operators(), in_words():
            result = ctx.cell.construct(*inputs)
        ctx.single = not isinstance(result, tuple)
        ctx.others = tuple(None if isinstance(x, torch.Tensor) else x for x in inputs)
        results = (result,) if ctx.single else result
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in (*inputs, *results)))
        return result

    def backward(ctx: Any, *cotangents: Any) -> Any:
        count, saved = len(ctx.others), ctx.saved_tensors
        inputs = [other if x is None else x for x, other in zip(saved[:count], ctx.others, strict=True)]
        out, dout = (saved[count], cotangents[0]) if ctx.single else (saved[count:], cotangents)
        with calls.inside(), unsplit_operators(), in_words():
            gradients = ctx.cell.bprop(*inputs, out, dout)
        gradients = tuple(gradients) if isinstance(gradients, (tuple, list)) else (gradients,)
        _check(kind, inputs, gradients)
        return None, *(g if _flows(x) else None for x, g in zip(inputs, gradients, strict=True))

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": kind.__module__}
    return type(kind.__name__, (torch.autograd.Function,), {**body, "__qualname__": f"{kind.__qualname__}.bprop"})


def applied(cell: Any, function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run ``construct`` with the gradient of ``bprop``."""
    name = type(cell).__name__
    trained = [path for path, parameter in cell.named_parameters() if parameter.requires_grad]
    if trained:
        what = f"{name} has a bprop and the parameter {trained[0]}, whose gradient bprop cannot return"
        raise TypeError(problem(what, op=name, fix="keep parameters in another cell and pass them as inputs"))
    if kwargs:
        args = inspect.signature(cell.construct).bind(*args, **kwargs).args
    split = [primitive.title for primitive in planning.primitives(cell) if primitive.in_strategy is not None]
    if split and context.options().distributed:
        what = f"{name} has a bprop, which makes it one operator, and {split[0]} in it has a strategy"
        raise CaptureError(what, op=name, fix="leave the strategy out, or write the cell without bprop")
    return function.apply(_state(cell) if torch.compiler.is_exporting() else cell, *args)


def _state(cell: nn.Module) -> str:
    """Serialise the attributes of a cell as text. Raises CaptureError for tensors and unpicklable values."""
    name = type(cell).__name__
    kept = {attribute: value for attribute, value in vars(cell).items() if attribute not in _HOOKS}
    tensors = [path for path, _ in (*cell.named_parameters(), *cell.named_buffers())]
    tensors += [attribute for attribute, value in kept.items() if isinstance(value, torch.Tensor)]
    if tensors:
        what = f"{name} has a bprop and the tensor {tensors[0]}"
        raise CaptureError(what, op=name, fix="pass it as an input")
    try:
        return base64.b64encode(pickle.dumps(kept)).decode()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        what = f"{name} has a bprop, and its attributes cannot be pickled: {error}"
        raise CaptureError(what, op=name, fix="keep numbers and operators in its attributes") from error


def _restored(kind: type[Any], state: str) -> Any:
    cell: Any = object.__new__(kind)
    nn.Module.__init__(cell)
    vars(cell).update(pickle.loads(base64.b64decode(state)))
    return cell


def _flows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _check(kind: type[Any], inputs: Any, gradients: tuple[Any, ...]) -> None:
    """Check for one gradient per input, in its shape."""
    fix = f"return ({', '.join(f'd{i}' for i in range(len(inputs)))},), zeros_like where there is none"
    if len(gradients) != len(inputs):
        what = f"{kind.__name__}.bprop returned {len(gradients)} gradients for {len(inputs)} inputs"
        raise ValueError(problem(what, op=kind.__name__, fix=fix))
    for i, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        shape = list(gradient.shape) if isinstance(gradient, torch.Tensor) else gradient
        if _flows(x) and shape != list(x.shape):
            what = (
                f"{kind.__name__}.bprop returned {shape} as the gradient of input {i}, whose shape is {list(x.shape)}"
            )
            raise ValueError(problem(what, op=kind.__name__, fix=fix))
