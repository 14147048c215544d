"""Tags of words: an LSTM over sentences of several lengths under a conditional random field, and Viterbi's algorithm
(rows C1, C5).
"""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, Tensor, nn, ops
from shardwise.mindspore.common.initializer import Uniform, initializer
from shardwise.mindspore.communication import init


def compute_score(emissions, tags, seq_ends, mask, trans, start_trans, end_trans):
    seq_length, batch_size = tags.shape
    mask = mask.astype(emissions.dtype)
    score = start_trans[tags[0]]
    score += emissions[0, ops.arange(batch_size), tags[0]]
    for i in range(1, seq_length):
        score += trans[tags[i - 1], tags[i]] * mask[i]
        score += emissions[i, ops.arange(batch_size), tags[i]] * mask[i]
    last_tags = tags[seq_ends, ops.arange(batch_size)]
    score += end_trans[last_tags]
    return score


def compute_normalizer(emissions, mask, trans, start_trans, end_trans):
    seq_length = emissions.shape[0]
    score = start_trans + emissions[0]
    for i in range(1, seq_length):
        broadcast_score = score.expand_dims(2)
        broadcast_emissions = emissions[i].expand_dims(1)
        next_score = broadcast_score + trans + broadcast_emissions
        next_score = ops.logsumexp(next_score, axis=1)
        score = ops.where(mask[i].expand_dims(1), next_score, score)
    score += end_trans
    return ops.logsumexp(score, axis=1)


def viterbi_decode(emissions, mask, trans, start_trans, end_trans):
    seq_length = mask.shape[0]
    score = start_trans + emissions[0]
    history = ()
    for i in range(1, seq_length):
        broadcast_score = score.expand_dims(2)
        broadcast_emission = emissions[i].expand_dims(1)
        next_score = broadcast_score + trans + broadcast_emission
        indices = next_score.argmax(axis=1)
        history += (indices,)
        next_score = next_score.max(axis=1)
        score = ops.where(mask[i].expand_dims(1), next_score, score)
    score += end_trans
    return score, history


def post_decode(score, history, seq_length):
    batch_size = seq_length.shape[0]
    seq_ends = seq_length - 1
    best_tags_list = []
    for idx in range(batch_size):
        best_last_tag = score[idx].argmax(axis=0)
        best_tags = [int(best_last_tag.asnumpy())]
        for hist in reversed(history[: seq_ends[idx]]):
            best_last_tag = hist[idx][best_tags[-1]]
            best_tags.append(int(best_last_tag.asnumpy()))
        best_tags.reverse()
        best_tags_list.append(best_tags)
    return best_tags_list


def sequence_mask(seq_length, max_length, batch_first=False):
    range_vector = ops.arange(0, max_length, 1, dtype=seq_length.dtype)
    result = range_vector < seq_length.view((*seq_length.shape, 1))
    if batch_first:
        return result.astype(ms.int64)
    return result.astype(ms.int64).swapaxes(0, 1)


class CRF(nn.Cell):
    def __init__(self, num_tags, batch_first=False, reduction="sum"):
        super().__init__()
        if reduction not in ("none", "sum", "mean", "token_mean"):
            raise ValueError(f"invalid reduction: {reduction}")
        self.batch_first, self.reduction, self.num_tags = batch_first, reduction, num_tags
        self.start_transitions = Parameter(initializer(Uniform(0.1), (num_tags,)), name="start_transitions")
        self.end_transitions = Parameter(initializer(Uniform(0.1), (num_tags,)), name="end_transitions")
        self.transitions = Parameter(initializer(Uniform(0.1), (num_tags, num_tags)), name="transitions")

    def construct(self, emissions, tags=None, seq_length=None):
        if tags is None:
            return self._decode(emissions, seq_length)
        return self._forward(emissions, tags, seq_length)

    def _forward(self, emissions, tags=None, seq_length=None):
        if self.batch_first:
            batch_size, max_length = tags.shape
            emissions = emissions.swapaxes(0, 1)
            tags = tags.swapaxes(0, 1)
        else:
            max_length, batch_size = tags.shape
        if seq_length is None:
            seq_length = ops.fill(ms.int64, (batch_size,), max_length)
        mask = sequence_mask(seq_length, max_length)
        numerator = compute_score(
            emissions, tags, seq_length - 1, mask, self.transitions, self.start_transitions, self.end_transitions
        )
        denominator = compute_normalizer(
            emissions, mask.astype(ms.bool_), self.transitions, self.start_transitions, self.end_transitions
        )
        llh = denominator - numerator
        if self.reduction == "none":
            return llh
        if self.reduction == "sum":
            return llh.sum()
        if self.reduction == "mean":
            return llh.mean()
        return llh.sum() / mask.astype(emissions.dtype).sum()

    def _decode(self, emissions, seq_length=None):
        if self.batch_first:
            batch_size, max_length = emissions.shape[:2]
            emissions = emissions.swapaxes(0, 1)
        else:
            batch_size, max_length = emissions.shape[:2]
        if seq_length is None:
            seq_length = ops.fill(ms.int64, (batch_size,), max_length)
        mask = sequence_mask(seq_length, max_length)
        return viterbi_decode(
            emissions, mask.astype(ms.bool_), self.transitions, self.start_transitions, self.end_transitions
        )


class BiLSTM_CRF(nn.Cell):
    def __init__(self, vocab_size, embedding_dim, hidden_dim, num_tags, padding_idx=0):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim, padding_idx=padding_idx)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim // 2, bidirectional=True, batch_first=True)
        self.hidden2tag = nn.Dense(hidden_dim, num_tags, "he_uniform")
        self.crf = CRF(num_tags, batch_first=True)

    def construct(self, inputs, seq_length, tags=None):
        embeds = self.embedding(inputs)
        outputs, _ = self.lstm(embeds, seq_length=seq_length)
        feats = self.hidden2tag(outputs)
        return self.crf(feats, tags, seq_length)


def main(mode=None):
    if mode is not None:
        init()
        ms.set_auto_parallel_context(parallel_mode=mode, full_batch=mode != "data_parallel")
    ms.set_seed(3)
    r = np.random.RandomState(3)
    model = BiLSTM_CRF(vocab_size=20, embedding_dim=8, hidden_dim=8, num_tags=3)
    optimizer = nn.SGD(model.trainable_params(), learning_rate=0.01, weight_decay=1e-4)
    grad_fn = ms.value_and_grad(model, None, optimizer.parameters)

    def train_step(data, seq_length, label):
        loss, grads = grad_fn(data, seq_length, label)
        optimizer(grads)
        return loss

    data = Tensor(r.randint(1, 20, (4, 6)), ms.int64)
    length = Tensor([6, 4, 3, 5], ms.int64)
    label = Tensor(r.randint(0, 3, (4, 6)), ms.int64)
    losses = []
    for _ in range(4):
        losses.append(float(train_step(data, length, label)))
    model.set_train(False)
    score, history = model(data, length)
    predict = post_decode(score, history, length)
    return [*losses, float(score.asnumpy().sum()), float(sum(sum(p) for p in predict))]
