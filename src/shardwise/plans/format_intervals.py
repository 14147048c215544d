"""What a plan is expected to take and hold, as people read it: each figure with the interval in which it is measured
nine times of ten, as far as the plan's cluster says how well its figures are known."""

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
    """What the plan was priced for; None where it was not, or where somebody edited it so that it cannot be read
    (whoever asks for prices is told)."""
    try:
        return None if plan.pricing is None else parse_cluster(plan.pricing.cluster, "the plan's cluster")
    except ShardwiseError:
        return None


def format_interval_seconds(interval: Interval) -> str:
    """Of seconds."""
    return format_interval(interval.value, interval.low, interval.high, format_seconds)


def format_step_interval(plan: Plan) -> str:
    """The step of a plan; empty where nothing is predicted."""
    cluster = priced_cluster(plan)
    if plan.pipeline is not None:
        return format_seconds_interval(plan.pipeline.step_seconds, cluster)
    if plan.predicted is None:
        return ""
    if cluster is None:
        return format_seconds(plan.predicted.planned_seconds)
    return format_interval_seconds(plan.predicted.step_interval(cluster))


def format_seconds_interval(seconds: float, cluster: Cluster | None) -> str:
    """Of which no one knows what part operators take: all are as uncertain as what is known least."""
    if cluster is None:
        return format_seconds(seconds)
    device, links = between(seconds, seconds, cluster), between(seconds, 0.0, cluster)
    return format_interval_seconds(max(device, links, key=lambda interval: interval.high))


def format_bytes_interval(num_bytes: float, cluster: Cluster | None) -> str:
    """Of a device at its peak."""
    if cluster is None:
        return format_bytes(num_bytes)
    interval = between_bytes(num_bytes, cluster)
    return format_interval(interval.value, interval.low, interval.high, format_bytes)
