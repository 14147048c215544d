"""The values that the search prices as not kept from forward to backward, or as converted once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.search.constants import REGATHER_TRAFFIC, RESEND_TRAFFIC

# Reshard-after-forward mode: gathered parameters are "held" from forward to backward, gathered "again" in backward
# (ZeRO-3), or gathered "once" for all micro-batches of a step, whose gradients add up whole (ZeRO-1). In a step of one
# micro-batch "once" is the same as "held".
ReshardMode = Literal["once", "held", "again"]


@dataclass(frozen=True, slots=True)
class RecomputeSpec:
    """Recomputation as the search prices it. ``operators``: those whose results are recomputed; ``reshard_mode``: of
    gathered parameters; ``offloaded``: operators whose results are offloaded; ``local``: those of ``operators`` whose
    results are kept where a message brought them, as it is not sent again; ``resent``: operators for which messages of
    saved operands are sent again, where what was sent takes fewer bytes. Other repeated conversions, and copies to the
    host, are left to the simulation."""

    operators: frozenset[str] = frozenset()
    reshard_mode: ReshardMode = "held"
    offloaded: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    resent: frozenset[str] = frozenset()


__all__ = ["REGATHER_TRAFFIC", "RESEND_TRAFFIC", "RecomputeSpec", "ReshardMode"]
