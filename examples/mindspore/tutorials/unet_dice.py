"""A U-Net with a loss and a metric of its own, of pictures and masks (rows A35, C1)."""

import numpy as np
from shardwise.mindspore.nn.loss.loss import LossBase
from shardwise.mindspore.train.loss_scale_manager import FixedLossScaleManager

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
import shardwise.mindspore.dataset.vision as CV
import shardwise.mindspore.nn as nn
import shardwise.mindspore.ops as ops
from shardwise.mindspore import Model, Tensor, context
from shardwise.mindspore.common import dtype as mstype
from shardwise.mindspore.common.initializer import TruncatedNormal, XavierUniform
from shardwise.mindspore.communication import get_group_size, get_rank, init
from shardwise.mindspore.ops import functional as F
from shardwise.mindspore.train.callback import Callback, TimeMonitor
from shardwise.mindspore.train.model import ParallelMode


class UNetConvBlock(nn.Cell):
    def __init__(self, cin, cout, use_bn=True):
        super(UNetConvBlock, self).__init__()
        layers = [
            nn.Conv2d(cin, cout, kernel_size=3, stride=1, pad_mode="same", weight_init=TruncatedNormal(0.05)),
            nn.BatchNorm2d(cout) if use_bn else nn.Identity(),
            nn.ReLU(),
            nn.Conv2d(cout, cout, 3, pad_mode="pad", padding=1, has_bias=True),
            nn.ReLU(),
        ]
        self.conv = nn.SequentialCell(layers)

    def construct(self, x):
        return self.conv(x)


class Up(nn.Cell):
    def __init__(self, hi, lo, deconv=True):
        super().__init__()
        self.conv = UNetConvBlock(hi, lo, use_bn=False)
        if deconv:
            self.up = nn.Conv2dTranspose(hi, lo, kernel_size=2, stride=2, pad_mode="same")
        else:
            self.up = nn.SequentialCell(
                [
                    nn.ResizeBilinear() if hasattr(nn, "ResizeBilinear") else nn.Upsample(scale_factor=2.0),
                    nn.Conv2d(hi, lo, 1),
                ]
            )
        self.concat = ops.Concat(axis=1)

    def construct(self, hi, lo):
        x = self.up(hi)
        x = self.concat((x, lo))
        return self.conv(x)


class UNet(nn.Cell):
    def __init__(self, cin, n_class, feature=4):
        super().__init__()
        self.conv0 = UNetConvBlock(cin, feature)
        self.conv1 = UNetConvBlock(feature, feature * 2)
        self.conv2 = UNetConvBlock(feature * 2, feature * 4)
        self.maxpool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.up1 = Up(feature * 4, feature * 2)
        self.up0 = Up(feature * 2, feature)
        self.final = nn.Conv2d(feature, n_class, 1)
        for _, cell in self.cells_and_names():
            if isinstance(cell, nn.Conv2d):
                cell.weight.set_data(
                    ms.common.initializer.initializer(XavierUniform(), cell.weight.shape, cell.weight.dtype)
                )

    def construct(self, x):
        x0 = self.conv0(x)
        x1 = self.conv1(self.maxpool(x0))
        x2 = self.conv2(self.maxpool(x1))
        y = self.up0(self.up1(x2, x1), x0)
        return self.final(y)


class CrossEntropyWithLogits(LossBase):
    def __init__(self):
        super().__init__()
        self.transpose_fn = ops.Transpose()
        self.reshape_fn = ops.Reshape()
        self.softmax_cross_entropy_loss = nn.SoftmaxCrossEntropyWithLogits()
        self.cast = ops.Cast()

    def construct(self, logits, label):
        logits = self.transpose_fn(logits, (0, 2, 3, 1))
        logits = self.cast(logits, mstype.float32)
        label = self.transpose_fn(label, (0, 2, 3, 1))
        _, _, _, c = self.shape(label) if hasattr(self, "shape") else F.shape(label)
        loss = self.reduce_mean(
            self.softmax_cross_entropy_loss(self.reshape_fn(logits, (-1, c)), self.reshape_fn(label, (-1, c))),
            self.get_axis(logits)[:1],
        )
        return self.get_loss(loss)


