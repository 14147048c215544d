"""The prices that a plan was chosen with, and what they predict for it: never its program."""

from __future__ import annotations

from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import parse as parse_cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.plans.plan import Plan


def prices_of(plan: Plan) -> Prices:
    """Return the prices that a plan was chosen by; if it was not, those of CPU ranks, which are the same everywhere."""
    entry, num_devices = plan.pricing, plan.mesh.num_devices
    if entry is None:
        links = Links(Cluster.load("local").with_devices(num_devices), plan.mesh)
        return Prices(links, plan.optimizer, plan.micro_batches)
    cluster = parse_cluster(entry.cluster, "the plan's cluster")
    if cluster.num_devices != num_devices:  # a plan of a single stage
        cluster = cluster.with_devices(num_devices)
    return Prices(Links(cluster, plan.mesh), plan.optimizer, plan.micro_batches)


def figures(plan: Plan) -> tuple[float, float] | None:
    """Return the predicted seconds of a step, and bytes of the device that holds most; None if nothing is predicted."""
    if plan.pipeline is not None:
        return plan.pipeline.step_seconds, plan.pipeline.memory_bytes
    return None if plan.predicted is None else (plan.predicted.planned_seconds, plan.predicted.memory_bytes)
