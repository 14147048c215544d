"""The batch of a graph: which inputs have samples, and how many."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from shardwise.graph.ir import Graph
from shardwise.graph.trees import flatten, unflatten

T = TypeVar("T")


def batch_size(graph: Graph) -> int | None:
    """The size of dim 0 of the first input that has dims; of a part without inputs, of the first activation."""
    sources = [s for kind in ("input", "activation") for s in graph.sources if s.kind == kind]
    shapes = [graph.by_name[source.value].shape for source in sources]
    return next((shape[0] for shape in shapes if shape), None)


def num_samples(arguments: Any) -> int | None:
    """The samples of a call's arguments, nested as they are: dim 0 of the first tensor that has dims; None: there is
    none."""
    shapes = (leaf.shape for leaf in flatten(arguments)[0] if isinstance(leaf, torch.Tensor))
    return next((shape[0] for shape in shapes if shape), None)


def with_samples(arguments: T, count: int) -> T:
    """The arguments with ``count`` samples, without values: every tensor whose dim 0 has the size of the batch gets so
    many rows; all else is as it was (inputs without samples, numbers)."""
    batch = num_samples(arguments)
    if count == batch:
        return arguments

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        return torch.empty((count, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)

    leaves, spec = flatten(arguments)
    changed: T = unflatten([resized(leaf) for leaf in leaves], spec)
    return changed
