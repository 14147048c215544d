"""State of the current call: outermost, inside another cell, or recomputed; and whether cells run by plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardwise.mindspore import context
from shardwise.mindspore.library import in_reference_mode
from shardwise.mindspore.tensor import as_ours

_INSIDE: ContextVar[bool] = ContextVar("shardwise_inside_cell", default=False)
_AGAIN: ContextVar[bool] = ContextVar("shardwise_again", default=False)


def is_outermost() -> bool:
    """Return whether a cell's call is the outermost one. Calls inside capture or the reference mode are not."""
    return not _INSIDE.get() and not torch.compiler.is_exporting() and not in_reference_mode()


def inside() -> AbstractContextManager[None]:
    """Mark calls of cells within the context as parts of another cell's call."""
    return set_within(_INSIDE, True)


def again(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Call a function. In eager mode backward recomputes it instead of saving its activations."""
    if torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return function(*args, **(kwargs or {}))

    is_inside = _INSIDE.get()

    @contextmanager
    def second() -> Iterator[None]:  # backward of a Tensor disables __torch_function__
        with set_within(_AGAIN, True), set_within(_INSIDE, is_inside), torch._C._EnableTorchFunction():
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return set_within(_AGAIN, False), second()

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **(kwargs or {}))


def is_again() -> bool:
    """Return whether a function runs a second time, for backward."""
    return _AGAIN.get()


def outside(result: Any) -> Any:
    """Give tensors of the result the reference's methods, unless a cell is running."""
    if not is_outermost():
        return result
    return as_ours(result) if isinstance(result, torch.Tensor) else pytree.tree_map(as_ours, result)


def is_split() -> bool:
    """Return whether cells run as parts of a plan: in semi_auto or auto mode on several devices."""
    options = context.options()
    return options.distributed and options.devices > 1


@contextmanager
def set_within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable within the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
