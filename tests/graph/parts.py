"""Running the parts of a cut graph one after another on one device, and their backward by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.graph.cut import CutValue, GraphCut, cut_apart, free_values
from shardwise.graph.graph_invariants import verify_graph
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph, Ref


def cut_graph(graph: Graph, boundaries: Sequence[str]) -> GraphCut:
    """Cut the graph before each of the ``boundaries``, operators in execution order."""
    names = [op.name for op in graph.ops]
    starts = [0, *map(names.index, boundaries), len(names)]
    return cut_apart(graph, [names[start:end] for start, end in pairwise(starts)])


def carriers(crossing: CutValue) -> tuple[int, ...]:
    return tuple(part for part in crossing.receivers if part not in crossing.users)


def run_parts(
    cut: GraphCut, data: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, gradients of sources, what buffers become). A part sees what it receives as new leaves, and nothing but
    values and cotangents passes between parts."""
    outputs: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    environments: list[dict[str, Tensor]] = []
    for number, part in enumerate(cut.parts):
        given = dict(data)
        for source in part.sources:
            value = part.by_name[source.value]
            if source.kind == "activation":
                assert source.value in cut.sends(number - 1)
                sent = environments[-1][source.value]
                given[source.value] = sent.detach().clone().requires_grad_(value.requires_grad)
            else:
                given[source.value] = data[source.value].detach().clone().requires_grad_(value.requires_grad)
        environments.append(interpret(part, given))
        for buffer, value_name in part.mutations:
            new = environments[-1][value_name].detach().clone()
            assert buffer not in written or torch.equal(written[buffer], new), f"parts rewrite {buffer} differently"
            written[buffer] = new
        delivered = {name for name, where in cut.output_parts if where == number}
        names = {out.name for out in part.outputs if isinstance(out, Ref)}
        assert names == delivered - ({part.loss} - names) | set(cut.sends(number))
        outputs |= {name: environments[-1][name].detach() for name in delivered}
    return outputs, _backward(cut.parts, environments), written


def _backward(parts: tuple[Graph, ...], environments: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    returned: dict[str, Tensor] = {}  # value -> the cotangent that the next part sends back
    for part, environment in zip(reversed(parts), reversed(environments), strict=True):
        ends = [name for name in part.differentiated if environment[name].requires_grad]
        leaves = [s.value for s in part.sources if part.by_name[s.value].requires_grad]
        ones = {name: torch.ones_like(environment[name]) for name in ends if name not in returned}
        assert all(name == part.loss for name in ones), f"no cotangent came back for {list(ones)}"
        found = (
            torch.autograd.grad(
                [environment[name] for name in ends],
                [environment[name] for name in leaves],
                [returned.get(name, ones.get(name)) for name in ends],
                allow_unused=True,
            )
            if ends and leaves
            else [None] * len(leaves)
        )
        returned = {}
        for name, gradient in zip(leaves, found, strict=True):
            if part.source_of[name].kind == "activation":
                if gradient is not None:
                    returned[name] = gradient
            elif gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def check_parts(cut: GraphCut, graph: Graph, data: Mapping[str, Tensor], tolerance: float = 1e-12) -> float:
    """Outputs, every gradient and buffers of the parts against those of the whole graph; the worst relative error."""
    for part in cut.parts:
        verify_graph(part)
    names = [op.name for op in graph.ops]
    assert [name for name in names if not any(name in part.op_by_name for part in cut.parts)] == []
    for name in cut.repeated:
        assert not any(graph.by_name[result].requires_grad for result in graph.op_by_name[name].results)
    assert {s for part in cut.parts for s in part.source_of} >= {s.value for s in graph.sources if s.kind != "constant"}
    leaves = {
        s.value: data[s.value].detach().clone().requires_grad_(graph.by_name[s.value].requires_grad)
        for s in graph.sources
    }
    whole = interpret(graph, leaves)
    outputs, gradients, written = run_parts(cut, data)
    worst = 0.0
    wanted = {out.name for out in graph.outputs if isinstance(out, Ref)} | ({graph.loss} - {None})
    assert set(outputs) == wanted
    for name, have in outputs.items():
        torch.testing.assert_close(have, whole[name].detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert set(written) == {buffer for buffer, _ in graph.mutations}
    for buffer, name in graph.mutations:
        torch.testing.assert_close(written[buffer], whole[name].detach(), rtol=tolerance, atol=tolerance)
    if graph.loss is None or not whole[graph.loss].requires_grad:
        assert not gradients
        return worst
    needed = [name for name in leaves if leaves[name].requires_grad]
    expected = torch.autograd.grad(whole[graph.loss], [leaves[name] for name in needed], allow_unused=True)
    largest = max((float(g.abs().max()) for g in expected if g is not None and g.numel()), default=0.0)
    for name, want in zip(needed, expected, strict=True):
        have = gradients.get(name)
        assert (want is None) == (have is None), f"the gradient of {name}: {want is None} {have is None}"
        if want is not None and have is not None and want.numel():
            scale = max(float(want.abs().max()), 1e-6 * largest) or 1.0
            error = float((want - have).abs().max()) / scale
            assert error <= tolerance, f"the gradient of {name}: {error}"
            worst = max(worst, error)
    return worst


def random_cut(graph: Graph, rng: random.Random, num_parts: int) -> GraphCut:
    """Cut before random operators that are not repeated elsewhere, so that no part is empty."""
    free = free_values(graph)
    bound = [op.name for op in graph.ops if not free.issuperset(op.results)]
    starts = sorted(rng.sample(range(1, len(bound)), min(num_parts, len(bound)) - 1))
    return cut_graph(graph, [bound[start] for start in starts])
