"""Where a call is: outermost, inside a cell's, or made again for backward; and whether cells run as parts of plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardwise.graph.to_float64 import in_reference_mode
from shardwise.mindspore import context
from shardwise.mindspore.tensor import as_ours

_INSIDE: ContextVar[bool] = ContextVar("shardwise_inside_cell", default=False)
_AGAIN: ContextVar[bool] = ContextVar("shardwise_again", default=False)


def is_outermost() -> bool:
    """Whether a call of a cell is neither inside another one's nor inside capture, nor what a plan is compared with."""
    return not _INSIDE.get() and not torch.compiler.is_exporting() and not in_reference_mode()


def inside() -> AbstractContextManager[None]:
    """Calls of cells meanwhile are parts of another one's."""
    return _noted(_INSIDE, True)


def again(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What a function returns; where it runs by itself, backward calls it again instead of keeping what it made."""
    if torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return function(*args, **(kwargs or {}))

    is_inside = _INSIDE.get()

    @contextmanager
    def second() -> Iterator[None]:  # backward of a Tensor disables what its class makes of operators
        with _noted(_AGAIN, True), _noted(_INSIDE, is_inside), torch._C._EnableTorchFunction():
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _noted(_AGAIN, False), second()

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **(kwargs or {}))


def is_again() -> bool:
    """Whether a function runs a second time, for backward."""
    return _AGAIN.get()


def outside(result: Any) -> Any:
    """What a function of the dialect returns: where no cell runs, its tensors have the reference's methods."""
    return pytree.tree_map(as_ours, result) if is_outermost() else result


def is_split() -> bool:
    """Whether cells run as parts of a plan: the mode is semi_auto or auto, on several devices."""
    options = context.options()
    return options.distributed and options.devices > 1


@contextmanager
def _noted(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
