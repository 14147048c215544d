"""The two-device example of document 004: a product split over its sum, then a ReLU split by rows.

    shardwise run -n 2 two_devices.py

Errata: on the page several lines have run together (``...Layersimport mindspore as ms``); they are apart here. The
device target is "Ascend" as printed: a note says what this machine has instead. Every rank prints the mean over its
own eight rows, as ``SoftmaxCrossEntropyWithLogits`` returns one loss per row and ReLU's strategy splits the rows.
"""

# a simple example to demonstrate auto data parallel and model parallel
import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.communication as D
import shardwise.mindspore.dataset as ds
import shardwise.mindspore.nn as nn
from shardwise.mindspore import train
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.nn import Cell
from shardwise.mindspore.ops import operations as ops

# generate fake dataset
step_per_epoch = 4


def get_dataset(*inputs):
    def generate():
        for _ in range(step_per_epoch):
            yield inputs

    return generate


# define a simple net which will cut data into pieces for multi-npu training
class Net(Cell):
    def __init__(self):
        super().__init__()
        self.matmul = ops.MatMul().shard(((1, 2), (2, 1)))
        self.weight = ms.Parameter(initializer("normal", [32, 16]), "w1")
        self.relu = ops.ReLU().shard(((2, 1),))

    def construct(self, x):
        out = self.matmul(x, self.weight)
        out = self.relu(out)
        return out


# Compile the graph once and execute it multiple times.
ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")

# Initialize distributed training environment
D.init()
# get rank of current device in the whole distributed computation
rank = D.get_rank()
# set semi-auto-parallel
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2, full_batch=True)

np.random.seed(1)

input_data = np.random.rand(16, 32).astype(np.float32)
label_data = np.random.rand(16, 16).astype(np.float32)
fake_dataset = get_dataset(input_data, label_data)

net = Net()

# define callback function while training, including loss monitor and checkpoint file save path
callback = [train.LossMonitor(), train.ModelCheckpoint(directory="{}".format(rank))]
# generate dataset and define data column
dataset = ds.GeneratorDataset(fake_dataset, ["input", "label"])
# define loss function
loss = nn.SoftmaxCrossEntropyWithLogits()

lr = 1e-3
momentum = 0.1
num_epochs = 5

optimizer = nn.Momentum(net.trainable_params(), lr, momentum)

model = ms.Model(net, loss_fn=loss, optimizer=optimizer)

model.train(num_epochs, dataset, callbacks=callback, dataset_sink_mode=False)
