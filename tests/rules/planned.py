"""Every sample in a small model of its own, under the plan that ``sw.plan`` chooses by itself: ``python -m
rules.planned`` in tests/ plans and verifies all of them (part of ``make sweep``)."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwise as sw
from rules.samples import SAMPLES, Sample

NUM_DEVICES = 2


class Called(nn.Module):
    """A sample's call on its operands, those with a gradient multiplied by a parameter. Returns a loss."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten((list(sample.args), sample.kwargs))
        self.target = sample.target
        self.flows = [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
        self.leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *operands: Tensor) -> Tensor:
        given = iter([x * self.scale if flows else x for x, flows in zip(operands, self.flows, strict=True)])
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = [r for r in pytree.tree_leaves(self.target(*args, **kwargs)) if isinstance(r, Tensor)]
        real = [torch.view_as_real(r.resolve_conj()) if r.is_complex() else r for r in results]
        return sum((r.sin().sum() for r in real if r.requires_grad), self.scale.sin())


def is_differentiable(sample: Sample) -> bool:
    return any(r.requires_grad for r in _tensors(sample.target(*sample.args, **sample.kwargs)))


def planned_samples() -> Iterator[Sample]:
    return (sample for sample in SAMPLES if not sample.unspecified and is_differentiable(sample))


def fault(sample: Sample) -> str:
    """What is wrong with the default plan of a sample; empty if nothing is."""
    operands = tuple(tensor.detach() for tensor in _tensors((list(sample.args), sample.kwargs)))
    model = Called(sample)
    try:
        with warnings.catch_warnings(action="ignore"):
            report = sw.verify(model, operands, sw.plan(model, operands, NUM_DEVICES))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if report.ok else str(report)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for i, sample in enumerate(planned_samples()):
        if names and not any(name in str(sample.target) for name in names):
            continue
        found = fault(sample)
        counts += Counter(samples=1, faults=bool(found))
        if found:
            print(f"{i} {sample}\n  {found}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    if counts["faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
