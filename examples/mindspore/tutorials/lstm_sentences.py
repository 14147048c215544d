"""Sentences told apart by an LSTM: a training cell of one's own that clips gradients, a layer with a backward of its
own, evaluation with metrics, and the network as a file for inference (rows B1, B16, B17, B23, B24)."""

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init


class StraightThrough(nn.Cell):
    """Rounded to quarters, with the gradient of the identity."""

    def __init__(self):
        super().__init__()
        self.round = ops.Round()

    def construct(self, x):
        return self.round(x * 4) / 4

    def bprop(self, x, out, dout):
        return (dout,)


class Sentences(nn.Cell):
    def __init__(self, vocab=20, width=6, hidden=5):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, hidden, num_layers=1, bidirectional=True, batch_first=True)
        self.quantized, self.decoder = StraightThrough(), nn.Dense(2 * hidden, 2)
        self.concat = ops.Concat(axis=1)

    def construct(self, ids):
        _, (hidden, _) = self.lstm(self.embedding(ids))
        return self.decoder(self.quantized(self.concat((hidden[0], hidden[1]))))


class ClippingStep(nn.TrainOneStepCell):
    """Gradients are reduced, then clipped by the norm of all of them together."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
        return ops.depend(loss, self.optimizer(ops.clip_by_global_norm(grads, 0.5)))


def sentences(rows, shards=1, shard=0):
    """The label is whether the sum of the words is even."""
    numbers = np.random.RandomState(2)
    ids = numbers.randint(1, 20, (rows, 6)).astype(np.int32)
    table = [(own, np.int32(own.sum() % 2)) for own in ids]
    dataset = ds.GeneratorDataset(table, ["ids", "label"], shuffle=False, num_shards=shards, shard_id=shard)
    return dataset.batch(8 // shards)


def main(folder, epochs=2):
    init()
    ranks, rank = get_group_size(), get_rank()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(8)
    net, loss = Sentences(), nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    rate = nn.ExponentialDecayLR(0.05, 0.9, 2)
    step = ClippingStep(nn.WithLossCell(net, loss), nn.Momentum(net.trainable_params(), rate, 0.9))
    step.set_train()
    losses = []
    for _ in range(epochs):
        for ids, label in sentences(16, ranks, rank).create_tuple_iterator():
            losses.append(float(step(ids, label).asnumpy()))
    metrics = {"loss": nn.Loss(), "accuracy": nn.Accuracy(), "f1": nn.F1()}
    model = ms.Model(net, loss, metrics=metrics)
    scores = model.eval(sentences(16), dataset_sink_mode=False)
    if rank == 0:
        example = Tensor(np.ones((1, 6), np.int32))
        ms.export(net, example, file_name=f"{folder}/sentences", file_format="MINDIR")
        loaded = nn.GraphCell(ms.load(f"{folder}/sentences.mindir"))
        assert np.allclose(loaded(example).asnumpy(), net(example).asnumpy(), atol=1e-6)
    return losses, {"loss": float(scores["loss"]), "accuracy": float(scores["accuracy"])}


if __name__ == "__main__":
    print(main("."))
