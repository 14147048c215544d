"""Higher-order functions: gradients, and strategies of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import problem
from shardwise.mindspore import calls, context, engine, strict
from shardwise.mindspore.holding import PARAMETERS, as_gradient, averaged_over
from shardwise.mindspore.layout import as_counts
from shardwise.mindspore.library import MARKS, in_reference_mode
from shardwise.mindspore.loss_scale import note_overflow
from shardwise.mindspore.ops.primitive import counted, laid
from shardwise.mindspore.planning import STRATEGIES
from shardwise.mindspore.tensor import as_ours, plain

# Whether a call is inside a function that value_and_grad differentiates, or that torch.func transforms.
_DIFFERENTIATED: ContextVar[bool] = ContextVar("shardwise_differentiated", default=False)
_TRANSFORMED: ContextVar[bool] = ContextVar("shardwise_transformed", default=False)


def differentiate(
    network: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any], weights: Sequence[nn.Parameter],
    sens: float = 1.0,
) -> tuple[Any, tuple[torch.Tensor, ...]]:  # fmt: skip
    """Return a network's results and the gradients of its weights, for the sum of its loss: the first result.

    A split network computes a loss vector in parts, and this rank's part is returned.
    """
    options, split = context.options(), None
    with _without_gradients(weights):
        if isinstance(network, nn.Module) and calls.is_split() and calls.is_outermost():
            own_inputs, own_kwargs = pytree.tree_map(plain, (tuple(inputs), kwargs))
            split, result = engine.run(network, own_inputs, own_kwargs, sens)
        else:
            with calls.set_within(_DIFFERENTIATED, True):
                result = network(*inputs, **kwargs)
        loss = result[0] if isinstance(result, (tuple, list)) else result
        if loss.requires_grad:  # not where every weight is frozen
            (loss.sum() * sens if sens != 1.0 else loss.sum()).backward()
        grads = tuple(torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights)
        note_overflow((loss, *grads))
    if split is not None:
        if options.gradients_mean:
            grads = tuple(grad / averaged_over(weight) for grad, weight in zip(grads, weights, strict=True))
        if loss.dim():
            own_loss = engine.own_part(split, 0, loss.detach())
            result = (own_loss, *result[1:]) if isinstance(result, (tuple, list)) else own_loss
    return _detached(result), tuple(map(as_gradient, grads, weights))


@contextmanager
def _without_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Clear the gradients of tensors within the context, and restore them behind it."""
    before = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    yield
    for tensor, grad in zip(tensors, before, strict=True):
        tensor.grad = grad if grad is None or grad.shape == tensor.shape else None  # the tensor may be split by now


def _detached(result: Any) -> Any:
    return pytree.tree_map(lambda x: as_ours(x.detach()) if isinstance(x, torch.Tensor) else x, result)


