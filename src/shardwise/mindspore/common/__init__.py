"""Data types, seeds and initial values."""

from shardwise.mindspore.common import dtype
from shardwise.mindspore.common.seed import get_seed, set_seed

__all__ = ["dtype", "get_seed", "set_seed"]
