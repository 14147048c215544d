"""The overflow status of Ascend devices, in software: whether a loss or a gradient was not finite since the status was
cleared. (The device's own notes every operator: an infinity that later ones hide shows there, and not here.)"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WORDS = 8  # of the device's status
_state = {"watched": False, "overflowed": False}


def alloc() -> torch.Tensor:
    """A status without overflow."""
    return torch.zeros(_WORDS)


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
    """Called with every loss and gradient that is computed; they are looked at once a program has cleared a status."""
    if _state["watched"] and not _state["overflowed"]:
        _state["overflowed"] = not all(bool(torch.isfinite(x).all()) for x in tensors)
