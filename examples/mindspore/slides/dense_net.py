"""The automatic parallelism of the slides: single-device code, and one line of context.

    shardwise run -n 4 dense_net.py

For one device, change ``AUTO_PARALLEL`` in the marked line to ``STAND_ALONE``: the losses are the same.

Errata: ``super(DenseMutMulNet, ...)`` names another class than its own; ``Tensor(12288, 128)`` is no shape, and weights
of (12288, 128) do not fit inputs of (32, 128): (128, 128) does. ``opt``, ``loss`` and ``train`` are not defined on the
slide. One line is added: every rank is given the whole batch (``full_batch``), since QK' couples all rows.
"""

import numpy as np

from shardwise.mindspore import Model, ParallelMode, Parameter, Tensor, context, nn
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.communication import init
from shardwise.mindspore.ops import operations as P
from shardwise.mindspore.train import LossMonitor


class DenseNet(nn.Cell):
    def __init__(self):
        super(DenseNet, self).__init__()
        self.embedding_weight = Parameter(initializer("normal", [128, 128]))
        self.embedding = P.MatMul()
        self.fc1 = nn.Dense(128, 768, activation="relu")
        self.fc2 = nn.Dense(128, 768, activation="relu")
        self.fc3 = nn.Dense(128, 768, activation="relu")
        self.transpose = P.Transpose()
        self.matmul1 = P.MatMul()
        self.matmul2 = P.MatMul()

    def construct(self, x):
        x = self.embedding(x, self.embedding_weight)
        q = self.fc1(x)
        k = self.fc2(x)
        v = self.fc3(x)
        k = self.transpose(k, (1, 0))
        c = self.matmul1(q, k)
        s = self.matmul2(c, v)
        return s


def train(model, input, label):
    model.train(4, [(input, label)], callbacks=LossMonitor())


def train_step():
    context.set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL)  # <- STAND_ALONE: one device
    context.set_auto_parallel_context(full_batch=True)
    input = Tensor(np.ones([32, 128]).astype(np.float32))
    label = Tensor(np.zeros([32, 768]).astype(np.float32))
    net = DenseNet()
    opt = nn.Momentum(net.trainable_params(), 1e-4, 0.5)
    loss = nn.MSELoss()
    model = Model(net, opt, loss)
    train(model, input, label)


init()
train_step()
