"""Running a captured graph beside the module it came from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.graph.call_arguments import call_module
from shardwise.graph.capture import Capture, capture
from shardwise.graph.graph_invariants import verify_graph
from shardwise.graph.infer import TypeInference
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph, Ref

SEED = "_shardwise_seed"


def data_of(
    captured: Capture, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int = 0
) -> dict[str, torch.Tensor]:
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    leaves = iter(leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))
    data = {}
    for source in captured.graph.sources:
        if source.kind == "input":
            data[source.value] = next(leaves)
        elif source.kind == "constant":
            data[source.value] = captured.constants[source.value]
        elif source.names == (SEED,):
            data[source.value] = torch.tensor(seed)
        else:
            data[source.value] = held[source.names[0]]
    return data


def run_graph(
    captured: Capture, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """(the leaves of the call's output, every value) of the graph, its mutations done.

    Gradients go to the module's parameters.
    """
    values = interpret(captured.graph, data_of(captured, module, args, kwargs))
    leaves = [values[leaf.name] if isinstance(leaf, Ref) else leaf for leaf in captured.graph.outputs]
    written = {buffer: values[name].detach().clone() for buffer, name in captured.graph.mutations}
    with torch.no_grad():
        for buffer, value in written.items():
            values[buffer].copy_(value)
    assert captured.out_spec.num_leaves == len(leaves)
    return leaves, values


def check_against_eager(
    module: nn.Module,
    *args: Any,
    loss: Callable[..., Any] | None = None,
    tolerance: float = 1e-12,
    calls: int = 1,
    equal_nan: bool = False,
    **kwargs: Any,
) -> Capture:
    """Captures the call and compares outputs, gradients and buffers with the eager module in float64, call by call."""
    module = module.double()
    twin = copy.deepcopy(module)
    captured = capture(module, args, kwargs, loss=loss)
    graph = captured.graph
    verify_graph(graph)
    verify_types(graph)
    for _ in range(calls):
        module.zero_grad()
        twin.zero_grad()
        leaves, values = run_graph(captured, module, args, kwargs)
        expected = call_module(twin, args, kwargs, loss)
        for own, theirs in zip(leaves, pytree.tree_leaves(expected), strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance, equal_nan=equal_nan)
        total = _scalar(leaves) if graph.loss is None else values[graph.loss]
        if total.requires_grad:
            total.backward()
            _scalar(expected, None if graph.loss is None else graph.outputs.index(Ref(graph.loss))).backward()
    for (name, parameter), (_, other) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), f"the gradient of {name}"
        if parameter.grad is not None:
            torch.testing.assert_close(
                parameter.grad, other.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    for (name, buffer), (_, other) in zip(module.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    return captured


def verify_types(graph: Graph) -> None:
    """Compare the stated types with those of every operator on fake tensors."""
    inference = TypeInference()
    for op in graph.ops:
        inferred = inference.results(op, graph.by_name.__getitem__)
        assert len(inferred) == len(op.results), (
            f"{op.name} has {len(op.results)} results, the operator returns {len(inferred)}"
        )
        for name, value in zip(op.results, inferred, strict=True):
            stated = graph.by_name[name]
            same = (stated.shape, stated.dtype) == (value.shape, value.dtype)
            assert same, (
                f"{op.name}: {name} is stated as {stated.dtype} {stated.shape}, found {value.dtype} {value.shape}"
            )


def _scalar(output: Any, position: int | None = None) -> torch.Tensor:
    leaves = pytree.tree_leaves(output)
    if position is not None:
        found = leaves[position]
        assert isinstance(found, torch.Tensor)
        return found
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum() if tensors else torch.zeros(())


def operators(captured: Capture) -> list[str]:
    return [str(op.target).removeprefix("aten.") for op in captured.graph.ops]
