"""Q-learning: a copy of a network judges what the network chooses, over a buffer of steps (rows C1, C5)."""

import random
from collections import deque

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore.communication import init


class QNet(nn.Cell):
    def __init__(self, obs, act, hidden=16):
        super(QNet, self).__init__()
        self.fc1 = nn.Dense(obs, hidden, weight_init="XavierUniform", activation=nn.ReLU())
        self.adv = nn.Dense(hidden, act).to_float(ms.float32)
        self.val = nn.Dense(hidden, 1, bias_init="ones")

    def construct(self, x):
        h = self.fc1(x)
        a = self.adv(h)
        return self.val(h) + a - ops.ReduceMean(True)(a, 1)


class Loss(nn.Cell):
    def __init__(self, q):
        super().__init__()
        self.q, self.loss = q, nn.HuberLoss()

    def construct(self, s, a, y):
        q = self.q(s)
        picked = ops.gather_elements(q, 1, a.expand_dims(1)).squeeze(-1)
        also = (q * ops.one_hot(a, q.shape[-1], Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))).sum(axis=1)
        return self.loss(picked, y) + 0 * also.sum()


class Replay:
    def __init__(self, size):
        self.buf = deque(maxlen=size)

    def add(self, *row):
        self.buf.append(row)

    def sample(self, n, rng):
        rows = rng.sample(list(self.buf), n)
        return (np.array(c) for c in zip(*rows, strict=True))


def main(mode=None):
    if mode is not None:
        init()
        ms.set_auto_parallel_context(parallel_mode=mode, full_batch=mode != "data_parallel")
    ms.set_seed(13)
    rng, r = random.Random(0), np.random.RandomState(13)
    policy, target = QNet(4, 3), QNet(4, 3)
    for t, p in zip(target.trainable_params(), policy.trainable_params(), strict=True):
        t.set_data(p)
    opt = nn.RMSProp(policy.trainable_params(), learning_rate=0.01, decay=0.9, centered=True)
    loss = Loss(policy)
    train = nn.TrainOneStepCell(loss, opt)
    train.set_train()
    buf = Replay(50)
    s = r.randn(4).astype(np.float32)
    for _ in range(30):
        a = int(policy(Tensor(s[None])).argmax(1).asnumpy()[0]) if r.rand() > 0.5 else r.randint(0, 3)
        n = r.randn(4).astype(np.float32)
        buf.add(s, np.int32(a), np.float32(r.rand()), n, np.float32(r.rand() > 0.9))
        s = n
    losses = []
    for _ in range(4):
        s, a, rew, n, d = buf.sample(8, rng)
        nq = policy(Tensor(n))
        best = ops.argmax(nq, -1)
        tq = target(Tensor(n)).gather_elements(1, best.view(-1, 1)).reshape(-1)
        y = Tensor(rew) + 0.9 * tq * (1 - Tensor(d))
        losses.append(float(train(Tensor(s), Tensor(a), ops.stop_gradient(y))))
    return losses
