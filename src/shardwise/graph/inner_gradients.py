"""Gradients that a model takes inside forward: ``torch.autograd.grad``, and the transforms of ``torch.func``.

While a model is traced, ``torch.autograd.grad`` runs on the fake tensors, for its results' types, for None and for its
errors, and is traced as one operator, ``shardwise::gradient``. The functionalizer emits its derivative in its place
(``graph.gradient_graph``). ``requires_grad_`` is traced as ``shardwise::leaf``, by which values keep what it sets.

Of the transforms, ``grad``, ``vjp`` and ``jacrev`` call ``torch.autograd.grad`` on aliases of their arguments, and
``jvp`` is the derivative of ``vjp`` by its cotangents, in which it is linear. ``vmap`` runs as it is, with all that it
calls; the operators below it are recorded and traced in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.traceback
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch._functorch.vmap import vmap_impl
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError
from shardwise.graph.operator_library import composite
from shardwise.graph.origins import LINE, calling_line
from shardwise.graph.schema import is_random, operator_name

aten = torch.ops.aten

NO_GRAD = "shardwise_no_grad"  # the key that marks operators that ran under no_grad inside of a transform
_OF_TRANSFORMS = eager_transforms.__file__
_PENDING: list[list[Tensor]] = []  # what the next ``shardwise::gradient`` returns
_FORWARD: list[list[Any]] = []  # of each function that jvp runs now, the origins of the arguments


def _gradient(*_: Any) -> list[Tensor]:
    return _PENDING.pop()


def _leaf(x: Tensor, requires_grad: bool) -> Tensor:
    return x.requires_grad_(requires_grad)


LEAF = composite(_leaf)
GRADIENT = composite(
    _gradient, "Tensor[] outputs, Tensor[] inputs, Tensor[] cotangents, bool batched, bool create_graph"
)


def traced_gradient(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Any = None,
    *,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Trace ``torch.autograd.grad`` as one operator; its arguments, results and errors."""
    outputs, inputs = _as_tuple(outputs), _as_tuple(inputs)
    cotangents: list[Any] = [None] * len(outputs) if grad_outputs is None else list(_as_tuple(grad_outputs))
    with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        try:
            found = torch.autograd.grad(
                outputs,
                inputs,
                cotangents,
                create_graph=create_graph,
                allow_unused=bool(allow_unused) or materialize_grads,
                is_grads_batched=is_grads_batched,
                **options,
            )
        except Exception as error:
            if not (name := _function_of(error)):
                raise
            raise function_refusal(name, calling_line()) from error
        # New tensor objects, since tracing goes by objects: a cotangent may be returned as it is.
        results = [gradient.view_as(gradient) for gradient in found if gradient is not None]
    # Not ``ones_like``, which would make the gradient wait for a value of the whole batch.
    cotangents = [
        torch.ones(o.shape, dtype=o.dtype) if c is None else c if c.dtype == o.dtype else c.to(o.dtype)
        for o, c in zip(outputs, cotangents, strict=True)
    ]
    reached = [x for x, gradient in zip(inputs, found, strict=True) if gradient is not None]
    if not reached:
        return tuple(torch.zeros_like(x) if materialize_grads else None for x in inputs)
    _PENDING.append(results)
    gradients = iter(GRADIENT(outputs, reached, cotangents, is_grads_batched, create_graph))
    return tuple(
        next(gradients) if gradient is not None else torch.zeros_like(x) if materialize_grads else None
        for x, gradient in zip(inputs, found, strict=True)
    )


def function_refusal(name: str, source: str) -> CaptureError:
    """Return the error for a gradient that goes through a ``torch.autograd.Function``."""
    what = f"a gradient inside forward goes through {name}, a torch.autograd.Function"
    fix = "write it with ordinary operators, or as a torch.library.custom_op with register_autograd"
    return CaptureError(what, source=source, fix=fix)


def _function_of(error: Exception) -> str:
    """Return the name of the function whose backward raised an error, or "": it has not saved what it reads while a
    model is traced (``graph.function_operator``)."""
    step = error.__traceback__
    while step is not None:
        node = step.tb_frame.f_locals.get("self")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return type(node).__name__.removesuffix("Backward")
        step = step.tb_next
    return ""


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def is_in_transform() -> bool:
    """Return whether torch's own transforms are running, rather than those by which this module replaces them."""
    return torch._C._functorch.maybe_current_level() is not None


