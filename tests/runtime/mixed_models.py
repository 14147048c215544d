"""Small models for tests of precision, and one device that trains them as FSDP2's mixed precision would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from runtime.small_gpt import example_module

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Llama(nn.Module):
    """RMSNorm that computes in float32, grouped keys and values, a gated product, an untied head, logits in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(48, 16), nn.Linear(16, 48, bias=False)
        self.q, self.kv, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.gate, self.up, self.down = (nn.Linear(i, o, bias=False) for i, o in ((16, 32), (16, 32), (32, 16)))
        self.first, self.second = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (BF16, FP16) else x
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        h = self.norm(x, self.first)
        q = self.q(h).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm(x, self.second)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        logits = self.head(x).float() if x.dtype in (BF16, FP16) else self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Convolutions(nn.Module):
    """A convolution, batch norm with its statistics, and a linear layer; images are floating inputs. One parameter is
    frozen, one buffer and one parameter are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)  # whose gradient would be rounding, ahead of a norm
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.order = nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(images))).mean((2, 3)) * self.scale
        h = h[:, self.order] + self.shift.to(h.dtype)
        return F.cross_entropy(self.head(h), labels)


def gpt() -> nn.Module:
    """GPT-2's blocks with tied embeddings."""
    made = example_module("gpt")
    model: nn.Module = made.GPT(made.GPTConfig(vocab=48, layers=2, heads=4, width=16, context=8, tied=True))
    return model


def words(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 48, (2, 8, 8), generator=torch.Generator().manual_seed(step))
    return drawn[0], drawn[1]


def images(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 6, 6, generator=random), torch.randint(0, 4, (8,), generator=random)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "gpt": (gpt, words),
    "llama": (Llama, words),
    "convolutions": (Convolutions, images),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


@dataclass(frozen=True)
class Trained:
    """Losses, the gradients of the last step, parameters and buffers at the end."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def optimizer_of(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def trained_alone(
    name: str,
    precision: sw.Precision,
    steps: int = 3,
    *,
    off: float = 0.0,
    seed: int = 0,
    passes: int = 1,
    scale: float = 1.0,
) -> Trained:
    """One device. ``off``: every number that is computed with is changed by this share of it, up or down, at random;
    ``passes``: equal micro-batches, whose losses' mean is the step's; ``scale``: what is differentiated is the loss
    times this, and gradients are divided by it."""
    model, random = made(name), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(precision.parameter or parameter.dtype)
    optimizer = optimizer_of(list(model.parameters()))
    losses = []

    def computed(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        x = x.to(precision.compute or x.dtype)
        signs = torch.randint(2, x.shape, generator=random).to(x.dtype) * 2 - 1
        return x * (1 + off * signs) if off else x

    for step in range(steps):
        cast = {key: computed(p) for key, p in model.named_parameters()}
        optimizer.zero_grad()
        found = []
        for part in zip(*(computed(x).chunk(passes) for x in MODELS[name][1](step)), strict=True):
            loss = torch.func.functional_call(model, cast, part) / passes
            (loss * scale).backward(retain_graph=True)  # through the casts, which all passes share
            found.append(loss.detach())
        for parameter in model.parameters():
            if parameter.grad is not None and scale != 1.0:
                parameter.grad /= scale
        optimizer.step()
        losses.append(sum(found[1:], found[0]))
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return Trained(losses, gradients, {key: x.detach() for key, x in model.state_dict().items()})


def apart(one: Trained, other: Trained) -> dict[str, float]:
    """How far two runs are apart, by tensor, as a share of its largest number."""
    losses = [(a.double(), b.double()) for a, b in zip(one.losses, other.losses, strict=True)]
    found = {"loss": max(float((a - b).abs() / a.abs()) for a, b in losses)}
    for kind, left, right in (("gradient", one.gradients, other.gradients), ("state", one.state, other.state)):
        assert left.keys() == right.keys(), (kind, left.keys() ^ right.keys())
        floor = 1e-3 * max(float(x.double().abs().max()) for x in left.values())
        for key in left:
            a, b = left[key].double(), right[key].double()
            found[f"{kind} {key}"] = float((a - b).abs().max()) / max(float(a.abs().max()), floor)
    return found


def plan_of(name: str, devices: int, precision: sw.Precision, way: str) -> sw.Plan:
    """``dp``: replicated parameters; ``zero``: every parameter sharded as far as it goes; ``tp``: the layers split;
    ``searched``: by price."""
    model, batch = made(name), MODELS[name][1](0)
    options: dict[str, Any] = {"precision": precision}
    if way == "searched":
        return sw.plan(model, batch, devices, optimizer="sgd", **options)
    if way == "tp":
        split = {"gpt": ("blocks.*.mlp.up", "blocks.*.attention.qkv"), "llama": ("up", "gate", "q"), "convolutions": ()}
        options["strategies"] = dict.fromkeys(split[name], "n@tp") or {"conv": "co@tp"}
        options["mesh"] = sw.Mesh(dp=devices // 2, tp=2) if devices > 2 else sw.Mesh(tp=2)
    if way == "zero":
        options["layouts"] = {
            key: (devices, *[1] * (p.dim() - 1))
            for key, p in model.named_parameters()
            if p.is_floating_point() and p.shape[0] % devices == 0 and "kv" not in key  # whose blocks are used apart
        }
    return sw.plan(model, batch, devices, optimizer="sgd", search="sharding_propagation", **options)
