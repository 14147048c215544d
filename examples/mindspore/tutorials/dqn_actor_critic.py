"""Learning from rewards: deep Q-learning with a slowly moving copy, and an actor with a critic (rows A35, C1)."""

from collections import deque

import numpy as np
from shardwise.mindspore.nn.probability import distribution as msd

import shardwise.mindspore as ms
import shardwise.mindspore.common.dtype as mstype
from shardwise.mindspore import Tensor, context, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init


class PolicyNetWithLossCell(nn.Cell):
    def __init__(self, backbone, loss_fn):
        super().__init__(auto_prefix=False)
        self._backbone = backbone
        self._loss_fn = loss_fn
        self.gather = ops.GatherD()

    def construct(self, x, a0, label):
        out = self._backbone(x)
        out = self.gather(out, 1, a0)
        return self._loss_fn(out, label)


class DQN(nn.Cell):
    def __init__(self, i, h, o):
        super().__init__()
        self.linear1 = nn.Dense(i, h)
        self.linear2 = nn.Dense(h, o, weight_init="xavier_uniform", bias_init="zeros")
        self.relu = nn.ReLU()

    def construct(self, x):
        return self.linear2(self.relu(self.linear1(x)))


class Agent:
    def __init__(self, **kw):
        for k, v in kw.items():
            setattr(self, k, v)
        self.policy, self.target = DQN(4, 16, 2), DQN(4, 16, 2)
        self.policy_param = ms.ParameterTuple(self.policy.get_parameters())
        self.target_param = ms.ParameterTuple(self.target.get_parameters())
        self.opt = nn.Adam(self.policy.trainable_params(), learning_rate=self.lr)
        self.train = nn.TrainOneStepCell(PolicyNetWithLossCell(self.policy, nn.MSELoss()), self.opt)
        self.train.set_train(mode=True)
        self.hyper_map = ops.HyperMap()
        self.assign = ops.Assign()

    def load_dict(self):
        for t, s in zip(self.target_param, self.policy_param, strict=True):
            t.set_data(s.data if hasattr(s, "data") else s)
        success = self.hyper_map(
            ops.partial(_update_op, ops.scalar_to_tensor(0.9) if hasattr(ops, "scalar_to_tensor") else 0.9),
            self.policy_param,
            self.target_param,
        )
        return success


_soft = ops.MultitypeFuncGraph("soft_update")


@_soft.register("Tensor", "Tensor", "Tensor")
def _soft_fn(factor, p, t):
    return ops.assign(t, factor * t + (1 - factor) * p)


_update_op = _soft


class ActorCritic(nn.Cell):
    def __init__(self):
        super().__init__()
        self.common = nn.Dense(4, 8, weight_init="XavierUniform")
        self.actor = nn.Dense(8, 2)
        self.critic = nn.Dense(8, 1)
        self.relu = nn.LeakyReLU()

    def construct(self, s):
        x = self.relu(self.common(s))
        return ops.Softmax(axis=-1)(self.actor(x)), self.critic(x)


def main(mode=None):
    context.set_context(mode=context.PYNATIVE_MODE)
    init()
    rank, size = get_rank(), get_group_size()
    ms.set_seed(1)
    if mode == "data_parallel":
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    agent = Agent(lr=0.01)
    agent.load_dict()
    r = np.random.RandomState(0)
    memory = deque(maxlen=64)
    for _ in range(48):
        memory.append(
            (
                r.rand(4).astype(np.float32),
                r.randint(2),
                float(r.rand()),
                r.rand(4).astype(np.float32),
                bool(r.rand() < 0.1),
            )
        )
    losses = []
    for _ in range(3):
        batch = [memory[i] for i in r.choice(len(memory), 16)]
        k = 16 // size
        if mode == "data_parallel":
            batch = batch[rank * k : (rank + 1) * k]
        s, a, w, n, d = map(np.stack, zip(*batch, strict=True))
        s, n = Tensor(s), Tensor(n)
        a = Tensor(a, mstype.int32).view(-1, 1)
        w = Tensor(w, mstype.float32).expand_dims(1)
        d = Tensor(d).astype(mstype.float32).reshape(-1, 1)
        nxt = agent.target(n).max(axis=1, keepdims=True)
        nxt = ops.stop_gradient(nxt)
        y = w + 0.9 * nxt * (1 - d)
        losses.append(float(agent.train(s, a, y).asnumpy()))
        agent.load_dict()
    ac = ActorCritic()
    opt = nn.RMSProp(ac.trainable_params(), 0.01, centered=False)
    cat = msd.Categorical(dtype=mstype.float32)

    def loss_fn(s, acts, rets):
        probs, v = ac(s)
        idx = ops.stack((ops.arange(acts.shape[0]).astype(ms.int32), acts), 1)
        p = ops.gather_nd(probs, idx)
        adv = rets - v.squeeze(-1)
        act = -(ops.log(p) * ops.stop_gradient(adv)).mean()
        return act + ops.smooth_l1_loss(v.squeeze(-1), rets, reduction="mean") - 0.01 * cat.entropy(probs).mean()

    gf = ms.value_and_grad(loss_fn, None, opt.parameters)
    red = nn.DistributedGradReducer(opt.parameters) if mode == "data_parallel" else (lambda g: g)
    for _ in range(2):
        s, a, w = r.rand(8, 4).astype(np.float32), r.randint(0, 2, 8).astype(np.int32), r.rand(8).astype(np.float32)
        k = 8 // size if mode == "data_parallel" else 8
        sl = slice(rank * k, rank * k + k) if mode == "data_parallel" else slice(None)
        loss, g = gf(Tensor(s[sl]), Tensor(a[sl]), Tensor(w[sl]))
        opt(red(g))
        losses.append(float(loss))
    return losses, (float(ops.ReduceSum()(agent.target_param[0]).asnumpy()),)
