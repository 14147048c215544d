"""GPT with strategies, the parallel optimizer and recomputation (rows B9, B27, C6): semi-automatic on several
ranks, the same program on one."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Parameter, Tensor, nn, ops
from shardwise.mindspore.common.initializer import initializer
from shardwise.mindspore.communication import get_group_size, init


class Attention(nn.Cell):
    def __init__(self, width, heads, mp):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.qkv.matmul.shard(((1, 1), (mp, 1)))
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.softmax = ops.Softmax(-1)
        self.transpose = ops.Transpose()

    def construct(self, x, mask):
        batch, time, width = x.shape
        qkv = self.qkv(x).reshape((batch, time, 3, self.heads, self.size))
        q, k, v = self.transpose(qkv, (2, 0, 3, 1, 4)).split(1, axis=0)
        scores = self.scores(q.squeeze(0), k.squeeze(0)) / self.size**0.5
        mixed = self.mix(self.softmax(ops.masked_fill(scores, mask, -1e9)), v.squeeze(0))
        return self.out(self.transpose(mixed, (0, 2, 1, 3)).reshape((batch, time, width)))


class Block(nn.Cell):
    def __init__(self, width, heads, mp):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.attention = Attention(width, heads, mp)
        self.up, self.down = nn.Dense(width, 4 * width, activation="gelu"), nn.Dense(4 * width, width)

    def construct(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(self.up(self.norm2(x)))


class GPT(nn.Cell):
    def __init__(self, vocab=32, width=16, time=8, layers=2, mp=1):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = Parameter(initializer("normal", [time, width]), "places")
        self.blocks = nn.CellList([Block(width, 4, mp) for _ in range(layers)])
        for block in self.blocks:
            block.recompute(mp_comm_recompute=True)
        self.norm, self.head = nn.LayerNorm((width,)), nn.Dense(width, vocab, has_bias=False)
        self.mask = Tensor(np.triu(np.ones((time, time), bool), 1))
        self.loss = nn.CrossEntropyLoss()

    def construct(self, ids, labels):
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.head(self.norm(x))
        return self.loss(logits.reshape((-1, logits.shape[-1])), labels.reshape((-1,)))


def main(steps=3):
    init()
    ranks = get_group_size()
    ms.set_context(mode=ms.GRAPH_MODE)
    if ranks > 1:
        ms.set_auto_parallel_context(
            parallel_mode="semi_auto_parallel", full_batch=True, enable_parallel_optimizer=True,
            parallel_optimizer_config={"parallel_optimizer_threshold": 1},
        )  # fmt: skip
    ms.set_seed(3)
    net = GPT(mp=2 if ranks > 1 else 1)
    decayed = [p for p in net.trainable_params() if "norm" not in p.name and "bias" not in p.name]
    others = [p for p in net.trainable_params() if not any(p is other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}, {"order_params": net.trainable_params()}]
    optimizer = nn.AdamWeightDecay(groups, learning_rate=nn.CosineDecayLR(0.001, 0.02, 10))
    train_network = nn.TrainOneStepCell(net, optimizer)
    train_network.set_train()
    ids, losses = Tensor(np.random.RandomState(0).randint(0, 32, (8, 9)).astype(np.int32)), []
    for _ in range(steps):
        losses.append(float(train_network(ids[:, :-1], ids[:, 1:]).asnumpy()))
    return losses


if __name__ == "__main__":
    print(main())