class DiceCoeff(nn.Metric):
    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self._dice = 0
        self._n = 0

    def update(self, *inputs):
        if len(inputs) != 2:
            raise ValueError
        pred = self._convert_data(inputs[0])
        y = self._convert_data(inputs[1])
        self._n += pred.shape[0]
        p = pred.argmax(1)
        t = y.argmax(1)
        inter = np.dot(p.flatten(), t.flatten())
        self._dice += 2 * float(inter) / float(p.sum() + t.sum() + 1e-6) * pred.shape[0]

    def eval(self):
        if self._n == 0:
            raise RuntimeError
        return self._dice / self._n


class StepLossTimeMonitor(Callback):
    def __init__(self, batch_size, per_print_times=1):
        super().__init__()
        self._per = per_print_times
        self.losses = []

    def step_end(self, run_context):
        cb = run_context.original_args()
        loss = cb.net_outputs
        if isinstance(loss, (tuple, list)):
            loss = loss[0]
        if isinstance(loss, Tensor) and isinstance(loss.asnumpy(), np.ndarray):
            loss = np.mean(loss.asnumpy())
        if isinstance(loss, float) and (np.isnan(loss) or np.isinf(loss)):
            raise ValueError
        self.losses.append(float(loss))

    def epoch_begin(self, run_context):
        pass


class Blobs:
    def __init__(self, n=16):
        r = np.random.RandomState(0)
        self.x = r.randint(0, 256, (n, 16, 16, 3)).astype(np.uint8)
        self.m = (self.x.mean(-1) > 128).astype(np.uint8)

    def __getitem__(self, i):
        return self.x[i], self.m[i]

    def __len__(self):
        return len(self.x)


def create(batch, rank, size, repeat=1):
    dataset = ds.GeneratorDataset(Blobs(), ["image", "mask"], shuffle=False, num_shards=size, shard_id=rank)

    def onehot(mask):
        return np.eye(2, dtype=np.float32)[mask].transpose(2, 0, 1)

    dataset = dataset.map(
        operations=[CV.Rescale(1.0 / 127.5, -1.0), CV.HWC2CHW()], input_columns=["image"], num_parallel_workers=1
    )
    dataset = dataset.map(input_columns="mask", operations=onehot)
    dataset = dataset.batch(batch, drop_remainder=True)
    return dataset.repeat(repeat)


def main(mode=None):
    init()
    rank, size = get_rank(), get_group_size()
    ms.set_seed(1)
    if mode == "data_parallel":
        context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)
    elif mode == "semi":
        context.set_auto_parallel_context(parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL, gradients_mean=False)
    elif mode == "auto":
        context.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode="recursive_programming")
    net = UNet(3, 2)
    criterion = CrossEntropyWithLogits()
    data = create(16 // size if size > 1 else 16, rank, size, repeat=3)
    lr = nn.cosine_decay_lr(0.0, 0.01, 3, 1, 3)
    opt = nn.Adam(params=net.trainable_params(), learning_rate=lr, weight_decay=1e-4, loss_scale=1024.0)
    manager = FixedLossScaleManager(1024.0, False)
    model = Model(
        net, loss_fn=criterion, loss_scale_manager=manager, optimizer=opt, amp_level="O0", metrics={"dice": DiceCoeff()}
    )
    mon = StepLossTimeMonitor(4)
    model.train(1, data, callbacks=[mon, TimeMonitor(1)], dataset_sink_mode=False)
    res = model.eval(create(16 // size, rank, size), dataset_sink_mode=False)
    return mon.losses, (float(net.final.weight.asnumpy().sum()) if mode in (None, "data_parallel") else 0.0, res)
