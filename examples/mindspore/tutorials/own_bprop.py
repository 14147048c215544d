"""Cells with backwards of their own: a straight-through rounding and a layer that clips what flows back, in a network
of strategies, and by hand with ops.GradOperation (rows B1, B9, B22)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore.communication import get_group_size, init


class RoundThrough(nn.Cell):
    """Rounded to eighths, with the gradient of the identity."""

    def __init__(self):
        super(RoundThrough, self).__init__()
        self.round = ops.Round()

    def construct(self, x):
        return self.round(x * 8) / 8

    def bprop(self, x, out, dout):
        return (dout,)


class ClippedBackward(nn.Cell):
    """x * y, whose gradients are clipped by value."""

    def __init__(self, bound):
        super(ClippedBackward, self).__init__()
        self.mul, self.bound = ops.Mul(), bound

    def construct(self, x, y):
        return self.mul(x, y)

    def bprop(self, x, y, out, dout):
        clip = ops.clip_by_value
        return clip(dout * y, -self.bound, self.bound), clip(dout * x, -self.bound, self.bound)


class Net(nn.Cell):
    def __init__(self, dp, mp):
        super(Net, self).__init__()
        self.fc1, self.fc2, self.gate = nn.Dense(12, 16), nn.Dense(16, 4), nn.Dense(12, 16)
        self.fc1.matmul.shard(((dp, 1), (mp, 1)))
        self.fc2.matmul.shard(((dp, mp), (1, mp)))
        self.rounded, self.product, self.tanh = RoundThrough(), ClippedBackward(0.01), nn.Tanh()

    def construct(self, x):
        hidden = self.product(self.tanh(self.fc1(x)), self.gate(x))
        return self.fc2(self.rounded(hidden))


class GradNet(nn.Cell):
    """The gradients of all inputs."""

    def __init__(self, net):
        super(GradNet, self).__init__()
        self.net, self.grad_op = net, ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *inputs):
        return self.grad_op(self.net)(*inputs)


def main(steps=3):
    x, y = (Tensor(np.array(own, np.float32)) for own in ([[0.5, 2.0]], [[3.0, -0.001]]))
    dx, dy = GradNet(ClippedBackward(0.5))(x, y, ops.ones_like(x))
    assert np.allclose(dx.asnumpy(), [[0.5, -0.001]])
    assert np.allclose(dy.asnumpy(), [[0.5, 0.5]])
    init()
    ranks = get_group_size()
    mp = 2 if ranks > 1 else 1
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=ranks, full_batch=True)
    ms.set_seed(9)
    net = Net(ranks // mp, mp)
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.01)
    train_net = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    train_net.set_train()
    numbers, losses = np.random.RandomState(3), []
    for _ in range(steps):
        data, label = numbers.rand(8, 12).astype(np.float32), numbers.rand(8, 4).astype(np.float32)
        losses.append(float(train_net(Tensor(data), Tensor(label)).asnumpy()))
    return losses


if __name__ == "__main__":
    print(main())
