"""Batch size of a graph and of a call's arguments."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from shardwise.graph.ir import Graph
from shardwise.graph.trees import flatten, unflatten

T = TypeVar("T")


def batch_size(graph: Graph) -> int | None:
    """Return the size of dim 0 of the first input that has dims; for a part without inputs, of the first activation."""
    sources = [s for kind in ("input", "activation") for s in graph.sources if s.kind == kind]
    shapes = [graph.by_name[source.value].shape for source in sources]
    return next((shape[0] for shape in shapes if shape), None)


def inputs_with_samples(graph: Graph) -> frozenset[str]:
    """Return the names of the inputs whose first dim is the samples of the batch: those that micro-batches split."""
    batch = batch_size(graph)
    inputs = [source for source in graph.sources if source.kind == "input"]
    return frozenset(source.names[0] for source in inputs if graph.by_name[source.value].shape[:1] == (batch,))


def num_samples(arguments: Any) -> int | None:
    """Return the number of samples of a call's arguments: dim 0 of the first tensor that has dims, or None if there is
    none."""
    shapes = (leaf.shape for leaf in flatten(arguments)[0] if isinstance(leaf, torch.Tensor))
    return next((shape[0] for shape in shapes if shape), None)


def with_samples(arguments: T, count: int) -> T:
    """Return the arguments with ``count`` samples and without values. Tensors whose dim 0 has the size of the batch are
    resized; everything else (inputs without samples, numbers) stays."""
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
