"""A functional training loop with ms.value_and_grad and ms.jit on a Wide & Deep network, a cell with its own bprop, a
checkpoint that another number of ranks goes on from, evaluation and export (rows A33, B1, B22, B24)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init


class Halved(nn.Cell):
    """x, whose gradient is halved."""

    def construct(self, x):
        return x * 1

    def bprop(self, x, out, dout):
        return (dout * 0.5,)


class WideDeep(nn.Cell):
    def __init__(self, vocab=40, fields=4, width=8):
        super().__init__()
        self.wide = Parameter(Tensor(np.zeros((vocab, 1), np.float32)), "wide")
        self.table = nn.Embedding(vocab, width)
        self.deep = nn.SequentialCell(nn.Dense(fields * width, 16), nn.ReLU(), nn.Dropout(p=0.0), nn.Dense(16, 1))
        self.gather, self.halved = ops.Gather(), Halved()

    def construct(self, ids):
        wide = self.gather(self.wide, ids, 0).sum(axis=1)
        deep = self.deep(self.table(ids).reshape((ids.shape[0], -1)))
        return (wide + self.halved(deep)).squeeze(axis=1)


def batches(steps, rank, ranks):
    numbers = np.random.RandomState(5)
    for _ in range(steps):
        ids = numbers.randint(0, 40, (8, 4)).astype(np.int32)
        rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        yield Tensor(ids[rows]), Tensor((ids.sum(1) % 2).astype(np.float32)[rows])


def main(folder, steps=4):
    init()
    rank, ranks = get_rank(), get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(4)
    net = WideDeep()
    wide = ParameterTuple([p for p in net.trainable_params() if "wide" in p.name])
    deep = ParameterTuple([p for p in net.trainable_params() if "wide" not in p.name])
    wide_optimizer = nn.FTRL(wide, learning_rate=0.1, l1=1e-8, l2=1e-8, initial_accum=1.0)
    deep_optimizer = nn.LazyAdam(deep, learning_rate=0.01, eps=1e-8)
    loss_fn = nn.BCEWithLogitsLoss()
    reducer = nn.DistributedGradReducer([*wide, *deep]) if ranks > 1 else lambda grads: grads

    def forward_fn(ids, label):
        logits = net(ids)
        return loss_fn(logits, label), logits

    grad_fn = ms.value_and_grad(forward_fn, None, ParameterTuple([*wide, *deep]), has_aux=True)

    @ms.jit
    def train_step(ids, label):
        (loss, _), grads = grad_fn(ids, label)
        grads = reducer(grads)
        grads = ops.clip_by_global_norm(grads, 1.0)
        wide_optimizer(grads[: len(wide)])
        deep_optimizer(grads[len(wide) :])
        return loss

    net.set_train()
    losses = [float(train_step(ids, label).asnumpy()) for ids, label in batches(steps, rank, ranks)]
    ms.save_checkpoint(net, f"{folder}/{rank}/wide_deep.ckpt", append_dict={"epoch": 1})
    fresh = WideDeep()
    missing, unused = ms.load_param_into_net(fresh, ms.load_checkpoint(f"{folder}/{rank}/wide_deep.ckpt"))
    assert not missing
    assert not unused
    roc = nn.ROC(pos_label=1)
    ids, label = next(batches(1, 0, 1))
    score = ops.sigmoid(fresh.set_train(False)(ids))
    roc.update(score, label)
    false, true, _ = roc.eval()
    ms.export(fresh, ids, file_name=f"{folder}/{rank}/wide_deep", file_format="MINDIR")
    again = nn.GraphCell(ms.load(f"{folder}/{rank}/wide_deep.mindir"))
    assert np.allclose(again(ids).asnumpy(), fresh(ids).asnumpy())
    return losses, float(nn.auc(false, true)), score.asnumpy()


if __name__ == "__main__":
    print(main("."))
