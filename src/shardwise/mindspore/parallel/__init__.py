"""What programs ask about their own parallelism."""

from shardwise.mindspore.context import get_algo_parameters, reset_algo_parameters, set_algo_parameters
from shardwise.mindspore.layout import Layout
from shardwise.mindspore.ops.functional import shard
from shardwise.mindspore.parallel.report import copies_report, redistribution_report

__all__ = [
    "Layout", "copies_report", "get_algo_parameters", "redistribution_report", "reset_algo_parameters",
    "set_algo_parameters", "shard",
]  # fmt: skip
