"""The prices that a plan was chosen with, and what they predict for it: never its program."""

from __future__ import annotations

from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import parse as parse_cluster
from shardwise.costs.collectives import Links
from shardwise.costs.prices import Prices
from shardwise.errors import ShardwiseError
from shardwise.plans.plan_data import PlanData
from shardwise.plans.quantities import format_interval_seconds, format_seconds_interval


def prices_of(plan: PlanData) -> Prices:
    """Return the prices that a plan was chosen by; if it was not, those of CPU ranks, which are the same everywhere."""
    entry, num_devices = plan.pricing, plan.mesh.num_devices
    if entry is None:
        links = Links(Cluster.load("local").with_devices(num_devices), plan.mesh)
        return Prices(links, plan.optimizer, plan.micro_batches)
    cluster = parse_cluster(entry.cluster, "the plan's cluster")
    if cluster.num_devices != num_devices:  # a plan of a single stage
        cluster = cluster.with_devices(num_devices)
    return Prices(Links(cluster, plan.mesh), plan.optimizer, plan.micro_batches)


def figures(plan: PlanData) -> tuple[float, float] | None:
    """Return the predicted seconds of an eager step, by which plans are compared, and the bytes of the device that
    holds most; None if nothing is predicted."""
    if plan.pipeline is not None:
        return plan.pipeline.step_seconds, plan.pipeline.memory_bytes
    return None if plan.predicted is None else (plan.predicted.planned_seconds, plan.predicted.memory_bytes)


def default_seconds(plan: PlanData) -> float:
    """Return the predicted seconds of a step as it runs by default; 0 if nothing is predicted."""
    predicted = plan.pipeline or plan.predicted
    return 0.0 if predicted is None else predicted.default_seconds


def priced_cluster(plan: PlanData) -> Cluster | None:
    """Return the cluster that the plan was priced for. None if it was not priced, or if its entry was edited and cannot
    be read (questions about prices raise an error then)."""
    try:
        return None if plan.pricing is None else parse_cluster(plan.pricing.cluster, "the plan's cluster")
    except ShardwiseError:
        return None


def format_step_interval(plan: PlanData) -> str:
    """Format the step of a plan, as it runs by default; empty if nothing is predicted."""
    cluster = priced_cluster(plan)
    if plan.predicted is not None and plan.pipeline is None and cluster is not None:
        return format_interval_seconds(plan.predicted.step_interval(cluster))
    seconds = default_seconds(plan)
    return format_seconds_interval(seconds, cluster) if seconds else ""
