"""Optimizers with moments: Adam, AdamWeightDecay and Lamb, by the reference's formulas.

Each keeps m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2 of its gradients, element by element, so that
shards are updated like whole parameters; Lamb's norms are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore import engine
from shardwise.mindspore.nn.optimizer import Optimizer, Rate

Tensor = torch.Tensor


class _Moments(Optimizer):
    """``update(state, p, g, group)``: by what p decreases, learning rate included."""

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Rate,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(learning_rate, params, weight_decay, loss_scale)
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0 < value < 1:
                raise ValueError(problem(f"{name} is {value}", fix="a number between 0 and 1"))
        if eps <= 0:
            raise ValueError(problem(f"eps is {eps}", fix="a number above 0"))
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return _ByFormula(groups, self.update)

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def moments(self, state: dict[str, Any], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The two moments after a step."""
        if not state:
            state |= {"step": 0, "moment1": torch.zeros_like(p), "moment2": torch.zeros_like(p)}
        state["step"] += 1
        m: Tensor = state["moment1"].mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        v: Tensor = state["moment2"].mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        return m, v


@sw.elementwise_optimizer
class _ByFormula(torch.optim.Optimizer):
    """A torch optimizer that subtracts what ``update`` returns. It may have shards: Lamb sums its norms itself."""

    def __init__(self, groups: list[dict[str, Any]], update: Callable[..., Tensor]) -> None:
        super().__init__(groups, {})
        self._update = update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self._update(self.state[p], p, p.grad.to(p.dtype), group))


class Adam(_Moments):
    """p -= lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps), where ``weight_decay`` times p is added to the
    gradient. ``use_nesterov``: beta1 m + (1 - beta1) g stands for m. (Kingma and Ba, 2015, section 2.)"""

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(params, learning_rate, beta1, beta2, eps, weight_decay, loss_scale)
        self.use_nesterov = use_nesterov

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        g = g + group["weight_decay"] * p if group["weight_decay"] else g
        m, v = self.moments(state, p, g)
        if self.use_nesterov:
            m = self.beta1 * m + (1 - self.beta1) * g
        rate = group["lr"] * (1 - self.beta2 ** state["step"]) ** 0.5 / (1 - self.beta1 ** state["step"])
        step: Tensor = rate * m / (v.sqrt() + self.eps)
        return step


class AdamWeightDecay(_Moments):
    """p -= lr (m / (sqrt(v) + eps) + weight_decay p), without correction of the bias."""

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, learning_rate, beta1, beta2, eps, weight_decay)

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        m, v = self.moments(state, p, g)
        step: Tensor = group["lr"] * (m / (v.sqrt() + self.eps) + group["weight_decay"] * p)
        return step


class Lamb(_Moments):
    """p -= lr |p| / |u| u, where u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p, and norms
    that are 0 give the factor 1. (You et al., ICLR 2020, algorithm 2.)"""

    def __init__(
        self,
        params: Iterable[Any],
        learning_rate: Rate,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, learning_rate, beta1, beta2, eps, weight_decay)

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
        m, v = self.moments(state, p, g)
        first, second = 1 - self.beta1 ** state["step"], 1 - self.beta2 ** state["step"]
        direction = m / first / ((v / second).sqrt() + self.eps) + group["weight_decay"] * p
        size, length = _whole_norms(p, direction)
        ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
        step: Tensor = group["lr"] * ratio * direction
        return step


def _whole_norms(parameter: Tensor, direction: Tensor) -> Tensor:
    """The 2-norms of a whole parameter and of its direction, of which this rank may hold a part."""
    squares = torch.stack([tensor.detach().square().sum() for tensor in (parameter, direction)])
    if engine.held(parameter) is not None:
        squares = squares / engine.copies(parameter)
        dist.all_reduce(squares)
    return squares.sqrt()


__all__ = ["Adam", "AdamWeightDecay", "Lamb"]
