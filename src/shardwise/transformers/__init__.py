"""Training and generation with transformers on many devices.

``from shardwise.transformers import ShardwiseTrainer as Trainer`` replaces transformers' Trainer.

Needs ``transformers`` and ``accelerate`` (``pip install "shardwise[hf]"``).
"""

from shardwise.errors import problem

try:
    from shardwise.transformers.generate import generator
    from shardwise.transformers.hf_trainer import ShardwiseTrainer
    from shardwise.transformers.seq2seq import ShardwiseSeq2SeqTrainer
except ModuleNotFoundError as error:
    needed = (error.name or "").partition(".")[0]
    if needed not in ("transformers", "accelerate"):
        raise
    raise ImportError(
        problem(f"shardwise.transformers needs {needed}: {error}", fix='pip install "shardwise[hf]"')
    ) from error

__all__ = ["ShardwiseSeq2SeqTrainer", "ShardwiseTrainer", "generator"]
