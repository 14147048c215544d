"""Decide which optimizers may update shards: those that update every element by itself, and those that are given
whole matrices.

An optimizer that treats a shard as the whole parameter is correct exactly if an element's new value depends on that
element's history alone. Torch's own such optimizers are in ``ELEMENTWISE``. LBFGS (inner products), Adafactor (row and
column means) and Muon (singular values) are not: they get whole tensors (``matrix_optimizers``). Others must be
declared with ``elementwise_optimizer`` or ``matrix_optimizer``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError, problem
from shardwise.layouts.text import format_layout
from shardwise.runtime.guards.registry import bind_wrapper, records_of

OptimizerType = TypeVar("OptimizerType", bound=type[Optimizer])

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.Rprop,
)  # fmt: skip

# Those that need whole parameters -> whether they also look at all parameters together.
MATRIX_KINDS: Mapping[type[Optimizer], bool] = {
    torch.optim.Muon: False,
    torch.optim.Adafactor: False,
    torch.optim.LBFGS: True,
}

declared_matrixwise: WeakKeyDictionary[type[Optimizer], bool] = WeakKeyDictionary()  # as MATRIX_KINDS; they gather
_declared: WeakSet[type[Optimizer]] = WeakSet()
_trusted: WeakSet[type[Optimizer]] = WeakSet()  # classes found element-wise; looked up at every step
_passed: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()  # others without shards: parameters
_replaced: WeakKeyDictionary[Callable[..., Any], frozenset[Any]] = WeakKeyDictionary()  # step -> its wrappers
_HOOKED = Optimizer.profile_hook_step(lambda: None).__code__  # the wrapper that torch puts around every step


def elementwise_optimizer(kind: OptimizerType) -> OptimizerType:
    """Declare that an optimizer class updates every element by itself, so that it may update shards.

    Use it as a decorator or as a call: ``sw.elementwise_optimizer(Lion)``. Do not declare a class that takes a norm,
    mean or inner product of a parameter, gradient or state, as LARS, LAMB and Shampoo do: see ``matrix_optimizer``.
    A declaration states no price: ``sw.plan(optimizer=...)`` counts the memory and seconds of the names that it knows,
    and refuses others. ``sw.prepare`` looks for the class's name among them, and else counts AdamW, with a warning.

    Args:
        kind: The optimizer class, a subclass of ``torch.optim.Optimizer``.

    Returns:
        The class itself.

    Raises:
        ShardwiseError: If ``kind`` is not such a class.
    """
    check_class("elementwise_optimizer", kind)
    _declared.add(kind)
    return kind


def check_class(function: str, kind: Any) -> None:
    """Raise ShardwiseError if what a function got is not a class of optimizers."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        what = f"{function} takes a subclass of torch.optim.Optimizer, not {kind!r}"
        raise ShardwiseError(what, fix="pass the class of the optimizer, not an instance")


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return whether a class is known or declared to be element-wise, or derives from such a class without overriding
    any of its methods (except the constructor)."""
    return _base(kind, (*ELEMENTWISE, *_declared)) is not None


def is_matrixwise(kind: type[Optimizer]) -> bool:
    """Return whether the steps of a class gather whole matrices, as ``is_elementwise`` finds out."""
    return _base(kind, declared_matrixwise) is not None


def looks_at_all(kind: type[Optimizer]) -> bool:
    """Return whether a class of whole matrices looks at all of them together."""
    base = _base(kind, declared_matrixwise)
    return base is not None and declared_matrixwise[base]


def _base(kind: type[Optimizer], known: Collection[type[Optimizer]]) -> type[Optimizer] | None:
    """Return the first base of a class that is known, unless a class between them overrides a method."""
    for position, base in enumerate(kind.__mro__):
        if base in known:
            overridden = any(_replaces(derived, base) for derived in kind.__mro__[:position])
            return None if overridden else base
    return None


def _replaces(derived: type, base: type) -> bool:
    for name, attribute in vars(derived).items():
        if not (name.startswith("__") and name.endswith("__")):
            inherited = inspect.getattr_static(base, name, None)
            if inherited is not None and bare_step(attribute) is not bare_step(inherited):
                return True
    return False


def known_elementwise(kind: type[Optimizer]) -> bool:
    """Return whether a class is one of torch's element-wise ones, or derives from one without overriding methods."""
    return is_elementwise(kind) and not any(base in _declared for base in kind.__mro__)


