"""ResNet on CIFAR-10's files in automatic parallelism: strategies by a search, a loss with smoothed labels, parameters
in groups, a rate per step and a fixed loss scale (rows A11, B8, B16, B18, D9); and in two stages (D10).

shardwise run -n 8 examples/mindspore/tutorials/resnet_cifar.py FOLDER
"""

import sys

import numpy as np
from shardwise.mindspore.nn.loss.loss import LossBase
from shardwise.mindspore.nn.optim import Momentum
from shardwise.mindspore.train.loss_scale_manager import FixedLossScaleManager

import shardwise.mindspore as ms
import shardwise.mindspore.common.initializer as weight_init
import shardwise.mindspore.dataset as ds
import shardwise.mindspore.dataset.transforms as C2
import shardwise.mindspore.dataset.vision as C
from shardwise.mindspore import Tensor, context, nn
from shardwise.mindspore import dtype as mstype
from shardwise.mindspore.communication.management import get_group_size, get_rank, init
from shardwise.mindspore.ops import functional as F
from shardwise.mindspore.ops import operations as P
from shardwise.mindspore.train.callback import Callback, LossMonitor, TimeMonitor
from shardwise.mindspore.train.model import Model


def conv(in_channel, out_channel, kernel_size, stride=1):
    return nn.Conv2d(in_channel, out_channel, kernel_size=kernel_size, stride=stride, padding=0, pad_mode="same")


def bn(channel, gamma_init=1):
    return nn.BatchNorm2d(channel, eps=1e-4, momentum=0.9, gamma_init=gamma_init, beta_init=0, moving_mean_init=0,
                          moving_var_init=1)  # fmt: skip


