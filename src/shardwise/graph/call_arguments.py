"""Arguments of the captured call, the targets of a loss function among them, and the loss that the call returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.untrusted_text import shorten_repr

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_arguments(
    example_inputs: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call whose inputs are given as a tensor, a tuple, or a dict of named ones. Raises
    CaptureError for anything else."""
    if not isinstance(kwargs, Mapping | None):
        what = f"kwargs is {shorten_repr(kwargs)}"
        raise CaptureError(what, fix="pass a dict of named inputs, or leave it out")
    if isinstance(example_inputs, Mapping):
        return (), {**example_inputs, **(kwargs or {})}
    if not isinstance(example_inputs, Iterable):
        what = f"the example inputs are {shorten_repr(example_inputs)}"
        raise CaptureError(what, fix="pass a tensor, a tuple of inputs, a dict of named inputs, or ()")
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    return args, dict(kwargs or {})


def call_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[..., Any] | None
) -> Any:
    """Call the module as ``capture`` does, without capturing.

    Return the module's output, or with ``loss`` the loss of that output and the targets.
    """
    own_args, own_kwargs, targets, named = divide_targets(module, tuple(args), dict(kwargs), loss)
    try:
        output = module(*own_args, **own_kwargs)
    except TypeError:
        _check_taken(module, own_args, own_kwargs, len(targets) + len(named))
        raise
    return output if loss is None else loss(output, *targets, **named)


def divide_targets(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[..., Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    """Split a call's arguments into (module args, module kwargs, positional targets, named targets)."""
    if loss is None:
        return args, kwargs, (), {}
    parameters = _parameters_of(loss)
    required = [p.name for p in parameters.values() if p.kind in _POSITIONAL and p.default is inspect.Parameter.empty]
    target_names = required[1:]
    of_forward, every = set(inspect.signature(module.forward).parameters), set(parameters)
    named = {name: value for name, value in kwargs.items() if name in every and name not in of_forward}
    count = len([name for name in target_names if name not in named])
    if count > len(args):
        raise CaptureError(
            f"the loss takes {count} positional targets ({', '.join(target_names)}), "
            f"but there are {len(args)} positional examples",
            op=getattr(loss, "__name__", type(loss).__name__),
            fix="pass the examples in order: the inputs of the module, then the targets of the loss",
        )
    first = len(args) - count
    own_args, own_kwargs = args[:first], {name: value for name, value in kwargs.items() if name not in named}
    return own_args, own_kwargs, args[first:], named


def _check_taken(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], num_targets: int) -> None:
    """Raise CaptureError for arguments that forward does not take. ``num_targets``: number of loss targets."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
        why, fix, most = str(error), "pass the arguments of its signature", sum(map(_POSITIONAL.__contains__, kinds))
        if num_targets:
            fix = f"pass the inputs and then the {num_targets} targets of the loss; par.predict takes the inputs only"
        elif inspect.Parameter.VAR_POSITIONAL not in kinds and len(args) > most:
            why = f"{most} positional argument{'s' * (most != 1)}, {len(args)} were given"
            fix = "if the last are targets, pass loss=, a function of the output and the targets"
        what = f"{type(module).__name__}.forward does not take these arguments: {why}"
        raise CaptureError(what, fix=fix) from error


def _parameters_of(loss: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a loss. Raises CaptureError if it is no function, or has no signature (a builtin)."""
    try:
        return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except (TypeError, ValueError) as error:
        name = getattr(loss, "__name__", repr(loss))
        what = f"the loss {name} has no signature: {error}" if callable(loss) else f"the loss {name} is not a function"
        fix = "pass a function with named parameters: loss=lambda output, target: ..."
        raise CaptureError(what, fix=fix) from error


def find_loss(output: Any, *, required: bool = False) -> torch.Tensor | None:
    """Return the scalar to differentiate, by the convention of ``capture``."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)):
        candidates.extend(pytree.tree_leaves(output)[:1])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.dim() == 0 and candidate.dtype.is_floating_point:
            return candidate
    if required:
        what, fix = (
            type(output).__name__.replace("SymFloat", "a number"),
            "return the loss as a tensor, without .item() or float()",
        )
        if isinstance(output, torch.Tensor):
            what = f"{list(output.shape)} of {output.dtype}"
            fix = "reduce it: loss.mean()" if output.dim() else "compute it from floating-point tensors"
        raise CaptureError(f"the loss function returned {what}, not a floating scalar", fix=fix)
    return None
