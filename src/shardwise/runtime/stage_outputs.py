"""Outputs of a call under stages: one stage computes each, and all ranks return it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.graph.ir import Ref
from shardwise.plans.bind_stages import delivered_layouts
from shardwise.plans.plan import Plan
from shardwise.runtime.collective_tracker import trail
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.hooks import gather_whole
from shardwise.runtime.stage import BoundaryTensor
from shardwise.runtime.stage_calls import StageCall
from shardwise.runtime.stage_faults import StageFaults


def gather_stage_outputs(
    ready: StageCall, plan: Plan, ranks: Sequence[Communicator], faults: StageFaults, device: torch.device
) -> list[Any]:
    """Return the flattened outputs of a finished call on all ranks, broadcast from the stages that compute them.
    ``ranks``: communicators of every stage."""
    graph, bound = ready.captured.graph, ready.bound
    home = dict(bound.cut.output_parts)
    layouts = [delivered_layouts(part, spmd) for part, spmd in zip(bound.cut.parts, bound.spmds, strict=True)]
    outputs = {name: tensor for worker in ready.workers for name, tensor in worker.outputs.items()}
    whole: dict[str, Tensor] = {}
    for out in graph.outputs:
        if not isinstance(out, Ref) or out.name in whole:
            continue
        value, number = graph.by_name[out.name], home[out.name]
        makers = plan.stages[number].placement.ranks
        crossing = BoundaryTensor(out.name, value.shape, value.dtype, returns=False)
        with faults.exchange(f"an output of stage {number}", makers), trail.waiting(b"an output"):
            if dist.get_rank() in makers:
                tensor = outputs[out.name].detach().clone()
                layout = layouts[number][out.name]
                if layout.positions:  # also sent to the next stage, which has it sharded
                    tensor = gather_whole(tensor, layout, f"an output of stage {number}", ranks[number])
                wire = crossing.packed(tensor, crossing.example())
            else:
                wire = torch.empty_like(crossing.example(), device=device)
            dist.broadcast(wire, makers[0])
        whole[out.name] = crossing.unpacked(wire)
    return [whole[out.name] if isinstance(out, Ref) else out for out in graph.outputs]


__all__ = ["gather_stage_outputs"]
