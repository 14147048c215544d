"""The memory policy as the search prices it: which values are recomputed, offloaded, gathered again or sent again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.search.constants import REGATHER_TRAFFIC, RESEND_TRAFFIC

# When a parameter that is stored in shards is gathered:
# - "held": in every micro-batch, and held from forward to backward;
# - "again": in every forward, and again in backward (ZeRO-3);
# - "once": once per step. Micro-batches accumulate the whole gradient, which is reduced once (ZeRO-1).
# In a step of one micro-batch, "once" equals "held".
ReshardMode = Literal["once", "held", "again"]


@dataclass(frozen=True, slots=True)
class RecomputeSpec:
    """The memory policy as the search prices it (``MemoryPolicy.priced``).

    Prices leave out other conversions that backward repeats, and copies to the host. The simulation counts them.

    Attributes:
        operators: Operators whose results are recomputed in backward, so they hold no bytes.
        reshard_mode: When sharded parameters are gathered.
        offloaded: Operators whose results wait in host memory, so they hold no bytes on the device.
        local: The part of ``operators`` that is recomputed without repeating messages (``recompute="cheap"``). A copy
            of such a result in another layout, which a message delivered, is kept and counts.
        resent: Operators whose backward may receive saved operands again. The operand is then kept as it was before the
            message, if that takes fewer bytes, and the price adds the second message (``RESEND_TRAFFIC``).
    """

    operators: frozenset[str] = frozenset()
    reshard_mode: ReshardMode = "held"
    offloaded: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    resent: frozenset[str] = frozenset()


__all__ = ["REGATHER_TRAFFIC", "RESEND_TRAFFIC", "RecomputeSpec", "ReshardMode"]
