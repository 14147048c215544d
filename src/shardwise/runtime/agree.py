"""What is computed on rank 0 once and handed to the others: the captured graph (and the errors of capturing it)."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from shardwise.errors import ShardwiseError

T = TypeVar("T")


def from_rank_zero(compute: Callable[[], T]) -> T:
    """``compute()`` of rank 0 on every rank. Every rank must call this; an error that a user can mend is raised on all
    of them."""
    outcome: T | ShardwiseError | None = None
    if dist.get_rank() == 0:
        try:
            outcome = compute()
        except ShardwiseError as error:
            outcome = error
    if dist.get_world_size() > 1:
        box: list[Any] = [_dump(outcome) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() != 0:
            with warnings.catch_warnings():  # torch's own tree specs warn when they are unpickled (2.13)
                warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
                outcome = pickle.loads(box[0])
    if isinstance(outcome, ShardwiseError):
        raise outcome
    assert outcome is not None
    return outcome


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Operators travel by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            return _operator, (value.namespace, value._opname, value._overloadname)
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> OpOverload:
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found