def value_and_grad(
    fn: Callable[..., Any], grad_position: int | tuple[int, ...] | None = 0, weights: Any = None,
    has_aux: bool = False, return_ids: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function that returns the results of ``fn`` and gradients.

    With both ``grad_position`` and ``weights`` the gradients are a pair. For gradients of inputs every rank computes a
    split cell whole, which needs ``full_batch``. In semi_auto and auto mode, if ranks have rows of their own, their
    losses are summed (with ``gradients_mean`` averaged).

    Args:
        grad_position: positions of the inputs by which to differentiate.
        weights: parameters by which to differentiate.
        has_aux: differentiate only the first output; else the sum of all outputs.
        return_ids: return each gradient as a pair with its input's position or its parameter's name.
    """
    positions = (grad_position,) if isinstance(grad_position, int) else tuple(grad_position or ())
    listed = None if weights is None else ((weights,) if isinstance(weights, nn.Parameter) else tuple(weights))
    if not positions and listed is None:
        raise ValueError(problem("value_and_grad has nothing to differentiate by", fix="give grad_position or weights"))

    def labelled(ids: Iterable[Any], grads: tuple[Any, ...], is_one: bool) -> Any:
        pairs = tuple(zip(ids, grads, strict=True)) if return_ids else grads
        return pairs[0] if is_one else pairs

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        inputs = [plain(arg) if place in positions else arg for place, arg in enumerate(args)]
        if _TRANSFORMED.get() and listed is None:  # torch.func's tensors have no requires_grad_
            result, of_inputs = _transformed(partial(fn, **kwargs), inputs, positions, has_aux)
            return result, labelled(positions, of_inputs, isinstance(grad_position, int))
        is_inner = (
            _DIFFERENTIATED.get()
            or torch.compiler.is_exporting()
            or in_reference_mode()
            or any(inputs[position].requires_grad for position in positions)
        )
        for position in positions:
            if not (is_inner and inputs[position].requires_grad):
                inputs[position] = inputs[position].detach().requires_grad_()
        targets = [*(inputs[position] for position in positions), *(listed or ())]
        with _without_gradients(targets):
            with calls.set_within(_DIFFERENTIATED, True):
                result = fn(*map(as_ours, inputs), **kwargs)
            total = _total(result, has_aux)
            if not total.requires_grad:  # nothing in it depends on what is asked for
                found: Sequence[torch.Tensor | None] = (None,) * len(targets)
            elif is_inner:
                found = torch.autograd.grad(total, targets, create_graph=True, allow_unused=True)
            else:
                total.backward()
                found = [tensor.grad for tensor in targets]
            grads = tuple(torch.zeros_like(x) if g is None else g for x, g in zip(targets, found, strict=True))
            note_overflow((total, *grads))
        as_tensors = tuple(map(as_ours, grads))
        input_grads, others = as_tensors[: len(positions)], as_tensors[len(positions) :]
        first = labelled(positions, input_grads, isinstance(grad_position, int)) if positions else ()
        of_weights = labelled((p.name for p in listed or ()), tuple(map(as_gradient, others, listed or ())), False)
        both = (first, of_weights) if positions and listed is not None else first if positions else of_weights
        return (result if is_inner else _detached(result)), both

    return differentiated


def _total(result: Any, has_aux: bool) -> torch.Tensor:
    """Return the sum of all outputs, or of the first."""
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    losses = outputs[:1] if has_aux else outputs
    for loss in losses:
        if not isinstance(loss, torch.Tensor):
            what = f"value_and_grad differentiates the sum of all outputs, and one is {loss!r}"
            raise TypeError(problem(what, fix="return tensors, or the loss first, with has_aux=True"))
    return torch.stack([loss.sum() for loss in losses]).sum()


def grad(
    fn: Callable[..., Any], grad_position: int | tuple[int, ...] | None = 0, weights: Any = None,
    has_aux: bool = False, return_ids: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Return ``value_and_grad`` without the value. With ``has_aux`` it returns the gradients and the other outputs."""
    both = value_and_grad(fn, grad_position, weights, has_aux, return_ids)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, tuple(value[1:])) if has_aux else grads

    return gradient


def shard(fn: Any, in_strategy: Any, out_strategy: Any = None, parameter_plan: Any = None, **settings: Any) -> Any:
    """Return the function or cell ``fn`` with strategies of its inputs and outputs.

    Operators inside follow the strategy if a search propagates strategies. In semi_auto mode operators without a
    strategy of their own split their batch, as everywhere. A cell is marked and returned itself, so that its parameters
    keep their names.

    Args:
        in_strategy: one tuple of split counts per input, one count per dim; None for an input without a strategy.
        out_strategy: the same for the outputs.
        parameter_plan: split counts per dim in which parameters are stored, by their names: ``{"self.dense.weight": (4,
            1)}``; operators convert them.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs, outputs = _left_out(name, "in_strategy", in_strategy), _left_out(name, "out_strategy", out_strategy)
    if parameter_plan is not None and not isinstance(parameter_plan, dict):
        raise TypeError(problem(f"parameter_plan is {parameter_plan!r}", fix='a dict: {"self.dense.weight": (4, 1)}'))
    parameters = {
        key: (strict.nested(name, f"parameter_plan[{key!r}]", (counts,)) or ((),))[0]
        for key, counts in (parameter_plan or {}).items()
    }

    enter = partial(_split_as, name, "inputs", inputs)

    def leave(result: Any) -> Any:
        if not isinstance(result, (tuple, list)):
            return _split_as(name, "outputs", outputs, (result,))[0]
        return type(result)(_split_as(name, "outputs", outputs, tuple(result)))

    if isinstance(fn, nn.Module):
        fn.register_forward_pre_hook(_marking(lambda _, args: enter(args)))
        fn.register_forward_hook(_marking(lambda _, args, result: leave(result)))
        vars(fn)[STRATEGIES], vars(fn)[PARAMETERS] = (inputs, outputs), parameters
        return fn

    def sharded(*args: Any, **kwargs: Any) -> Any:
        return leave(fn(*enter(args), **kwargs))

    vars(sharded)[STRATEGIES], vars(sharded)[PARAMETERS] = (inputs, outputs), parameters
    return sharded


def _marking(hook: Any) -> Any:
    """Mark a hook as internal."""
    setattr(hook, MARKS, True)
    return hook


def _left_out(name: str, role: str, strategy: Any) -> tuple[Any, Any]:
    """Return a strategy with () for tensors without an entry, and its layouts."""
    counts, layouts = as_counts(strategy)
    listed = isinstance(counts, (tuple, list))
    return strict.nested(name, role, [() if c is None else c for c in counts] if listed else counts), layouts


def _split_as(name: str, role: str, split: tuple[Any, Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Constrain values to their split counts, while a cell is captured in semi_auto_parallel and auto_parallel mode."""
    options, (strategy, layouts) = context.options(), split
    if strategy is None or not (options.distributed and torch.compiler.is_exporting()):
        return values
    shapes = [tuple(getattr(tensor, "shape", ())) for tensor in values]
    strict.check_tensors(name, role, strategy, shapes, options.stage_devices, even=options.strict)
    return tuple(
        laid(tensor, layout) if layout else counted(tensor, counts) if counts else tensor
        for tensor, counts, layout in zip(values, strategy, layouts or (None,) * len(values), strict=True)
    )


