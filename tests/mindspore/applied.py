"""A primitive in a cell, planned by its strategy and compared with one device on the virtual cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardwise as sw
import shardwise.mindspore as ms
from shardwise.mindspore import calls, context, planning
from shardwise.mindspore.layout import AXIS


class Name(str):
    """The name of a tensor of a cell."""


class Fixed(Tensor):
    """A floating tensor that is no parameter."""


class Applied(ms.nn.Cell):
    """A primitive on parameters (floating tensors) and buffers (others); returns a loss and all results."""

    def __init__(self, primitive: ms.ops.Primitive, args: Sequence[Any]) -> None:
        super().__init__()
        self.primitive = primitive
        self.count = 0
        self.given = pytree.tree_map(self._held, tuple(args))

    def _held(self, leaf: Any) -> Any:
        """A tensor becomes a parameter or a buffer, and its name takes its place."""
        if not isinstance(leaf, Tensor):
            return leaf
        name = f"p{self.count}"
        self.count += 1
        if leaf.is_floating_point() and not isinstance(leaf, Fixed):
            self.register_parameter(name, ms.Parameter(leaf.clone(), name))
        else:
            self.register_buffer(name, leaf.as_subclass(Tensor))
        return Name(name)

    def construct(self) -> Any:
        args = pytree.tree_map(lambda own: getattr(self, own) if isinstance(own, Name) else own, self.given)
        tensors = [own for own in pytree.tree_leaves(self.primitive(*args)) if isinstance(own, Tensor)]
        loss = sum(((own.sin() * own).sum() for own in tensors if own.is_floating_point()), torch.zeros(()))
        return loss, *(own * 1 for own in tensors)  # no views of parameters, which the optimizer updates


def planned(cell: ms.nn.Cell, inputs: tuple[Any, ...], devices: int, **options: Any) -> sw.Plan:
    """The plan of a cell in the dialect's mode of that many devices."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=devices, **options)
    return sw.plan(cell, inputs, devices, mesh=sw.Mesh({AXIS: devices}), mode="semi_auto")


def planned_by_context(cell: Any, inputs: tuple[Any, ...], **kwargs: Any) -> sw.Plan:
    """The plan of a cell for whole batches, by the context. No ranks are needed."""
    model, inputs = planning.whole_copy(cell, inputs)
    planning.be_buffers(model, planning.changed_parameters(model, inputs, kwargs))
    return planning.decided(cell, model, inputs, kwargs, {}, context.options())


def equal_to_one_device(cell: ms.nn.Cell, inputs: tuple[Any, ...], devices: int, **options: Any) -> sw.Plan:
    plan = planned(cell, inputs, devices, **options)
    with calls.inside():
        report = sw.verify(cell, inputs, plan, steps=1)
    no_gradient = report.not_proven.startswith("these inputs do not prove backward")  # of an operator that has none
    equal = no_gradient and all(difference.error <= report.tolerance for difference in report.differences)
    assert report.ok or equal, f"{report}\n{plan}"
    return plan
