"""What watches or replaces calls of operators derives from torch's dispatch mode, whose constructor has no type."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """``TorchDispatchMode`` with a constructor that has a type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


__all__ = ["DispatchMode"]
