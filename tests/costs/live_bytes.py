"""How many bytes a piece of code has live at once, measured below autograd."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.dispatch_mode import DispatchMode


class LiveBytes(DispatchMode):
    """Bytes of the storages that appeared while the mode was on and are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(returned):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in before:
                self._note(tensor.untyped_storage())
        return returned

    def _note(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, num_bytes).atexit = False

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes
