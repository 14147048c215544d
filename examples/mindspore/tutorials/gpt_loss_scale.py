"""GPT's pre-training step by hand: strategies, a loss scale, and clipping by the norm of all gradients together (rows
A7, B9, B11, B24, C6)."""

import numpy as np
from shardwise.mindspore.nn.learning_rate_schedule import CosineDecayLR, LearningRateSchedule, WarmUpLR
from shardwise.mindspore.nn.wrap.loss_scale import TrainOneStepWithLossScaleCell

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from shardwise.mindspore.common.initializer import Normal, TruncatedNormal, initializer
from shardwise.mindspore.communication import get_group_size, init
from shardwise.mindspore.ops import composite as C
from shardwise.mindspore.ops import functional as F
from shardwise.mindspore.ops import operations as P

grad_scale = C.MultitypeFuncGraph("grad_scale")


@grad_scale.register("Tensor", "Tensor")
def tensor_grad_scale(scale, grad):
    return F.cast(grad, ms.float32) * P.Reciprocal()(scale)


class LearningRate(LearningRateSchedule):
    """Linear at first, then along a cosine."""

    def __init__(self, start_learning_rate, end_learning_rate, warmup_steps, decay_steps):
        super(LearningRate, self).__init__()
        self.warmup_lr = WarmUpLR(start_learning_rate, warmup_steps)
        self.decay_lr = CosineDecayLR(end_learning_rate, start_learning_rate, decay_steps)
        self.warmup_steps = Tensor(np.array([warmup_steps]).astype(np.float32))
        self.greater, self.cast = P.Greater(), P.Cast()
        self.one = Tensor(np.array([1.0]).astype(np.float32))

    def construct(self, global_step):
        is_warmup = self.cast(self.greater(self.warmup_steps, global_step), ms.float32)
        return (self.one - is_warmup) * self.decay_lr(global_step) + is_warmup * self.warmup_lr(global_step)


class Output(nn.Cell):
    """The two products behind attention, over ``mp`` devices."""

    def __init__(self, width, dp, mp):
        super().__init__()
        self.mapping = nn.Dense(width, 4 * width, weight_init=Normal(0.02)).to_float(ms.float32)
        self.projection = nn.Dense(4 * width, width, weight_init=Normal(0.02))
        self.mapping.matmul.shard(((dp, 1), (mp, 1)))
        self.mapping.bias_add.shard(((dp, mp), (mp,)))
        self.projection.matmul.shard(((dp, mp), (1, mp)))
        self.activation = ops.GeLU().shard(((dp, mp),))

    def construct(self, x):
        shape = x.shape
        x = self.activation(self.mapping(x.view((-1, shape[-1]))))
        return self.projection(x).view(shape)


