"""Detection: inverted residuals, boxes of two scales, a focal loss, and a training cell by hand (rows B5, C1, C5)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore import dataset as ds
from shardwise.mindspore.common.initializer import TruncatedNormal, initializer
from shardwise.mindspore.communication import init


class ConvBNReLU(nn.Cell):
    def __init__(self, in_planes, out_planes, kernel_size=3, stride=1, groups=1):
        super().__init__()
        padding = (kernel_size - 1) // 2
        self.features = nn.SequentialCell(
            [
                nn.Conv2d(
                    in_planes, out_planes, kernel_size, stride=stride, pad_mode="pad", padding=padding, group=groups
                ),
                nn.BatchNorm2d(out_planes, eps=1e-3, momentum=0.97, use_batch_statistics=True),
                nn.ReLU6(),
            ]
        )

    def construct(self, x):
        return self.features(x)


class InvertedResidual(nn.Cell):
    def __init__(self, inp, oup, stride, expand_ratio):
        super().__init__()
        hidden_dim = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup
        layers = []
        if expand_ratio != 1:
            layers.append(ConvBNReLU(inp, hidden_dim, kernel_size=1))
        layers.extend(
            [
                ConvBNReLU(hidden_dim, hidden_dim, stride=stride, groups=hidden_dim),
                nn.Conv2d(hidden_dim, oup, kernel_size=1, stride=1, has_bias=False),
                nn.BatchNorm2d(oup),
            ]
        )
        self.conv = nn.SequentialCell(layers)
        self.add = ops.Add()
        self.cast = ops.Cast()

    def construct(self, x):
        identity = x
        x = self.conv(x)
        if self.use_res_connect:
            return self.add(identity, x)
        return x


class FlattenConcat(nn.Cell):
    def __init__(self, num_default):
        super().__init__()
        self.num_ssd_boxes = num_default
        self.concat = ops.Concat(axis=1)
        self.transpose = ops.Transpose()

    def construct(self, inputs):
        output = ()
        batch_size = ops.shape(inputs[0])[0]
        for x in inputs:
            x = self.transpose(x, (0, 2, 3, 1))
            output += (ops.reshape(x, (batch_size, -1)),)
        res = self.concat(output)
        return ops.reshape(res, (batch_size, self.num_ssd_boxes, -1))


class SSD(nn.Cell):
    def __init__(self, num_classes=4):
        super().__init__()
        self.stem = ConvBNReLU(3, 8, stride=2)
        self.blocks = nn.CellList([InvertedResidual(8, 8, 1, 2), InvertedResidual(8, 16, 2, 2)])
        self.cls, self.loc = nn.CellList(), nn.CellList()
        for c in (8, 16):
            self.cls.append(nn.Conv2d(c, 2 * num_classes, 3, pad_mode="same", has_bias=True))
            self.loc.append(nn.Conv2d(c, 2 * 4, 3, pad_mode="same", has_bias=True))
        self.flat = FlattenConcat(2 * 64 + 2 * 16)

    def construct(self, x):
        x = self.stem(x)
        cls, loc = (), ()
        for block, classes, places in zip(self.blocks, self.cls, self.loc, strict=True):
            x = block(x)
            cls += (classes(x),)
            loc += (places(x),)
        return self.flat(loc), self.flat(cls)


class SigmoidFocalClassificationLoss(nn.Cell):
    def __init__(self, gamma=2.0, alpha=0.75):
        super().__init__()
        self.sigmiod_cross_entropy = ops.SigmoidCrossEntropyWithLogits()
        self.sigmoid = ops.Sigmoid()
        self.pow = ops.Pow()
        self.onehot = ops.OneHot()
        self.on_value = Tensor(1.0, ms.float32)
        self.off_value = Tensor(0.0, ms.float32)
        self.gamma, self.alpha = gamma, alpha

    def construct(self, logits, label):
        label = self.onehot(label, ops.shape(logits)[-1], self.on_value, self.off_value)
        sigmiod_cross_entropy = self.sigmiod_cross_entropy(logits, label)
        sigmoid = self.sigmoid(logits)
        label = ops.cast(label, ms.float32)
        p_t = label * sigmoid + (1 - label) * (1 - sigmoid)
        modulating_factor = self.pow(1 - p_t, self.gamma)
        alpha_weight_factor = label * self.alpha + (1 - label) * (1 - self.alpha)
        return modulating_factor * alpha_weight_factor * sigmiod_cross_entropy


class SSDWithLossCell(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.less = ops.Less()
        self.tile = ops.Tile()
        self.reduce_sum = ops.ReduceSum()
        self.expand_dims = ops.ExpandDims()
        self.class_loss = SigmoidFocalClassificationLoss()
        self.loc_loss = nn.SmoothL1Loss(reduction="none")

    def construct(self, x, gt_loc, gt_label, num_matched_boxes):
        pred_loc, pred_label = self.network(x)
        mask = ops.cast(self.less(0, gt_label), ms.float32)
        num_matched_boxes = self.reduce_sum(ops.cast(num_matched_boxes, ms.float32))
        mask_loc = self.tile(self.expand_dims(mask, -1), (1, 1, 4))
        smooth_l1 = self.loc_loss(pred_loc, gt_loc) * mask_loc
        loss_loc = self.reduce_sum(self.reduce_sum(smooth_l1, -1), -1)
        loss_cls = self.class_loss(pred_label, gt_label)
        loss_cls = self.reduce_sum(loss_cls, (1, 2))
        return self.reduce_sum((loss_cls + loss_loc) / num_matched_boxes)


grad_scale = ops.MultitypeFuncGraph("grad_scale")


@grad_scale.register("Tensor", "Tensor")
def tensor_grad_scale(scale, grad):
    return grad * ops.reciprocal(scale)


class TrainingWrapper(nn.Cell):
    def __init__(self, network, optimizer, sens=1.0):
        super().__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.weights = ms.ParameterTuple(network.trainable_params())
        self.optimizer = optimizer
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.sens = sens
        self.hyper_map = ops.HyperMap()
        self.reducer_flag = False
        self.parallel_mode = ms.get_auto_parallel_context("parallel_mode")
        if self.parallel_mode in [ms.ParallelMode.DATA_PARALLEL, ms.ParallelMode.HYBRID_PARALLEL]:
            self.reducer_flag = True
        if self.reducer_flag:
            mean = ms.get_auto_parallel_context("gradients_mean")
            degree = ms.communication.get_group_size()
            self.grad_reducer = nn.DistributedGradReducer(optimizer.parameters, mean, degree)

    def construct(self, *args):
        weights = self.weights
        loss = self.network(*args)
        sens = ops.Fill()(ops.DType()(loss), ops.Shape()(loss), self.sens)
        grads = self.grad(self.network, weights)(*args, sens)
        if self.reducer_flag:
            grads = self.grad_reducer(grads)
        self.optimizer(grads)
        return loss


def init_net_param(network, initialize_mode="TruncatedNormal"):
    params = network.trainable_params()
    for p in params:
        if "beta" not in p.name and "gamma" not in p.name and "bias" not in p.name:
            if initialize_mode == "TruncatedNormal":
                p.set_data(initializer(TruncatedNormal(0.02), p.data.shape, p.data.dtype))
            else:
                p.set_data(initialize_mode, p.data.shape, p.data.dtype)


def get_lr(global_step, lr_init, lr_end, lr_max, warmup_epochs, total_epochs, steps_per_epoch):
    lr_each_step = []
    total_steps = steps_per_epoch * total_epochs
    warmup_steps = steps_per_epoch * warmup_epochs
    for i in range(total_steps):
        if i < warmup_steps:
            lr = lr_init + (lr_max - lr_init) * i / warmup_steps
        else:
            lr = (
                lr_end
                + (lr_max - lr_end) * (1.0 + np.cos(np.pi * (i - warmup_steps) / (total_steps - warmup_steps))) / 2.0
            )
        lr_each_step.append(max(lr, 0.0))
    return np.array(lr_each_step).astype(np.float32)[global_step:]


def main(mode=None):
    if mode is not None:
        init()
        ms.set_auto_parallel_context(parallel_mode=mode, full_batch=mode != "data_parallel")
    ms.set_seed(4)
    ssd = SSD()
    net = SSDWithLossCell(ssd)
    init_net_param(net)
    lr = Tensor(get_lr(0, 0.001, 0.001 * 0.05, 0.05, 1, 3, 2))
    opt = nn.Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), lr, 0.9, 1e-4, 1024.0)
    net = TrainingWrapper(net, opt, 1024.0)
    net.set_train()
    r = np.random.RandomState(4)
    data = [
        (
            r.randn(3, 16, 16).astype(np.float32),
            r.randn(160, 4).astype(np.float32),
            (r.rand(160) > 0.8).astype(np.int32) * r.randint(1, 4, 160).astype(np.int32),
            np.int32(20),
        )
        for _ in range(8)
    ]
    dataset = ds.GeneratorDataset(data, ["img", "box", "label", "num"], shuffle=False).batch(4)
    losses = []
    for _epoch in range(2):
        for d in dataset.create_dict_iterator():
            losses.append(float(net(d["img"], d["box"], d["label"], d["num"]).asnumpy()))
    ssd.set_train(False)
    loc, cls = ssd(Tensor(np.stack([x[0] for x in data[:2]])))
    score = ops.Sigmoid()(cls)
    _top, idx = ops.TopK(sorted=True)(score.max(axis=-1), 5)
    box = ops.gather_d(loc, 1, ops.tile(idx.expand_dims(-1), (1, 1, 4)))
    return [*losses, float(box.asnumpy().sum())]
