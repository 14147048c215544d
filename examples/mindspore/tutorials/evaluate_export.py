"""A network trained split, saved by every rank, joined, judged and exported: confusion matrix, top-k accuracy, a loss
of several labels, a file for inference (rows A30, B17, B23, G4).

shardwise run -n 4 examples/mindspore/tutorials/evaluate_export.py FOLDER
"""

import sys

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init


class Net(nn.Cell):
    def __init__(self, mp=1):
        super(Net, self).__init__()
        self.fc1, self.fc2 = nn.Dense(10, 16, activation="relu"), nn.Dense(16, 4)
        self.fc1.matmul.shard(((1, 1), (mp, 1)))
        self.fc2.matmul.shard(((1, mp), (1, mp)))

    def construct(self, x):
        return self.fc2(self.fc1(x))


class TwoLabels(nn.LossBase):
    """The mean of the losses of two labels."""

    def __init__(self):
        super(TwoLabels, self).__init__("mean")
        self.ce = nn.CrossEntropyLoss(label_smoothing=0.05)

    def construct(self, logits, first, second):
        return (self.ce(logits, first) + self.ce(logits, second)) / 2


class WithTwoLabels(nn.Cell):
    def __init__(self, backbone, loss_fn):
        super(WithTwoLabels, self).__init__(auto_prefix=False)
        self._backbone, self._loss_fn = backbone, loss_fn

    def construct(self, data, first, second):
        return self._loss_fn(self._backbone(data), first, second)


class EvalTwoLabels(nn.Cell):
    def __init__(self, network):
        super(EvalTwoLabels, self).__init__(auto_prefix=False)
        self.network = network

    def construct(self, data, first, second):
        return self.network(data), first, second


def create_dataset(batch_size=8):
    numbers = np.random.RandomState(21)
    data, first = numbers.rand(24, 10).astype(np.float32), (np.arange(24) % 4).astype(np.int32)
    columns = {"data": data, "first": first, "second": (first + numbers.randint(0, 2, 24).astype(np.int32)) % 4}
    return ds.NumpySlicesDataset(columns, shuffle=False).batch(batch_size)


def train(folder, epochs=2):
    """The metrics; every rank saves its parts."""
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=ranks, full_batch=True,
                                     strategy_ckpt_save_file=f"{folder}/strategy_{ranks}.ckpt")  # fmt: skip
    ms.set_seed(14)
    net = Net(mp=ranks)
    optimizer = nn.RMSProp(net.trainable_params(), learning_rate=0.01)
    first, second = nn.Accuracy(), nn.TopKCategoricalAccuracy(2)
    first.set_indexes([0, 1])
    second.set_indexes([0, 2])
    model = ms.Model(WithTwoLabels(net, TwoLabels()), optimizer=optimizer, eval_network=EvalTwoLabels(net),
                     metrics={"first": first, "second": second})  # fmt: skip
    model.train(epochs, create_dataset(), dataset_sink_mode=False)
    score = model.eval(create_dataset(), dataset_sink_mode=False)
    ms.save_checkpoint(net, f"{folder}/judged_{ranks}/rank_{rank}/net.ckpt")
    return score


def judge(folder, ranks):
    """In one process, from the files of all ranks: the confusion matrix, the precision of every class, and logits."""
    net = Net()
    files = [f"{folder}/judged_{ranks}/rank_{rank}/net.ckpt" for rank in range(ranks)]
    ms.load_distributed_checkpoint(net, files)
    net.set_train(False)
    matrix, precision = nn.ConfusionMatrix(num_classes=4), nn.Precision("classification")
    matrix.clear()
    precision.clear()
    for batch in create_dataset().create_dict_iterator():
        logits = net(batch["data"])
        matrix.update(logits.argmax(axis=1), batch["first"])
        precision.update(ops.softmax(logits), batch["first"])
    example = Tensor(np.linspace(0, 1, 20).reshape(2, 10), ms.float32)
    name = f"{folder}/judged_{ranks}/net"
    ms.export(net, example, file_name=name, file_format="MINDIR")
    graph = nn.GraphCell(ms.load(f"{name}.mindir"))
    assert np.allclose(graph(example).asnumpy(), net(example).asnumpy(), atol=1e-6)
    return matrix.eval(), precision.eval(), net(example).asnumpy()


if __name__ == "__main__":
    print(train(sys.argv[1]))