def called_by_transform() -> bool:
    """Return whether torch's own code of a transform, rather than the model, calls ``torch.autograd.grad``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # the call goes through the function modes of export, each of which calls it again
        caller = frame.f_back
        if (
            frame.f_code is torch.autograd.grad.__code__
            and caller is not None
            and caller.f_code.co_filename == _OF_TRANSFORMS
        ):
            return True
        frame = caller
    return False


# ---------------------------------------------------------------------------------------------------- transforms

_GRAD_AND_VALUE = eager_transforms.grad_and_value_impl
_VJP, _VMAP = eager_transforms._vjp_with_argnums, vmap_impl


@contextmanager
def transforms_as_operators() -> Iterator[None]:
    """Replace the transforms of torch.func while a model is traced."""
    replaced: dict[str, Any] = {
        "grad_and_value_impl": _grad_and_value,
        "_vjp_with_argnums": _vjp,
        "_jvp_with_argnums": _jvp,
        "lazy_dynamo_disallow": _refuse_linearize,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch.object(eager_transforms, name, function))
        stack.enter_context(patch.object(apis, "vmap_impl", _vmap))
        yield


@dataclass
class _Pullback:
    """The function that ``vjp`` returns; ``batched``: cotangents have a further, leading dim."""

    outputs: list[Tensor]
    out_spec: pytree.TreeSpec
    inputs: list[Tensor]
    in_spec: pytree.TreeSpec

    def __call__(
        self, cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None, batched: bool = False
    ) -> Any:
        flat, spec = pytree.tree_flatten(cotangents)
        if spec != self.out_spec:
            raise RuntimeError(f"the cotangents are {spec}, and the outputs of the function {self.out_spec}")
        pairs = [(output, c) for output, c in zip(self.outputs, flat, strict=True) if output.requires_grad]
        found: tuple[Any, ...] = (None,) * len(self.inputs)
        if pairs:
            found = torch.autograd.grad(
                *([output for output, _ in pairs], self.inputs, [c for _, c in pairs]),
                retain_graph=True,
                create_graph=torch.is_grad_enabled() if create_graph is None else create_graph,
                allow_unused=True,
                is_grads_batched=batched,
            )
        zeros = [
            x.new_zeros((*flat[0].shape[:batched], *x.shape)) if g is None else g
            for x, g in zip(self.inputs, found, strict=True)
        ]
        return pytree.tree_unflatten(zeros, self.in_spec)


def _vjp(func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    if is_in_transform():
        check_forward_mode(primals, primals, calling_line())
        with _mode_marked():
            return _VJP(func, *primals, argnums=argnums, has_aux=has_aux)
    places = range(len(primals)) if argnums is None else (argnums,) if isinstance(argnums, int) else argnums
    chosen = {place % len(primals) for place in places}
    with torch.enable_grad():
        call = [pytree.tree_map(_variable, x) if i in chosen else x for i, x in enumerate(primals)]
        result = func(*call)
    result, *aux = result if has_aux else (result,)
    outputs, out_spec = pytree.tree_flatten(result)
    inputs, in_spec = pytree.tree_flatten(
        call[argnums] if isinstance(argnums, int) else tuple(call[place] for place in places)
    )
    result, *aux = pytree.tree_map(_as_outside, (result, *aux))
    return (result, _Pullback(outputs, out_spec, inputs, in_spec), *aux)


def _variable(x: Any) -> Any:
    """Return an alias of a tensor by which to differentiate."""
    if not isinstance(x, Tensor):
        return x
    return x.view_as(x) if x.requires_grad else LEAF(x.detach(), True)


def _as_outside(x: Any) -> Any:
    """Return a result of a transform, without a gradient under no_grad."""
    check_forward_mode(x, x, calling_line())
    return x.detach() if isinstance(x, Tensor) and not torch.is_grad_enabled() else x


def _grad_and_value(
    func: Callable[..., Any], argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if is_in_transform():
        check_forward_mode((args, kwargs), args, calling_line())
        with _mode_marked():
            return _GRAD_AND_VALUE(func, argnums, has_aux, args, kwargs)
    value, pull, *aux = _vjp(lambda *args: func(*args, **kwargs), *args, argnums=argnums, has_aux=has_aux)
    if not isinstance(value, Tensor) or value.dim():
        raise RuntimeError("grad_and_value(f)(*args): Expected f(*args) to return a scalar Tensor")
    gradient = pull(torch.ones(value.shape, dtype=value.dtype), create_graph=True)
    return pytree.tree_map(_as_outside, gradient), ((value, *aux) if has_aux else value)


def _refuse_linearize(*_: Any) -> None:
    what, fix = "torch.func.linearize in forward traces a function that is traced already", "use torch.func.jvp"
    raise CaptureError(what, source=calling_line(), fix=fix)


def _jvp(
    func: Callable[..., Any], primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool
) -> Any:
    vjp: Any = eager_transforms._vjp_with_argnums

    def running(*args: Any) -> Any:
        _FORWARD.append([] if is_in_transform() else _origins(args))
        try:
            return func(*args)
        finally:
            _FORWARD.pop()

    with _mode_marked():
        value, pull, *aux = vjp(running, *primals, argnums=argnums, has_aux=has_aux)
        with torch.enable_grad():
            _, push = vjp(pull, pytree.tree_map(torch.zeros_like, value))
        (tangent,) = push(tangents[0] if isinstance(argnums, int) else tangents)
    return (value, tangent, *aux)


def _mode_marked() -> AbstractContextManager[None]:
    """Mark what a transform calls inside of another under no_grad: it enables gradients for itself alone."""
    marked = is_in_transform() and not torch.is_grad_enabled()
    return torch.fx.traceback.annotate({NO_GRAD: True}) if marked else nullcontext()


def check_forward_mode(operands: Any, result: Any, source: str) -> None:
    """Raise CaptureError where a function that ``jvp`` runs computes under no_grad from its arguments. That ends the
    gradient by which the tangent is computed here; PyTorch's ``jvp`` goes on."""
    if not _FORWARD or torch.is_grad_enabled():
        return
    floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(result))
    if floats and _reads_arguments(operands):
        what = "torch.no_grad inside of a function that torch.func.jvp, jacfwd or hessian differentiates"
        fix = "use .detach() in place of torch.no_grad() there, if no tangent shall go through; else leave it out"
        raise CaptureError(what, source=source, fix=fix)


