"""A small BERT with its two pre-training losses, in cells: masked language model and next sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

import shardwise.mindspore as ms
from shardwise.mindspore import nn, ops
from shardwise.mindspore.common.initializer import Normal, initializer


@dataclass(frozen=True)
class BertConfig:
    vocab_size: int = 120
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    seq_length: int = 16
    masked_per_row: int = 4


class Attention(nn.Cell):
    """Self-attention over whole rows; padding (mask 0) is not attended to."""

    def __init__(self, config: BertConfig):
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_heads
        self.query, self.key, self.value = nn.Dense(size, size), nn.Dense(size, size), nn.Dense(size, size)
        self.output = nn.Dense(size, size)
        self.scores, self.context = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.softmax = ops.Softmax(axis=-1)

    def split_heads(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def construct(self, x, input_mask):
        query, key, value = (self.split_heads(dense(x)) for dense in (self.query, self.key, self.value))
        scores = self.scores(query, key) / query.shape[-1] ** 0.5
        scores = scores + (1.0 - input_mask[:, None, None, :].to(scores.dtype)) * -10000.0
        mixed = self.context(self.softmax(scores), value)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class Layer(nn.Cell):
    def __init__(self, config: BertConfig):
        super().__init__()
        size = config.hidden_size
        self.attention = Attention(config)
        self.norm1, self.norm2 = nn.LayerNorm((size,)), nn.LayerNorm((size,))
        self.up, self.down = nn.Dense(size, 4 * size, activation="gelu"), nn.Dense(4 * size, size)

    def construct(self, x, input_mask):
        x = self.norm1(x + self.attention(x, input_mask))
        return self.norm2(x + self.down(self.up(x)))


class BertForPreTraining(nn.Cell):
    """The logits of the masked positions (rows, masked, vocabulary) and of the next sentence (rows, 2)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        size = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, size, embedding_table=Normal(0.02))
        self.positions = ms.Parameter(initializer(Normal(0.02), [config.seq_length, size]), "positions")
        self.segments = nn.Embedding(2, size, embedding_table=Normal(0.02))
        self.norm = nn.LayerNorm((size,))
        self.layers = nn.CellList([Layer(config) for _ in range(config.num_layers)])
        self.pooler = nn.Dense(size, size, activation="tanh")
        self.transform = nn.Dense(size, size, activation="gelu")
        self.transform_norm = nn.LayerNorm((size,))
        self.decoder_bias = ms.Parameter(initializer("zeros", [config.vocab_size]), "decoder_bias")
        self.next_sentence = nn.Dense(size, 2)

    def construct(self, input_ids, input_mask, segment_ids, masked_lm_positions):
        x = self.norm(self.words(input_ids) + self.positions + self.segments(segment_ids))
        for layer in self.layers:
            x = layer(x, input_mask)
        masked = torch.take_along_dim(x, masked_lm_positions[:, :, None], dim=1)
        masked = self.transform_norm(self.transform(masked))
        lm_logits = masked @ self.words.embedding_table.t() + self.decoder_bias
        return lm_logits, self.next_sentence(self.pooler(x[:, 0]))


class BertLoss(nn.Cell):
    """(total, masked LM, next sentence), each a mean: of the weighted masked positions, and of the rows."""

    def __init__(self, network: BertForPreTraining):
        super().__init__()
        self.network = network

    def construct(self, input_ids, input_mask, segment_ids, masked_lm_ids, masked_lm_positions, masked_lm_weights,
                  next_sentence_label):  # fmt: skip
        lm_logits, ns_logits = self.network(input_ids, input_mask, segment_ids, masked_lm_positions)
        each = F.cross_entropy(lm_logits.flatten(0, 1), masked_lm_ids.flatten(), reduction="none")
        weights = masked_lm_weights.flatten()
        masked_lm_loss = (each * weights).sum() / weights.sum()
        next_sentence_loss = F.cross_entropy(ns_logits, next_sentence_label)
        return masked_lm_loss + next_sentence_loss, masked_lm_loss, next_sentence_loss


def random_batch(config: BertConfig, rows: int, seed: int) -> tuple[ms.Tensor, ...]:
    """Rows in the order of ``train_step``'s arguments. Each has as many masked positions, all of weight 1: so the mean
    of the ranks' means is the mean over all."""
    numbers = np.random.RandomState(seed)
    length, masked = config.seq_length, config.masked_per_row
    lengths = numbers.randint(length // 2, length + 1, (rows, 1))
    positions = np.stack([np.sort(numbers.choice(length // 2, masked, replace=False)) for _ in range(rows)])
    arrays = (
        numbers.randint(0, config.vocab_size, (rows, length)),  # input_ids
        (np.arange(length) < lengths).astype(np.int64),  # input_mask
        numbers.randint(0, config.vocab_size, (rows, masked)),  # masked_lm_ids
        positions,  # masked_lm_positions
        np.ones((rows, masked)),  # masked_lm_weights
        numbers.randint(0, 2, (rows,)),  # next_sentence_label
        (np.arange(length) >= lengths // 2).astype(np.int64),  # segment_ids
    )
    return tuple(ms.Tensor(array) for array in arrays)
