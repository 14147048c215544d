"""shardwise trains an ordinary PyTorch model on many devices, choosing by itself how to split it.

The public names are imported when they are first used, so that ``shardwise run`` starts its ranks without loading
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise import errors, results
    from shardwise.api import compare, plan
    from shardwise.costs.cluster import Cluster
    from shardwise.errors import PlanError, ShardwiseError
    from shardwise.foreign.check import check
    from shardwise.graph.annotate import constrain, shard
    from shardwise.graph.segments import offload, recompute
    from shardwise.graph.stage_marks import stage
    from shardwise.graph.step_precision import Precision
    from shardwise.launch.ranks import init_ranks, rank, world_size
    from shardwise.layouts.mesh import Mesh
    from shardwise.planning.fits import fits
    from shardwise.plans.plan import Plan
    from shardwise.prepare import prepare
    from shardwise.proof.rule_check import check_rule
    from shardwise.proof.verify import verify
    from shardwise.rules.custom import rule
    from shardwise.runtime.guards.elementwise_optimizers import elementwise_optimizer
    from shardwise.runtime.guards.matrix_optimizers import matrix_optimizer
    from shardwise.runtime.guards.norms import clip_grad_norm
    from shardwise.runtime.initial.deferred import deferred
    from shardwise.runtime.parallel import Parallel
    from shardwise.runtime.parallelize import parallelize
    from shardwise.runtime.whole_tensors import full_tensor, norms
    from shardwise.search.zero import Zero
    from shardwise.train.checkpoints import save_checkpoint
    from shardwise.train.data import DataLoader
    from shardwise.train.peers import PeerCopy
    from shardwise.train.pretrained import save_pretrained
    from shardwise.train.recovery import Recovery, planned
    from shardwise.train.resuming import load_checkpoint
    from shardwise.train.retention import Keep
    from shardwise.train.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "shardwise.planning.fits": ("fits",),
    "shardwise.api": ("compare", "plan"),
    "shardwise.costs.cluster": ("Cluster",),
    "shardwise.errors": ("PlanError", "ShardwiseError"),
    "shardwise.foreign.check": ("check",),
    "shardwise.graph.annotate": ("constrain", "shard"),
    "shardwise.graph.step_precision": ("Precision",),
    "shardwise.graph.segments": ("offload", "recompute"),
    "shardwise.graph.stage_marks": ("stage",),
    "shardwise.layouts.mesh": ("Mesh",),
    "shardwise.plans.plan": ("Plan",),
    "shardwise.prepare": ("prepare",),
    "shardwise.search.zero": ("Zero",),
    "shardwise.rules.custom": ("rule",),
    "shardwise.runtime.initial.deferred": ("deferred",),
    "shardwise.runtime.guards.elementwise_optimizers": ("elementwise_optimizer",),
    "shardwise.runtime.guards.matrix_optimizers": ("matrix_optimizer",),
    "shardwise.runtime.guards.norms": ("clip_grad_norm",),
    "shardwise.runtime.parallel": ("Parallel",),
    "shardwise.runtime.parallelize": ("parallelize",),
    "shardwise.runtime.whole_tensors": ("full_tensor", "norms"),
    "shardwise.train.checkpoints": ("save_checkpoint",),
    "shardwise.train.data": ("DataLoader",),
    "shardwise.train.recovery": ("Recovery", "planned"),
    "shardwise.train.pretrained": ("save_pretrained",),
    "shardwise.train.peers": ("PeerCopy",),
    "shardwise.train.resuming": ("load_checkpoint",),
    "shardwise.train.retention": ("Keep",),
    "shardwise.train.trainer": ("Trainer",),
    "shardwise.launch.ranks": ("init_ranks", "rank", "world_size"),
    "shardwise.proof.rule_check": ("check_rule",),
    "shardwise.proof.verify": ("verify",),
}
_MODULES = ("errors", "results")  # of further public names
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"shardwise.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})


__all__ = [
    "Cluster",
    "DataLoader",
    "Keep",
    "Mesh",
    "Parallel",
    "PeerCopy",
    "Plan",
    "PlanError",
    "Precision",
    "Recovery",
    "ShardwiseError",
    "Trainer",
    "Zero",
    "check",
    "check_rule",
    "clip_grad_norm",
    "compare",
    "constrain",
    "deferred",
    "elementwise_optimizer",
    "errors",
    "fits",
    "full_tensor",
    "init_ranks",
    "load_checkpoint",
    "matrix_optimizer",
    "norms",
    "offload",
    "parallelize",
    "plan",
    "planned",
    "prepare",
    "rank",
    "recompute",
    "results",
    "rule",
    "save_checkpoint",
    "save_pretrained",
    "shard",
    "stage",
    "verify",
    "world_size",
]
