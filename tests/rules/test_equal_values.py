"""Of equal values an operator takes the ones that it takes on one device, however the dim along which it chooses is
split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from programs.running import run
from rules.samples import ids, leaf
from rules.test_odd_inputs import program_of
from shardwise.rules.lowerings import reductions

INF, NAN = math.inf, math.nan
MESHES = (sw.Mesh(a=2, b=2), sw.Mesh(x=4), sw.Mesh(x=3))

CHOICES: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda a: a.topk(4, 1),
    "topk, one": lambda a: a.topk(1, 0),
    "topk, least": lambda a: a.topk(5, 1, largest=False),
    "topk, unsorted": lambda a: a.topk(3, 0, sorted=False),
    "topk in bfloat16": lambda a: a.bfloat16().topk(4, 1),
    "sort": lambda a: a.sort(1),
    "sort down": lambda a: a.sort(0, descending=True),
    "stable sort": lambda a: a.sort(dim=1, stable=True),
    "argsort": lambda a: (a.argsort(0, descending=True), a.sum()),
    "msort": lambda a: a.msort(),
    "max": lambda a: a.max(1),
    "min": lambda a: a.min(0),
    "max of all": lambda a: a.max(),
    "min of all": lambda a: a.min(),
    "argmax": lambda a: (a.argmax(1), a.argmax(0, keepdim=True), a.argmax(), a.sum()),
    "argmin": lambda a: (a.argmin(1), a.argmin(0, keepdim=True), a.argmin(), a.sum()),
    "amax": lambda a: (a.amax(1), a.amin((0, 1))),
    "aminmax": lambda a: a.aminmax(dim=1),
    "median": lambda a: (*a.median(1), a.median(), *a.nanmedian(0)),
    "mode": lambda a: (*a.mode(1), *a.mode(0)),
    "kthvalue": lambda a: (*a.kthvalue(5, 1), *a.kthvalue(2, 0)),
    "quantile": lambda a: a.quantile(0.5, 1),
    "cummax": lambda a: a.cummax(1),
    "cummin": lambda a: a.cummin(0),
    "infinity norm": lambda a: (a.norm(p=INF), a.norm(p=INF, dim=0), a.norm(p=-INF, dim=1)),
    "max pooling": lambda a: F.max_pool1d(a, 3, 1, 1, return_indices=True),
}
VALUES = {
    "equal": (ids(3, 12, 12) - 1).double(),
    "all the same": torch.ones(12, 12).double(),
    "nan": torch.tensor([0.0, NAN, 1.0, -INF, INF, 0.0]).double()[ids(6, 12, 12)],
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.sampled(16)
def test_of_equal_values_the_same_ones_are_taken(choice: str, values: str) -> None:
    program = program_of(lambda a: CHOICES[choice](a), (leaf(VALUES[values].tolist()),))
    if choice in ("amax", "aminmax") and values == "nan":
        pytest.skip("their gradients are nan, against which run() measures no error; compared below")
    for seed, mesh in enumerate(MESHES):
        outcome = run(program, seed, mesh)
        assert outcome.ok, f"{mesh}: {outcome.error:.3g} at {outcome.where}"


@pytest.mark.parametrize(
    ("operator", "lowered"),
    [
        (lambda a: a.amax(1), lambda a: reductions.amax(a, 1)),
        (lambda a: a.amin((0, 1)), lambda a: reductions.amin(a, (0, 1))),
        (lambda a: a.max(), reductions.max_all),
        (lambda a: a.min(), reductions.min_all),
        (lambda a: a.norm(p=INF, dim=0), lambda a: reductions.norm(a, INF, 0)),
        (lambda a: a.norm(p=-INF), lambda a: reductions.norm(a, -INF)),
    ],
)
@pytest.mark.parametrize("values", VALUES)
def test_extremes_are_lowered_to_the_same_values_and_gradients(
    values: str, operator: Callable[[Tensor], Tensor], lowered: Callable[[Tensor], Tensor]
) -> None:
    found = []
    for function in (operator, lowered):
        tensor = leaf(VALUES[values].tolist())
        result = function(tensor)
        found.append((result.detach(), *torch.autograd.grad(result.sum(), tensor)))
    for want, have in zip(*found, strict=True):
        torch.testing.assert_close(have, want, equal_nan=True)
