"""A head fused with its cross entropy: the loss and all gradients of one device, without the logits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from costs.live_bytes import LiveBytes
from proving import prove
from shardwise.graph import head_loss
from shardwise.graph.capture import capture
from shardwise.graph.head_loss import HEAD_LOSS, HEAD_TERMS

CLASSES = 48


class Language(nn.Module):
    """Two layers, a head and a cross entropy. ``shifts``: labels are the next tokens; ``casts``: the logits to float64
    before."""

    def __init__(self, *, tied: bool = False, shifts: bool = False, casts: bool = False, **loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(CLASSES, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.shifts, self.casts, self.loss = shifts, casts, loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.layers(self.embed(tokens)))
        if self.casts:
            logits = logits.double()
        if self.shifts:
            logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
        return F.cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1), **self.loss)


def batch(ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(CLASSES, (8, 6), generator=generator) for _ in range(2))
    labels[0, :4] = ignored  # parts of the batch have different counts
    return tokens, labels


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse small heads, and compute them in blocks that do not divide the classes."""
    monkeypatch.setattr(head_loss, "FEWEST_LOGITS", 1)
    monkeypatch.setattr(head_loss, "BLOCK", 7)


def fused(module: nn.Module, *inputs: Tensor) -> bool:
    return any(op.target == HEAD_LOSS for op in capture(module, inputs or batch()).graph.ops)


@pytest.mark.parametrize("block", [7, CLASSES])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_are_those_of_the_logits(block: int, smoothing: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(head_loss, "BLOCK", block)
    x, weight = (torch.randn(*shape, 8, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (CLASSES,)))
    target = torch.randint(CLASSES, (3, 5)).index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(-1))
    found = HEAD_LOSS(weight, x, target, -1, smoothing)
    scores = (x @ weight.T).flatten(0, 1)
    wanted = F.cross_entropy(scores, target.flatten(), reduction="none", ignore_index=-1, label_smoothing=smoothing)
    assert torch.allclose(found.flatten(), wanted, rtol=1e-12)
    cotangent = torch.randn(3, 5, dtype=torch.float64)
    for own, other in zip(
        torch.autograd.grad(found, (weight, x), cotangent),
        torch.autograd.grad(wanted, (weight, x), cotangent.flatten()),
        strict=True,
    ):
        assert torch.allclose(own, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("parts", [1, 3])
def test_classes_may_be_masked(parts: int) -> None:
    """Whole blocks and parts of the classes have logits of -inf."""
    x = torch.rand(5, 8, dtype=torch.float64) + 0.1
    weight = torch.randn(CLASSES, 8, dtype=torch.float64)
    weight[:17], weight[20], weight[40:] = -torch.inf, -torch.inf, -1.0
    target, weight = torch.tensor([18, 19, 40, 47, 0]), weight.requires_grad_()
    found = head_loss.head_loss(weight, x, target, -100, 0.0, parts)
    wanted = F.cross_entropy(x @ weight.T, target, reduction="none")
    assert wanted[:4].isfinite().all()
    assert torch.allclose(found, wanted, rtol=1e-12)
    (own,), (other,) = (torch.autograd.grad(some[:4].sum(), weight, retain_graph=True) for some in (found, wanted))
    assert other.isfinite().all()
    assert torch.allclose(own, other, rtol=1e-12, atol=1e-14)


def test_its_gradient_has_no_gradient() -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(CLASSES, 8, requires_grad=True)
    losses = HEAD_LOSS(weight, x, torch.arange(5), -100, 0.0)
    (gradient,) = torch.autograd.grad(losses.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_it_needs_no_rules() -> None:
    """Captures fuse heads without what later folders register."""
    call = "torch.ops.shardwise.head_loss(torch.rand(5, 3), torch.rand(2, 3), torch.tensor([0, 4]), -100, 0.0)"
    modules = "[name for name in sys.modules if name.startswith('shardwise.rules')]"
    code = f"import sys, torch, shardwise.graph.head_loss; assert not {modules}, {modules}; {call}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("label", [-1, CLASSES, torch.iinfo(torch.int64).max])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_label_that_is_no_class_fails_in_the_lookup(label: int, parts: int) -> None:
    """Labels are checked ahead on CPUs alone; on GPUs the lookup asserts."""
    weight, x = torch.randn(parts, CLASSES // parts, 8), torch.randn(4, 8)
    HEAD_TERMS(weight, x, torch.tensor([0, 1, 7, CLASSES - 1]), False, [parts], [0], [parts])
    with pytest.raises(RuntimeError, match="out of bounds"):
        HEAD_TERMS(weight, x, torch.tensor([0, 1, label, 2]), False, [parts], [0], [parts])


def test_the_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "BLOCK", 256)
    x, weight = torch.randn(512, 4, requires_grad=True), torch.randn(4096, 4, requires_grad=True)
    with LiveBytes() as live:
        HEAD_LOSS(weight, x, torch.randint(4096, (512,)), -100, 0.1).sum().backward()
    block = 512 * 256 * 4
    assert block < live.peak < 3 * block, "16 blocks are the logits"


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "tied": {"tied": True},
    "shifted": {"shifts": True, "casts": True, "label_smoothing": 0.1},
    "sum, shifted and tied": {"shifts": True, "tied": True, "reduction": "sum", "label_smoothing": 0.2},
    "another index is ignored": {"ignore_index": 3, "tied": True},
}
PLANS: dict[str, dict[str, Any]] = {
    "data": {"mesh": sw.Mesh(dp=2)},
    "classes": {"mesh": sw.Mesh(tp=2), "strategies": {"head": "n@tp"}},
    "classes, unevenly": {"mesh": sw.Mesh(a=5), "strategies": {"head": "n@a"}},
    "both, ZeRO 3": {"mesh": sw.Mesh(dp=2, tp=2), "strategies": {"head": "n@tp"}, "zero": 3},
    "recomputed": {"mesh": sw.Mesh(dp=2, tp=2), "strategies": {"head": "n@tp"}, "recompute": "all"},
    "micro-batches": {"mesh": sw.Mesh(tp=2), "strategies": {"head": "n@tp"}, "micro_batch": 2},
    "stages": {"mesh": sw.Mesh(tp=2), "stages": 2, "micro_batch": 4},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "loss"), [(name, loss) for name in PLANS for loss in LOSSES])
