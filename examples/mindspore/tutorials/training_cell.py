"""A training cell that adds up gradients over micro-steps and updates every second time: parameters clone parameters,
ops.HyperMap over lists of them, ops.Assign (rows B1, B11, B19, B24)."""

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import Parameter, ParameterTuple, Tensor, context, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init
from shardwise.mindspore.context import ParallelMode

_sum_op = ops.MultitypeFuncGraph("grad_sum_op")
_clear_op = ops.MultitypeFuncGraph("clear_op")


@_sum_op.register("Tensor", "Tensor")
def _cumulative_grad(grad_sum, grad):
    """Add a gradient to the sum."""
    return ops.assign_add(grad_sum, grad)


@_clear_op.register("Tensor", "Tensor")
def _clear_grad_sum(grad_sum, zero):
    return ops.assign(grad_sum, zero)


class TrainForwardBackward(nn.Cell):
    def __init__(self, network, optimizer, grad_sum, sens=1.0):
        super(TrainForwardBackward, self).__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.network.add_flags(defer_inline=True)
        self.weights = ParameterTuple(network.trainable_params())
        self.optimizer, self.grad_sum, self.sens = optimizer, grad_sum, sens
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.hyper_map, self.grad_reducer = ops.HyperMap(), ops.identity
        if context.get_auto_parallel_context("parallel_mode") == ParallelMode.DATA_PARALLEL:
            mean = context.get_auto_parallel_context("gradients_mean")
            self.grad_reducer = nn.DistributedGradReducer(self.weights, mean, get_group_size())

    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.Fill()(ops.DType()(loss), ops.Shape()(loss), self.sens)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
        return ops.depend(loss, self.hyper_map(ops.partial(_sum_op), self.grad_sum, grads))


class TrainOptim(nn.Cell):
    def __init__(self, optimizer, grad_sum):
        super(TrainOptim, self).__init__(auto_prefix=False)
        self.optimizer, self.grad_sum = optimizer, grad_sum

    def construct(self):
        return self.optimizer(self.grad_sum)


class TrainClear(nn.Cell):
    def __init__(self, grad_sum, zeros):
        super(TrainClear, self).__init__(auto_prefix=False)
        self.grad_sum, self.zeros, self.hyper_map = grad_sum, zeros, ops.HyperMap()

    def construct(self):
        return self.hyper_map(ops.partial(_clear_op), self.grad_sum, self.zeros)


class Net(nn.Cell):
    def __init__(self):
        super(Net, self).__init__()
        self.body = nn.SequentialCell([nn.Dense(6, 10, activation="tanh"), nn.LayerNorm((10,)), nn.Dense(10, 3)])
        self.temperature = Parameter(Tensor(2.0, ms.float32), name="temperature", requires_grad=False)
        self.calls = Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)
        self.assign_add = ops.AssignAdd()

    def construct(self, x):
        if self.training:
            self.assign_add(self.calls, Tensor(1, ms.int32))
        return self.body(x) / self.temperature


def create_dataset(batch_size, shards, shard):
    numbers = np.random.RandomState(1)
    rows = [(numbers.rand(6).astype(np.float32), np.int32(i % 3)) for i in range(32)]
    data = ds.GeneratorDataset(rows, ["data", "label"], shuffle=False, num_shards=shards, shard_id=shard)
    return data.batch(batch_size, drop_remainder=True)


def main(epochs=2, mini_steps=2):
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)
    ms.set_seed(11)
    net = Net()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.2, momentum=0.5)
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    zeros = optimizer.parameters.clone(prefix="zeros", init="zeros")
    forward_backward = TrainForwardBackward(nn.WithLossCell(net, loss), optimizer, grad_sum, sens=1.0 / mini_steps)
    update, clear = TrainOptim(optimizer, grad_sum), TrainClear(grad_sum, zeros)
    for cell in (forward_backward, update, clear):
        cell.set_train(True)
    losses = []
    for _ in range(epochs):
        for step, batch in enumerate(create_dataset(8 // ranks, ranks, rank).create_dict_iterator(num_epochs=1)):
            losses.append(float(forward_backward(batch["data"], batch["label"]).asnumpy()))
            if (step + 1) % mini_steps == 0:
                update()
                clear()
    assert int(net.calls.asnumpy()) == 2 * len(losses)  # forward, and again for the gradient
    return losses, [p.asnumpy() for p in net.trainable_params()]


if __name__ == "__main__":
    print(main()[0])
