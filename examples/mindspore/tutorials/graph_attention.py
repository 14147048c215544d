"""Classes of a graph's nodes: a convolution over edges, and attention over them (rows A35, C1)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, Tensor, context, nn, ops
from shardwise.mindspore.common.initializer import XavierUniform, initializer
from shardwise.mindspore.communication import init

NODES, EDGES, FEATURES, CLASSES = 24, 80, 8, 4


class GCNConv(nn.Cell):
    def __init__(self, in_feat, out_feat):
        super().__init__()
        self.fc = nn.Dense(in_feat, out_feat, weight_init=XavierUniform(), has_bias=False)
        self.bias = Parameter(initializer("zero", [out_feat]), name="bias")

    def construct(self, x, in_deg, out_deg, src, dst):
        scale = ops.reshape(ops.pow(ops.clip_by_value(out_deg, 1, 1e6).astype(ms.float32), -0.5), (-1, 1))
        x = self.fc(x * scale)
        found = ops.tensor_scatter_add(ops.zeros(x.shape, ms.float32), dst.reshape(-1, 1), ops.gather(x, src, 0))
        return found * ops.pow(ops.maximum(in_deg.astype(ms.float32), Tensor(1.0)), -0.5).expand_dims(-1) + self.bias


class GATConv(nn.Cell):
    def __init__(self, in_feat, out_feat, heads):
        super().__init__()
        self.heads, self.out_feat = heads, out_feat
        self.fc = nn.Dense(in_feat, out_feat * heads, has_bias=False)
        self.attn_s = Parameter(initializer(XavierUniform(), [1, heads, out_feat]), name="attn_s")
        self.attn_d = Parameter(initializer(XavierUniform(), [1, heads, out_feat]), name="attn_d")
        self.leaky_relu, self.exp = nn.LeakyReLU(0.2), ops.Exp()
        self.sum, self.max = ops.UnsortedSegmentSum(), ops.UnsortedSegmentMax()

    def construct(self, x, src, dst):
        f = self.fc(x).view(-1, self.heads, self.out_feat)
        of_ends = ops.reduce_sum(f * self.attn_s, -1), (f * self.attn_d).sum(-1)
        e = self.leaky_relu(ops.gather(of_ends[0], src, 0) + ops.gather(of_ends[1], dst, 0))
        e = self.exp(e - ops.stop_gradient(ops.gather(self.max(e, dst, NODES), dst, 0)))
        a = e / (ops.gather(self.sum(e, dst, NODES), dst, 0) + 1e-9)
        return self.sum(ops.gather(f, src, 0) * a.expand_dims(-1), dst, NODES).view(NODES, -1)


class LossNet(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv, self.attention, self.out = GCNConv(FEATURES, 16), GATConv(16, 4, 2), nn.Dense(8, CLASSES)
        self.elu, self.loss = nn.ELU(), nn.SoftmaxCrossEntropyWithLogits(sparse=True)

    def construct(self, x, in_deg, out_deg, src, dst, mask, label):
        x = ops.relu(self.conv(x, in_deg, out_deg, src, dst))
        return ops.ReduceSum()(self.loss(self.out(self.elu(self.attention(x, src, dst))), label) * mask) / mask.sum()


def main(mode=None):
    init()
    ms.set_seed(1)
    if mode is not None:
        context.set_auto_parallel_context(parallel_mode=mode, full_batch=True)
    numbers = np.random.RandomState(0)
    src = numbers.randint(0, NODES, EDGES).astype(np.int32)
    dst = np.concatenate([np.arange(NODES), numbers.randint(0, NODES, EDGES - NODES)]).astype(np.int32)
    degrees = [np.bincount(ends, minlength=NODES).astype(np.int32) for ends in (dst, src)]
    x, label = numbers.randn(NODES, FEATURES).astype(np.float32), numbers.randint(0, CLASSES, NODES).astype(np.int32)
    mask = (numbers.rand(NODES) < 0.7).astype(np.float32)
    net = LossNet()
    step = nn.TrainOneStepCell(net, nn.Adam(net.trainable_params(), learning_rate=0.02, weight_decay=5e-4))
    step.set_train()
    inputs = [Tensor(array) for array in (x, *degrees, src, dst, mask, label)]
    losses = [float(step(*inputs)) for _ in range(4)]
    print("losses:", losses)
    return losses


if __name__ == "__main__":
    main()
