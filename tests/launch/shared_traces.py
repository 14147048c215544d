"""What the ranks of tests find out about calls of PyTorch's operators, and their plans, once for all of them.

The ranks of a test trace the same calls at the same time, and those of the next test trace them again: a third of what
they do. Here the first rank that meets a call writes down what it found, and the others read it. It is what every
process keeps for itself (``graph.switches.CallCache``), under the same key.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.graph.ir import Graph
from shardwise.graph.switches import CallCache, is_pytorchs, switches
from shardwise.programs import lower, vjp
from shardwise.runtime.agree import _dump, _load

_WAIT_SECONDS = 1.0  # for the rank that was first; then a rank looks for itself
_POLL_SECONDS = 0.001
_PLAN_SECONDS = 10.0  # for rank 0's plan; then a rank plans for itself


class Shelf:
    """Findings in a folder, a file each, by whatever tells them apart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: object) -> Any:
        """What another rank found. None for the rank that is to find it, which calls ``keep``."""
        path = self._path(key)
        if not path.exists() and self._is_first(path):
            return None
        return self.wait(key, _WAIT_SECONDS)

    def wait(self, key: object, seconds: float) -> Any:
        """What another rank found, or None: it has found nothing that could be kept."""
        path, until = self._path(key), time.monotonic() + seconds
        while not path.exists():
            if time.monotonic() > until:
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


def share_plans(folder: Path, run: str, rank: int) -> None:
    """Let rank 0 plan for the others that call ``sw.plan`` on the same line, as often, with equal arguments. Where the
    point is what each of them plans, they call ``shardwise.api.plan``."""
    shelf, plan, calls = Shelf(folder), sw.plan, Counter[object]()

    def shared(*args: Any, **kwargs: Any) -> sw.Plan:
        line = (sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
        calls[line] += 1
        key, own = ("plan", run, line, calls[line]), (described((args, kwargs)), switches())
        others, found = (shelf.wait(key, _PLAN_SECONDS) if rank else None) or (None, None)
        if found is not None and others == own:
            return found
        try:
            found = plan(*args, **kwargs)
        finally:
            if rank == 0:
                shelf.keep(key, (own, found))
        return found

    sw.plan = shared


def described(arguments: Any) -> list[object]:
    """Arguments as text, without the addresses of objects, the values of tensors and the weights of modules."""
    leaves, spec = pytree.tree_flatten(arguments)
    found: list[object] = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, nn.Module):
            state = (*leaf.named_parameters(), *leaf.named_buffers())
            found += [f"{type(leaf)} {leaf!r}", *((name, x.requires_grad, *of_tensor(x)) for name, x in state)]
        elif isinstance(leaf, torch.Tensor):
            found.append(of_tensor(leaf))
        elif isinstance(leaf, FunctionType):
            found.append((leaf.__module__, leaf.__qualname__, leaf.__code__.co_firstlineno))
        else:
            found.append(re.sub(r" at 0x\w+", "", repr(leaf)))
    return found


def of_tensor(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.device


def shared_lowerings(capture: Callable[..., Graph], shelf: Shelf) -> Callable[..., Graph]:
    def captured(lowering: Any, *arguments: Any) -> Graph:
        name = _name(lowering)
        if name is None:
            return capture(lowering, *arguments)
        key = ("lowering", name, *arguments, switches())
        graph: Graph | None = shelf.get(key)
        if graph is None:
            graph = capture(lowering, *arguments)
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
