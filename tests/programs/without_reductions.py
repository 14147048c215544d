"""A mutation of what a step of several passes does once."""

from __future__ import annotations

from dataclasses import replace

from shardwise.programs.grad_accum_program import GradAccumProgram, repeated
from shardwise.programs.rank_program import RankProgram


def without_reductions(program: RankProgram) -> GradAccumProgram:
    """The passes of a step that never reduces the sums of their gradients."""
    parts = repeated(program)
    summed = dict(zip(parts.behind.gradients, parts.behind.saved, strict=True))
    return replace(parts, behind=replace(parts.behind, backward=(), gradients=summed))
