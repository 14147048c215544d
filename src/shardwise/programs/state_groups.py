"""Which optimizer states wait on the host between steps, and in which groups of parameters an update has them back.

An update goes through the groups one after the other: the states of a group come to the device while those of the one
before are updated, and leave when they are. At most two groups are on the device at any moment. What ranks do and what
is priced are these groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from shardwise.programs.activation_offload import SMALLEST_BYTES

GROUP_BYTES = 1 << 25  # of parameters; copies are at their full rate long before

Parameter = TypeVar("Parameter")


def is_offloaded(num_bytes: int) -> bool:
    """Whether a state of so many bytes waits on the host; smaller ones stay on the device."""
    return num_bytes >= SMALLEST_BYTES


def state_groups(parameters: Sequence[tuple[Parameter, int]]) -> list[list[Parameter]]:
    """Parameters, each with its bytes, in groups that are updated together: in their order, and of up to
    ``GROUP_BYTES`` where there are several. Those whose states stay count as nothing."""
    groups: list[list[Parameter]] = []
    group_bytes = 0
    for parameter, num_bytes in parameters:
        state_bytes = num_bytes * is_offloaded(num_bytes)
        if not groups or (group_bytes and group_bytes + state_bytes > GROUP_BYTES):
            groups.append([])
            group_bytes = 0
        groups[-1].append(parameter)
        group_bytes += state_bytes
    return groups
