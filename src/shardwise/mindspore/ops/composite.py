"""Higher-order functions over lists of tensors: mapping, overloading by type, gradients; and clipping by a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.errors import ShardwiseError, problem
from shardwise.mindspore import calls
from shardwise.mindspore.checks import number
from shardwise.mindspore.context import jit
from shardwise.mindspore.holding import as_gradient, parameter_of
from shardwise.mindspore.library import device_of, held_parameters, total_norm
from shardwise.mindspore.loss_scale import scaled
from shardwise.mindspore.ops.functional import grad
from shardwise.mindspore.tensor import Tensor

Bound = torch.Tensor | float | None


class Map:
    """A map over lists: ``Map()(function, xs, ys)`` or ``Map(function)(xs, ys)`` returns a tuple of the results."""

    def __init__(self, ops: Callable[..., Any] | None = None, reverse: bool = False) -> None:
        self.ops, self.reverse = ops, reverse

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        function, lists = (self.ops, args) if self.ops is not None else (args[0], args[1:])
        rows = list(zip(*lists, strict=True))
        results = [_marked(self.apply(function, row), row) for row in (reversed(rows) if self.reverse else rows)]
        return tuple(reversed(results) if self.reverse else results)

    def apply(self, function: Callable[..., Any], row: tuple[Any, ...]) -> Any:
        return function(*row)


def _marked(result: Any, row: tuple[Any, ...]) -> Any:
    """Mark a result computed from a gradient as a gradient of the same parameter, if it has the same shape."""
    if isinstance(result, torch.Tensor):
        peers = (x for x in row if isinstance(x, torch.Tensor) and x.shape == result.shape)
        return as_gradient(result, next((parameter for x in peers if (parameter := parameter_of(x)) is not None), None))
    return result


class HyperMap(Map):
    """A map that also descends into nested lists."""

    def apply(self, function: Callable[..., Any], row: tuple[Any, ...]) -> Any:
        if isinstance(row[0], (tuple, list)):
            return type(self)(reverse=self.reverse)(function, *row)
        return function(*row)


class Partial:
    """Partial application: ``Partial()(function, *args)``."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return partial(function, *args, **kwargs)


_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,), "Number": (int, float), "Bool": (bool,), "Int": (int,), "Float": (float,),
    "String": (str,), "Tuple": (tuple,), "List": (list,), "None": (type(None),),
    **dict.fromkeys(("RowTensor", "COOTensor", "CSRTensor", "MapTensor"), ()),  # gradients are dense here
}  # fmt: skip


def _as_kind(x: Any, kind: Any) -> Any:
    """Convert a number to a tensor where a tensor is expected, and a tensor of one element to a number."""
    if kind == _KINDS["Tensor"] and isinstance(x, _KINDS["Number"]):
        return Tensor(x)
    return x.item() if kind == _KINDS["Number"] and isinstance(x, torch.Tensor) and x.numel() == 1 else x


