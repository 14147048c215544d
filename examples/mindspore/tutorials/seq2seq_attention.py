"""Translation: a GRU with attention, groups of parameters, and a loss that is scaled (rows A35, C1)."""

import numpy as np

import shardwise.mindspore as ms
from shardwise.mindspore import Tensor, nn, ops
from shardwise.mindspore.communication import get_group_size, get_rank, init


class Encoder(nn.Cell):
    def __init__(self, vocab, emb, hid):
        super().__init__()
        self.embedding = nn.Embedding(vocab, emb)
        self.rnn = nn.GRU(emb, hid, batch_first=True, bidirectional=True)
        self.fc = nn.Dense(hid * 2, hid, activation="tanh")
        self.dropout = nn.Dropout(keep_prob=1.0) if False else nn.Dropout(p=0.0)

    def construct(self, src, src_len):
        x = self.dropout(self.embedding(src))
        out, hidden = self.rnn(x, None, src_len) if src_len is not None else self.rnn(x)
        h = self.fc(ops.concat((hidden[-2, :, :], hidden[-1, :, :]), axis=1))
        return out, h


class Attention(nn.Cell):
    def __init__(self, hid):
        super().__init__()
        self.attn = nn.Dense(hid * 3, hid)
        self.v = nn.Dense(hid, 1, has_bias=False)

    def construct(self, hidden, enc, mask):
        n = enc.shape[1]
        hidden = ops.tile(ops.expand_dims(hidden, 1), (1, n, 1))
        energy = ops.tanh(self.attn(ops.concat((hidden, enc), 2)))
        a = self.v(energy).squeeze(2)
        a = a.masked_fill(mask == 0, -1e10)
        return ops.softmax(a, axis=1)


class Decoder(nn.Cell):
    def __init__(self, vocab, emb, hid):
        super().__init__()
        self.vocab = vocab
        self.embedding = nn.Embedding(vocab, emb)
        self.attention = Attention(hid)
        self.cell = nn.GRUCell(hid * 2 + emb, hid)
        self.out = nn.Dense(hid * 3 + emb, vocab)

    def construct(self, tok, hidden, enc, mask):
        e = self.embedding(tok)
        a = self.attention(hidden, enc, mask).expand_dims(1)
        w = ops.bmm(a, enc).squeeze(1)
        hidden = self.cell(ops.cat((e, w), axis=-1), hidden)
        return self.out(ops.cat((hidden, w, e), axis=-1)), hidden


class Seq2Seq(nn.Cell):
    def __init__(self, enc, dec, pad=0):
        super().__init__()
        self.encoder, self.decoder, self.pad = enc, dec, pad
        self.ce = nn.CrossEntropyLoss(ignore_index=pad)

    def construct(self, src, src_len, trg):
        _, n = trg.shape
        outs = []
        enc, h = self.encoder(src, src_len)
        mask = (src != self.pad).astype(ms.int32)
        tok = trg[:, 0]
        for t in range(1, n):
            o, h = self.decoder(tok, h, enc, mask)
            outs.append(o)
            tok = trg[:, t]
        outs = ops.stack(outs, axis=1)
        return self.ce(outs.view(-1, outs.shape[-1]), trg[:, 1:].reshape(-1).astype(ms.int32))


def main(mode=None):
    init()
    rank, size = get_rank(), get_group_size()
    ms.set_seed(1)
    if mode == "data_parallel":
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = Seq2Seq(Encoder(20, 6, 5), Decoder(20, 6, 5))
    params = net.trainable_params()
    decay = list(filter(lambda p: "bias" not in p.name and "gamma" not in p.name, params))
    other = [p for p in params if "bias" in p.name or "gamma" in p.name]
    group = [{"params": decay, "weight_decay": 0.01, "lr": 0.02}, {"params": other}, {"order_params": params}]
    opt = nn.AdamWeightDecay(group, learning_rate=nn.PolynomialDecayLR(0.01, 1e-4, 10, 1.0))
    manager = nn.DynamicLossScaleUpdateCell(loss_scale_value=2**10, scale_factor=2, scale_window=2)
    train = nn.TrainOneStepWithLossScaleCell(net, opt, scale_sense=manager)
    train.set_train()
    r = np.random.RandomState(0)
    losses = []
    for _ in range(3):
        src = r.randint(1, 20, (8, 6)).astype(np.int32)
        ln = np.full(8, 6, np.int32)
        trg = r.randint(1, 20, (8, 5)).astype(np.int32)
        k = 8 // size if mode == "data_parallel" else 8
        o = rank if mode == "data_parallel" else 0
        s = slice(o * k, o * k + k)
        loss, overflow, scale = train(Tensor(src[s]), Tensor(ln[s]), Tensor(trg[s]))
        assert not overflow.asnumpy()
        losses.append(float(loss.asnumpy()))
    return losses, (float(scale.asnumpy()), sum(float(abs(p.asnumpy()).sum()) for p in params))
