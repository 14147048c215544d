"""What replicas and stages of a published run send each other (for ``published_prices.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from published_experts import Experts
from published_rows import Row
from published_software import Software

import shardwise as sw
from shardwise.costs.cluster import Cluster, Device
from shardwise.costs.collectives import Links


@dataclass(frozen=True, slots=True)
class Moves:
    """What a row's replicas exchange, over ``axes``; ``itemsize``: of the gradients that are added up and reduced;
    ``gathered_itemsize``: of parameters that are gathered; ``shards``: whether they are."""

    links: Links
    axes: tuple[str, ...]
    itemsize: int
    gathered_itemsize: int
    shards: bool

    @staticmethod
    def of(row: Row, cluster: Cluster) -> Moves:
        return Moves._over(row, cluster, {name: row.get(name) or 1 for name in ("pp", "dp", "cp", "tp")}, ("dp", "cp"))

    @staticmethod
    def of_experts(row: Row, cluster: Cluster, experts: Experts) -> Moves:
        """Of devices that have the same experts; those between have others."""
        sizes = {"pp": row["pp"], "dp": experts.replicas(row), "ep": experts.ep, "tp": experts.tp}
        return Moves._over(row, cluster, sizes, ("dp",))

    @staticmethod
    def _over(row: Row, cluster: Cluster, sizes: Mapping[str, int], names: Sequence[str]) -> Moves:
        links = Links(cluster, sw.Mesh({name: size for name, size in sizes.items() if size > 1} or {"dp": 1}))
        axes = tuple(part for name in names if sizes[name] > 1 for part in links.mesh.expand(name))
        software = Software.of(row)
        itemsize = 4 if "fp32 grad" in row["precision"] else software.reduced_itemsize
        return Moves(links, axes, itemsize, 1 if software.gathers_float8 else 2, software.shards)

    def after_step(self, numel: float) -> float:
        """Once a step: gradients and, where they are in parts, parameters."""
        return self.gathered(numel) + self.scattered(numel) if self.shards else self.reduced(numel)

    def gathered(self, numel: float) -> float:
        return self.links.seconds("all_gather", self.axes, self.gathered_itemsize * numel) if self.axes else 0.0

    def scattered(self, numel: float) -> float:
        return self.links.seconds("reduce_scatter", self.axes, self.itemsize * numel) if self.axes else 0.0

    def reduced(self, numel: float) -> float:
        return self.links.seconds("all_reduce", self.axes, self.itemsize * numel) if self.axes else 0.0

    def added(self, numel: float) -> float:
        """A gradient is read and added to what is there."""
        return (2 + 2 * self.itemsize) * numel / self.links.cluster.device.bytes_per_second()

    def sent(self, num_bytes: float) -> float:
        """To the next stage."""
        return self.links.seconds("collective_permute", self.links.mesh.expand("pp"), num_bytes)


def beside(device: Device, computed: float, sent: float) -> float:
    """Return the seconds of kernels beside messages, which slow them down while they last (``Device.overlap``)."""
    return max(computed + (1 - device.overlap) * sent, sent)
