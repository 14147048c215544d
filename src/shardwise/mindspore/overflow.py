"""The overflow status of Ascend devices, in software: whether a loss or a gradient, of any network, was not finite
since the status was cleared. Each rank has its own, as each device has; programs sum them. (The device's notes every
operator: an infinity that later ones hide shows there, and not here.)"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.mindspore.amp import all_finite

_state = {"watched": False, "overflowed": False}  # of this process, as the register is of a device


def clear(status: torch.Tensor) -> torch.Tensor:
    """Forget what was noted, and note from now on."""
    _state.update(watched=True, overflowed=False)
    with torch.no_grad():
        return status.zero_()


def read(status: torch.Tensor) -> torch.Tensor:
    """Write into the status what was noted: 1 in its first word, or 0."""
    with torch.no_grad():
        status[0] = float(_state["overflowed"])
    return status


def noted(tensors: Iterable[torch.Tensor]) -> None:
    """Called with every loss and gradient that is computed. They are looked at once a program has cleared a status, and
    until one is not finite; that is one answer from the device a step."""
    if _state["watched"] and not _state["overflowed"]:
        _state["overflowed"] = not all_finite(tensors)
