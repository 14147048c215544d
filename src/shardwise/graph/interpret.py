"""Direct execution of a graph on one device: the reference for all transformations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.graph.ir import Arg, Graph, Ref
from shardwise.graph.schema import tensor_results


def interpret(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run every op in order with autograd as usual.

    ``inputs`` holds the data of every source (value name -> tensor of the global shape). Returns the data of every
    value, sources included. Raises KeyError if the data of a source is missing.
    """
    data = {source.value: inputs[source.value] for source in graph.sources}
    for op in graph.ops:
        result = op.target(
            *(resolve_refs(arg, data) for arg in op.args), **{key: resolve_refs(arg, data) for key, arg in op.kwargs}
        )
        data.update(zip(op.results, tensor_results(result), strict=True))
    return data


def resolve_refs(arg: Arg, values: Mapping[str, torch.Tensor]) -> Any:
    """Return the argument with tensors in place of Refs and lists in place of tuples."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, tuple):
        return [resolve_refs(item, values) for item in arg]
    return arg
