"""Labels of cross entropies, which must be classes."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.errors import problem
from shardwise.graph.operator_library import kernel


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise torch's error for a label out of range. On GPUs the lookups that follow assert it, as torch does there."""
    if labels.device.type == "cpu" and (outside := (labels < 0) | (labels >= classes)).any():
        what = f"Target {labels[outside][0]} is out of bounds."
        raise IndexError(problem(what, fix=f"labels from 0 to {classes - 1}, or ignore_index"))


@kernel(lambda labels, classes: torch.empty_like(labels))
def checked_labels(labels: Tensor, classes: int) -> Tensor:
    """Return a copy of the labels after raising for one out of range."""
    check_labels(labels, classes)
    return labels.clone()
