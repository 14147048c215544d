"""``ShardwiseSeq2SeqTrainer``: transformers' Seq2SeqTrainer, which evaluates generated text."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from shardwise.train.data import same_random_numbers
from shardwise.transformers.generate import generator
from shardwise.transformers.hf_trainer import ShardwiseTrainer

_DEFAULT_LENGTH = 20  # of transformers, if neither settings nor the model give one
_STEP = 64  # cache lengths are rounded up to multiples, so that fewer programs are needed


class ShardwiseSeq2SeqTrainer(ShardwiseTrainer, transformers.Seq2SeqTrainer):
    """A ``ShardwiseTrainer`` that replaces ``Seq2SeqTrainer``. With ``predict_with_generate=True``, ``evaluate`` and
    ``predict`` generate the same texts as one process: greedily, by sampling or with beam search.

    The ranks' generation programs are compiled for the first batch, and again for a later batch with another number of
    sequences (such as the last one), longer sources or longer texts. Those of two batch sizes are kept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._generators: dict[int, tuple[tuple[int, int], Any]] = {}  # sequences -> ((length, source), generator)
        super().__init__(*args, **kwargs)

    def _split(self, loader: DataLoader[Any]) -> None:
        super()._split(loader)
        assert self._front is not None, "it was just split"
        self._front.__dict__["generate"] = self._generate

    def _generate(self, inputs: torch.Tensor | None = None, **settings: Any) -> Any:
        front: Any = self._front
        config = settings.get("generation_config") or front.generation_config

        def setting(name: str, default: int) -> int:
            return next((n for n in (settings.get(name), getattr(config, name, None)) if n is not None), default)

        ids = settings["input_ids"] if inputs is None else inputs
        rows = ids.shape[0] * max(setting("num_beams", 1), setting("num_return_sequences", 1))
        most = max(setting("max_new_tokens", 0), setting("max_length", _DEFAULT_LENGTH))
        translates = bool(front.config.is_encoder_decoder)
        prefix = settings.get("decoder_input_ids") if translates else ids
        needed = most + (1 if prefix is None else prefix.shape[1]), ids.shape[1] if translates else 0
        (length, source), model = self._generators.get(rows, ((0, 0), None))
        if model is None or needed[0] > length or needed[1] > source:
            length, source = (-(-max(a, b) // _STEP) * _STEP for a, b in zip(needed, (length, source), strict=True))
            limit = getattr(front.config, "max_position_embeddings", None)
            source = source if limit is None or limit < needed[1] else min(source, limit)
            assert self._parallel is not None, "the model is split by now"
            self._generators.pop(rows, None)
            model = None  # free its memory before the next one needs as much
            while len(self._generators) > 1:
                del self._generators[next(iter(self._generators))]
            with same_random_numbers():
                model = generator(
                    self._parallel, batch_size=rows, max_length=length, source_length=source if translates else None
                )
            self._generators[rows] = (length, source), model
        model.generation_config = copy.deepcopy(front.generation_config)
        model.generation_config.use_cache = True  # training turns it off
        return model.generate(inputs, **settings)
