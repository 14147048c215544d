"""Attention with one more score per head in its softmax (GPT-OSS) is one operator, without scores of all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from graph.against_eager import check_against_eager
from models.breadth import tiny_of
from shardwise.graph.attention_sinks import ATTENTION_WITH_SINKS
from shardwise.graph.capture import capture

HEADS, GROUPS, WIDTH, LENGTH = 4, 2, 6, 10
X = torch.randn(2, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Core(nn.Module):
    """Attention with sinks behind the scores, or (``ahead``) before them."""

    def __init__(self, ahead: bool) -> None:
        super().__init__()
        self.ahead = ahead

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, added: Tensor | None) -> Tensor:
        scores = q @ k.transpose(2, 3) * WIDTH**-0.5
        scores = scores if added is None else scores + added
        sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        logits = torch.cat([sinks, scores] if self.ahead else [scores, sinks], -1)
        weights = (logits - logits.max(-1, keepdim=True).values).softmax(-1)
        return (weights[..., 1:] if self.ahead else weights[..., :-1]) @ v


class Sunk(nn.Module):
    """Attention whose keys may belong to groups of heads, under a mask."""

    def __init__(self, mask: str = "", ahead: bool = False, groups: int = GROUPS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.kv = nn.Linear(HEADS * WIDTH, 2 * groups * WIDTH)
        self.sinks, self.mask, self.core, self.groups = nn.Parameter(torch.randn(HEADS)), mask, Core(ahead), groups
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.groups, WIDTH)).transpose(1, 2).chunk(2, 1)
        k, v = (part.repeat_interleave(HEADS // self.groups, 1) for part in (k, v))
        added = self.added(x, lengths) if self.mask else None
        return self.core(q, k, v, self.sinks, added).transpose(1, 2).square().mean()

    def added(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        if self.mask == "learned":
            return self.bias
        rows, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        seen = keys <= rows
        if self.mask == "window":
            seen = seen & (keys > rows - 3)
        if self.mask == "blocks":
            seen = keys // 4 == rows // 4
        if lengths is not None:
            seen = seen & (keys < lengths[:, None, None, None])
        return torch.where(seen, x.new_zeros(()), torch.finfo(x.dtype).min)


BANDS = {"": (), "causal": (1 - LENGTH, 0), "window": (-2, 0), "blocks": (), "learned": ()}


@pytest.mark.parametrize("mask", BANDS)
@pytest.mark.parametrize("ahead", [False, True], ids=["behind", "ahead"])
def test_sinks_are_one_operator_with_the_numbers_of_the_model(mask: str, ahead: bool) -> None:
    graph = check_against_eager(Sunk(mask, ahead, groups=1 + ahead), X).graph
    (op,) = (op for op in graph.ops if op.target is ATTENTION_WITH_SINKS)
    assert op.args[5] == BANDS[mask]
    assert (op.args[4] is not None) == (mask in ("blocks", "learned"))
    assert op.args[6], "keys are of groups of heads"
    assert not any(value.shape == (len(X), HEADS, LENGTH, LENGTH) for value in graph.values), "no scores"


def test_padding_stays_a_mask() -> None:
    graph = check_against_eager(Sunk("causal"), X, torch.tensor([LENGTH, 7])).graph
    (op,) = (op for op in graph.ops if op.target is ATTENTION_WITH_SINKS)
    assert op.args[4] is not None


class Twice(Sunk):
    """A sink for every row is no sink of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS * LENGTH))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        sinks = self.sinks.view(1, HEADS, LENGTH, 1).expand(len(x), -1, -1, 1)
        return (torch.cat([q @ q.transpose(2, 3), sinks], -1).softmax(-1)[..., :-1] @ q).square().mean()


def test_what_is_no_sink_keeps_its_scores() -> None:
    graph = check_against_eager(Twice(), X).graph
    assert not any(op.target is ATTENTION_WITH_SINKS for op in graph.ops)


class Near(nn.Module):
    """Almost attention with sinks: ``change`` says where it is not, by the name of a way."""

    def __init__(self, change: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))
        self.sinks, self.bias = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.randn(2, HEADS, LENGTH, LENGTH))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        change = self.change
        q, k, v = (p(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if change == "wider batch":
            q, k, v = q[:1], k[:1], v[:1]
        if change == "wider keys":
            k = k[:, :, :1]
        scores, distance = q @ k.transpose(2, 3), torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
        added = {"boolean": distance <= 0, "integer": distance}.get(change, self.bias)
        scores = torch.add(scores, added, alpha=3) if change == "alpha" else scores + added
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, sinks], -1)
        if change in ("rows", "heads"):
            logits = logits - logits.amax({"rows": -2, "heads": 1}[change], keepdim=True)
        if change == "rows, max":
            logits = logits - logits.max(-2, keepdim=True).values
        if change == "alpha of the largest":
            logits = torch.sub(logits, logits.amax(-1, keepdim=True), alpha=2)
        weights = logits.softmax(-1, dtype=torch.float32 if change == "narrow" else None)[..., :-1]
        return (weights.to(x.dtype) @ v).square().mean()


MASKS = ["wider batch", "wider keys", "boolean", "integer", "alpha"]
SHIFTS = ["rows", "heads", "rows, max", "alpha of the largest"]


@pytest.mark.parametrize("change", [*MASKS, *SHIFTS, "narrow"])
def test_what_is_nearly_a_sink_keeps_its_scores(change: str) -> None:
    graph = check_against_eager(Near(change), X).graph
    assert not any(op.target is ATTENTION_WITH_SINKS for op in graph.ops)


def test_without_a_change_it_is_a_sink() -> None:
    graph = check_against_eager(Near(""), X).graph
    assert any(op.target is ATTENTION_WITH_SINKS for op in graph.ops)


@pytest.mark.parametrize("strategy", ["b@a", "g@a", "r@a", "t@a", "s@a", "d@a", "e@a", "t@(a,c)"])
@pytest.mark.parametrize("mask", ["causal", "window", "learned"])
@pytest.mark.sampled(4)
def test_every_split_of_sinks_equals_one_device(mask: str, strategy: str) -> None:
    module, x = Sunk(mask), X.float()
    mesh = sw.Mesh(a=2, c=2) if "c" in strategy else sw.Mesh(a=2)
    marked = sw.plan(module, (x,), mesh.num_devices, mesh=mesh, strategies={"core": strategy})
    assert set(strategy.split()) <= set(marked.strategies["core/attention_with_sinks"].split())
    report = sw.verify(module, (x,), marked)
    assert report.is_equal, report


def test_layers_of_gpt_oss_have_their_windows() -> None:
    tiny = tiny_of("gpt_oss")
    module: Any = tiny.build()
    for layer in module.model.layers[::2]:
        layer.self_attn.sliding_window = 3
    module.config.sliding_window = 3
    graph = capture(module, (), tiny.inputs(4)).graph
    bands = [op.args[5] for op in graph.ops if op.target is ATTENTION_WITH_SINKS]
    assert bands == [(-2, 0), (-5, 0)]
