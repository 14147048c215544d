"""The overflow status of Ascend devices, in software: whether a loss or a gradient was not finite since the status was
cleared. Each rank has its own, as each device has; programs sum them. The device checks every operator, so it also
records an infinity that later operators hide; this status does not."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.mindspore.loss_scale import all_finite

_state = {"watched": False, "overflowed": False}  # of this process, like the register of a device


def clear(status: torch.Tensor) -> torch.Tensor:
    """Clear the status and start recording."""
    _state.update(watched=True, overflowed=False)
    with torch.no_grad():
        return status.zero_()


def read(status: torch.Tensor) -> torch.Tensor:
    """Write the status: 1 in its first word after an overflow, else 0."""
    with torch.no_grad():
        status[0] = float(_state["overflowed"])
    return status


def noted(tensors: Iterable[torch.Tensor]) -> None:
    """Check every computed loss and gradient. Nothing is checked before a program has cleared a status, nor after the
    first overflow. A check costs one device synchronisation per step."""
    if _state["watched"] and not _state["overflowed"]:
        _state["overflowed"] = not all_finite(tensors)
