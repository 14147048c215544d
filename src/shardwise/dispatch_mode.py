"""The typed base class of all dispatch modes, which observe (``OpRecorder``) or replace operator calls."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """``TorchDispatchMode`` with a typed constructor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class OpRecorder(DispatchMode):
    """Lets every operator call run, and ``record`` see it with what it returned."""

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        self.record(func, args, kwargs, returned)
        return returned
