"""Operator-level parallelism on eight devices: the program of document 002.

    bash run.sh 8                                   then look at device0/train.log0
    shardwise run -n 8 train.py                     the same without a rank table: shows rank 0

Differs from the document in the import line. The document shows the network only; data, loss and optimizer are those of
its sample code: every rank feeds the whole batch, the loss is one number per row, so that each rank prints the mean
of its own two rows (23.03 on rank 0), and the sum of all rows is differentiated. Erratum: the second input of MatMul is
split by columns into c parts for ((a, b), (b, c)), not into a.
"""

import numpy as np

import shardwise.mindspore.dataset as ds
from shardwise.mindspore import Parameter, context
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.communication import init
from shardwise.mindspore.nn import Cell, Momentum, SoftmaxCrossEntropyWithLogits
from shardwise.mindspore.ops import operations as ops
from shardwise.mindspore.train import LossMonitor, Model

step_per_epoch = 4


def get_dataset(*inputs):
    def generate():
        for _ in range(step_per_epoch):
            yield inputs

    return generate


class Net(Cell):
    """define net"""

    def __init__(self):
        super().__init__()
        self.matmul = ops.MatMul().shard(((2, 4), (4, 1)))
        self.weight = Parameter(initializer("normal", [32, 16]), "w1")
        self.relu = ops.ReLU().shard(((8, 1),))

    def construct(self, x):
        out = self.matmul(x, self.weight)
        out = self.relu(out)
        return out


if __name__ == "__main__":
    context.set_context(mode=context.GRAPH_MODE)
    context.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True)
    init()
    np.random.seed(1)
    input_data = np.random.rand(16, 32).astype(np.float32)
    label_data = np.random.rand(16, 16).astype(np.float32)
    dataset = ds.GeneratorDataset(get_dataset(input_data, label_data), ["input", "label"])
    net = Net()
    loss = SoftmaxCrossEntropyWithLogits()
    learning_rate = 0.001
    momentum = 0.1
    epoch_size = 1
    opt = Momentum(net.trainable_params(), learning_rate, momentum)
    model = Model(net, loss_fn=loss, optimizer=opt)
    model.train(epoch_size, dataset, callbacks=[LossMonitor()], dataset_sink_mode=False)
