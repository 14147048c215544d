"""Linear layers whose input is converted on the way (``partition.linears``) as autograd functions: backward sends the
gradient of the input before it computes that of the weight."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.graph.ir import Graph
from shardwise.partition.linears import LinearStep
from shardwise.partition.steps import Conversion
from shardwise.runtime.communicator import Communicator, Message
from shardwise.runtime.faults import Purpose, refuse_create_graph
from shardwise.runtime.moves import local_move


class OverlappedLinear(torch.nn.Module):
    """A linear layer whose input is converted from invariant to replicated: backward sends the gradient of the input
    before it computes the others."""

    def __init__(self, message: Message, conversion: Conversion) -> None:
        super().__init__()
        self.message, self.conversion = message, conversion

    @staticmethod
    def of(step: LinearStep, graph: Graph, ranks: Communicator) -> OverlappedLinear:
        conversion = step.conversion
        assert conversion is not None, "without a conversion there is nothing to overlap"
        own = local_move(conversion.moves[0], ranks.coordinates, backward=True)
        purpose = Purpose((conversion,), graph, ranks, backward=True)
        return OverlappedLinear(Message([own], ranks, purpose, in_place=True), conversion)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result: Tensor = _OverlappedLinear.apply(x, weight, bias, self.message)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"{self.conversion.source} -> {self.conversion.target}"


class _OverlappedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, message: Message) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.message = message
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        x, weight = ctx.saved_tensors
        num_rows = prod(x.shape[:-1])  # not -1: a rank may have no column at all
        rows = cotangent.reshape(num_rows, cotangent.shape[-1])
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        sent = ctx.message.launch([(rows @ weight).view(x.shape)], wait=False) if needs_x else None
        of_weight = rows.t() @ x.reshape(num_rows, x.shape[-1]) if needs_weight else None
        of_bias = rows.sum(0) if needs_bias else None
        of_x = _arrived(ctx.message, *sent) if sent is not None else None
        return of_x, of_weight, of_bias, None


def _arrived(message: Message, buffer: Tensor, work: Any) -> Tensor:
    if work is not None:
        message.finish(work)
    return message.land(buffer)[0]
