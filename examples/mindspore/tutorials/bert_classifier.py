"""BERT as a classifier: words of a vocabulary, groups of parameters, a metric and a network to evaluate with
(rows B17, B18, C1, C5).
"""

import math
import os
import tempfile

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore import dataset as ds
from shardwise.mindspore.common.initializer import TruncatedNormal
from shardwise.mindspore.communication import init
from shardwise.mindspore.dataset import text, transforms
from shardwise.mindspore.train import F1, CheckpointConfig, LossMonitor, Metric, Model, ModelCheckpoint
from shardwise.mindspore.train.callback import Callback


class BertConfig:
    def __init__(self, **kw):
        self.hidden, self.heads, self.layers, self.ff, self.vocab, self.maxlen, self.p = 16, 2, 2, 32, 30, 12, 0.0
        self.__dict__.update(kw)


class SelfAttention(nn.Cell):
    def __init__(self, c):
        super().__init__()
        self.n, self.d = c.heads, c.hidden // c.heads
        self.query = nn.Dense(c.hidden, c.hidden, weight_init=TruncatedNormal(0.02))
        self.key, self.value, self.out = (nn.Dense(c.hidden, c.hidden) for _ in range(3))
        self.dropout = nn.Dropout(p=c.p) if c.p else nn.Identity()
        self.softmax = nn.Softmax(-1)
        self.sqrt = math.sqrt(self.d)

    def transpose_for_scores(self, x):
        return x.reshape((*x.shape[:-1], self.n, self.d)).transpose(0, 2, 1, 3)

    def construct(self, x, mask):
        q, k, v = map(self.transpose_for_scores, (self.query(x), self.key(x), self.value(x)))
        s = ops.matmul(q, k.swapaxes(-1, -2)) / ops.sqrt(Tensor(self.d, ms.float32))
        s = s + mask
        p = self.dropout(self.softmax(s))
        ctx = ops.matmul(p, v).transpose(0, 2, 1, 3)
        return self.out(ctx.reshape((*ctx.shape[:-2], self.n * self.d)))


class Layer(nn.Cell):
    def __init__(self, c):
        super().__init__()
        self.attn, self.ln1, self.ln2 = (
            SelfAttention(c),
            nn.LayerNorm((c.hidden,), epsilon=1e-12),
            nn.LayerNorm((c.hidden,), epsilon=1e-12),
        )
        self.up, self.down = nn.Dense(c.hidden, c.ff, activation=nn.GELU(False)), nn.Dense(c.ff, c.hidden)

    def construct(self, x, mask):
        x = self.ln1(x + self.attn(x, mask))
        return self.ln2(x + self.down(self.up(x)))


class Bert(nn.Cell):
    def __init__(self, c):
        super().__init__()
        self.word, self.pos, self.seg = (
            nn.Embedding(c.vocab, c.hidden),
            nn.Embedding(c.maxlen, c.hidden),
            nn.Embedding(2, c.hidden),
        )
        self.ln = nn.LayerNorm((c.hidden,))
        self.layer = nn.CellList([Layer(c) for _ in range(c.layers)])
        self.pooler = nn.Dense(c.hidden, c.hidden, activation="tanh")

    def construct(self, ids, seg):
        mask = ops.not_equal(ids, 0).astype(ms.float32)
        ext = (1.0 - mask.expand_dims(1).expand_dims(2)) * Tensor(np.finfo(np.float32).min, ms.float32)
        pos = ops.arange(ids.shape[1]).expand_dims(0).broadcast_to(ids.shape)
        x = self.ln(self.word(ids) + self.pos(pos) + self.seg(seg))
        for layer in self.layer:
            x = layer(x, ext)
        return x, self.pooler(x[:, 0])


class BertForCls(nn.Cell):
    def __init__(self, c, num):
        super().__init__()
        self.bert = Bert(c)
        self.classifier = nn.Dense(c.hidden, num)

    def construct(self, ids, seg):
        _, pooled = self.bert(ids, seg)
        return self.classifier(pooled)