class Block(nn.Cell):
    def __init__(self, width, heads, dp, mp):
        super().__init__()
        self.layernorm1, self.layernorm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.query, self.key, self.value = (nn.Dense(width, width, weight_init=Normal(0.02)) for _ in range(3))
        self.projection, self.output = nn.Dense(width, width), Output(width, dp, mp)
        self.heads, self.scale = heads, Tensor((width // heads) ** -0.5, ms.float32)
        self.batch_matmul = P.BatchMatMul().shard(((dp, mp, 1, 1), (dp, mp, 1, 1)))
        self.transpose, self.softmax = P.Transpose(), nn.Softmax(axis=-1)
        self.merger, self.reshape = P.Transpose(), P.Reshape()

    def construct(self, x, mask):
        batch, time, width = F.shape(x)
        normed = self.layernorm1(x)
        apart = (batch, time, self.heads, width // self.heads)
        query = self.transpose(self.reshape(self.query(normed), apart), (0, 2, 1, 3))
        key = self.transpose(self.reshape(self.key(normed), apart), (0, 2, 3, 1))
        value = self.transpose(self.reshape(self.value(normed), apart), (0, 2, 1, 3))
        score = self.batch_matmul(query * self.scale, key) + (1.0 - mask) * -10000.0
        mixed = self.merger(self.batch_matmul(self.softmax(score), value), (0, 2, 1, 3))
        x = x + self.projection(self.reshape(mixed, (batch, time, width)))
        return x + self.output(self.layernorm2(x))


class GPTWithLoss(nn.Cell):
    def __init__(self, vocab=32, width=16, layers=2, heads=4, length=8, dp=1, mp=1):
        super().__init__()
        self.table = Parameter(initializer(TruncatedNormal(0.02), [vocab, width]), name="embedding_table")
        self.position = Parameter(initializer("normal", [length, width]), name="position_table")
        self.blocks = nn.CellList([Block(width, heads, dp, mp) for _ in range(layers)])
        self.norm, self.gather = nn.LayerNorm((width,)), P.Gather()
        self.head = P.MatMul(transpose_b=True)
        self.mask = Tensor(np.tril(np.ones((1, 1, length, length), np.float32)))
        self.ce, self.vocab = nn.SoftmaxCrossEntropyWithLogits(sparse=True), vocab

    def construct(self, input_ids):
        tokens, labels = input_ids[:, :-1], input_ids[:, 1:]
        x = self.gather(self.table, tokens, 0) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.head(self.norm(x).view((-1, x.shape[-1])), self.table)
        return P.ReduceMean()(self.ce(logits, labels.reshape((-1,))))


class GPTTrainOneStepWithLossScaleCell(TrainOneStepWithLossScaleCell):
    def __init__(self, network, optimizer, scale_update_cell=None):
        super().__init__(network, optimizer, scale_update_cell)
        self.weights = optimizer.parameters
        self.clip = lambda grads: ops.clip_by_global_norm(grads, clip_norm=1.0)

    def construct(self, input_ids, past=None):
        loss = self.network(input_ids)
        scaling_sens = self.scale_sense
        status, scaling_sens = self.start_overflow_check(loss, scaling_sens)
        scaling_sens_filled = C.ones_like(loss) * F.cast(scaling_sens, F.dtype(loss))
        grads = self.grad(self.network, self.weights)(input_ids, scaling_sens_filled)
        grads = self.grad_reducer(grads)
        grads = self.hyper_map(F.partial(grad_scale, scaling_sens), grads)
        grads = self.clip(grads)
        cond = self.get_overflow_status(status, grads)
        overflow = self.process_loss_scale(cond)
        if not overflow:
            loss = F.depend(loss, self.optimizer(grads))
        return loss, cond, scaling_sens


def main(steps=4):
    init()
    ranks = get_group_size()
    mp = 2 if ranks > 1 else 1
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=ranks, full_batch=True,
                                     gradients_mean=False, enable_parallel_optimizer=True)  # fmt: skip
    ms.set_seed(3)
    net = GPTWithLoss(dp=ranks // mp, mp=mp)
    decay = [p for p in net.trainable_params() if "norm" not in p.name.lower() and "bias" not in p.name]
    other = [p for p in net.trainable_params() if all(p is not own for own in decay)]
    group_params = [{"params": decay, "weight_decay": 1e-1}, {"params": other, "weight_decay": 0.0},
                    {"order_params": ParameterTuple(net.trainable_params())}]  # fmt: skip
    optimizer = nn.AdamWeightDecay(group_params, learning_rate=LearningRate(0.02, 0.002, 2, 8), eps=1e-8, beta2=0.95)
    update_cell = nn.DynamicLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=3)
    train = GPTTrainOneStepWithLossScaleCell(net, optimizer, update_cell)
    train.set_train()
    ids, losses, scales = np.random.RandomState(0).randint(0, 32, (8, 9)).astype(np.int32), [], []
    for _ in range(steps):
        loss, overflow, scale = train(Tensor(ids))
        assert not bool(overflow)
        losses.append(float(loss.asnumpy()))
        scales.append(float(scale.asnumpy()))
    return losses, scales


if __name__ == "__main__":
    print(main())
