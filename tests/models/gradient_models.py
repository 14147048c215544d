"""Models that take gradients inside forward, and their inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn import functional as F

BATCH = 8


class Critic(nn.Module):
    """A critic with gradient penalty (WGAN-GP, Gulrajani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.LayerNorm(36)
        self.up, self.head = nn.Linear(36, 8), nn.Linear(8, 1)

    def score(self, images: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(self.norm(F.leaky_relu(self.conv(images), 0.2).flatten(1)))))

    def forward(self, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        score = self.score(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
        penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        return self.score(fake).mean() - self.score(real).mean() + 10 * penalty


class Network(nn.Module):
    def __init__(self, inputs: int, outputs: int, width: int = 8) -> None:
        super().__init__()
        self.up, self.mid, self.head = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(torch.tanh(self.up(x)))))


class Heat(nn.Module):
    """The residual of u_t = u_xx at points (t, x), by gradients of gradients (Raissi et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network(2, 1)

    def forward(self, points: Tensor) -> Tensor:
        points.requires_grad_(True)
        u = self.net(points)
        (first,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
        (second,) = torch.autograd.grad(first[:, 1].sum(), points, create_graph=True)
        return (first[:, 0] - second[:, 1]).square().mean() + u.square().mean()


class HeatByTransforms(Heat):
    def forward(self, points: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return self.net(point).squeeze(-1)

        first, second = vmap(jacrev(u))(points), vmap(hessian(u))(points)
        return (first[:, 0] - second[:, 1, 1]).square().mean() + self.net(points).square().mean()


class ForceField(nn.Module):
    """Energies of molecules, and forces, which are their negative gradients by positions."""

    def __init__(self, kinds: int = 3, width: int = 8) -> None:
        super().__init__()
        self.kinds, self.net = nn.Embedding(kinds, width), Network(2 * width, 1, width)

    def forward(self, positions: Tensor, kinds: Tensor, energies: Tensor, forces: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_(True)
        state = self.kinds(kinds)
        distances = (positions.unsqueeze(1) - positions.unsqueeze(2)).square().sum(-1)
        near = torch.exp(-distances)
        messages = torch.einsum("bij,bjf->bif", near, state)
        energy = self.net(torch.cat([state, messages], dim=-1)).sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return F.mse_loss(energy, energies) + F.mse_loss(-slope, forces)


class Score(nn.Module):
    """Score matching (Hyvarinen 2005): the trace of the Jacobian by vmap, and sliced by jvp (Song et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network(3, 3)

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        trace = vmap(lambda row: jacrev(self.net)(row).trace())(x)
        score, along = jvp(self.net, (x,), (direction,))
        sliced = (along * direction).sum(-1) + 0.5 * (score * direction).sum(-1).square()
        return (trace + 0.5 * score.square().sum(-1) + sliced).mean()


class Adapted(nn.Module):
    """A step of gradient descent per task inside the model (MAML, Finn et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network(3, 2)

    def forward(self, x: Tensor, y: Tensor, later_x: Tensor, later_y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.net, values, (x,)), y)

        def task(x: Tensor, y: Tensor, later_x: Tensor, later_y: Tensor) -> Tensor:
            slopes = grad(loss)(weights, x, y)
            return loss({name: value - 0.1 * slopes[name] for name, value in weights.items()}, later_x, later_y)

        return vmap(task)(x, y, later_x, later_y).mean()


class AdaptedOnce(Adapted):
    """The same step for the whole batch, outside of vmap."""

    def forward(self, x: Tensor, y: Tensor, later_x: Tensor, later_y: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def loss(values: dict[str, Tensor]) -> Tensor:
            return F.mse_loss(functional_call(self.net, values, (x,)), y)

        slopes = grad(loss)(weights)
        after = {name: value - 0.1 * slopes[name] for name, value in weights.items()}
        return F.mse_loss(functional_call(self.net, after, (later_x,)), later_y)


def model_and_inputs(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model called ``name``, with random weights, and a batch for it."""
    torch.manual_seed(0)
    tasks = torch.randn(BATCH, 4, 3), torch.randn(BATCH, 4, 2), torch.randn(BATCH, 4, 3), torch.randn(BATCH, 4, 2)
    inputs = {
        "Critic": (*torch.randn(2, BATCH, 2, 6, 6), torch.rand(BATCH, 1, 1, 1)),
        "Heat": (torch.rand(BATCH, 2),),
        "HeatByTransforms": (torch.rand(BATCH, 2),),
        "ForceField": (
            torch.randn(BATCH, 5, 3),
            torch.randint(3, (BATCH, 5)),
            torch.randn(BATCH),
            torch.randn(BATCH, 5, 3),
        ),
        "Score": tuple(torch.randn(2, BATCH, 3)),
        "Adapted": tasks,
        "AdaptedOnce": tasks,
    }
    return globals()[name](), inputs[name]
