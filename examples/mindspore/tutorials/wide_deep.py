"""Wide & Deep with two optimizers in one training cell, as recommenders are trained: the wide part by FTRL, the deep
one by LazyAdam (rows B14, B19, B24)."""

import itertools

import numpy as np
from shardwise.mindspore.nn.wrap.grad_reducer import DistributedGradReducer
from shardwise.mindspore.parallel._utils import _get_device_num, _get_gradients_mean, _get_parallel_mode

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import Parameter, ParameterTuple, Tensor, nn
from shardwise.mindspore.common.initializer import Uniform, initializer
from shardwise.mindspore.communication.management import get_group_size, get_rank, init
from shardwise.mindspore.context import ParallelMode
from shardwise.mindspore.ops import composite as C
from shardwise.mindspore.ops import functional as F
from shardwise.mindspore.ops import operations as P


def init_method(method, shape, name, max_val=1.0):
    if method == "uniform":
        return Parameter(initializer(Uniform(max_val), shape, ms.float32), name=name)
    return Parameter(initializer(method, shape, ms.float32), name=name)


class DenseLayer(nn.Cell):
    def __init__(self, input_dim, output_dim, act_str="relu", use_activation=True):
        super(DenseLayer, self).__init__()
        self.weight = init_method("uniform", [input_dim, output_dim], name="weight", max_val=0.3)
        self.bias = init_method("zeros", [output_dim], name="bias")
        self.act_func = P.ReLU() if act_str == "relu" else P.Tanh()
        self.matmul, self.bias_add, self.cast = P.MatMul(transpose_b=False), P.BiasAdd(), P.Cast()
        self.use_activation = use_activation

    def construct(self, x):
        x = self.bias_add(self.matmul(x, self.weight), self.bias)
        return self.act_func(x) if self.use_activation else x


class WideDeepModel(nn.Cell):
    def __init__(self, vocab_size=40, field_size=4, emb_dim=8, deep_layers=(16, 8)):
        super(WideDeepModel, self).__init__()
        self.field_size, self.emb_dim = field_size, emb_dim
        self.wide_w = init_method("normal", [vocab_size, 1], name="Wide_w")
        self.wide_b = init_method("zeros", [1], name="Wide_b")
        self.embedding_table = init_method("normal", [vocab_size, emb_dim], name="V_l2")
        sizes = [field_size * emb_dim, *deep_layers]
        self.deep_layers = nn.CellList([DenseLayer(*pair) for pair in itertools.pairwise(sizes)])
        self.head = DenseLayer(sizes[-1], 1, use_activation=False)
        self.gather, self.mul, self.reshape = P.Gather(), P.Mul(), P.Reshape()
        self.reduce_sum, self.tile, self.concat = P.ReduceSum(keep_dims=False), P.Tile(), P.Concat(axis=1)

    def construct(self, id_hldr, wt_hldr):
        mask = self.reshape(wt_hldr, (-1, self.field_size, 1))
        wide = self.mul(self.gather(self.wide_w, id_hldr, 0), mask)
        wide_out = self.reshape(self.reduce_sum(wide, 1) + self.wide_b, (-1, 1))
        vx = self.mul(self.gather(self.embedding_table, id_hldr, 0), mask)
        deep = self.reshape(vx, (-1, self.field_size * self.emb_dim))
        for layer in self.deep_layers:
            deep = layer(deep)
        return wide_out + self.head(deep), self.embedding_table


class NetWithLossClass(nn.Cell):
    def __init__(self, network, l2_coef=1e-4):
        super(NetWithLossClass, self).__init__(auto_prefix=False)
        self.loss, self.network, self.l2_coef = P.SigmoidCrossEntropyWithLogits(), network, l2_coef
        self.reduce_mean, self.reduce_sum, self.square = P.ReduceMean(), P.ReduceSum(), P.Square()

    def construct(self, batch_ids, batch_wts, label):
        predict, embedding_table = self.network(batch_ids, batch_wts)
        wide_loss = self.reduce_mean(self.loss(predict, label))
        return wide_loss, wide_loss + self.reduce_sum(self.square(embedding_table)) / 2 * self.l2_coef


