"""LeNet on digits: files in MNIST's format, vision transforms, Model.fit with callbacks and metrics (rows A3, B15-B18).

shardwise run -n 2 examples/mindspore/tutorials/lenet.py FOLDER
"""

import sys

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
import shardwise.mindspore.dataset.transforms as transforms
import shardwise.mindspore.dataset.vision as vision
from shardwise.mindspore import nn
from shardwise.mindspore.common.initializer import Normal
from shardwise.mindspore.communication import get_group_size, get_rank, init
from shardwise.mindspore.train import EarlyStopping, History, LossMonitor, Model, ReduceLROnPlateau


class LeNet5(nn.Cell):
    def __init__(self, num_class=10, num_channel=1):
        super().__init__()
        self.conv1 = nn.Conv2d(num_channel, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.fc1 = nn.Dense(16 * 5 * 5, 120, weight_init=Normal(0.02))
        self.fc2 = nn.Dense(120, 84, weight_init=Normal(0.02))
        self.fc3 = nn.Dense(84, num_class, weight_init=Normal(0.02))
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()

    def construct(self, x):
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


def create_dataset(folder, usage, batch_size, rank=0, ranks=1):
    dataset = ds.MnistDataset(folder, usage, shuffle=False, num_shards=ranks, shard_id=rank)
    image = [vision.Resize(32, vision.Inter.LINEAR), vision.Rescale(1 / 255.0, 0.0),
             vision.Normalize(mean=(0.1307,), std=(0.3081,)), vision.HWC2CHW()]  # fmt: skip
    dataset = dataset.map(operations=image, input_columns="image")
    dataset = dataset.map(operations=transforms.TypeCast(ms.int32), input_columns="label")
    return dataset.batch(batch_size, drop_remainder=True)


def main(folder):
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    ms.set_seed(1)
    net = LeNet5()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = Model(net, loss, nn.Momentum(net.trainable_params(), 0.05, 0.9), metrics={"acc": nn.Accuracy(), "loss"
                                                                                      : nn.Loss()})  # fmt: skip
    history = History()
    callbacks = [LossMonitor(), history, EarlyStopping("eval_loss", patience=3), ReduceLROnPlateau(patience=1)]
    train = create_dataset(folder, "train", 8 // ranks, rank, ranks)
    model.fit(2, train, create_dataset(folder, "test", 8), callbacks=callbacks)
    return history, net


if __name__ == "__main__":
    main(sys.argv[1])
