"""Predicted seconds and bytes of a plan as text. Each figure has the interval in which nine of ten measurements lie, as
far as the plan's cluster states how accurate its figures are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.costs.cluster_file import parse as parse_cluster
from shardwise.costs.prediction import Interval, between, between_bytes
from shardwise.errors import ShardwiseError
from shardwise.plans.quantities import format_bytes, format_interval, format_seconds

if TYPE_CHECKING:
    from shardwise.costs.cluster import Cluster
    from shardwise.plans.plan import Plan


def priced_cluster(plan: Plan) -> Cluster | None:
    """Return the cluster that the plan was priced for. None if it was not priced, or if its entry was edited and cannot
    be read (questions about prices raise an error then)."""
    try:
        return None if plan.pricing is None else parse_cluster(plan.pricing.cluster, "the plan's cluster")
    except ShardwiseError:
        return None


def format_interval_seconds(interval: Interval) -> str:
    """Format an interval of seconds."""
    return format_interval(interval.value, interval.low, interval.high, format_seconds)


def format_step_interval(plan: Plan) -> str:
    """Format the step of a plan; empty if nothing is predicted."""
    cluster = priced_cluster(plan)
    if plan.pipeline is not None:
        return format_seconds_interval(plan.pipeline.step_seconds, cluster)
    if plan.predicted is None:
        return ""
    if cluster is None:
        return format_seconds(plan.predicted.planned_seconds)
    return format_interval_seconds(plan.predicted.step_interval(cluster))


def format_seconds_interval(seconds: float, cluster: Cluster | None) -> str:
    """Format seconds with the wider of the compute and communication intervals: the split between them is unknown."""
    if cluster is None:
        return format_seconds(seconds)
    device, links = between(seconds, seconds, cluster), between(seconds, 0.0, cluster)
    return format_interval_seconds(max(device, links, key=lambda interval: interval.high))


def format_bytes_interval(num_bytes: float, cluster: Cluster | None) -> str:
    """Format the peak bytes of a device."""
    if cluster is None:
        return format_bytes(num_bytes)
    interval = between_bytes(num_bytes, cluster)
    return format_interval(interval.value, interval.low, interval.high, format_bytes)
