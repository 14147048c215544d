"""Larger images from smaller ones, judged by their structure, their slopes and their pixels (rows A35, C1)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Model, Tensor, context, nn, ops
from shardwise.mindspore import dataset as ds
from shardwise.mindspore.communication import init
from shardwise.mindspore.train import Callback, Metric


class ESPCN(nn.Cell):
    def __init__(self, upscale_factor=2):
        super().__init__()
        self.pad = ops.Pad(((0, 0), (0, 0), (2, 2), (2, 2)))
        self.conv1 = nn.Conv2d(1, 8, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(8, 4, 3, padding=1, pad_mode="pad")
        self.depth_to_space, self.shuffle = ops.DepthToSpace(upscale_factor), nn.PixelShuffle(upscale_factor)
        self.tanh, self.resize, self.last = nn.Tanh(), nn.ResizeBilinear(), nn.Conv2d(2, 1, 3)

    def construct(self, x):
        y = self.conv2(self.tanh(self.conv1(self.pad(x))))
        y = ops.concat((self.depth_to_space(y), self.shuffle(y)), 1)
        return self.last(y) + self.resize(x, scale_factor=2)


class Loss(nn.LossBase):
    def __init__(self):
        super().__init__("mean")
        self.ssim, self.slopes = nn.SSIM(max_val=1.0, filter_size=7), nn.ImageGradients()

    def construct(self, base, target):
        (down, right), (want_down, want_right) = self.slopes(base), self.slopes(target)
        steep = ops.abs(down - want_down).mean() + ops.abs(right - want_right).mean()
        return self.get_loss((base - target) ** 2) + 0.1 * (1 - self.ssim(base, target).mean()) + 0.05 * steep


class PSNR(Metric):
    def __init__(self):
        super().__init__()
        self.psnr = nn.PSNR(max_val=1.0)
        self.clear()

    def clear(self):
        self.values = []

    def update(self, *inputs):
        self.values += self.psnr(*(Tensor(self._convert_data(x)) for x in inputs)).asnumpy().tolist()

    def eval(self):
        return float(np.mean(self.values))


class Record(Callback):
    def __init__(self):
        self.losses = []

    def on_train_step_end(self, run_context):
        self.losses.append(float(run_context.original_args().net_outputs))

    def on_eval_end(self, run_context):
        self.losses.append(run_context.original_args().metrics["psnr"])


def main(mode=None):
    init()
    ms.set_seed(1)
    if mode is not None:
        context.set_auto_parallel_context(parallel_mode=mode, full_batch=True)
    large = np.random.RandomState(0).rand(16, 1, 16, 16).astype(np.float32)
    large = (large + np.roll(large, 1, 2) + np.roll(large, 1, 3)) / 3
    small = large.reshape(16, 1, 8, 2, 8, 2).mean((3, 5))
    data = ds.NumpySlicesDataset({"lr": small, "hr": large}, shuffle=False).batch(8, drop_remainder=True)
    net, record = ESPCN(), Record()
    opt = nn.Adam(net.trainable_params(), nn.ExponentialDecayLR(5e-3, 0.9, 4))
    Model(net, Loss(), opt, metrics={"psnr": PSNR()}).fit(2, data, data, callbacks=[record])
    print("losses, and after each epoch how alike the images are:", record.losses)
    return record.losses


if __name__ == "__main__":
    main()
