"""Optimizer state offloading: which states are kept on the host between steps, and in which groups they are updated.

An update processes the groups one after the other. The states of a group are copied to the device while the previous
group is updated, and copied back after their own update. At most two groups are on the device at any time. Execution
and the cost model use the same groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from shardwise.programs.activation_offload import SMALLEST_BYTES

GROUP_BYTES = 1 << 25  # of parameters; much smaller copies already reach the full rate

Parameter = TypeVar("Parameter")


def is_offloaded(num_bytes: int) -> bool:
    """Return whether a state of ``num_bytes`` is offloaded to the host; smaller ones stay on the device."""
    return num_bytes >= SMALLEST_BYTES


def state_groups(parameters: Sequence[tuple[Parameter, int]]) -> list[list[Parameter]]:
    """Group parameters, each with its bytes, for updates: in order, up to ``GROUP_BYTES`` per group unless a single
    parameter is larger. Parameters whose states stay on the device count as zero."""
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
