"""The settings of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from shardwise.layouts.layout import Layout
from shardwise.programs.buckets import BUCKET_BYTES
from shardwise.search.memory_policy import MemoryPolicy
from shardwise.search.user_layouts import Kept
from shardwise.search.zero import Zero


@dataclass(frozen=True)
class SearchConfig:
    """The settings of a search. ``search``: one of ``search.auto``; ``passes``: micro-batches of a step;
    ``memory_bytes``: the limit for the tensors of a device (None: what the cluster's devices have beside their
    reserve); ``bucket_bytes``: the largest message that several parameters share; ``layouts``: those in which the user
    keeps tensors; ``zero``: whether parameters are stored in parts wherever they would be copied; ``in_flight``:
    micro-batches whose values a device keeps for backward at once; ``turns``: the stages of a pipeline rank, which take
    turns, so that transient bytes are there once; ``taken``: the layouts in which the next stage takes values, device
    by device; ``known``: seconds of the step of an existing plan (a search for a better one ends where prices are
    clearly above it); ``together``: the equal stages of a pipeline rank, whose micro-batches all run one after the
    other in a step."""

    search: str = "dynamic_programming"
    optimizer: str = "adamw"
    passes: int = 1
    memory_bytes: float | None = None
    bucket_bytes: int = BUCKET_BYTES
    layouts: Mapping[str, Kept] = field(default_factory=dict)
    memory_policy: MemoryPolicy = field(default_factory=MemoryPolicy)
    zero: Zero | None = None
    in_flight: int = 1
    turns: int = 1
    taken: Mapping[str, Layout] = field(default_factory=dict)
    known: float = inf
    together: int = 1
