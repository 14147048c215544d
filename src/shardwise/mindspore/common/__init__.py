"""Seeds and initial values."""

from shardwise.mindspore.common.seed import get_seed, set_seed

__all__ = ["get_seed", "set_seed"]
