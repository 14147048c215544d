"""Elementwise operators of one operand, or of operands that are broadcast to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore.named import TABLES, classes_of
from shardwise.mindspore.ops.of_torch import of_functions
from shardwise.mindspore.ops.primitive import Names, Simple, counted
from shardwise.mindspore.strict import Strategy


class Elementwise(Simple):
    """An elementwise operator: ``function`` of one or several operands, broadcast."""

    lead = None

    def led(self, strategy: Strategy, *args: Any) -> Any:
        """Split the result by the counts of all operands. The operators inside follow it."""
        rank = max(map(len, strategy))
        padded = ((1,) * (rank - len(counts)) + counts for counts in strategy)
        return counted(self.compute(*args), tuple(map(max, zip(*padded, strict=True))))

    def followed(self, names: Names, args: tuple[Any, ...]) -> frozenset[str]:
        return frozenset(name for operand_names in names for name in operand_names)


def _maximum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.maximum(x, y)
    return x.clamp(min=y) if isinstance(x, torch.Tensor) else y.clamp(min=x)


def _minimum(x: Any, y: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return torch.minimum(x, y)
    return x.clamp(max=y) if isinstance(x, torch.Tensor) else y.clamp(max=x)


ELEMENTS: dict[str, Any] = {
    **of_functions(TABLES["ops"]["elements"]),
    "GeLU": lambda x: F.gelu(x, approximate="tanh"), "Maximum": _maximum, "Minimum": _minimum,
    "Cast": lambda x, dtype: (x if isinstance(x, torch.Tensor) else torch.as_tensor(x)).to(dtype),
    "Elu": lambda x, *, alpha=1.0: F.elu(x, alpha),
    "LeakyReLU": lambda x, *, alpha=0.2: F.leaky_relu(x, alpha),
}  # fmt: skip
COMPOSED: dict[str, Any] = {  # made of several torch operators
    "AddN": lambda tensors: sum(tensors[1:], tensors[0]),
    "DivNoNan": lambda x, y: torch.where(y == 0, 0, x / torch.where(y == 0, 1, y)),
    "Identity": torch.clone,
    "Softsign": lambda x: x / (1 + x.abs()),
    "SquaredDifference": lambda x, y: (x - y).square(),
}
CLASSES = classes_of(ELEMENTS, Elementwise, __name__) | classes_of(COMPOSED, Elementwise, __name__, lead=0)
globals().update(CLASSES)

__all__ = list(CLASSES)
