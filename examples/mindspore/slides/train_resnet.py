"""The slides' live demo: ResNet-50 in data parallel and in auto parallel.

    shardwise run -n 8 train_resnet.py --mode data_parallel
    shardwise run -n 8 train_resnet.py --mode auto_parallel

Every rank reads its own rows. In data_parallel mode each normalises its batch by itself, as on one device with these
rows, and every rank prints the loss of its own rows. In auto_parallel mode the program is one of a single device with
all rows: batch statistics are those of the whole batch, exactly, whatever is split, and the loss is that of all rows.
So the two modes train the same only where the ranks' statistics agree; ``--same-rows`` gives all ranks the same rows,
for which they do. ``make bench-resnet-modes`` compares their times.
"""

import argparse

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import nn
from shardwise.mindspore.communication import get_rank, init
from shardwise.mindspore.train import LossMonitor, Model, TimeMonitor

from resnet import ResNet  # isort: skip

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mode", choices=("data_parallel", "auto_parallel"), default="data_parallel")
parser.add_argument("--search", default="recursive_programming")
parser.add_argument("--layers", type=int, nargs="+", default=[3, 4, 6, 3])
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--classes", type=int, default=100)
parser.add_argument("--image", type=int, default=64, help="pixels in each direction")
parser.add_argument("--rows", type=int, default=2, help="of every rank")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--same-rows", action="store_true")
parser.add_argument("--float64", action="store_true", help="to compare without rounding")
options = parser.parse_args()

data_parallel = options.mode == "data_parallel"
ms.set_auto_parallel_context(
    parallel_mode=options.mode, search_mode=options.search, gradients_mean=data_parallel, parameter_broadcast=True
)
init()

ms.set_seed(1)
net = ResNet(options.layers, options.classes, options.width)
if options.float64:
    net.to(ms.float64)
numbers = np.random.RandomState(0 if options.same_rows else get_rank())
images = numbers.rand(options.rows, 3, options.image, options.image)
images = images if options.float64 else images.astype(np.float32)
labels = numbers.randint(0, options.classes, options.rows).astype(np.int32)
dataset = ds.GeneratorDataset([(images, labels)] * options.steps, ["image", "label"])
loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.Momentum(net.trainable_params(), 1e-3, 0.9)
model = Model(net, loss_fn=loss, optimizer=optimizer)
model.train(1, dataset, callbacks=[LossMonitor(), TimeMonitor()])