class MultitypeFuncGraph:
    """A function with one body per signature of argument types: ``@scale.register("Tensor", "Number")``."""

    def __init__(self, name: str, read_value: bool = False) -> None:
        self.name = name
        self._bodies: list[tuple[tuple[Any, ...], Callable[..., Any]]] = []

    def register(self, *kinds: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        types = tuple(_KINDS[kind] if isinstance(kind, str) else kind for kind in kinds)

        def added(body: Callable[..., Any]) -> Callable[..., Any]:
            self._bodies.append((types, body))
            return body

        return added

    def __call__(self, *args: Any) -> Any:
        bodies = [(types, body) for types, body in self._bodies if len(types) == len(args)]
        for converted in (lambda x, kind: x, _as_kind):  # versions pass either numbers or tensors
            for types, body in bodies:
                operands = [*map(converted, args, types)]
                if all(map(isinstance, operands, types)):
                    return body(*operands)
        types_of_args = ", ".join(type(arg).__name__ for arg in args)
        what = f"{self.name} has no body for ({types_of_args})"
        raise TypeError(problem(what, fix=f"@{self.name}.register(...) one"))


class GradOperation:
    """``GradOperation(get_all, get_by_list, sens_param)(network, weights)(*inputs)``: the gradients of the first input,
    all inputs, or the weights. ``sens_param``: the last argument is the initial gradient of the output."""

    def __init__(self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> None:
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(self, network: Callable[..., Any], weights: Any = None) -> Callable[..., Any]:
        if self.get_by_list and weights is None:
            what = "GradOperation(get_by_list=True) has no weights"
            raise ValueError(problem(what, fix="give net.trainable_params()"))

        def gradient(*inputs: Any) -> Any:
            network_inputs, sens = (inputs[:-1], inputs[-1]) if self.sens_param else (inputs, 1.0)
            positions: Any = tuple(range(len(network_inputs))) if self.get_all else None if self.get_by_list else 0
            scaled = network if not self.sens_param else lambda *args: _times(network(*args), sens)
            return grad(scaled, positions, weights if self.get_by_list else None)(*network_inputs)

        return gradient


def _times(result: Any, sens: Any) -> Any:
    """Multiply the results of a network by sensitivities, given as a tuple for several results."""
    return tuple(map(_times, result, sens)) if isinstance(sens, (tuple, list)) else result * sens


add_flags = core = jit  # ``@add_flags(has_effect=True)``: flags are for the reference's compiler

# -- clipping ----------------------------------------------------------------------------------------------------------


def clip_by_global_norm(
    x: Sequence[torch.Tensor], clip_norm: float = 1.0, use_norm: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, ...]:
    """Scale tensors by ``clip_norm / norm`` if the 2-norm of all their elements together exceeds ``clip_norm``.

    The norm is that of the arguments. Before gradients are reduced it is this rank's own, and before they are unscaled
    it is that of the scaled gradients. Clip reduced and unscaled gradients to match a single device. For gradients of
    split parameters it is the norm of the whole gradients, and all ranks must call it.

    Args:
        x: tensors, in a tuple or list.
        clip_norm: the largest norm.
        use_norm: the norm, if it is already known (the reference does not take it).

    Raises:
        ShardwiseError: if parameters are split and a tensor is not known as the gradient of one.
    """
    if isinstance(x, torch.Tensor) or not all(isinstance(tensor, torch.Tensor) for tensor in x) or not x:
        raise TypeError(problem(f"clip_by_global_norm of {type(x).__name__}", fix="give a tuple or list of tensors"))
    if number("clip_norm", clip_norm) <= 0:
        raise ValueError(problem(f"clip_norm is {clip_norm}", fix="give a number above 0"))
    norm = torch.as_tensor(use_norm) if use_norm is not None else _norm(x)
    clipped: tuple[torch.Tensor, ...] = scaled(tuple(x), clip_norm / norm.clamp(min=clip_norm))
    return clipped


def clip_by_norm(x: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
    """Scale tensors so that their common norm is at most ``max_norm``. Split gradients are handled as in
    ``clip_by_global_norm``."""
    norm = _norm([x] if isinstance(x, torch.Tensor) else x, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(problem(f"the norm is {float(norm)}", fix="error_if_nonfinite=False"))
    return scaled(x, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _norm(x: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """Return the norm of all elements together, in float32 at least; of split gradients that of the whole ones. Raises
    ValueError where there are none."""
    if not x:
        raise ValueError(problem("clipping by the norm of no tensors", fix="give at least one tensor"))
    norm = split_norm(x, order)
    if norm is not None:
        return norm
    dtype = torch.promote_types(x[0].dtype, torch.float32)
    parts = [torch.linalg.vector_norm(t, order, dtype=torch.promote_types(t.dtype, dtype)) for t in x]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]), order)
    return whole


def split_norm(x: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor | None:
    """Return the norm of the whole gradients of split parameters. None: no parameter is split."""
    if not (calls.is_split() and calls.is_outermost()):
        return None
    held_by_id = {id(parameter): holding for parameter, holding in held_parameters()}
    if not held_by_id:
        return None
    parameters = [parameter_of(tensor) for tensor in x]
    unknown = next((place for place, parameter in enumerate(parameters) if parameter is None), None)
    if unknown is not None:
        what = (
            f"tensor {unknown}, of shape {list(x[unknown].shape)}, cannot be clipped by a norm: it is not known as the "
            "gradient of a parameter. Parameters are split, so the norm of this rank's part is not that of the whole"
        )
        fix = "clip what value_and_grad, a HyperMap over it or unscale returned, or clip_by_global_norm with use_norm"
        raise ShardwiseError(what, fix=fix)
    placed = [(tensor, held_by_id.get(id(parameter))) for tensor, parameter in zip(x, parameters, strict=True)]
    return total_norm(placed, order, device=device_of(x), across_ranks=True, error_if_nonfinite=False)


def clip_by_value(x: Any, clip_value_min: Bound = None, clip_value_max: Bound = None) -> Any:
    """Clamp a tensor, or each of a tuple or list, to ``clip_value_min`` and ``clip_value_max``. If these cross, the
    upper bound applies."""
    if clip_value_min is None and clip_value_max is None:
        raise ValueError(problem("clip_by_value has no bound", fix="give clip_value_min, clip_value_max or both"))
    if isinstance(x, tuple | list):
        return type(x)(clip_by_value(tensor, clip_value_min, clip_value_max) for tensor in x)
    if not isinstance(x, torch.Tensor):
        what = f"clip_by_value of {type(x).__name__}"
        raise TypeError(problem(what, fix="give a tensor, or a tuple or list of them"))
    low, high = (
        bound.to(x.device) if isinstance(bound, torch.Tensor) else None if bound is None else torch.tensor(bound).to(x)
        for bound in (clip_value_min, clip_value_max)
    )
    return torch.clamp(x, low, high)


__all__ = [
    "GradOperation", "HyperMap", "Map", "MultitypeFuncGraph", "Partial", "add_flags", "clip_by_global_norm",
    "clip_by_value", "core",
]  # fmt: skip
