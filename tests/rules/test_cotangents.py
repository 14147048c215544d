"""Backward collectives are listed by what the graph says carries a gradient, so autograd must say the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rules.harness import make_case
from rules.samples import SAMPLES, Sample
from shardwise.graph.emitter import rewrite_graph
from shardwise.graph.interpret import interpret
from shardwise.graph.ir import Graph, Ref, Source
from shardwise.graph.schema import filled, tensor_results
from shardwise.graph.simplify import SIMPLIFICATIONS

# Operand that carries a gradient and gets none, result by result.
SILENT = {
    "shardwise.ring_gradients.default": "the log-sum-exp, which ``ring_step`` computes without gradients",
    "aten.hinge_embedding_loss.default": "signs, which a model does not learn",
    "aten.cosine_embedding_loss.default": "signs, which a model does not learn",
    "shardwise.label_terms.default": "class probabilities of labels",
    "aten._fused_rms_norm.default": "its second result is a statistic, of the first operand only",
    "aten.linalg_slogdet.default": "the sign of a determinant is constant",
    "aten.slogdet.default": "the sign of a determinant is constant",
    "aten.linalg_vector_norm.default": "the norm of order 0 counts",
}
pytestmark = pytest.mark.filterwarnings("ignore")


def leaves(sample: Sample) -> Sample:
    """The sample with a gradient on every operand that can carry one."""

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            detached = value.detach().clone()
            return detached.requires_grad_(value.is_floating_point() or value.is_complex())
        return [own(item) for item in value] if isinstance(value, (list, tuple)) else value

    return replace(sample, args=tuple(map(own, sample.args)), kwargs={k: own(v) for k, v in sample.kwargs.items()})


def silent_operands(sample: Sample) -> Iterator[str]:
    """What carries a gradient in the simplified graph of a call and gets none from a result that carries one."""
    case = make_case(sample)
    sources = tuple(Source(f"x{i}", "input", (f"x{i}",)) for i in range(len(case.operands)))
    outputs = tuple(Ref(name) for name in case.op.results)
    graph = rewrite_graph(Graph(case.graph.values, sources, (case.op,), outputs), SIMPLIFICATIONS)
    known = interpret(graph, {f"x{i}": tensor.detach() for i, tensor in enumerate(case.operands)})
    for op in graph.ops:
        own = {name: known[name].detach().clone() for name in op.operands}
        wanted = {name: tensor.requires_grad_() for name, tensor in own.items() if graph.by_name[name].requires_grad}
        called = op.target(
            *[filled(a, own.__getitem__) for a in op.args], **{key: filled(a, own.__getitem__) for key, a in op.kwargs}
        )
        for result in tensor_results(called):
            if wanted and result.requires_grad:
                found = gradients(result, tuple(wanted.values()))
                yield from (f"{op}: {name}" for name, g in zip(wanted, found, strict=True) if g is None)


def gradients(result: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.sampled(1)
def test_every_operand_that_carries_a_gradient_gets_one_from_every_result(part: int) -> None:
    wrong: dict[str, str] = {}
    for sample in SAMPLES[part::4]:
        name = str(sample.target)
        if name in SILENT:
            continue
        found = list(silent_operands(sample))
        if has_derivatives(sample):
            found += silent_operands(leaves(sample))
        if found:
            wrong[name] = found[0]
    assert not wrong


def has_derivatives(sample: Sample) -> bool:
    """Whether autograd can differentiate the call with respect to all its operands."""
    try:
        case = make_case(leaves(sample))
        wanted = [tensor for tensor in case.operands if tensor.requires_grad]
        for result in case.results:
            if wanted and result.requires_grad:
                gradients(result, wanted)
    except (RuntimeError, NotImplementedError):  # not implemented
        return False
    return True


@pytest.mark.parametrize("name", SILENT)
def test_what_is_excepted_does_get_none(name: str) -> None:
    own = [sample for sample in SAMPLES if str(sample.target) == name]
    assert any(list(silent_operands(leaves(sample))) for sample in own)
