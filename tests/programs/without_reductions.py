"""A mutation of what a step of several passes does once."""

from __future__ import annotations

from dataclasses import replace

from shardwise.programs.once import Repeated, repeated
from shardwise.programs.rank_program import Program


def without_reductions(program: Program) -> Repeated:
    """The passes of a step that never reduces the sums of their gradients."""
    parts = repeated(program)
    summed = dict(zip(parts.behind.gradients, parts.behind.saved, strict=True))
    return replace(parts, behind=replace(parts.behind, backward=(), gradients=summed))
