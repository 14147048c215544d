"""Records the calls of a model's own code, on one device and on ranks, in float64 and under the same names.

A call is identified by the path of its module, its function, its line and its index among those. Calls of a tool's own
code in between (hooks, exchanges) are not recorded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.graph.call_arguments import call_module
from shardwise.graph.origins import NOT_USER_CODE
from shardwise.graph.to_float64 import Reference

_TORCH = Path(torch.__file__).parent
_SITE = _TORCH.parent
_OWN_FORWARD, _CALLS_HOOKS = str(_TORCH / "nn" / "modules"), str(_TORCH / "nn" / "modules" / "module.py")
TOOLS = (
    str(_TORCH / "distributed"),
    *(
        str(_SITE / name)
        for name in ("transformers/distributed", "transformers/integrations/tensor_parallel", "accelerate")
    ),
)


@dataclass(frozen=True, slots=True)
class CallKey:
    """Identifies a call. ``module``: path of the module; ``index``: among the calls of this function on this line."""

    module: str
    function: str
    source: str
    index: int

    @property
    def name(self) -> str:
        """Return the name that operators have in plans: ``blocks.0.up/linear``."""
        return f"{self.module}/{self.function}"


@dataclass(frozen=True)
class RecordedResult:
    """The results of a call: copies, without DTensor's wrapper. ``differentiable``: whether they have gradients;
    ``operands``: calls, parameters (their names) or "an input"; ``read``: values of the operands at the call, which may
    be in another layout than when they were made, if the tool converted them (None: a parameter)."""

    results: tuple[Tensor, ...]
    differentiable: bool
    operands: tuple[CallKey | str, ...]
    read: tuple[Tensor | None, ...]


class CallRecorder(Reference):
    """Runs a model without dropout, in float64 (``widens``), and records its calls (``records``). One per thread."""

    def __init__(self, records: bool = False, widens: bool = True) -> None:
        super().__init__(0, widens=widens)
        self.records, self.made = records, dict[CallKey, RecordedResult]()
        self.failed: dict[CallKey, tuple[Tensor | None, ...]] = {}  # calls that raised -> their operands
        self.drops = self.draws = False
        self.names: dict[int, str] = {}  # parameters
        self._path: list[str] = [""]
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._makers: dict[int, CallKey] = {}
        self._alive: list[Any] = []  # keeps the ids in ``_makers`` unique

    def drop(self, x: Tensor, p: float) -> Tensor:
        self.drops = True
        return x

    def uniform(self, shape: Any) -> Tensor:
        self.draws = True
        return super().uniform(shape)

    def follow(self, module: nn.Module) -> None:
        """Track the module in which calls are made. Must run before a tool adds its own hooks."""
        for path, part in module.named_modules():
            part.register_forward_pre_hook(partial(self._enter, path))
            part.register_forward_hook(self._leave, always_call=True)

    def know(self, module: nn.Module) -> None:
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}

    def _enter(self, path: str, *_: Any) -> None:
        self._path.append(path)

    def _leave(self, *_: Any) -> None:
        self._path.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.records:
            return super().__torch_function__(func, types, args, kwargs)
        line = "" if getattr(func, "__name__", "") == "__get__" else _line(sys._getframe(1))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)] if line else []
        read = tuple(None if id(one) in self.names else _copy(one) for one in tensors)  # the call may overwrite them
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except Exception:
            if line:
                self.failed[self._call(func, line)] = read
            raise
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        placements = getattr(result, "placements", ())  # a DTensor's masked lookup is meaningful once it is reduced
        if line and results and not any("Mask" in type(placement).__name__ for placement in placements):
            call = self._call(func, line)
            self._counts[call.module, call.function, call.source] += 1
            operands = tuple(self._makers.get(id(one)) or self.names.get(id(one), "an input") for one in tensors)
            differentiable = any(one.requires_grad for one in results)
            self.made[call] = RecordedResult(tuple(map(_copy, results)), differentiable, operands, read)
            self._alive.append(results)
            self._makers.update((id(one), call) for one in results)
        return result

    def _call(self, func: Callable[..., Any], line: str) -> CallKey:
        key = self._path[-1], getattr(func, "__name__", str(func)).strip("_"), line
        return CallKey(*key, self._counts[key])


def _copy(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return local(tensor).clone()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, DTensor or not."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    wait = getattr(part, "wait", None)
    return (wait() if callable(wait) else part).detach()


def _line(frame: FrameType | None) -> str:
    """Return the model's line, such as ``"model.py:41"``, or that of a module of PyTorch, or ``"loss="``; "" for calls
    of a tool's own code."""
    of_torch = ""
    while frame is not None and frame.f_code is not call_module.__code__:  # the caller of the model
        name = frame.f_code.co_filename
        if name.startswith(_OWN_FORWARD) and name != _CALLS_HOOKS:
            of_torch = of_torch or f"{Path(name).name}:{frame.f_lineno}"
        elif name.startswith(TOOLS) and not of_torch:
            return ""
        elif not name.startswith((*NOT_USER_CODE, *TOOLS)):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return of_torch or ("loss=" if frame is not None else "")


def error_line(error: BaseException) -> str:
    """Return the model's line at which an error was raised, or ""."""
    line, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if not name.startswith((*NOT_USER_CODE, *TOOLS)):
            line = f"{Path(name).name}:{step.tb_lineno}"
        step = step.tb_next
    return line
