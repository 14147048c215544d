"""Rows that a boolean mask selects: in masked form, with the numbers of one device; or refused by line."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from graph.against_eager import check_against_eager
from proving import prove
from raising import raises
from shardwise.errors import CaptureError
from shardwise.graph.capture import capture

BATCH, TOKENS, CLASSES = 4, 5, 6
X = torch.randn(BATCH, TOKENS, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
SOME = torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.5
MASKS = {"some": SOME, "none": torch.zeros_like(SOME), "all": torch.ones_like(SOME)}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.encoder, self.head, self.norm = nn.Linear(4, 4), nn.Linear(4, CLASSES), nn.LayerNorm(4)
        self.table = nn.Embedding(CLASSES, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.scale, self.gate = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(()))
        self.register_buffer("weight", torch.rand(CLASSES))
        self.dropout, self.batch_norm = nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x, mask, y):
        return self.function(self, self.encoder(x), mask, y)


def without_gradient(self, h, mask, y):
    with torch.no_grad():
        targets = self.head(h[mask]).softmax(-1)
    return -(targets * self.head(h[mask]).log_softmax(-1)).sum(-1).mean()


def with_accuracy(self, h, mask, y):
    scores, labels = self.head(h)[mask], y[mask]
    accuracy = (scores.argmax(-1) == labels).sum() / labels.numel()
    return F.cross_entropy(scores, labels), accuracy


def experts_by_mask(self, h, mask, y):
    out = torch.zeros_like(h)
    for number, expert in enumerate(self.experts):
        out[y % 3 == number] = expert(h[y % 3 == number])
    return out.square().mean()


def experts_by_number(self, h, mask, y):
    tokens, of = h.flatten(0, 1), y.flatten() % 3
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(self.experts):
        chosen = torch.where(of == number)[0]
        out.index_add_(0, chosen, expert(tokens[chosen]))
    return out.square().mean()


def picked(self, h, mask, y):
    scores, labels = self.head(h[mask]).log_softmax(-1), y[mask]
    return -scores[torch.arange(scores.shape[0]), labels].mean()


def overwritten(self, h, mask, y):
    rows = h[mask].detach() * 2
    rows.fill_(3.0)
    return (rows * self.scale).mean() + h.sum()


def two_coordinates(self, h, mask, y):
    places = mask.nonzero()
    return h[places[:, 0], places[:, 1]].mean()


def distances(self, h, mask, y):
    return (h[mask] - self.norm(h)[mask]).pow(2).sum(-1).sqrt().mean()


# Losses, whose value and gradients must be those of one device, for masks that select some rows, none (NaN for means),
# or all. The operators on rows have infinite derivatives at 0 and 1, or raise for labels that are not selected.
CASES = {
    "mean": lambda self, h, m, y: h[m].mean(),
    "sum": lambda self, h, m, y: self.head(h[m]).sum(),
    "cross entropy": lambda self, h, m, y: F.cross_entropy(self.head(h)[m], y[m]),
    "cross entropy behind": lambda self, h, m, y: F.cross_entropy(self.head(h[m]), y[m]),
    "labels that are not ignored": lambda self, h, m, y: F.cross_entropy(self.head(h)[y != 2], y[y != 2]),
    "flat": lambda self, h, m, y: F.cross_entropy(self.head(h).view(-1, CLASSES)[m.view(-1)], y.view(-1)[m.view(-1)]),
    "shifted": lambda self, h, m, y: F.cross_entropy(self.head(h)[:, :-1][m[:, 1:]], y[:, 1:][m[:, 1:]]),
    "ignored": lambda self, h, m, y: F.cross_entropy(self.head(h)[m], y[m], ignore_index=2),
    "weighted": lambda self, h, m, y: F.cross_entropy(self.head(h)[m], y[m], weight=self.weight, label_smoothing=0.1),
    "summed": lambda self, h, m, y: F.cross_entropy(self.head(h)[m], y[m], reduction="sum") / m.sum(),
    "by element": lambda self, h, m, y: F.cross_entropy(self.head(h)[m], y[m], reduction="none").mean(),
    "nll": lambda self, h, m, y: F.nll_loss(self.head(h[m]).log_softmax(-1), y[m]),
    "picked": picked,
    "gathered": lambda self, h, m, y: self.head(h[m]).log_softmax(-1).gather(1, y[m].unsqueeze(1)).mean(),
    "logarithm": lambda self, h, m, y: (h.abs()[m].log() * self.scale).mean(),
    "roots": lambda self, h, m, y: self.head(h[m].abs().sqrt()).abs().sqrt().sum(),
    "quotient": lambda self, h, m, y: (self.scale / h[m]).mean(),
    "distances": distances,
    "no gradient": without_gradient,
    "accuracy": with_accuracy,
    "experts": experts_by_mask,
    "experts by number": experts_by_number,
    "in place": lambda self, h, m, y: self.mlp(h[m]).square().mean(),
    "overwritten": overwritten,
    "embedding": lambda self, h, m, y: (self.table(y[m]) * h[m]).sum(-1).sigmoid().mean(),
    "labels from 1 on": lambda self, h, m, y: self.table(y[y > 0] - 1).square().sum(),
    "one-hot": lambda self, h, m, y: (F.one_hot(y[m], CLASSES) * self.head(h[m])).sum(),
    "table": lambda self, h, m, y: (self.weight[y[m]] * h[m].sum(-1)).sum(),
    "joined and divided": lambda self, h, m, y: self.head(h[m]).view(-1).view(-1, 2, 3).amax(-1).sum(),
    "heads": lambda self, h, m, y: h[m].view(-1, 2, 2).transpose(1, 2).softmax(-1).square().mean(),
    "binary": lambda self, h, m, y: F.binary_cross_entropy_with_logits(h[..., 0][m], y[m].to(h.dtype)),
    "probabilities": lambda self, h, m, y: F.binary_cross_entropy(h[..., 0][m].sigmoid(), (y[m] > 2).to(h.dtype)),
    "squares": lambda self, h, m, y: F.mse_loss(h[m], self.norm(h)[m]),
    "smooth": lambda self, h, m, y: F.smooth_l1_loss(h[m], h.flip(1)[m].detach(), beta=0.3),
    "huber": lambda self, h, m, y: F.huber_loss(h[m], h[m].detach() * 2 + 1, reduction="sum"),
    "divergence": lambda self, h, m, y: F.kl_div(
        h[m].log_softmax(-1), h.flip(-1)[m].softmax(-1), reduction="batchmean"
    ),
    "cosine": lambda self, h, m, y: (1 - F.cosine_similarity(h[m], self.norm(h)[m], dim=-1)).mean(),
    "normalized": lambda self, h, m, y: (F.normalize(h[m], dim=-1) * self.scale).sum(),
    "along rows": lambda self, h, m, y: h[m].mean(dim=0).square().sum(),
    "gram": lambda self, h, m, y: (h[m].T @ h[m]).square().sum(),
    "norm": lambda self, h, m, y: h[m].norm(),
    "any": lambda self, h, m, y: h.sum() * (h[m] > 0).any() + h.mean() * (h[m] > -9).all(),
    "topk": lambda self, h, m, y: h[m].topk(2, -1).values.sum(),
    "elements": lambda self, h, m, y: h.masked_select(m[..., None]).mean() + h[h > 0].log().mean(),
    "one dim": lambda self, h, m, y: h[m[:, 0]].mean() + h[:, m[0]].sum(),
    "coordinates": lambda self, h, m, y: h[torch.where(m)].mean() + h[m.nonzero(as_tuple=True)].sum(),
    "two coordinates": two_coordinates,
    "numbers": lambda self, h, m, y: h.flatten(0, 1)[m.flatten().nonzero().squeeze(-1)].mean(),
    "index_select": lambda self, h, m, y: h.flatten(0, 1).index_select(0, m.flatten().nonzero().flatten()).mean(),
    "samples of rows": lambda self, h, m, y: (h.mean(1)[torch.where(m)[0]] * h[m]).sum(),
    "count": lambda self, h, m, y: h[m].sum() / h[m].shape[0] + h[m].sum() / max(1, h[m].numel()),
    "count and more": lambda self, h, m, y: h[m].sum() / (h[m].shape[0] + 1e-6),
    "side by side": lambda self, h, m, y: self.head(torch.cat([h[m][:, :2], self.table(y[m])[:, 2:]], -1)).mean(),
    "where": lambda self, h, m, y: torch.where(h[m] > 0, h[m], self.scale).mean(),
    "put back": lambda self, h, m, y: h.masked_scatter(m[..., None], self.norm(h[m])).square().sum(),
    "put back, expanded": lambda self, h, m, y: (
        h.masked_scatter(m.unsqueeze(-1).expand_as(h), self.norm(h[m])).square().sum()
    ),
    "added back": lambda self, h, m, y: h.index_put((m,), self.norm(h[m]), accumulate=True).square().sum(),
    "convolution": lambda self, h, m, y: F.conv1d(h[m[:, 0]], self.gate * h.new_ones(2, TOKENS, 3)).square().mean(),
}


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param(name, mask, marks=() if (i + j) % 3 == 0 else pytest.mark.long)
        for i, name in enumerate(CASES)
        for j, mask in enumerate(MASKS)
    ],
)
@pytest.mark.sampled(24)
def test_selected_rows_have_values_and_gradients_of_one_device(name, mask):
    check_against_eager(Model(CASES[name]), X.double(), MASKS[mask], Y, tolerance=1e-10, equal_nan=True)


PLANNED = ["labels that are not ignored", "quotient", "experts", "put back"]
OPTIONS = {
    "data parallel": {"mode": "data_parallel"},
    "searched": {"mesh": sw.Mesh(a=2, b=2)},
    "passes": {"mode": "data_parallel", "micro_batch": 2},
    "stages": {"mode": "data_parallel", "micro_batch": 2, "stages": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.sampled(2)
def test_plans_of_selected_rows_are_equal(name, options):
    model, inputs = Model(CASES[name]), (X, SOME, Y)
    plan = sw.plan(model, inputs, 4 if options == "searched" else 2, optimizer="sgd", **OPTIONS[options])
    prove(model, inputs, plan, steps=2)


def halves(self, h, mask, y):
    rows = h[mask]
    rows[:, 0] = 0
    return rows.sum()


REFUSED = {
    "sort": lambda self, h, m, y: h[m].sort(0)[0].sum(),
    "max": lambda self, h, m, y: h[m].max(),
    "std": lambda self, h, m, y: h[m].std(),
    "cumsum": lambda self, h, m, y: h[m].cumsum(0).sum(),
    "index": lambda self, h, m, y: h[m][h[m].sum(-1) > 0].sum(),
    "matmul": lambda self, h, m, y: (h[m] @ h[m].T).square().sum(),
    "mul": lambda self, h, m, y: (torch.arange(h[m].shape[0]) * h[m][:, 0]).sum(),
    "cat": lambda self, h, m, y: torch.cat([h[m], h[~m]]).sum(),
    "dropout": lambda self, h, m, y: self.dropout(h[m]).sum(),
    "returns": lambda self, h, m, y: h[m],
    "copy_": halves,
    "assumed": lambda self, h, m, y: (h[m] + h.flatten(0, 1)).sum(),
    "u0": lambda self, h, m, y: h[m].sum() / len(h[m]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_the_rows_themselves_is_refused_by_line_with_a_rewrite(what):
    with raises(CaptureError, what, "fix:", source="test_selected.py"):
        capture(Model(REFUSED[what]), (X, SOME, Y))


def test_layers_that_add_self_loops_are_refused_with_the_setting(tmp_path, monkeypatch):
    (tmp_path / "torch_geometric").mkdir()
    (tmp_path / "torch_geometric" / "__init__.py").touch()
    code = "import torch\ndef add(edges, loops): return torch.cat([edges[:, edges[0] != edges[1]], loops], 1)\n"
    (tmp_path / "torch_geometric" / "self_loop.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    added = importlib.import_module("torch_geometric.self_loop").add
    with raises(CaptureError, "add_self_loops=False", source="self_loop.py"):
        capture(Model(lambda self, h, m, y: h.sum() * added(y, y).sum()), (X, SOME, Y))


def test_repeated_layers_that_select_rows_are_traced_one_by_one():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            out = x.clone()
            chosen = x.sum(-1) > 0
            out[chosen] = self.linear(x[chosen]) / x[chosen].shape[0]
            return out

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    check_against_eager(model, X.double(), tolerance=1e-10)
