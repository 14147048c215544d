"""``check_replicas=`` under a plan of stages.

The ranks of a stage compare their copies (``runtime.replicas``), micro-batch by micro-batch. All ranks compare the
batch and the parameters that several stages share. A stage keeps a difference to itself until the schedule has run,
since other stages wait for its messages. Then all ranks exchange differences and raise the same error, before adding a
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ReplicaError
from shardwise.plans.plan import Plan
from shardwise.runtime.agree import gather_values
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.replicas import ReplicaCheck, Subject
from shardwise.runtime.shared_parameters import sharing_pipeline_ranks


class StageCheck(ReplicaCheck):
    """The check of one of several stages."""

    def __init__(self, ranks: Communicator, number: int, device: torch.device) -> None:
        super().__init__(1, ranks, device)
        self.part = f" of stage {number}"

    def _differs(self, message: str, differing: list[int]) -> None:
        self.difference = self.difference or (message, differing)


class PipelineCheck(ReplicaCheck):
    """The check of a rank of a pipeline. ``ranks``: communicators of its stages, by number; ``passed``: comparisons of
    all stages that found no difference."""

    def __init__(
        self, every: int, device: torch.device, plan: Plan, everyone: Communicator, ranks: Mapping[int, Communicator]
    ) -> None:
        super().__init__(every, everyone, device)
        self.stages = {number: StageCheck(of_stage, number, device) for number, of_stage in ranks.items()}
        # Parameter of several stages -> for each of its shards the ranks that hold it.
        self._shared = {name: tuple(zip(*places, strict=True)) for name, places in sharing_pipeline_ranks(plan).items()}

    def begin(self, batch: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for check in self.stages.values():
            check.difference = None
        size = dist.get_world_size()
        columns = [torch.zeros(size, dtype=torch.int64) for _ in batch]
        subjects = [Subject("batch", name, None, x.dtype) for name, x in batch.items()]
        prints = [self.fingerprint(x) for x in batch.values()]
        for name, groups in self._shared.items():
            leaders = torch.arange(size)
            for ranks in groups:
                leaders[list(ranks)] = ranks[0]
            columns.append(leaders)
            parameter = state.get(name)
            subjects.append(Subject("parameter", f"{name} of several stages", None, torch.float32))
            prints.append(self.fingerprint(torch.empty(0) if parameter is None else parameter))
        if subjects:
            self.compare(subjects, prints, torch.stack(columns, 1), "forward")

    def settle(self) -> None:
        found = (check.difference for check in self.stages.values() if check.difference is not None)
        first = next((difference for difference in gather_values(next(found, None)) if difference is not None), None)
        if first is not None:
            raise ReplicaError(*first)
        self.passed += 1
