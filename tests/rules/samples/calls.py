"""A sample call, and the tensors in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True, eq=False)
class Sample:
    """One call. ``unsplit``: no factor can be split. ``unspecified``: the values mean nothing."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unsplit: bool = False
    unspecified: bool = False

    def __str__(self) -> str:
        return f"{self.target}{[describe(a) for a in (*self.args, *self.kwargs.values())]}"


def describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return value


GENERATOR = torch.Generator().manual_seed(20)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64, requires_grad=True)


def unit(*shape: int) -> Tensor:
    """In (0.1, 0.9), where most special functions are smooth; differentiable."""
    return (torch.rand(shape, generator=GENERATOR, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


def bits(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR) < 0.5


def plain(tensor: Tensor) -> Tensor:
    return tensor.detach()


def leaf(values: Any) -> Tensor:
    return torch.as_tensor(values).to(torch.float64).requires_grad_()


def call(target: OpOverload, *args: Any, **kwargs: Any) -> Sample:
    return Sample(target, args, kwargs)


def unsplit(target: OpOverload, *args: Any, **kwargs: Any) -> Sample:
    return Sample(target, args, kwargs, unsplit=True)