class IthOutputCell(nn.Cell):
    def __init__(self, network, output_index):
        super(IthOutputCell, self).__init__()
        self.network, self.output_index = network, output_index

    def construct(self, *inputs):
        return self.network(*inputs)[self.output_index]


class TrainStepWrap(nn.Cell):
    def __init__(self, network, sens=1024.0):
        super(TrainStepWrap, self).__init__()
        self.network = network
        self.network.set_train()
        weights = ParameterTuple(network.trainable_params())
        self.weights_w = ParameterTuple([p for p in weights if "wide" in p.name.lower()])
        self.weights_d = ParameterTuple([p for p in weights if "wide" not in p.name.lower()])
        self.optimizer_w = nn.FTRL(learning_rate=1e-2, params=self.weights_w, l1=1e-8, l2=1e-8, initial_accum=1.0,
                                   loss_scale=sens)  # fmt: skip
        self.optimizer_d = nn.LazyAdam(self.weights_d, learning_rate=1e-2, eps=1e-8, loss_scale=sens)
        self.hyper_map = C.HyperMap()
        self.grad_w = C.GradOperation(get_by_list=True, sens_param=True)
        self.grad_d = C.GradOperation(get_by_list=True, sens_param=True)
        self.sens = sens
        self.loss_net_w, self.loss_net_d = IthOutputCell(network, 0), IthOutputCell(network, 1)
        self.reducer_flag = _get_parallel_mode() in (ParallelMode.DATA_PARALLEL, ParallelMode.HYBRID_PARALLEL)
        if self.reducer_flag:
            mean, degree = _get_gradients_mean(), _get_device_num()
            self.grad_reducer_w = DistributedGradReducer(self.optimizer_w.parameters, mean, degree)
            self.grad_reducer_d = DistributedGradReducer(self.optimizer_d.parameters, mean, degree)

    def construct(self, batch_ids, batch_wts, label):
        loss_w, loss_d = self.network(batch_ids, batch_wts, label)
        sens_w = P.Fill()(P.DType()(loss_w), P.Shape()(loss_w), self.sens)
        sens_d = P.Fill()(P.DType()(loss_d), P.Shape()(loss_d), self.sens)
        grads_w = self.grad_w(self.loss_net_w, self.weights_w)(batch_ids, batch_wts, label, sens_w)
        grads_d = self.grad_d(self.loss_net_d, self.weights_d)(batch_ids, batch_wts, label, sens_d)
        if self.reducer_flag:
            grads_w, grads_d = self.grad_reducer_w(grads_w), self.grad_reducer_d(grads_d)
        return F.depend(loss_w, self.optimizer_w(grads_w)), F.depend(loss_d, self.optimizer_d(grads_d))


def create_dataset(batch_size, rank_size, rank_id):
    numbers = np.random.RandomState(5)
    ids = numbers.randint(0, 40, (32, 4)).astype(np.int32)
    weights = numbers.uniform(0.5, 1.5, (32, 4)).astype(np.float32)
    labels = (ids.sum(1, keepdims=True) % 2).astype(np.float32)
    dataset = ds.NumpySlicesDataset((ids, weights, labels), ["ids", "weights", "label"], shuffle=False,
                                    num_shards=rank_size, shard_id=rank_id)  # fmt: skip
    return dataset.batch(batch_size, drop_remainder=True)


def main():
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=ranks)
    ms.set_seed(4)
    train_net = TrainStepWrap(NetWithLossClass(WideDeepModel()))
    train_net.set_train()
    seen = []

    class Losses(ms.Callback):
        def step_end(self, run_context):
            wide_loss, deep_loss = run_context.original_args().net_outputs
            seen.append([float(wide_loss.asnumpy()), float(deep_loss.asnumpy())])

    model = ms.Model(train_net)
    model.train(2, create_dataset(8 // ranks, ranks, rank), callbacks=[Losses()], dataset_sink_mode=False)
    return seen, [Tensor(p).asnumpy() for p in (*train_net.weights_w, *train_net.weights_d)]


if __name__ == "__main__":
    print(main()[0])
