"""transformers on many devices: ``from shardwise.transformers import ShardwiseTrainer as Trainer``.

Needs ``transformers`` and ``accelerate`` (``pip install "shardwise[hf]"``).
"""

from shardwise.errors import problem

try:
    from shardwise.transformers.generation import generator
    from shardwise.transformers.trainer import ShardwiseTrainer
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    raise ImportError(
        problem(f"shardwise.transformers needs {error.name}: it is missing", fix='pip install "shardwise[hf]"')
    ) from error

__all__ = ["ShardwiseTrainer", "generator"]