def _reads_arguments(operands: Any) -> bool:
    """Return whether values depend on arguments of a function that jvp runs, or, under torch's own transforms, which
    hide their nodes, on whatever requires grad."""
    if is_in_transform():
        return any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(operands))
    pending, seen = _origins(operands), dict[int, Any]()  # by id, kept so that no other object gets it
    while pending:
        node = pending.pop()
        node = getattr(node, "variable", node)  # of a leaf
        if id(node) not in seen:
            seen[id(node)] = node
            pending += [other for other, _ in getattr(node, "next_functions", ()) if other is not None]
    return any(id(node) in seen for nodes in _FORWARD for node in nodes)


def _origins(tensors: Any) -> list[Any]:
    """Return the autograd nodes of tensors that require grad, and leaves themselves."""
    with torch._C.DisableTorchFunction():
        variables = [x for x in pytree.tree_leaves(tensors) if isinstance(x, Tensor) and x.requires_grad]
        return [x if x.grad_fn is None else x.grad_fn for x in variables]


def _vmap(
    func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: int | None, *args: Any, **kwargs: Any
) -> Any:
    if is_in_transform() or proxy_tensor.get_proxy_mode() is None:
        return _VMAP(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    if isinstance(func, _Pullback):
        if in_dims not in (0, (0,)) or out_dims not in (0, (0,)):
            what = "torch.func.vmap of a function that vjp returned, by in_dims or out_dims other than 0"
            fix = "move the dim to the front (torch.movedim), and pass in_dims=0, out_dims=0"
            raise CaptureError(what, source=calling_line(), fix=fix)
        pull: Any = func
        return pull(*args, batched=True)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    returned: list[Any] = []

    def run(*given: Tensor) -> list[Any]:
        tensors = iter(given)
        own_args, own_kwargs = pytree.tree_unflatten(
            [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        result = _VMAP(func, in_dims, out_dims, randomness, chunk_size, *own_args, **own_kwargs)
        flat, out_spec = pytree.tree_flatten(result)
        returned.append(out_spec)
        return flat

    around = proxy_tensor._temp_remove_pre_dispatch_torch_function_mode()
    with proxy_tensor.disable_proxy_modes_tracing(), around:
        aliases = [
            tensor.view_as(tensor) for tensor in tensors
        ]  # tracing asks for their strides, which is no question of the model
        traced = proxy_tensor.make_fx(run, decomposition_table=differentiable_forms())(*aliases)
    traced.graph.eliminate_dead_code()
    for node in traced.graph.nodes:
        if isinstance(node.target, OpOverload) and is_random(node.target):
            what = f"{operator_name(node.target)} draws random numbers inside of torch.func.vmap"
            fix = "draw the noise outside, torch.rand_like(x), and pass it to the function"
            raise CaptureError(what, source=str((node.meta.get("custom") or {}).get(LINE, "")), fix=fix)
    return pytree.tree_unflatten(_replayed(traced, tensors), returned[0])


def _replayed(traced: torch.fx.GraphModule, tensors: list[Tensor]) -> list[Any]:
    """Run the operators of a trace where they are traced again; other tensors that it reads are the model's."""
    given, values = iter(tensors), dict[torch.fx.Node, Any]()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(traced, node.target)
        elif node.op == "output":
            break
        else:
            custom = node.meta.get("custom") or {}
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            around = torch.no_grad() if NO_GRAD in custom else nullcontext()
            with torch.fx.traceback.annotate(custom), around:
                values[node] = _out_of_place(node.target)(*args, **kwargs)
    return list(map_arg(node.args[0], values.__getitem__))


def _out_of_place(target: Any) -> Any:
    """Return the form of a view that gives a tensor a new shape in place, which batching rules do to new tensors."""
    if not isinstance(target, OpOverload) or torch.Tag.inplace_view not in target.tags:
        return target
    return getattr(getattr(aten, operator_name(target).removesuffix("_")), target._overloadname)


# ------------------------------------------------------------------------------------- backward by other operators


@cache
def differentiable_forms() -> dict[OpOverload, Callable[..., Any]]:
    """Return operators that backward calls -> what they compute, by operators that have rules and derivatives."""
    from torch._decomp import decomposition_table  # takes long to import

    norms = ("native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "native_group_norm", "linear")
    table: dict[OpOverload, Callable[..., Any]] = {
        target: function
        for target, function in decomposition_table.items()
        if isinstance(target, OpOverload)
        and not target._schema.is_mutable
        and (operator_name(target).endswith(("_backward", "_backward_data")) or operator_name(target) in norms)
    }
    return table | {
        aten.convolution_backward.default: _convolution_backward,
        aten.embedding_dense_backward.default: _embedding_backward,
    }


def _embedding_backward(
    gradient: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    rows, flat = gradient.flatten(0, -2), indices.flatten()
    rows = rows.masked_fill((flat == padding_idx).unsqueeze(-1), 0)
    if scale_grad_by_freq:
        ones = torch.ones_like(flat, dtype=rows.dtype)
        rows = rows / ones.new_zeros(num_weights).index_add(0, flat, ones)[flat].unsqueeze(-1)
    return rows.new_zeros(num_weights, rows.shape[-1]).index_add(0, flat, rows)


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], *rest: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of a convolution as convolutions. ``rest``: transposed, output_padding, groups, which of the
    gradients of input, weight and bias are wanted."""
    transposed, _, groups, (of_x, of_weight, of_bias) = rest
    conv, none, dims = aten.convolution.default, [0] * len(stride), range(len(stride))
    sizes, kernel = x.shape[2:], weight.shape[2:]
    result: list[Tensor | None] = [None, None, None]
    if of_x and transposed:
        result[0] = conv(gradient, weight, None, stride, padding, dilation, False, none, groups)
    elif of_x:
        least = [
            (gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1 for i in dims
        ]
        missing = [size - other for size, other in zip(sizes, least, strict=True)]
        result[0] = conv(gradient, weight, None, stride, padding, dilation, True, missing, groups)
    if of_weight:
        # A transposed convolution is the adjoint of one: its input and its gradient change places. The batch is what is
        # summed over, so it takes the place of the channels.
        read, by = (gradient, x) if transposed else (x, gradient)
        channels = read.shape[1]
        read = read.unflatten(1, (groups, channels // groups)).transpose(0, 2).flatten(1, 2)
        product = conv(read, by.transpose(0, 1), None, dilation, padding, stride, False, none, groups)
        for i in dims:
            product = product.narrow(2 + i, 0, kernel[i])
        result[1] = product.transpose(0, 1)
    if of_bias:
        result[2] = gradient.sum([0, *(2 + i for i in dims)])
    return tuple(result)
