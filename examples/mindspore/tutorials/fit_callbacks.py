"""Model.fit with callbacks: checkpoints, early stopping, a learning rate that falls, metrics of one's own, the best
file kept, and training that goes on from a file (rows A30, B15-B18).

shardwise run -n 8 examples/mindspore/tutorials/fit_callbacks.py FOLDER
"""

import os
import sys

import numpy as np

import shardwise.mindspore as ms
import shardwise.mindspore.dataset as ds
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init
from shardwise.mindspore.train import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    History,
    LambdaCallback,
    LossMonitor,
    ModelCheckpoint,
    TimeMonitor,
)


class RSquared(nn.Metric):
    """How much of the variance is explained."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.wrong, self.values = 0.0, []

    def update(self, *inputs):
        if len(inputs) != 2:
            raise ValueError("R squared needs 2 inputs (y_pred, y)")
        y_pred, y = inputs[0].asnumpy(), inputs[1].asnumpy()
        self.wrong += float(((y - y_pred) ** 2).sum())
        self.values.extend(y.reshape(-1).tolist())

    def eval(self):
        return 1 - self.wrong / (np.var(self.values) * len(self.values))


class HuberByHand(nn.LossBase):
    def __init__(self, delta=1.0, reduction="mean"):
        super().__init__(reduction)
        self.delta, self.abs, self.minimum = delta, ops.Abs(), ops.Minimum()

    def construct(self, logits, labels):
        gap = self.abs(logits - labels)
        inner = self.minimum(gap, Tensor(self.delta, ms.float32))
        return self.get_loss(0.5 * inner * inner + self.delta * (gap - inner))


class KeepBest(Callback):
    """Saves the network whenever the metric is the best so far."""

    def __init__(self, file, monitor="r2"):
        super(KeepBest, self).__init__()
        self.file, self.monitor, self.best = file, monitor, -np.inf

    def on_train_epoch_end(self, run_context):
        cb_params = run_context.original_args()
        score = cb_params.eval_results.get(self.monitor)
        if score is not None and score > self.best:
            self.best = score
            ms.save_checkpoint(cb_params.train_network, self.file, append_dict={"epoch_num": cb_params.cur_epoch_num})


def create_dataset(num, batch_size, shards=1, shard=0, seed=0):
    numbers = np.random.RandomState(seed)
    x = numbers.uniform(-1, 1, (num, 3)).astype(np.float32)
    y = (x @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 0.3).astype(np.float32)
    data = ds.NumpySlicesDataset({"data": x, "label": y}, shuffle=False, num_shards=shards, shard_id=shard)
    return data.batch(batch_size, drop_remainder=True)


def build(rate=0.1):
    net = nn.SequentialCell(nn.Dense(3, 8, weight_init="HeUniform"), nn.ReLU(), nn.Dense(8, 1))
    optimizer = nn.Momentum(net.trainable_params(), rate, momentum=0.9)
    metrics = {"r2": RSquared(), "mae": nn.MAE(), "loss": nn.Loss()}
    return net, optimizer, ms.Model(net, loss_fn=HuberByHand(), optimizer=optimizer, metrics=metrics)


def main(folder, epochs=3):
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, parameter_broadcast=True)
    ms.set_seed(12)
    net, optimizer, model = build()
    own = f"{folder}/fit_{ranks}_{rank}"
    train, valid = create_dataset(32, 8 // ranks, ranks, rank), create_dataset(16, 8, seed=1)
    config = CheckpointConfig(save_checkpoint_steps=4, keep_checkpoint_max=2, saved_network=net, append_info=[
        "epoch_num", "step_num"])  # fmt: skip
    history, rates = History(), []
    keep = LambdaCallback(on_train_step_end=lambda run_context: rates.append(float(optimizer.learning_rate.asnumpy())))
    halve = LambdaCallback(on_train_epoch_end=lambda run_context: ops.assign(
        optimizer.learning_rate, optimizer.learning_rate * 0.5))  # fmt: skip
    callbacks = [LossMonitor(2), TimeMonitor(), history, keep, halve, KeepBest(f"{own}/best.ckpt"), EarlyStopping(
        monitor="eval_loss", patience=2), ModelCheckpoint("fit", own, config)]  # fmt: skip
    model.fit(epochs, train, valid, callbacks=callbacks, dataset_sink_mode=False)
    assert rates[0] == 2 * rates[4] == 4 * rates[8]
    assert sorted(os.listdir(own)) == ["best.ckpt", "fit-2_4.ckpt", "fit-3_4.ckpt"]
    # What goes on from the best file has its metrics.
    param_dict = ms.load_checkpoint(f"{own}/best.ckpt")
    best = int(param_dict["epoch_num"].asnumpy())
    again, _, judged = build()
    not_loaded, _ = ms.load_param_into_net(again, param_dict)
    assert not not_loaded
    score = judged.eval(valid, dataset_sink_mode=False)
    assert np.isclose(score["r2"], history.history["eval_r2"][best - 1])
    return history.history["eval_loss"], [score["r2"], score["mae"]], [p.asnumpy() for p in net.trainable_params()]


if __name__ == "__main__":
    print(main(sys.argv[1])[0])
