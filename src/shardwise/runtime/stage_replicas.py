"""``check_replicas=`` under a plan of stages.

The ranks of a stage compare their copies (``runtime.replicas``), micro-batch by micro-batch. All ranks compare the
batch and the parameters that several stages share. A stage keeps a difference to itself until the schedule has run,
since other stages wait for its messages. Then all ranks exchange differences and raise the same error, before adding a
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ReplicaError
from shardwise.plans.plan import Plan
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.program_cache import RunSettings
from shardwise.runtime.replicas import ReplicaCheck, Subject
from shardwise.runtime.shared_parameters import sharing_pipeline_ranks


class StageCheck(ReplicaCheck):
    """The check of a stage. ``difference``: the first difference as (message, differing ranks)."""

    def __init__(self, ranks: Communicator, number: int, device: torch.device) -> None:
        super().__init__(1, ranks, device)
        self.part = f" of stage {number}"
        self.difference: tuple[str, list[int]] | None = None

    def _differs(self, message: str, differing: list[int]) -> None:
        self.difference = self.difference or (message, differing)


class PipelineCheck:
    """The check of a rank of a pipeline, in every ``check_replicas``-th step. ``ranks``: communicators of its stages,
    by number."""

    def __init__(
        self, settings: RunSettings, plan: Plan, everyone: Communicator, ranks: Mapping[int, Communicator]
    ) -> None:
        self.stages = {number: StageCheck(of_stage, number, settings.device) for number, of_stage in ranks.items()}
        self.passed = 0  # steps whose inputs and forward pass were found equal in all stages
        self._whole = ReplicaCheck(settings.check_replicas, everyone, settings.device)
        # Parameter of several stages -> for each of its shards the ranks that hold it.
        self._shared = {name: tuple(zip(*places, strict=True)) for name, places in sharing_pipeline_ranks(plan).items()}

    def is_due(self) -> bool:
        """Return whether this step is to be checked. Call it once in every step."""
        return self._whole.is_due()

    def begin(self, batch: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Compare the batch and the shared parameters before a step. ``batch``: whole, by name; ``state``: this rank's
        parameters. Raises ReplicaError on all ranks."""
        for check in self.stages.values():
            check.difference = None
        whole = self._whole
        size = dist.get_world_size()
        columns = [torch.zeros(size, dtype=torch.int64) for _ in batch]
        subjects = [Subject("batch", name, None, x.dtype) for name, x in batch.items()]
        prints = [whole.fingerprint(x) for x in batch.values()]
        for name, groups in self._shared.items():
            leaders = torch.arange(size)
            for ranks in groups:
                leaders[list(ranks)] = ranks[0]
            columns.append(leaders)
            parameter = state.get(name)
            subjects.append(Subject("parameter", f"{name} of several stages", None, torch.float32))
            prints.append(whole.fingerprint(torch.empty(0) if parameter is None else parameter))
        if subjects:
            whole.compare(subjects, prints, torch.stack(columns, 1), "forward")

    def settle_forward(self) -> None:
        """Finish the check of a schedule that has run. Raises as ``settle``."""
        self.settle()
        self.passed += 1

    def settle(self) -> None:
        """Raise ReplicaError on all ranks if a stage has found a difference."""
        differences: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            differences, next((c.difference for c in self.stages.values() if c.difference is not None), None)
        )
        first = next((difference for difference in differences if difference is not None), None)
        if first is not None:
            raise ReplicaError(*first)