def test_every_plan_trains_as_one_device(name: str, loss: str) -> None:
    module, inputs = Language(**LOSSES[loss]), batch(LOSSES[loss].get("ignore_index", -100))
    assert fused(module)
    choices = PLANS[name]
    devices = choices["mesh"].num_devices * choices.get("stages", 1)
    plan = sw.plan(module, inputs, devices, search="sharding_propagation", **choices)
    prove(module, inputs, plan)


class Other(Language):
    """Something else reads the logits, or they are not what the fused operator computes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.bias, self.weights = nn.Linear(8, CLASSES), torch.rand(CLASSES)

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        x = self.layers(self.embed(tokens))
        logits = self.head(x) if self.how != "bias" else self.bias(x)
        flat, labels = logits.flatten(0, 1), labels.flatten()
        if self.how == "output":
            return F.cross_entropy(flat, labels), logits
        if self.how == "z-loss":
            return F.cross_entropy(flat, labels) + flat.logsumexp(-1).square().mean()
        if self.how == "weights":
            return F.cross_entropy(flat, labels, self.weights)
        if self.how == "scaled":
            return F.cross_entropy(flat / 2, labels)
        if self.how == "sliced classes":
            return F.cross_entropy(flat[:, :40], labels.clamp_max(39))
        return F.cross_entropy(flat, labels) if self.how == "bias" else F.cross_entropy(flat, flat.detach().softmax(-1))


@pytest.mark.parametrize("how", ["output", "z-loss", "weights", "scaled", "sliced classes", "bias", "probabilities"])
def test_other_losses_keep_their_logits(how: str) -> None:
    assert not fused(Other(how))


def test_small_heads_keep_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "FEWEST_LOGITS", 8 * 6 * CLASSES + 1)
    assert not fused(Language())


class Balanced(Language):
    """With a term of the loss that is no mean over samples, as that of a mixture of experts."""

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.layers(self.embed(tokens))
        balance = x.mean((0, 1)).square().sum()
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + balance, "balance": balance}


@pytest.mark.parametrize("mesh", [sw.Mesh(dp=2), sw.Mesh(tp=2)], ids=str)
def test_a_micro_batch_is_fused_as_its_batch(mesh: sw.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "FEWEST_LOGITS", 8 * 6 * CLASSES // 2)  # on each of two devices
    settings: dict[str, Any] = {"mesh": mesh, "micro_batch": 2, "per_micro_batch": ["balance"]}
    plan = sw.plan(Balanced(), batch(), 2, search="sharding_propagation", **settings)
    assert plan.fused_heads == {"head"}
    prove(Balanced(), batch(), plan)


@pytest.mark.parametrize("samples", [(8, 4), (4, 8)], ids=str)
def test_a_call_is_fused_as_its_plan(samples: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "FEWEST_LOGITS", 8 * 6 * CLASSES // 2)  # on each of two devices
    planned, called = ([x[:count] for x in batch()] for count in samples)
    plan = sw.plan(Language(), tuple(planned), 2, search="sharding_propagation", mesh=sw.Mesh(dp=2))
    assert bool(plan.fused_heads) == (samples[0] == 8)
    prove(Language(), tuple(called), plan)


class Scored(Language):
    """With its cross entropy as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = self.score(self.head(self.layers(self.embed(tokens))).flatten(0, 1), labels.flatten())
        return scores


STRATEGIES: dict[str, tuple[str, Any, bool]] = {
    "classes of the head": ("head", "n@tp", True),
    "rows of the head": ("head", "m@tp", True),
    "a contraction": ("head", "k@tp", False),
    "counts": ("head", ((1, 1, 1), (2, 1)), False),
    "unequal parts": ("head", "n@tp{20,28}", False),
    "classes of the loss": ("score", "c@tp", False),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.sampled(3)
def test_strategies_are_those_of_small_heads(name: str) -> None:
    path, strategy, stays_fused = STRATEGIES[name]
    plan = sw.plan(Scored(), batch(), 2, search="sharding_propagation", mesh=sw.Mesh(tp=2), strategies={path: strategy})
    assert bool(plan.fused_heads) == stays_fused
    report = sw.verify(Scored(), batch(), plan)  # which knows of the strategies by the plan alone
    assert report.ok, str(report)


def test_an_annotated_head_is_as_one_with_strategies() -> None:
    module = Language()
    sw.shard(module.head, ((1, 1, 1), (2, 1)))
    plan = sw.plan(module, batch(), 2, search="sharding_propagation", mesh=sw.Mesh(tp=2))
    assert not plan.fused_heads
    assert sw.verify(module, batch(), plan).ok
