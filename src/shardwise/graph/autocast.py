"""``torch.autocast`` as casts of a graph. The casts of an operator are observed from torch itself.

An operator is called on fake tensors with and without autocast, and the kernels that run are recorded. Casts ahead of
the operator become casts in the graph; parameters are cast once, as torch's cache does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.dispatch_mode import OpRecorder
from shardwise.errors import CaptureError

DEVICES = ("cpu", "cuda")
_Call = tuple[str, tuple[torch.dtype, ...]]  # a kernel and the dtypes of its operands


@dataclass(frozen=True, slots=True)
class Autocast:
    """An active ``torch.autocast(device, dtype)``."""

    device: str
    dtype: torch.dtype

    @staticmethod
    def ambient() -> Autocast | None:
        """Return the active autocast, or None. Raises CaptureError for another device than the CPU: a model is captured
        on the CPU, and other devices cast other operators."""
        active = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        if not active:
            return None
        return Autocast.region(active[0] if len(active) == 1 else "cuda", None)

    @staticmethod
    def region(device: str, dtype: torch.dtype | None) -> Autocast:
        """Return the autocast of a region. Raises CaptureError as ``ambient`` does."""
        if device != "cpu":
            raise CaptureError(
                f'torch.autocast("{device}") is active, but models are captured on the CPU, where '
                "autocast casts other operators",
                fix="plan with precision=sw.Precision(compute=torch.bfloat16), or cast explicitly with .to(dtype)",
            )
        return Autocast(device, dtype or torch.get_autocast_dtype(device))

    def active(self, *, cache: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which torch has this autocast enabled."""
        return torch.autocast(self.device, self.dtype, cache_enabled=cache)

    def __str__(self) -> str:
        return f'torch.autocast("{self.device}", {self.dtype})'


def check_ambient(planned: Autocast | None, where: str) -> None:
    """Raise CaptureError if the active autocast is not the one of the plan; code outside the model must run without
    any. ``where``: what is being called."""
    active = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    if not active or (planned is not None and Autocast.ambient() == planned):
        return
    text = "no autocast" if planned is None else str(planned)
    raise CaptureError(
        f'torch.autocast("{active[0]}") is active {where}, but the plan was made for {text}',
        fix="call sw.plan and the module under the same autocast, and backward outside it (or use par.step)",
    )


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disable autocast while the context lasts."""
    with ExitStack() as stack:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@dataclass(frozen=True, slots=True)
class Casts:
    """The casts that autocast makes ahead of an operator. ``operands``: position of a tensor in the call -> the dtype
    it is cast to; ``dtype``: the value passed as the operator's argument ``dtype``, if any."""

    operands: Mapping[int, torch.dtype]
    dtype: torch.dtype | None = None


def casts_of(autocast: Autocast, target: OpOverload, call: Callable[[Callable[..., Any]], Any]) -> Casts | None:
    """Return the casts of a call; None if autocast casts inside the operator and no casts ahead of it are equivalent.

    ``call(make)`` makes the arguments (args, kwargs) of the call, with ``make(shape, dtype)`` for every tensor.
    """
    plain = _kernels(None, target, call, Casts({}))
    expected = _kernels(autocast, target, call, Casts({}))
    if expected is None or (plain is not None and expected.calls == plain.calls):
        return Casts({})
    inside = {} if plain is None else plain.casts
    ahead = Casts({i: dtype for i, dtype in expected.casts.items() if inside.get(i) != dtype})
    candidates = [ahead]
    if any(argument.name == "dtype" for argument in target._schema.arguments):
        candidates.append(Casts(ahead.operands, torch.float32))
    low = {i for i, x in enumerate(expected.tensors) if x.is_floating_point() and x.dtype != torch.float64}
    candidates.append(Casts(dict.fromkeys(low, autocast.dtype)))  # for compositions of products, such as einsum
    for cast in candidates:
        kernels = _kernels(None, target, call, cast)
        if kernels is not None and kernels.computing == expected.computing:
            return cast
    return None


class _KernelTrace(OpRecorder):
    """The kernels of a call, in order. ``computing``: those that are neither casts nor views; ``tensors``: of the call;
    ``cast_to``: identity of a tensor -> the dtype it was first cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.computing: list[_Call] = []
        self.cast_to: dict[int, torch.dtype] = {}
        self.tensors: list[torch.Tensor] = []

    @property
    def casts(self) -> dict[int, torch.dtype]:
        """Map positions of the call's tensors to the dtypes that they were cast to."""
        return {i: self.cast_to[id(x)] for i, x in enumerate(self.tensors) if id(x) in self.cast_to}

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        if func.namespace == "prim":
            return
        dtypes = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.calls.append((str(func), tuple(dtypes)))
        if func is torch.ops.aten._to_copy.default:
            self.cast_to.setdefault(id(args[0]), kwargs.get("dtype", args[0].dtype))
        elif not func.is_view:
            self.computing.append(self.calls[-1])


def _kernels(
    autocast: Autocast | None, target: OpOverload, call: Callable[..., Any], cast: Casts
) -> _KernelTrace | None:
    """Trace the kernels of a call on fake tensors after ``cast``. None if the call fails, as with operands of several
    dtypes, which some operators accept only under autocast."""
    trace = _KernelTrace()

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        trace.tensors.append(torch.empty(shape, dtype=cast.operands.get(len(trace.tensors), dtype)))
        return trace.tensors[-1]

    with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
        args, kwargs = call(make)
        if cast.dtype is not None:
            kwargs = {**kwargs, "dtype": cast.dtype}
        try:
            with trace, no_autocast() if autocast is None else autocast.active(cache=False):
                target(*args, **kwargs)
        except RuntimeError:
            return None
    return trace
