"""The cluster: the hardware that a plan is made for. So far the number of devices; links, speeds and memory come with
the prices."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ShardwiseError


@dataclass(frozen=True, slots=True)
class Cluster:
    """``num_devices`` equal devices, called ``name``."""

    name: str
    num_devices: int

    def __post_init__(self) -> None:
        if isinstance(self.num_devices, bool) or not isinstance(self.num_devices, int) or self.num_devices < 1:
            raise ShardwiseError(f"a cluster has a whole number of devices from 1, not {self.num_devices!r}")

    @staticmethod
    def local(num_devices: int) -> Cluster:
        """Devices of this machine: CPU ranks, or its GPUs."""
        return Cluster("local", num_devices)
