"""``ShardwiseSeq2SeqTrainer``: transformers' Seq2SeqTrainer, which evaluates what its model writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from shardwise.transformers.generate import generator
from shardwise.transformers.hf_trainer import ShardwiseTrainer
from shardwise.transformers.one_process import same_random_numbers

_DEFAULT_LENGTH = 20  # of transformers, where neither settings nor the model say one
_STEP = 64  # lengths of caches are multiples of it, so that other lengths need no other programs


class ShardwiseSeq2SeqTrainer(ShardwiseTrainer, transformers.Seq2SeqTrainer):
    """A ``Seq2SeqTrainer`` on ranks, as ``ShardwiseTrainer`` is a ``Trainer``: with ``predict_with_generate=True``,
    ``evaluate`` and ``predict`` write the texts that one process writes, greedily, by sampling or with beams.

    The ranks' programs for it are made for the first batch, and again where a later one has more sequences, longer
    sources or longer texts, or fewer sequences (the last batch); two sizes of a batch are kept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._writers: dict[int, tuple[tuple[int, int], Any]] = {}  # by sequences: (length, source) and what writes
        super().__init__(*args, **kwargs)

    def _split(self, loader: DataLoader[Any]) -> None:
        super()._split(loader)
        assert self._front is not None, "it was just split"
        self._front.__dict__["generate"] = self._write

    def _write(self, inputs: torch.Tensor | None = None, **settings: Any) -> Any:
        """``generate`` of ``trainer.model``."""
        front: Any = self._front
        config = settings.get("generation_config") or front.generation_config

        def said(name: str, default: int) -> int:
            return next((n for n in (settings.get(name), getattr(config, name, None)) if n is not None), default)

        given = settings["input_ids"] if inputs is None else inputs
        rows = given.shape[0] * max(said("num_beams", 1), said("num_return_sequences", 1))
        most = max(said("max_new_tokens", 0), said("max_length", _DEFAULT_LENGTH))
        translates = bool(front.config.is_encoder_decoder)
        begun = settings.get("decoder_input_ids") if translates else given
        wanted = most + (1 if begun is None else begun.shape[1]), given.shape[1] if translates else 0
        (length, source), writer = self._writers.get(rows, ((0, 0), None))
        if writer is None or wanted[0] > length or wanted[1] > source:
            length, source = (-(-max(a, b) // _STEP) * _STEP for a, b in zip(wanted, (length, source), strict=True))
            limit = getattr(front.config, "max_position_embeddings", None)
            source = source if limit is None or limit < wanted[1] else min(source, limit)
            assert self._parallel is not None, "the model is split by now"
            self._writers.pop(rows, None)
            writer = None  # its memory goes before another one takes as much
            while len(self._writers) > 1:
                del self._writers[next(iter(self._writers))]
            with same_random_numbers():
                writer = generator(
                    self._parallel,
                    batch_size=rows,
                    max_length=length,
                    source_length=source if translates else None,
                )
            self._writers[rows] = (length, source), writer
        writer.generation_config = copy.deepcopy(front.generation_config)
        writer.generation_config.use_cache = True  # training turns it off
        return writer.generate(inputs, **settings)


__all__ = ["ShardwiseSeq2SeqTrainer"]
