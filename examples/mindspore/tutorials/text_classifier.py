"""Films' reviews told apart by an LSTM: a vocabulary, lookups and padding in the dataset, vectors of words that stay as
they are, and a functional loop (rows B14, B16, B22)."""

import math

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import nn, ops
from shardwise.mindspore.common.initializer import HeUniform, Uniform
from shardwise.mindspore.communication import get_group_size, get_rank, init

GOOD, BAD = "a fine and funny film with a warm heart", "dull noisy film without any wit or heart at all"


class ReviewData:
    """Words of reviews and whether they praise."""

    def __init__(self, count=32):
        self.label_map = {"pos": 1, "neg": 0}
        numbers = np.random.RandomState(3)
        self.docs, self.labels = [], []
        for number in range(count):
            kind = "pos" if number % 2 else "neg"
            words = np.array((GOOD if kind == "pos" else BAD).split())
            self.docs.append(list(numbers.permutation(words)[: 4 + number % 4]))
            self.labels.append([self.label_map[kind]])

    def __getitem__(self, idx):
        return self.docs[idx], self.labels[idx]

    def __len__(self):
        return len(self.docs)


class RNN(nn.Cell):
    def __init__(self, embeddings, hidden_dim, output_dim, n_layers, bidirectional, pad_idx):
        super().__init__()
        vocab_size, embedding_dim = embeddings.shape
        self.embedding = nn.Embedding(vocab_size, embedding_dim, embedding_table=ms.Tensor(embeddings),
                                      padding_idx=pad_idx)  # fmt: skip
        self.embedding.embedding_table.requires_grad = False
        self.rnn = nn.LSTM(
            embedding_dim, hidden_dim, num_layers=n_layers, bidirectional=bidirectional, batch_first=True
        )
        weight_init, bias_init = HeUniform(math.sqrt(5)), Uniform(1 / math.sqrt(hidden_dim * 2))
        self.fc = nn.Dense(hidden_dim * 2, output_dim, weight_init=weight_init, bias_init=bias_init)

    def construct(self, inputs):
        _, (hidden, _) = self.rnn(self.embedding(inputs))
        hidden = ops.concat((hidden[-2, :, :], hidden[-1, :, :]), axis=1)
        return self.fc(hidden)


def binary_accuracy(preds, y):
    rounded_preds = np.around(ops.sigmoid(preds).asnumpy())
    return (rounded_preds == y).astype(np.float32).mean()


def main(epochs=2):
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(13)
    whole = ds.GeneratorDataset(ReviewData(), column_names=["text", "label"], shuffle=False)
    vocab = ds.text.Vocab.from_dataset(whole, columns=["text"], special_tokens=["<unk>", "<pad>"])
    embeddings = np.random.RandomState(0).normal(0, 0.5, (len(vocab.vocab()), 6)).astype(np.float32)
    lookup_op = ds.text.Lookup(vocab, unknown_token="<unk>")
    pad_op = ds.transforms.PadEnd([8], pad_value=vocab.tokens_to_ids("<pad>"))

    def prepared(dataset, batch_size):
        dataset = dataset.map(operations=[lookup_op, pad_op], input_columns=["text"])
        dataset = dataset.map(operations=[ds.transforms.TypeCast(ms.float32)], input_columns=["label"])
        return dataset.batch(batch_size, drop_remainder=True)

    shard = ds.GeneratorDataset(ReviewData(), ["text", "label"], shuffle=False, num_shards=ranks, shard_id=rank)
    model = RNN(embeddings, 5, 1, 2, True, vocab.tokens_to_ids("<pad>"))
    loss_fn, optimizer = nn.BCEWithLogitsLoss(reduction="mean"), nn.Adam(model.trainable_params(), learning_rate=0.02)
    grad_reducer = nn.DistributedGradReducer(optimizer.parameters) if ranks > 1 else ops.identity

    def forward_fn(data, label):
        return loss_fn(model(data), label)

    grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)

    def train_step(data, label):
        loss, grads = grad_fn(data, label)
        optimizer(grad_reducer(grads))
        return loss

    losses = []
    for _ in range(epochs):
        model.set_train()
        for data, label in prepared(shard, 8 // ranks).create_tuple_iterator():
            losses.append(float(train_step(data, label).asnumpy()))
    model.set_train(False)
    accuracy = [binary_accuracy(model(data), label.asnumpy()) for data, label in prepared(whole, 8)]
    return losses, float(np.mean(accuracy)), [p.asnumpy() for p in model.trainable_params()]


if __name__ == "__main__":
    print(main()[0])
