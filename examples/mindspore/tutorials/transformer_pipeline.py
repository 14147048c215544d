"""A Transformer in two pipeline stages, with model parallelism, the parallel optimizer and recomputation (rows A39 to
A45, B26, B27, C6, C10), and what it saved, fine-tuned on any other number of ranks (A33).

Every two ranks of a stage split its products; on two ranks a stage has one.
"""

import glob

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init


class Block(nn.Cell):
    def __init__(self, width, heads, mp):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.up, self.down = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)
        self.up.matmul.shard(((1, 1), (mp, 1)))
        self.down.matmul.shard(((1, mp), (1, mp)))
        self.scores, self.mix, self.softmax = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul(), ops.Softmax(-1)
        self.transpose, self.gelu = ops.Transpose(), ops.GeLU()

    def construct(self, x):
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape((batch, time, 3, self.heads, self.size))
        q, k, v = self.transpose(qkv, (2, 0, 3, 1, 4)).split(1, axis=0)
        weights = self.softmax(self.scores(q.squeeze(0), k.squeeze(0)) / self.size**0.5)
        mixed = self.transpose(self.mix(weights, v.squeeze(0)), (0, 2, 1, 3)).reshape((batch, time, width))
        x = x + self.out(mixed)
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class Transformer(nn.Cell):
    def __init__(self, vocab=16, width=8, layers=2, mp=1):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.CellList([Block(width, 2, mp) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((width,)), nn.Dense(width, vocab, has_bias=False)
        self.tokens.pipeline_stage = 0
        for number, block in enumerate(self.blocks):
            block.pipeline_stage = 2 * number // layers
            block.recompute()
        self.norm.pipeline_stage = self.head.pipeline_stage = 1
        self.loss = nn.CrossEntropyLoss()

    def construct(self, ids, labels):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return self.loss(logits.reshape((-1, logits.shape[-1])), labels.reshape((-1,)))


def batches(steps, seed):
    ids = np.random.RandomState(seed).randint(0, 16, (steps, 8, 5)).astype(np.int32)
    return [(Tensor(own[:, :-1]), Tensor(own[:, 1:])) for own in ids]


def pretrain(folder, steps=2):
    """Losses (of the four micro-batches together); every rank saves its parts."""
    init()
    ranks = get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(
            parallel_mode="semi_auto_parallel", pipeline_stages=2, full_batch=True, enable_parallel_optimizer=True,
            parallel_optimizer_config={"parallel_optimizer_threshold": 0},
        )  # fmt: skip
    ms.set_seed(5)
    net = Transformer(mp=2 if ranks > 2 else 1)
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.01)
    train = nn.TrainOneStepCell(nn.PipelineCell(net, 4), optimizer)
    train.set_train()
    losses = [float(train(*batch)) for batch in batches(steps, 0)]
    ms.save_checkpoint(train, f"{folder}/rank_{get_rank()}/transformer.ckpt")
    return losses


def finetune(folder, steps=2):
    """From the files of any number of ranks, by data parallelism on those that there are now."""
    init()
    ranks = get_group_size()
    if ranks > 1:
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = Transformer()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.01)
    content = ms.load_distributed_checkpoint(net, sorted(glob.glob(f"{folder}/rank_*/transformer.ckpt")))
    ms.load_param_into_net(optimizer, content)
    train = nn.TrainOneStepCell(net, optimizer)
    train.set_train()
    rows = slice(get_rank(), None, ranks)
    losses = [float(train(ids[rows], labels[rows])) for ids, labels in batches(steps, 1)]
    return losses, {name: p.asnumpy() for name, p in net.parameters_dict().items()}


if __name__ == "__main__":
    print(pretrain("transformer"))
