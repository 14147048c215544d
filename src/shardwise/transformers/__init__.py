"""transformers on many devices: ``from shardwise.transformers import ShardwiseTrainer as Trainer``.

Needs ``transformers`` and ``accelerate`` (``pip install "shardwise[hf]"``).
"""

from shardwise.transformers.generation import generator
from shardwise.transformers.trainer import ShardwiseTrainer

__all__ = ["ShardwiseTrainer", "generator"]
