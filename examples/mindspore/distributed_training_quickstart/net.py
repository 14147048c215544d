"""The quick start of distributed training on eight devices: the program of document 003.

    bash run_with_mpi.sh       with Open MPI, in the background: the log is device/train.log
    bash run.sh                without MPI
    mpirun -n 8 python net.py, shardwise run -n 8 net.py and torchrun --nproc-per-node 8 net.py start it as well

Differs from the document in the import lines, and in two errata. The arguments of ``get_dataset`` have the order of the
call (as printed, shapes do not fit). The learning rate is 0.4, as in the document's sample code: its log was made with
that, not with 0.2. (And its title says semi-automatic; the program is fully automatic.)
"""

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import Parameter
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.communication import get_rank, init
from shardwise.mindspore.nn import Cell, Momentum, MSELoss
from shardwise.mindspore.ops import operations as ops
from shardwise.mindspore.train import LossMonitor, Model, ModelCheckpoint


def get_dataset(batch_size, step_per_epoch, in_dim, out_dim):
    np.random.seed(1)
    input_data = np.random.rand(batch_size, in_dim).astype(np.float32)
    label_data = np.random.rand(batch_size, out_dim).astype(np.float32)

    def generate():
        for _ in range(step_per_epoch):
            yield (input_data, label_data)

    return generate


class Net(Cell):
    """define net"""

    def __init__(self, in_dim, hidden_dim, out_dim):
        super().__init__()
        self.in_dim = in_dim
        self.hidden_dim = hidden_dim
        self.out_dim = out_dim
        self.weight = Parameter(initializer("normal", [self.in_dim, self.hidden_dim]), "w")
        self.weight2 = Parameter(initializer("normal", [self.hidden_dim, self.out_dim]), "w2")

        # The strategy of the operator matmul: (2, 4) splits its data into two parts by batch and into four by width,
        # (4, 1) splits its weight into four parts by height.
        self.matmul = ops.MatMul().shard(((2, 4), (4, 1)))
        self.relu = ops.ReLU()
        self.matmul2 = ops.MatMul()

    def construct(self, x):
        out = self.matmul(x, self.weight)
        out = self.relu(out)
        out = self.matmul2(out, self.weight2)
        return out


if __name__ == "__main__":
    var_step_per_epoch = 4
    var_single_batch_size = 2
    var_in_dim = 32
    var_hidden_dim = 16
    var_out_dim = 16

    ms.set_context(mode=ms.GRAPH_MODE, device_target="GPU", save_graphs=2, save_graphs_path="../saved_graph")

    # One machine with eight devices: fully automatic, by propagation of the strategies that are given.
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.AUTO_PARALLEL,
        search_mode="sharding_propagation",
        dataset_strategy="data_parallel",
    )

    # Join the other devices, and ask which one this is.
    init("nccl")
    rank_id = get_rank()

    # A data set of random numbers.
    fake_dataset = get_dataset(var_single_batch_size, var_step_per_epoch, var_in_dim, var_out_dim)
    dataset = ds.GeneratorDataset(fake_dataset, ["input", "label"])

    net = Net(var_in_dim, var_hidden_dim, var_out_dim)

    loss = MSELoss()
    callback = [LossMonitor(), ModelCheckpoint(directory="{}".format(rank_id))]

    learning_rate = 0.4
    momentum = 0.1
    epoch_size = 5
    opt = Momentum(net.trainable_params(), learning_rate, momentum)

    model = Model(net, loss_fn=loss, optimizer=opt)
    model.train(epoch_size, dataset, callbacks=callback, dataset_sink_mode=False)