def bare_step(method: Any) -> Any:
    """Remove the wrappers that torch puts on a step, to call hooks, when the first optimizer of a class is created."""
    while getattr(method, "__code__", None) is _HOOKED:
        method = method.__wrapped__
    return method


def replace_step(kind: type[Optimizer], wrap: Callable[..., Any]) -> None:
    """Let the steps of a class, and of subclasses that inherit its step, run ``wrap(step, optimizer, ...)`` between
    torch's hooks. The function with the hooks stays the same: learning rate schedulers keep it on the optimizers that
    they were made for."""
    for owner in (kind, *_subclasses_with_step_of(kind)):
        hooked = _hooked_step(owner)
        cell = hooked.__closure__[hooked.__code__.co_freevars.index("func")]
        wrappers = _replaced.get(cell.cell_contents, frozenset())
        if wrap not in wrappers:
            cell.cell_contents = bind_wrapper(cell.cell_contents, wrap)
            _replaced[cell.cell_contents] = wrappers | {wrap}


def _hooked_step(kind: type[Optimizer]) -> Any:
    """Return the function in the step of a class that calls torch's hooks, which torch puts there when the first
    optimizer of the class is created."""
    step: Any = kind.step
    while step is not None and getattr(step, "__code__", None) is not _HOOKED:
        step = getattr(step, "__wrapped__", None)
    if step is None:
        step = kind.step = Optimizer.profile_hook_step(kind.step)  # type: ignore[method-assign, assignment]
        step.hooked = True
    return step


def _subclasses_with_step_of(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    """Yield the subclasses whose step is that of a class, between hooks of their own: torch puts those there if an
    optimizer of the subclass is created first."""
    for derived in kind.__subclasses__():
        if bare_step(derived.step) is bare_step(kind.step):
            yield derived
            yield from _subclasses_with_step_of(derived)


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check an optimizer; torch calls this before every step. Raises ShardwiseError if it would treat shards as whole
    parameters."""
    kind = type(optimizer)
    if kind in _trusted:
        return
    if issubclass(kind, torch.optim.SparseAdam):
        _check_sparse(optimizer)
    if is_elementwise(kind) or is_matrixwise(kind):
        _trusted.add(kind)
        return
    parameters = parameters_of(optimizer)
    ids = tuple(map(id, parameters))
    if _passed.get(optimizer) == ids:
        return
    pairs = zip(parameters, records_of(parameters), strict=True)
    shards = [(parameter, record) for parameter, record in pairs if record is not None and record.is_shard]
    if shards:
        parameter, record = shards[0]
        raise ShardwiseError(_refusal(kind, record.name, format_layout(record.layout, parameter.dtype), len(shards)))
    _passed[optimizer] = ids


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters in all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_sparse(optimizer: Optimizer) -> None:
    """Raise ShardwiseError for dense gradients, which SparseAdam refuses without naming a fix."""
    parameters = parameters_of(optimizer)
    dense = next((list(p.shape) for p in parameters if p.grad is not None and not p.grad.is_sparse), None)
    if dense:
        raise ShardwiseError(
            f"torch.optim.SparseAdam needs sparse gradients, but that of a parameter {dense} is dense: under a "
            "plan all gradients are dense, also those of nn.Embedding(sparse=True)",
            fix="use torch.optim.Adam or AdamW, which also decay the moments of rows that a batch does not look up",
        )


def _refusal(kind: type[Optimizer], name: str, layout: str, count: int) -> str:
    return problem(
        f"{kind.__qualname__} is not known to update every element independently, and this rank holds a shard of "
        f"{_among(name, count)}",
        source=f"{name}: {layout}",
        fix=f"if it takes no norm, mean or product over a parameter, call sw.elementwise_optimizer({kind.__name__}) "
        f"once; if it does, sw.matrix_optimizer({kind.__name__}), which gives it whole parameters",
    )


def _among(name: str, count: int) -> str:
    return name if count == 1 else f"{name} and of {count - 1} more of its parameters"
