"""DLRM: tables whose rows lie on different devices, a pairwise interaction, and products split over columns (rows A9,
B9, D5)."""

import itertools

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, Tensor, nn, ops
from shardwise.mindspore.common.initializer import Uniform, initializer
from shardwise.mindspore.communication import get_group_size, init


class MLP(nn.Cell):
    def __init__(self, sizes, last=None):
        super().__init__()
        layers = []
        for place, (ins, outs) in enumerate(itertools.pairwise(sizes)):
            is_last = place == len(sizes) - 2
            layers.append(nn.Dense(ins, outs, weight_init="XavierUniform", activation=last if is_last else "relu"))
        self.layers = nn.SequentialCell(*layers)

    def construct(self, x):
        return self.layers(x)


class DLRM(nn.Cell):
    def __init__(self, tables=3, rows=32, width=8, dense=6, devices=1):
        super().__init__()
        self.tables = ms.ParameterTuple(
            Parameter(initializer(Uniform(0.3), [rows, width], ms.float32), name=f"table_{i}") for i in range(tables)
        )
        self.bottom, self.top = MLP([dense, 16, width], "relu"), MLP([width + 6, 16, 1])
        self.gather = ops.Gather().shard(((devices, 1), (1, 1)))
        self.interact = ops.BatchMatMul(transpose_b=True)
        self.stack, self.concat = ops.Stack(axis=1), ops.Concat(axis=1)
        places = np.tril_indices(tables + 1, -1)
        self.rows, self.columns = (Tensor(own, ms.int32) for own in places)
        self.bottom.layers[0].matmul.shard(((1, 1), (devices, 1)))

    def construct(self, dense, ids):
        bottom = self.bottom(dense)
        pooled = [self.gather(table, ids[:, i], 0).sum(axis=1) for i, table in enumerate(self.tables)]
        features = self.stack((bottom, *pooled))
        products = self.interact(features, features)[:, self.rows, self.columns]
        return self.top(self.concat((bottom, products))).squeeze(-1)


def main(steps=4):
    init()
    ranks = get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(
            parallel_mode="semi_auto_parallel", device_num=ranks, dataset_strategy="full_batch"
        )
    ms.set_seed(6)
    net = DLRM(devices=ranks)
    loss_fn = nn.BCEWithLogitsLoss()
    optimizer = nn.Adagrad(net.trainable_params(), learning_rate=0.05)
    train_net = nn.TrainOneStepCell(nn.WithLossCell(Two(net), loss_fn), optimizer)
    train_net.set_train()
    numbers, losses = np.random.RandomState(7), []
    for _ in range(steps):
        dense = numbers.rand(8, 6).astype(np.float32)
        ids = numbers.randint(0, 32, (8, 3, 2)).astype(np.int32)
        label = (ids.sum((1, 2)) % 2).astype(np.float32)
        losses.append(float(train_net((Tensor(dense), Tensor(ids)), Tensor(label)).asnumpy()))
    net.set_train(False)
    return losses, net(Tensor(dense), Tensor(ids)).asnumpy()


class Two(nn.Cell):
    """A network of two inputs, which come as one."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, inputs):
        return self.network(*inputs)


if __name__ == "__main__":
    print(main())
