"""ResNet-50 in cells (He et al., 2016), and smaller ones of the same kind."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.mindspore import nn, ops
from shardwise.mindspore.common.initializer import HeNormal


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    weight = HeNormal(mode="fan_out", nonlinearity="relu")
    return nn.Conv2d(inputs, outputs, size, stride, pad_mode="pad", padding=size // 2, weight_init=weight)


class ResidualBlock(nn.Cell):
    """1x1, 3x3 and 1x1 convolutions with batch norms, added to the input."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int = 1):
        super().__init__()
        outputs = self.expansion * channels
        self.conv1, self.bn1 = conv(inputs, channels, 1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = conv(channels, channels, 3, stride), nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = conv(channels, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.down_sample = None
        if stride != 1 or inputs != outputs:
            self.down_sample = nn.SequentialCell(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def construct(self, x):
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu3(out + (x if self.down_sample is None else self.down_sample(x)))


class ResNet(nn.Cell):
    """``layers``: residual blocks of each of the stages. ``width``: channels of the first one."""

    def __init__(self, layers: Sequence[int] = (3, 4, 6, 3), num_classes: int = 1000, width: int = 64):
        super().__init__()
        self.conv1, self.bn1, self.relu = conv(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU()
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="same")
        blocks, inputs = [], width
        for stage, number in enumerate(layers):
            channels = width * 2**stage
            for block in range(number):
                blocks.append(ResidualBlock(inputs, channels, 2 if stage and not block else 1))
                inputs = ResidualBlock.expansion * channels
        self.blocks = nn.SequentialCell(blocks)
        self.mean, self.flatten = ops.ReduceMean(keep_dims=True), nn.Flatten()
        self.end_point = nn.Dense(inputs, num_classes)

    def construct(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.mean(self.blocks(x), (2, 3))
        return self.end_point(self.flatten(x))


def resnet50(num_classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), num_classes)
