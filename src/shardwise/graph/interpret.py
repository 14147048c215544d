"""Direct execution of a graph on one device: the reference for all transformations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwise.graph.ir import Graph
from shardwise.graph.schema import run_call, tensor_results


def interpret(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run every op in order with autograd as usual.

    ``inputs`` holds the data of every source (value name -> tensor of the global shape). Returns the data of every
    value, sources included. Raises KeyError if the data of a source is missing.
    """
    data = {source.value: inputs[source.value] for source in graph.sources}
    for op in graph.ops:
        result = run_call(op, data.__getitem__)
        data.update(zip(op.results, tensor_results(result), strict=True))
    return data