class WithLoss(nn.Cell):
    def __init__(self, net, loss):
        super().__init__(auto_prefix=False)
        self._backbone, self._loss_fn = net, loss

    def construct(self, ids, seg, label):
        return self._loss_fn(self._backbone(ids, seg), label)


class EvalNet(nn.Cell):
    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, ids, seg, label):
        return ops.argmax(self.net(ids, seg), dim=1).astype(ms.int32), label


class Acc(Metric):
    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.right = self.total = 0

    def update(self, *inputs):
        if len(inputs) != 2:
            raise ValueError("two")
        pred, y = self._convert_data(inputs[0]), self._convert_data(inputs[1])
        self.right += (pred == y).sum()
        self.total += len(y)

    def eval(self):
        return self.right / self.total


class Keep(Callback):
    def __init__(self):
        self.losses = []

    def step_end(self, ctx):
        self.losses.append(float(ctx.original_args().net_outputs.asnumpy()))

    def end(self, ctx):
        self.done = True


def main(mode=None):
    if mode is not None:
        init()
        ms.set_auto_parallel_context(parallel_mode=mode, full_batch=mode != "data_parallel")
    ms.set_seed(11)
    words = ["the", "cat", "sat", "on", "mat", "dog", "ran", "fast", "slow", "red", "blue"]
    vocab = text.Vocab.from_list(words, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], special_first=True)
    r = np.random.RandomState(11)
    sents = [(" ".join(r.choice([*words, "zebra"], r.randint(3, 8))), int(r.randint(0, 2))) for _ in range(16)]
    data = ds.GeneratorDataset(sents, ["text", "label"], shuffle=False)
    look = text.Lookup(vocab, unknown_token="[UNK]")
    data = data.map([text.WhitespaceTokenizer(), look, transforms.PadEnd([12], 0)], "text")
    data = data.map(lambda x: (x, np.zeros_like(x)), ["text"], ["ids", "seg"])
    data = data.project(["ids", "seg", "label"])
    data = data.map(transforms.TypeCast(ms.int32), ["label"]).batch(4)
    net = BertForCls(BertConfig(), 2)
    loss = nn.CrossEntropyLoss()
    sched = nn.PolynomialDecayLR(1e-3, 1e-5, 8, 1.0)
    params = net.trainable_params()
    decay = [p for p in params if "ln" not in p.name.lower() and "bias" not in p.name.lower()]
    other = [p for p in params if not ("ln" not in p.name.lower() and "bias" not in p.name.lower())]
    opt = nn.AdamWeightDecay([{"params": decay, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}], sched)
    keep = Keep()
    folder = tempfile.mkdtemp()
    config = CheckpointConfig(
        save_checkpoint_steps=2, keep_checkpoint_max=2, integrated_save=True, append_info=["epoch_num", {"lr": 1e-3}]
    )
    model = Model(WithLoss(net, loss), optimizer=opt, eval_network=EvalNet(net), metrics={"acc": Acc()})
    model.train(
        2, data, callbacks=[keep, ModelCheckpoint("bert", folder, config), LossMonitor()], dataset_sink_mode=False
    )
    res = model.eval(data)
    names = sorted(f for f in os.listdir(folder) if f.endswith(".ckpt"))
    assert names == ["bert-2_2.ckpt", "bert-2_4.ckpt"], names
    d = ms.load_checkpoint(os.path.join(folder, names[-1]))
    assert int(d["epoch_num"]) == 2 if "epoch_num" in d else True
    new = BertForCls(BertConfig(), 2)
    if mode is None:
        not_loaded, _ = ms.load_param_into_net(new, d)
        assert not not_loaded, not_loaded
        m2 = Model(new)
        one = next(data.create_dict_iterator())
        a = m2.predict(one["ids"], one["seg"]).asnumpy()
        b = Model(net).predict(one["ids"], one["seg"]).asnumpy()
        assert np.allclose(a, b, atol=1e-6)
    f1 = F1()
    for row in data.create_dict_iterator(num_epochs=1):
        f1.update(net(row["ids"], row["seg"]), row["label"])
    return keep.losses + [float(res["acc"])] + [float(x) for x in np.ravel(f1.eval())]