def vmap(fn: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """Vectorize ``fn`` over a dim of its inputs with ``torch.vmap``."""
    return _of_tensors(torch.vmap(_plainly(fn), in_axes, out_axes))


def _plainly(fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Return ``fn`` as a part of a call, whose cells are not outermost. ``has_aux``: it returns its first output, and a
    tuple of the others."""

    def call(*args: Any) -> Any:
        with calls.set_within(_TRANSFORMED, True), calls.inside():
            result = fn(*args)
        return (result[0], tuple(result[1:])) if has_aux else result

    return call


def _transformed(
    fn: Callable[..., Any], inputs: list[Any], positions: tuple[int, ...], has_aux: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Return a function's results and gradients by torch.func, which can differentiate them again."""

    def total(*targets: Any) -> tuple[Any, Any]:
        places = dict(zip(positions, targets, strict=True))
        result = fn(*(places.get(place, value) for place, value in enumerate(inputs)))
        return _total(result, has_aux), result

    targets = (inputs[position] for position in positions)
    grads, result = torch.func.grad(total, tuple(range(len(positions))), has_aux=True)(*targets)
    return result, grads


def _of_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: pytree.tree_map(as_ours, fn(*pytree.tree_map(plain, args)))


def jvp(fn: Callable[..., Any], inputs: Any, v: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Return the results of ``fn`` and its Jacobian's product with ``v``. ``has_aux`` appends all other outputs."""
    inputs, v = (x if isinstance(x, (tuple, list)) else (x,) for x in (inputs, v))
    product = _of_tensors(partial(torch.func.jvp, _plainly(fn, has_aux), has_aux=has_aux))
    return tuple(product(tuple(inputs), tuple(v)))


def vjp(fn: Callable[..., Any], *inputs: Any, weights: Any = None, has_aux: bool = False) -> tuple[Any, ...]:
    """Return the results of ``fn``, and a function that multiplies ``v`` with the Jacobian and returns one product per
    input (for one input not in a tuple). ``has_aux`` appends all other outputs."""
    if weights is not None:
        raise NotImplementedError(problem("vjp(weights=...)", fix="ms.grad(fn, None, weights), with a weighted sum"))
    value, pulled, *aux = torch.func.vjp(_plainly(fn, has_aux), *map(plain, inputs), has_aux=has_aux)

    def product(*v: Any) -> Any:
        cotangents = tuple(map(plain, v))
        grads = pulled(cotangents if isinstance(value, tuple) else cotangents[0])
        return pytree.tree_map(as_ours, grads[0] if len(inputs) == 1 else grads)

    return (pytree.tree_map(as_ours, value), product, *pytree.tree_map(as_ours, aux))


def jacrev(fn: Callable[..., Any], grad_position: int | tuple[int, ...] = 0, has_aux: bool = False) -> Any:
    """Return the reverse-mode Jacobian of ``fn``; with ``has_aux`` of its first output, and the other outputs."""
    return _of_tensors(torch.func.jacrev(_plainly(fn, has_aux), grad_position, has_aux=has_aux))


def jacfwd(fn: Callable[..., Any], grad_position: int | tuple[int, ...] = 0, has_aux: bool = False) -> Any:
    """Return the Jacobian like ``jacrev``, in forward mode."""
    return _of_tensors(torch.func.jacfwd(_plainly(fn, has_aux), grad_position, has_aux=has_aux))


__all__ = ["grad", "jacfwd", "jacrev", "jvp", "partial", "shard", "value_and_grad", "vjp", "vmap"]
