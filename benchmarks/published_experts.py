"""Layers of experts in rows of published runs (for ``published_prices.py``), in closed form.

A layer computes as much as a network of the width that a token meets (routing is taken as even). What is added is
that every rank sends its tokens, once for each expert, to the ranks of their experts and receives the results, both
again in backward; they are copied into the order of the experts before and behind. An expert's weights are split over
tensor parallelism as others are (Megatron), or whole on a rank of the expert axis, which takes in the ranks of tensor
parallelism (the recipes of NeMo and Megatron-Bridge: ``expert_tensor_parallel_size`` 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from published_rows import Row

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links

WHOLE_EXPERTS = ("nemo", "bridge", "maxtext", "torchtitan")
COPIES = 4  # of what is sent: read and written, before it is sent and behind


@dataclass(frozen=True, slots=True)
class Experts:
    """``number`` of experts of ``width``, of which a token meets ``active`` and all of ``shared``; ``ep``: ranks that
    have them, each with a share of ``tp`` of every one."""

    number: int
    active: int
    width: int
    shared: int
    ep: int
    tp: int
    gated: bool

    @staticmethod
    def of(row: Row) -> Experts | None:
        """Return those of a row, or None if its layers have none."""
        arch, ep = row["arch"], row.get("ep") or 1
        if not arch.get("experts"):
            return None
        is_whole = any(word in row["framework"].casefold() for word in WHOLE_EXPERTS)
        width = arch.get("expert_ffn") or arch["ffn"]
        return Experts(
            arch["experts"], arch["active_experts"], width, arch.get("shared_experts") or 0, ep,
            1 if is_whole and ep > 1 else row["tp"], bool(arch.get("gated_mlp")),
        )  # fmt: skip

    @property
    def computed_width(self) -> int:
        return (self.active + self.shared) * self.width

    def numel(self, hidden: int) -> float:
        """Parameters of a layer's experts on a device, without shared ones."""
        return (3.0 if self.gated else 2.0) * hidden * self.width * self.number / (self.ep * self.tp)

    def replicas(self, row: Row) -> int:
        """Devices that have the same experts."""
        return int(row["gpus"]) // (row["pp"] * self.ep * self.tp)

    def exchange_bytes(self, row: Row) -> float:
        """Bytes that a device sends to experts, of a layer and micro-batch."""
        tokens = row["micro_batch"] * row["seq"] / (row.get("cp") or 1)
        is_split = row.get("sequence_parallel") or self.tp == 1
        return 2.0 * tokens / (row["tp"] if is_split else 1) * self.active * row["arch"]["hidden"]

    def exchange_seconds(self, row: Row, cluster: Cluster) -> float:
        """Seconds of sending tokens to their experts and back, in one direction of a layer."""
        num_bytes = self.exchange_bytes(row)
        copied = COPIES * num_bytes / cluster.device.bytes_per_second()
        if self.ep == 1:
            return copied
        sizes = {"rest": row["gpus"] // (self.ep * self.tp), "ep": self.ep, "tp": self.tp}
        links = Links(cluster, sw.Mesh({name: size for name, size in sizes.items() if size > 1}))
        return copied + 2 * links.seconds("all_to_all", links.mesh.expand("ep"), num_bytes)


def uneven_experts(row: Row) -> str:
    """Return why the experts of a row cannot be priced; empty where they can, or there are none."""
    arch, ep = row["arch"], row.get("ep") or 1
    if not arch.get("experts"):
        return "ep of a model without experts" if ep > 1 else ""
    if not arch.get("active_experts"):
        return "experts, and an unknown number that a token meets"
    experts = Experts.of(row)
    assert experts is not None
    if experts.number % ep or row["gpus"] // row["pp"] % (ep * experts.tp):
        return "experts that ep does not divide, or more of it than GPUs of a stage"
    return ""
