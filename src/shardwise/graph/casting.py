"""Insertion of autocast's casts while a program is converted to a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch._ops import OpOverload

from shardwise.errors import CaptureError
from shardwise.graph.autocast import Autocast, casts_of
from shardwise.graph.emitter import Emitter
from shardwise.graph.ir import Op, Ref, map_operands
from shardwise.graph.schema import filled, operator_name, tensor_results

_FIX = "call it under torch.autocast(..., enabled=False) with operands cast beforehand"


class Casting:
    """Inserts casts for the active ``autocast``. As in torch's cache, a trained float32 parameter that was cast to
    autocast's dtype is reused until the outermost region ends."""

    def __init__(self, emitter: Emitter, autocast: Autocast | None) -> None:
        self.emitter, self.autocast = emitter, autocast
        self._casts: dict[tuple[str, torch.dtype], Ref] = {}

    @contextmanager
    def region(self, autocast: Autocast | None) -> Iterator[None]:
        """Enter a region with its own autocast, or with none."""
        before, self.autocast = self.autocast, autocast
        yield
        self.autocast = before
        if before is None:
            self._casts = {}

    def ahead_of(self, op: Op, cast: Callable[[str, torch.dtype], Ref], *, remembers: bool) -> Op:
        """Return the operator with operands cast by ``cast``. Raises CaptureError if autocast casts inside of it."""
        if self.autocast is None or not isinstance(op.target, OpOverload):
            return op
        if not any(self.emitter.values[name].dtype.is_floating_point for name in op.operands):
            return op
        casts = casts_of(self.autocast, op.target, partial(self._example, op))
        if casts is None:
            what = f"{self.autocast} casts inside of {operator_name(op.target)}, part by part"
            raise CaptureError(what, op=op.name.rstrip("/"), source=op.source, fix=_FIX)
        numbers = count()

        def operand(name: str) -> Ref:
            dtype = casts.operands.get(next(numbers))
            return Ref(name) if dtype is None else self._cast(name, dtype, cast, remembers)

        op = map_operands(op, operand)
        if casts.dtype is None:
            return op
        others = ((key, arg) for key, arg in op.kwargs if key != "dtype")
        return replace(op, kwargs=(*others, ("dtype", casts.dtype)))

    def _cast(self, name: str, dtype: torch.dtype, cast: Callable[[str, torch.dtype], Ref], remembers: bool) -> Ref:
        if (name, dtype) in self._casts:
            return self._casts[name, dtype]
        cast_ref, value = cast(name, dtype), self.emitter.values[name]
        assert self.autocast is not None
        trained = value.requires_grad and any(s.value == name and s.kind == "parameter" for s in self.emitter.sources)
        if trained and remembers and (value.dtype, dtype) == (torch.float32, self.autocast.dtype):
            self._casts[name, dtype] = cast_ref
        return cast_ref

    def _example(self, op: Op, make: Callable[..., Any]) -> tuple[Any, Any]:
        """Return the arguments of an operator with examples for its tensors, in the order of ``refs``."""

        def example(name: str) -> Any:
            value = self.emitter.values[name]
            return make(value.shape, value.dtype)

        return filled(op.args, example), {key: filled(arg, example) for key, arg in op.kwargs}

    def check(self, results: Sequence[Ref], val: Any, op: Op) -> None:
        """Raise CaptureError unless the results have the dtypes that the model saw. ``val``: the traced results."""
        if self.autocast is None:
            return
        for ref, fake in zip(results, tensor_results(val), strict=True):
            cast_dtype = self.emitter.value(ref).dtype
            if isinstance(fake, torch.Tensor) and fake.dtype != cast_dtype:
                what = f"{operator_name(op.target)} gives {fake.dtype} under {self.autocast}, {cast_dtype} by its casts"
                raise CaptureError(what, op=op.name.rstrip("/"), source=op.source, fix=_FIX)
