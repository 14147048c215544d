"""A residual network on CIFAR-10's files with augmentations, amp_level O2 and a rate per step; and an LSTM that
classifies sentences (rows B16, B17, D9)."""

import numpy as np
import shardwise.mindspore.dataset.transforms.c_transforms as C2
import shardwise.mindspore.dataset.vision.c_transforms as C

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init
from shardwise.mindspore.train.callback import Callback, LearningRateScheduler, TimeMonitor


class Residual(nn.Cell):
    def __init__(self, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, pad_mode="pad", padding=1)
        self.bn1, self.relu = nn.BatchNorm2d(channels), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels)
        self.add = ops.Add()

    def construct(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.add(self.bn2(self.conv2(out)), x))


class ResNet(nn.Cell):
    def __init__(self, classes=10, channels=8):
        super().__init__()
        self.stem = nn.SequentialCell([nn.Conv2d(3, channels, 3, weight_init="XavierUniform"), nn.ReLU()])
        self.blocks = nn.SequentialCell([Residual(channels), Residual(channels)])
        self.mean, self.fc = ops.ReduceMean(keep_dims=False), nn.Dense(channels, classes)

    def construct(self, x):
        return self.fc(self.mean(self.blocks(self.stem(x)), (2, 3)))


class Seen(Callback):
    def __init__(self):
        self.losses = []

    def step_end(self, run_context):
        self.losses.append(float(run_context.original_args().net_outputs[0].asnumpy()))


def train_images(folder, level="O2"):
    ms.set_seed(6)
    data = ds.Cifar10Dataset(folder, usage="train", shuffle=True)
    data = data.map([C.RandomCrop((32, 32), (4, 4, 4, 4)), C.RandomHorizontalFlip(0.5), C.Rescale(1 / 255, 0.0),
                     C.Normalize([0.49, 0.48, 0.45], [0.2, 0.2, 0.2]), C.HWC2CHW()], "image")  # fmt: skip
    data = data.map(C2.TypeCast(ms.int32), "label").batch(4, True)
    net, seen = ResNet(), Seen()
    steps = data.get_dataset_size()
    rates = nn.cosine_decay_lr(0.0, 0.05, 2 * steps, steps, 2)
    optimizer = nn.Momentum(filter(lambda p: p.requires_grad, net.get_parameters()), ms.Tensor(rates), 0.9, 1e-4)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.Model(net, loss, optimizer, amp_level=level, metrics={"acc"}, loss_scale_manager=ms.
                     DynamicLossScaleManager(2.0**8, 2, 2))  # fmt: skip
    model.train(2, data, callbacks=[TimeMonitor(steps), seen], dataset_sink_mode=False)
    return seen.losses, model.eval(data)["acc"], net


def train_rows(folder, level="O2", steps=2):
    """Data parallel in float16, without statistics of batches: the losses of a rank's rows."""
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(6)
    data = ds.Cifar10Dataset(folder, "train", shuffle=False, num_shards=ranks, shard_id=rank)
    data = data.map([C.Rescale(1 / 255, 0.0), C.HWC2CHW()], "image").map(C2.TypeCast(ms.int32), "label")
    net, seen = ResNet(), []
    for cell in (own for _, own in net.cells_and_names() if isinstance(own, nn.BatchNorm2d)):
        cell.use_batch_statistics = False
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    train_net = ms.build_train_network(net, optimizer, loss, level=level)
    for image, label in data.batch(8 // ranks, True).take(steps).create_tuple_iterator(num_epochs=1):
        seen.append(float(train_net(image, label)[0].asnumpy()))
    assert {p.dtype for p in net.trainable_params()} == {ms.float32}
    return seen


class Classifier(nn.Cell):
    def __init__(self, vocab=30, width=8, hidden=8, classes=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, hidden, num_layers=1, batch_first=True, bidirectional=True)
        self.dropout, self.fc = nn.Dropout(p=0.1), nn.Dense(2 * hidden, classes)

    def construct(self, ids):
        _, (hidden, _) = self.lstm(self.embedding(ids))
        hidden = ops.concat((hidden[-2, :, :], hidden[-1, :, :]), axis=1)
        return self.fc(self.dropout(hidden))


def train_sentences(epochs=3):
    ms.set_seed(7)
    numbers = np.random.RandomState(0)
    rows = [(numbers.randint(1, 30, 3 + i % 4).astype(np.int32), np.int32(i % 2)) for i in range(16)]
    data = ds.GeneratorDataset(rows, ["ids", "label"], shuffle=False)
    data = data.padded_batch(4, pad_info={"ids": ([6], 0), "label": ([], 0)})
    net, seen = Classifier(), []
    model = ms.Model(net, nn.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 0.02), metrics={"F1": nn.F1()})

    class Kept(Callback):
        def on_train_step_end(self, run_context):
            seen.append(float(run_context.original_args().net_outputs.asnumpy()))

    model.train(epochs, data, callbacks=[Kept(), LearningRateScheduler(lambda rate, step: rate * 0.99)])
    return seen, model.eval(data)["F1"]
