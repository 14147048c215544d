"""What the ranks of tests find out about calls of PyTorch's operators, once for all of them.

The ranks of a test trace the same calls at the same time, and those of the next test trace them again: a third of what
they do. Here the first rank that meets a call writes down what it found, and the others read it. It is what every
process keeps for itself (``graph.switches.CallCache``), under the same key.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from shardwise.graph.ir import Graph
from shardwise.graph.switches import CallCache, is_pytorchs, switches
from shardwise.programs import lower, vjp
from shardwise.runtime.agree import _dump, _load

_WAIT_SECONDS = 1.0  # for the rank that was first; then a rank looks for itself
_POLL_SECONDS = 0.001


class Shelf:
    """Findings in a folder, a file each, by whatever tells them apart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: object) -> Any:
        """What another rank found. None for the rank that is to find it, which calls ``keep``."""
        path = self._path(key)
        if not path.exists() and self._is_first(path):
            return None
        until = time.monotonic() + _WAIT_SECONDS
        while not path.exists():
            if time.monotonic() > until:  # it found nothing that could be kept
                return None
            time.sleep(_POLL_SECONDS)
        return _load(path.read_bytes())

    def keep(self, key: object, found: object) -> None:
        path = self._path(key)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(_dump(found))
        draft.replace(path)

    def _path(self, key: object) -> Path:
        return self._folder / sha256(repr(key).encode()).hexdigest()

    def _is_first(self, path: Path) -> bool:
        try:
            path.with_suffix(".first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class SharedKnown(CallCache[Any]):
    def __init__(self, kind: str, shelf: Shelf) -> None:
        super().__init__()
        self._kind, self._shelf = kind, shelf

    def get(self, target: Any, signature: object) -> Any:
        found = super().get(target, signature)
        if found is None and is_pytorchs(target):
            found = self._shelf.get((self._kind, signature, switches()))
            if found is not None:
                super().keep(target, signature, found)
        return found

    def keep(self, target: Any, signature: object, found: Any) -> None:
        super().keep(target, signature, found)
        if is_pytorchs(target):
            self._shelf.keep((self._kind, signature, switches()), found)


def share_traces(folder: Path) -> None:
    """Let this rank share what it traces with all that were given the same folder."""
    shelf = Shelf(folder)
    vjp._FORWARD, vjp._BACKWARD = SharedKnown("forward", shelf), SharedKnown("backward", shelf)
    lower._capture_lowering = shared_lowerings(lower._capture_lowering, shelf)  # type: ignore[assignment]


def shared_lowerings(capture: Callable[..., Graph], shelf: Shelf) -> Callable[..., Graph]:
    def captured(lowering: Any, args: Any, kwargs: Any) -> Graph:
        name = _name(lowering)
        if name is None:
            return capture(lowering, args, kwargs)
        key = ("lowering", name, args, kwargs, switches())
        graph: Graph | None = shelf.get(key)
        if graph is None:
            graph = capture(lowering, args, kwargs)
            shelf.keep(key, graph)
        return graph

    return captured


def _name(lowering: Any) -> str | None:
    """What every rank knows one of shardwise's lowerings by; None for others, a test's own among them."""
    if not lowering.__module__.startswith("shardwise."):
        return None
    if is_dataclass(lowering):
        return f"{lowering.__module__}.{lowering}"
    name = getattr(lowering, "__qualname__", "")
    known = getattr(sys.modules[lowering.__module__], name, None) is lowering
    return f"{lowering.__module__}.{name}" if known else None
