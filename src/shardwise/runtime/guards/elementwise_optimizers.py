"""Which optimizers may update shards: those that update every element by itself.

An optimizer that sees a shard as if it were the whole parameter is right exactly if the new value of an element depends
on the history of that element alone. Of torch's own, these are the ones in ``ELEMENTWISE``; LBFGS (inner products),
Adafactor (row and column means) and Muon (singular values) are not. Others are asked for: ``elementwise_optimizer``.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError, problem
from shardwise.layouts.text import format_layout
from shardwise.runtime.guards.registry import held_parameters

OptimizerType = TypeVar("OptimizerType", bound=type[Optimizer])

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.Rprop,
)  # fmt: skip

_declared: WeakSet[type[Optimizer]] = WeakSet()
_trusted: WeakSet[type[Optimizer]] = WeakSet()  # classes found element-wise; asked at every step
_passed: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()  # untrusted, seen without shards
_HOOKED = Optimizer.profile_hook_step(lambda: None).__code__  # the wrapper that torch puts around every step


def elementwise_optimizer(kind: OptimizerType) -> OptimizerType:
    """Declare that an optimizer class updates every element by itself, so that it may update shards; returns the class.

    Usable as a decorator or as a call: ``sw.elementwise_optimizer(Lion)``. It is not so if the class takes a norm, mean
    or inner product of a parameter, gradient or state, as LARS, LAMB, Adafactor, Muon and Shampoo do.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ShardwiseError(
            problem(
                f"elementwise_optimizer takes a subclass of torch.optim.Optimizer, not {kind!r}",
                fix="pass the class of the optimizer, not an instance",
            )
        )
    _declared.add(kind)
    return kind


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether a class is known or declared to be element-wise, or is derived from such a class without replacing any of
    its methods (the constructor excepted)."""
    for position, base in enumerate(kind.__mro__):
        if base in ELEMENTWISE or base in _declared:
            return not any(_replaces(derived, base) for derived in kind.__mro__[:position])
    return False


def _replaces(derived: type, base: type) -> bool:
    """Whether a class brings a method of its own where ``base`` has one."""
    for name, attribute in vars(derived).items():
        if not (name.startswith("__") and name.endswith("__")):
            inherited = inspect.getattr_static(base, name, None)
            if inherited is not None and _bare(attribute) is not _bare(inherited):
                return True
    return False


def known_elementwise(kind: type[Optimizer]) -> bool:
    """Whether a class is one of torch's own element-wise ones, or derived from one without replacing its methods."""
    return is_elementwise(kind) and not any(base in _declared for base in kind.__mro__)


def bare_step(kind: type[Optimizer]) -> Any:
    """The step of a class as it was written, which calls no hooks."""
    return _bare(kind.step)


def _bare(method: Any) -> Any:
    """A step without the wrappers that torch puts on it when the first optimizer of a class is made."""
    while getattr(method, "__code__", None) is _HOOKED:
        method = method.__wrapped__
    return method


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Torch calls this before every step of every optimizer. Raises ShardwiseError where it would update shards as if
    they were whole parameters."""
    kind = type(optimizer)
    if kind in _trusted:
        return
    if issubclass(kind, torch.optim.SparseAdam):
        _check_sparse(optimizer)
    if is_elementwise(kind):
        _trusted.add(kind)
        return
    parameters = tuple(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    if _passed.get(optimizer) == parameters:
        return
    wanted = set(parameters)
    shards = {id(p): (p, held) for p, held in held_parameters() if id(p) in wanted and held.is_shard}
    if shards:
        parameter, held = next(iter(shards.values()))
        raise ShardwiseError(_refusal(kind, held.name, format_layout(held.layout, parameter.dtype), len(shards)))
    _passed[optimizer] = parameters


def _check_sparse(optimizer: Optimizer) -> None:
    """Raise ShardwiseError for gradients that SparseAdam would refuse without a way out."""
    parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    dense = next((list(p.shape) for p in parameters if not p.grad.is_sparse), None)
    if dense:
        raise ShardwiseError(
            problem(
                f"torch.optim.SparseAdam takes sparse gradients, and that of a parameter {dense} is dense: under a "
                "plan all gradients are, those of nn.Embedding(sparse=True) among them",
                fix="torch.optim.Adam or AdamW, which also decay the moments of rows that a batch does not look up",
            )
        )


def _refusal(kind: type[Optimizer], name: str, layout: str, count: int) -> str:
    known = ", ".join(base.__name__ for base in ELEMENTWISE)
    part = f"this rank holds a shard of {_among(name, count)}"
    if kind.__module__.startswith("torch.optim"):
        return problem(
            f"torch.optim.{kind.__name__} looks at whole parameters, and {part}",
            source=f"{name}: {layout}",
            fix=f"use an element-wise optimizer ({known}), or give it only parameters that the plan leaves whole",
        )
    return problem(
        f"nothing says that {kind.__qualname__} updates every element by itself, and {part}",
        source=f"{name}: {layout}",
        fix=f"if it takes no norm, mean or product over a parameter, say so once: sw.elementwise_optimizer("
        f"{kind.__name__}); otherwise use one of {known}",
    )


def _among(name: str, count: int) -> str:
    return name if count == 1 else f"{name} and of {count - 1} more of its parameters"


__all__ = ["ELEMENTWISE", "before_step", "elementwise_optimizer", "is_elementwise"]
