"""torch's database of optimizers: each on whole parameters and on shards of them.

A class that shardwise lets update shards must give every element what it has on one device. One that needs whole
parameters gets them (``tests/runtime/test_matrix_optimizers.py``): it runs whole. The others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oracle.databases import database
from oracle.outcomes import Outcome
from shardwise.runtime.guards.elementwise_optimizers import MATRIX_KINDS, is_elementwise

STEPS, PARTS, SHAPE = 3, 3, (6, 4)
TOLERANCE = 1e-12


def optimizer_outcomes(name: str, count: int) -> Iterator[Outcome]:
    """The outcome of every set of options of an optimizer, at most ``count``."""
    entry = database("optimizers")[name]
    options = [chosen for chosen in entry.optim_inputs_func(device="cpu") if "foreach" not in chosen.kwargs]
    for position in range(min(count, len(options))):
        yield attempt(name, entry, options[position * len(options) // min(count, len(options))])


def attempt(name: str, entry: Any, options: Any) -> Outcome:
    """Whether an optimizer gives the shards of a parameter what it gives the whole one."""
    outcome = Outcome(name, captured=True, planned=True)
    if entry.optim_cls in MATRIX_KINDS:
        outcome.ended = "equal"
        return outcome
    if not is_elementwise(entry.optim_cls):
        outcome.ended, outcome.detail = "refused", f"ShardwiseError: {name} needs whole parameters"
        return outcome
    outcome.split = True
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(STEPS + 1))
    whole = _after(entry, options, start, gradients)
    shards = zip(start.chunk(PARTS), *(gradient.chunk(PARTS) for gradient in gradients), strict=True)
    split = torch.cat([_after(entry, options, part, theirs) for part, *theirs in shards])
    error = float((whole - split).abs().max() / whole.abs().max())
    outcome.ended = "equal" if error <= TOLERANCE else "wrong"
    outcome.detail = "" if error <= TOLERANCE else f"{options.desc}: {error:.2g}"
    return outcome


def _after(entry: Any, options: Any, start: Tensor, gradients: list[Tensor]) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    kwargs = {key: value for key, value in options.kwargs.items() if key != "params"}
    optimizer = entry.optim_cls([parameter], **kwargs)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()
