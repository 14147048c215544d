"""Accumulates the cotangents of values while backward is written: every consumer of a value contributes one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardwise.graph.ir import Ref
from shardwise.programs.forms import Form
from shardwise.programs.instructions import Compute, Instruction, Origin

aten = torch.ops.aten


@dataclass(eq=False)
class Cotangents:
    """The cotangents so far. ``names``: value -> the name of its cotangent, if it has one; ``forms``: of all names."""

    forms: dict[str, Form]
    names: dict[str, str] = field(default_factory=dict)

    def add(self, value: str, cotangent: str, origin: Origin, into: list[Instruction]) -> None:
        """Add a cotangent to those that the value already has. The addition is appended to ``into``."""
        if not self.forms[value].requires_grad:
            return
        before = self.names.get(value)
        if before is None:
            self.names[value] = cotangent
            return
        first, second = self.forms[before], self.forms[cotangent]
        dtype = torch.promote_types(first.dtype, second.dtype)  # those of a parameter may be reduced in other dtypes
        same = first.stride == second.stride and dtype == first.dtype
        form = first if same else Form.contiguous(first.shape, dtype)
        total = f"{cotangent}+{before}"
        if total in self.forms:  # another value has the same two cotangents: the values were added, the sum used twice
            total = f"{total}:{value}"
        self.forms[total] = form
        args = (Ref(before), Ref(cotangent))
        self.names[value] = total
        into.append(Compute(aten.add.Tensor, args, (), (total,), ((),), (form,), (None,), origin))

    def zeros(self, name: str, like: Form, origin: Origin, into: list[Instruction], value: str = "") -> str:
        """Append to ``into`` a cotangent of zeros with this name, and return the name. ``value``: one that has its
        size, if that is known in the step only."""
        form = self.forms[name] = Form.contiguous(like.shape, like.dtype)
        target, args = (aten.zeros_like.default, (Ref(value),)) if value else (aten.zeros.default, (form.shape,))
        kwargs = () if value else (("dtype", form.dtype), ("device", None))
        into.append(Compute(target, args, kwargs, (name,), ((),), (form,), (None,), origin))
        return name
