"""Gradient reduction for data parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.errors import ShardwiseError, problem
from shardwise.mindspore import calls, context, rank_groups
from shardwise.mindspore.communication.management import GlobalComm, find_group
from shardwise.mindspore.holding import parameter_of
from shardwise.mindspore.options import Options

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)


class DistributedGradReducer:
    """All-reduce of gradients: their sum over the ranks, with ``mean`` divided by ``degree``.

    Gradients of one dtype share messages of at most 25 MiB, filled in their order. (The reference sends each by itself
    unless fusion is configured.) The options comm_fusion and all_reduce_fusion_config and
    ``set_cost_model_context(costmodel_allreduce_fusion_algorithm=...)`` change that. With gradient_fp32_sync half
    precision is summed in float32.

    Args:
        parameters: the parameters of the gradients, in their order; a parameter with ``layerwise_parallel`` is every
            rank's own, and its gradient is not reduced.
        mean: whether to average; by default the option gradients_mean.
        degree: the divisor of the mean; by default the size of the group.
        fusion_type: accepted without effect.
        group: name of the group of ranks; by default all.

    Raises:
        ShardwiseError: for gradients that a plan has split and reduced (semi_auto_parallel, auto_parallel).
    """

    def __init__(
        self, parameters: Iterable[Any], mean: bool | None = None, degree: int | None = None, fusion_type: int = 1,
        group: str | None = None,
    ) -> None:  # fmt: skip
        self.group = GlobalComm.WORLD_COMM_GROUP if group is None else group
        options = context.options()
        self.mean = options.gradients_mean if mean is None else mean
        self.degree = find_group(self.group).size if degree is None else degree
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 1:
            what = f"DistributedGradReducer: degree is {degree!r}"
            raise ValueError(problem(what, fix="give the number of ranks, or leave it out"))
        if not isinstance(self.mean, bool):
            raise TypeError(problem(f"DistributedGradReducer: mean is {mean!r}", fix="give True or False"))
        self._shared = [not getattr(parameter, "layerwise_parallel", False) for parameter in parameters]

    def __call__(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the reduced gradients. The arguments are not changed."""
        if len(grads) != len(self._shared):
            what = f"DistributedGradReducer has {len(self._shared)} parameters and is given {len(grads)} gradients"
            raise ValueError(problem(what, fix="give one gradient for every parameter, in their order"))
        if missing := [i for i, grad in enumerate(grads) if not isinstance(grad, Tensor)]:
            what = f"DistributedGradReducer: gradient {missing[0]} is {grads[missing[0]]!r}, not a tensor"
            raise TypeError(problem(what, fix="give zeros for a parameter that is not used, as all ranks must agree"))
        if calls.is_split() and any(parameter_of(grad) is not None for grad in grads):
            what = "DistributedGradReducer got gradients that a plan has already reduced: each rank holds a part"
            fix = "leave it out in semi_auto_parallel and auto_parallel; data_parallel is the mode that needs it"
            raise ShardwiseError(what, fix=fix)
        options, group = context.options(), find_group(self.group)
        results = list(grads)
        for positions in fill_messages(grads, self._shared, options):
            self._reduce(results, positions, options, group)
        return tuple(results)

    def _reduce(
        self, grads: list[Tensor], positions: list[int], options: Options, group: rank_groups.RankGroup
    ) -> None:
        """Replace some gradients of one dtype by their all-reduced values, in one message."""
        flat = torch.cat([grads[i].detach().reshape(-1) for i in positions])
        widened = flat.dtype in HALVES and (options.gradient_fp32_sync or options.force_fp32_communication)
        total = rank_groups.all_reduce(flat.float() if widened else flat, "sum", group)
        if self.mean:
            total = total / self.degree
        pieces = total.to(flat.dtype).split([grads[i].numel() for i in positions])
        for i, piece in zip(positions, pieces, strict=True):
            grads[i] = piece.view(grads[i].shape)


def fill_messages(grads: Sequence[Tensor], shared: Sequence[bool], options: Options) -> list[list[int]]:
    """Return the positions of gradients that share a message: of one dtype and device, as the options say."""
    cuts = options.fusion_cuts
    limit = context.message_bytes(sum(grad.nbytes for grad, sent in zip(grads, shared, strict=True) if sent))
    messages: list[list[int]] = []
    open_messages: dict[object, tuple[list[int], int]] = {}
    for i, grad in enumerate(grads):
        if not shared[i]:
            continue
        num_bytes = grad.numel() * grad.element_size()
        key = grad.dtype, grad.device, sum(cut < i for cut in cuts)
        positions, filled = open_messages.get(key, ([], 0))
        if not positions or (not cuts and filled + num_bytes > limit):
            positions, filled = [], 0
            messages.append(positions)
        positions.append(i)
        open_messages[key] = positions, filled + num_bytes
    return messages
