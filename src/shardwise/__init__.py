"""shardwise trains an ordinary PyTorch model on many devices, choosing by itself how to split it."""

from shardwise.api import plan
from shardwise.costs.cluster import Cluster
from shardwise.errors import CaptureError, LaunchError, LayoutError, NotationError, PlanError, ShardwiseError
from shardwise.graph.annotate import constrain, shard
from shardwise.layouts.layout import Layout
from shardwise.layouts.mesh import Mesh
from shardwise.plans.decide import UnsplitWarning
from shardwise.plans.plan import Plan
from shardwise.runtime.deferred import deferred
from shardwise.runtime.parallel import Parallel, parallelize
from shardwise.runtime.ranks import finish, init_ranks, rank, world_size
from shardwise.runtime.verify import Report, verify

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Cluster",
    "LaunchError",
    "Layout",
    "LayoutError",
    "Mesh",
    "NotationError",
    "Parallel",
    "Plan",
    "PlanError",
    "Report",
    "ShardwiseError",
    "UnsplitWarning",
    "constrain",
    "deferred",
    "finish",
    "init_ranks",
    "parallelize",
    "plan",
    "rank",
    "shard",
    "verify",
    "world_size",
]
