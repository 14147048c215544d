"""Targets of instructions that are no operators.

Calls that cannot be traced run with autograd, inside of two instructions: ``Record`` runs the call and returns its
detached results and a tape; ``Differentiate`` runs the tape's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.graph.schema import filled
from shardwise.programs.vjp import Call


@dataclass(frozen=True, slots=True)
class OpaqueTape:
    """Results of one recorded call with their autograd history, and its operands that need a gradient."""

    results: Sequence[Tensor]
    operands: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Record:
    """Maps operands to (results of the call in order, tape). ``wanted``: per operand whether it needs a gradient."""

    call: Call
    wanted: tuple[bool, ...]

    def __call__(self, *operands: Tensor) -> tuple[Any, ...]:
        target, args, kwargs = self.call
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_(w) for tensor, w in zip(operands, self.wanted, strict=True)]

            def operand(name: str) -> Tensor:
                return leaves[int(name)]

            named = {key: filled(arg, operand) for key, arg in kwargs}
            returned = target(*filled(args, operand), **named)
        results = [item for item in tree_leaves(returned) if isinstance(item, Tensor)]
        tape = OpaqueTape(results, [leaf for leaf in leaves if leaf.requires_grad])
        return (*(result.detach() for result in results), tape)


@dataclass(frozen=True, slots=True)
class Differentiate:
    """Maps (tape, cotangents) to the cotangents of the operands that need one. ``has_cotangent``: of each result."""

    has_cotangent: tuple[bool, ...]

    def __call__(self, tape: OpaqueTape, *cotangents: Tensor) -> tuple[Tensor, ...]:
        results = [result for result, has_one in zip(tape.results, self.has_cotangent, strict=True) if has_one]
        gradients = torch.autograd.grad(
            results, list(tape.operands), list(cotangents), allow_unused=True, materialize_grads=True, retain_graph=True
        )
        return tuple(gradient.contiguous() for gradient in gradients)