class ResidualBlock(nn.Cell):
    expansion = 4

    def __init__(self, in_channel, out_channel, stride=1):
        super(ResidualBlock, self).__init__()
        channel = out_channel // self.expansion
        self.conv1, self.bn1 = conv(in_channel, channel, 1), bn(channel)
        self.conv2, self.bn2 = conv(channel, channel, 3, stride), bn(channel)
        self.conv3, self.bn3 = conv(channel, out_channel, 1), bn(out_channel, gamma_init=0.5)
        self.relu, self.add = nn.ReLU(), P.Add()
        self.down_sample = stride != 1 or in_channel != out_channel
        self.down_sample_layer = None
        if self.down_sample:
            self.down_sample_layer = nn.SequentialCell([conv(in_channel, out_channel, 1, stride), bn(out_channel)])

    def construct(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.down_sample:
            identity = self.down_sample_layer(identity)
        return self.relu(self.add(out, identity))


class ResNet(nn.Cell):
    def __init__(self, block, layer_nums, in_channels, out_channels, strides, num_classes):
        super(ResNet, self).__init__()
        self.conv1, self.bn1, self.relu = conv(3, in_channels[0], 3, 2), bn(in_channels[0]), P.ReLU()
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="same")
        stages = zip(layer_nums, in_channels, out_channels, strides, strict=True)
        self.layers = nn.SequentialCell([self._make_layer(block, *stage) for stage in stages])
        self.mean, self.flatten = P.ReduceMean(keep_dims=True), nn.Flatten()
        self.end_point = nn.Dense(out_channels[-1], num_classes, has_bias=True, bias_init=0)

    def _make_layer(self, block, layer_num, in_channel, out_channel, stride):
        layers = [block(in_channel, out_channel, stride=stride)]
        for _ in range(1, layer_num):
            layers.append(block(out_channel, out_channel, stride=1))
        return nn.SequentialCell(layers)

    def construct(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.end_point(self.flatten(self.mean(self.layers(x), (2, 3))))


class CrossEntropySmooth(LossBase):
    def __init__(self, reduction="mean", smooth_factor=0.0, num_classes=10):
        super(CrossEntropySmooth, self).__init__()
        self.onehot = P.OneHot()
        self.on_value = Tensor(1.0 - smooth_factor, mstype.float32)
        self.off_value = Tensor(1.0 * smooth_factor / (num_classes - 1), mstype.float32)
        self.ce = nn.SoftmaxCrossEntropyWithLogits(reduction=reduction)

    def construct(self, logit, label):
        label = self.onehot(label, F.shape(logit)[1], self.on_value, self.off_value)
        return self.ce(logit, label)


def create_dataset(folder, batch_size, rank_size, rank_id):
    data_set = ds.Cifar10Dataset(folder, usage="train", shuffle=False, num_shards=rank_size, shard_id=rank_id)
    trans = [C.Resize((16, 16)), C.Rescale(1.0 / 255.0, 0.0),
             C.Normalize([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]), C.HWC2CHW()]  # fmt: skip
    data_set = data_set.map(operations=C2.TypeCast(mstype.int32), input_columns="label", num_parallel_workers=2)
    data_set = data_set.map(operations=trans, input_columns="image", num_parallel_workers=2)
    return data_set.batch(batch_size, drop_remainder=True).repeat(2)


class StepLoss(Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def step_end(self, run_context):
        cb_params = run_context.original_args()
        self.losses.append(float(cb_params.net_outputs.asnumpy()))


def main(folder):
    context.set_context(mode=context.GRAPH_MODE, save_graphs=False)
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        context.set_auto_parallel_context(device_num=ranks, parallel_mode=context.ParallelMode.AUTO_PARALLEL,
                                          search_mode="recursive_programming", gradients_mean=False)  # fmt: skip
    ms.set_seed(1)
    net = ResNet(ResidualBlock, [2, 1], [8, 16], [16, 32], [1, 2], 10)
    for _, cell in net.cells_and_names():
        if isinstance(cell, nn.Conv2d):
            cell.weight.set_data(weight_init.initializer(weight_init.XavierUniform(), cell.weight.shape,
                                                         cell.weight.dtype))  # fmt: skip
        if isinstance(cell, nn.Dense):
            cell.weight.set_data(weight_init.initializer(weight_init.TruncatedNormal(), cell.weight.shape,
                                                         cell.weight.dtype))  # fmt: skip
    dataset = create_dataset(folder, 16 // ranks, ranks, rank)
    decayed_params, no_decayed_params = [], []
    for param in net.trainable_params():
        if "beta" not in param.name and "gamma" not in param.name and "bias" not in param.name:
            decayed_params.append(param)
        else:
            no_decayed_params.append(param)
    group_params = [{"params": decayed_params, "weight_decay": 1e-4}, {"params": no_decayed_params},
                    {"order_params": net.trainable_params()}]  # fmt: skip
    lr = Tensor(np.linspace(0.05, 0.01, 10).astype(np.float32))
    opt = Momentum(group_params, lr, 0.9, loss_scale=1024)
    loss = CrossEntropySmooth(reduction="mean", smooth_factor=0.1, num_classes=10)
    loss_scale, seen = FixedLossScaleManager(1024, drop_overflow_update=False), StepLoss()
    model = Model(net, loss_fn=loss, optimizer=opt, loss_scale_manager=loss_scale, metrics={"acc"}, amp_level="O0")
    step_size = dataset.get_dataset_size()
    callbacks = [TimeMonitor(data_size=step_size), LossMonitor(), seen]
    model.train(2, dataset, callbacks=callbacks, sink_size=step_size, dataset_sink_mode=True)
    return seen.losses


def staged(steps=2):
    """The same network in two stages of a pipeline (row D10): the losses of two micro-batches together. Their
    statistics are each micro-batch's own."""
    init()
    if get_group_size() > 1:
        context.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2, full_batch=True)
    ms.set_seed(2)
    net = ResNet(ResidualBlock, [2, 1], [8, 16], [16, 32], [1, 2], 10)
    for cell in (net.conv1, net.bn1, net.layers[0]):
        cell.pipeline_stage = 0
    for cell in (net.layers[1], net.end_point):
        cell.pipeline_stage = 1
    loss = CrossEntropySmooth(reduction="mean", smooth_factor=0.1, num_classes=10)
    train = nn.TrainOneStepCell(
        nn.PipelineCell(nn.WithLossCell(net, loss), 2), Momentum(net.trainable_params(), 0.05, 0.9)
    )
    train.set_train()
    numbers, losses = np.random.RandomState(4), []
    for _ in range(steps):
        images = numbers.normal(size=(16, 3, 16, 16)).astype(np.float32)
        losses.append(float(train(Tensor(images), Tensor(numbers.randint(0, 10, 16), mstype.int32))))
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
