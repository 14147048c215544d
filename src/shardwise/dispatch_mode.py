"""The typed base class of all dispatch modes, which observe or replace operator calls."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """``TorchDispatchMode`` with a typed constructor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


__all__ = ["DispatchMode"]
