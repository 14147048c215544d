"""Adaptive optimizers, by the reference's formulas.

Those of Adam's family keep m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2 elementwise, so that shards
are updated like whole parameters. Lamb's norms are summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.mindspore.checks import within
from shardwise.mindspore.holding import copies, holding_of, is_elsewhere
from shardwise.mindspore.named import SETTINGS
from shardwise.mindspore.nn.optimizer import OfSettings, Optimizer

Tensor = torch.Tensor


class _Formula(OfSettings):
    """An optimizer by its formula: ``update(state, p, g, group)`` returns the decrease of p, learning rate included.
    ``decays``: ``weight_decay`` times p is added to the gradient first."""

    decays = True

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return _ByFormula(groups, self.update, self.decays)

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        raise NotImplementedError

    def kept(self, state: dict[str, Any], p: Tensor, **starts: float) -> list[Tensor]:
        state |= {name: torch.full_like(p, start) for name, start in starts.items() if name not in state}
        return [state[name] for name in starts]


class _Moments(_Formula):
    """An optimizer with the moments m and v."""

    checks: ClassVar = {
        **dict.fromkeys(("beta1", "beta2"), within(0, 1, "a number between 0 and 1")),
        "eps": within(0, math.inf, "a number above 0"),
    }

    def moments(self, state: dict[str, Any], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        state["step"] = state.get("step", 0) + 1
        m, v = self.kept(state, p, moment1=0.0, moment2=0.0)
        return m.mul_(self.beta1).add_(g, alpha=1 - self.beta1), v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)


@sw.elementwise_optimizer
class _ByFormula(torch.optim.Optimizer):
    """A torch optimizer that subtracts the result of ``update``. It supports shards: Lamb sums its norms itself."""

    def __init__(self, groups: list[dict[str, Any]], update: Callable[..., Tensor], decays: bool) -> None:
        super().__init__(groups, {})
        self._update, self._decays = update, decays

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not supported
        for group in self.param_groups:
            decay = group["weight_decay"] if self._decays else 0.0
            for p in group["params"]:
                if p.grad is not None:
                    g = p.grad.to(p.dtype)
                    p.sub_(self._update(self.state[p], p, g + decay * p if decay else g, group))


class Adam(_Moments, **SETTINGS["nn.Adam"]):
    """p -= lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps), with ``weight_decay`` times p added to the
    gradient. ``use_nesterov``: m becomes beta1 m + (1 - beta1) g; ``use_amsgrad``: v becomes its maximum. ``use_lazy``
    and ``use_offload`` change no result. (Kingma and Ba, 2015, section 2.)"""

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        m, v = self.moments(state, p, g)
        if self.use_nesterov:
            m = self.beta1 * m + (1 - self.beta1) * g
        if self.use_amsgrad:
            state["vhat"] = v = torch.maximum(state.get("vhat", v), v)
        rate = group["lr"] * (1 - self.beta2 ** state["step"]) ** 0.5 / (1 - self.beta1 ** state["step"])
        return rate * m / (v.sqrt() + self.eps)


class AdamWeightDecay(_Moments, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0):
    """p -= lr (m / (sqrt(v) + eps) + weight_decay p), without bias correction."""

    decays = False
    state_names: ClassVar = {"moment1": "adam_m", "moment2": "adam_v"}

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        m, v = self.moments(state, p, g)
        return group["lr"] * (m / (v.sqrt() + self.eps) + group["weight_decay"] * p)


class Lamb(_Moments, learning_rate=..., beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0):
    """p -= lr |p| / |u| u, where u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p. If a norm is
    0 the factor is 1. (You et al., ICLR 2020, algorithm 2.)"""

    decays = False
    state_names: ClassVar = {"moment1": "lamb_m", "moment2": "lamb_v"}

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        m, v = self.moments(state, p, g)
        first, second = 1 - self.beta1 ** state["step"], 1 - self.beta2 ** state["step"]
        direction = m / first / ((v / second).sqrt() + self.eps) + group["weight_decay"] * p
        size, length = _whole_norms(p, direction)
        ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
        return group["lr"] * ratio * direction


def _whole_norms(parameter: Tensor, direction: Tensor) -> Tensor:
    """Return the 2-norms of a whole parameter and of its direction; this rank may hold a part of them."""
    squares = torch.stack([tensor.detach().square().sum() for tensor in (parameter, direction)])
    if holding_of(parameter) is not None:
        here = squares.new_tensor([0.0 if is_elsewhere(parameter) else 1.0])  # stages may share a parameter
        both = torch.cat([squares, here]) / copies(parameter)
        dist.all_reduce(both)
        squares = both[:2] / both[2]
    return squares.sqrt()


class LazyAdam(Adam):
    """Adam; rows without a gradient are updated like the others, as gradients are dense here."""


class AdaMax(_Moments, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, loss_scale=1.0):
    """p -= lr / (1 - beta1^t) m / (u + eps), where u = max(beta2 u, |g|). (Kingma and Ba, 2015, section 7.)"""

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        m, u = self.kept(state, p, moment1=0.0, moment2=0.0)
        state["step"] = state.get("step", 0) + 1
        m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        torch.maximum(u.mul_(self.beta2), g.abs(), out=u)
        return group["lr"] / (1 - self.beta1 ** state["step"]) * m / (u + self.eps)


class Adagrad(_Formula, accum=0.1, learning_rate=1e-3, update_slots=True, loss_scale=1.0, weight_decay=0.0):
    """a += g^2 (with ``update_slots``); p -= lr g / sqrt(a). (Duchi et al. 2011.)"""

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        (a,) = self.kept(state, p, accum=self.accum)
        if self.update_slots:
            a.addcmul_(g, g)
        return group["lr"] * g / a.sqrt()


class Adadelta(_Formula, learning_rate=1.0, rho=0.9, epsilon=1e-6, loss_scale=1.0, weight_decay=0.0):
    """a = rho a + (1 - rho) g^2; u = sqrt(d + eps) / sqrt(a + eps) g; d = rho d + (1 - rho) u^2; p -= lr u. (Zeiler
    2012.)"""

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        a, d = self.kept(state, p, accum=0.0, accum_update=0.0)
        a.mul_(self.rho).addcmul_(g, g, value=1 - self.rho)
        u = (d + self.epsilon).sqrt() / (a + self.epsilon).sqrt() * g
        d.mul_(self.rho).addcmul_(u, u, value=1 - self.rho)
        return group["lr"] * u


class RMSProp(_Formula, **SETTINGS["nn.RMSProp"]):
    """s = decay s + (1 - decay) g^2, starting at ones; v = momentum v + lr g / sqrt(s + eps); p -= v. ``centered``
    subtracts the square of the moving mean gradient from s."""

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        s, v = self.kept(state, p, mean_square=1.0, moment=0.0)
        s.mul_(self.decay).addcmul_(g, g, value=1 - self.decay)
        spread = s
        if self.centered:
            (mean,) = self.kept(state, p, mean_grad=0.0)
            mean.mul_(self.decay).add_(g, alpha=1 - self.decay)
            spread = s - mean.square()
        return v.mul_(self.momentum).add_(group["lr"] * g / (spread + self.epsilon).sqrt())


class FTRL(_Formula, **SETTINGS["nn.FTRL"]):
    """Follow the regularized leader (McMahan et al. 2013, algorithm 1), with powers of the accumulated squares. Every
    parameter decays, whatever its name."""

    decays_all = True

    checks: ClassVar = {"lr_power": within(-math.inf, math.nextafter(0, 1), "a number up to 0")}

    def update(self, state: dict[str, Any], p: Tensor, g: Tensor, group: dict[str, Any]) -> Any:
        a, z = self.kept(state, p, moments=self.initial_accum, linear=0.0)
        before = a**-self.lr_power
        after = a.addcmul_(g, g) ** -self.lr_power
        z.add_(g - (after - before) / group["lr"] * p)
        target = (z.sign() * self.l1 - z) / (after / group["lr"] + 2 * self.l2)
        return p - torch.where(z.abs() > self.l1, target, 0.0)


class LARS(Optimizer):
    """A wrapper of an optimizer that scales gradients by coefficient |p| / (|g| + weight_decay |p| + eps) per
    parameter. (You et al. 2017, equation 6.) ``lars_filter``: which parameters; ``use_clip``: at most by the learning
    rate."""

    def __init__(
        self, optimizer: Optimizer, epsilon: float = 1e-5, coefficient: float = 1e-3, use_clip: bool = False,
        lars_filter: Callable[[Any], bool] = lambda x: "LayerNorm" not in x.name and "bias" not in x.name,
    ) -> None:  # fmt: skip
        super().__init__(optimizer.rates[0], optimizer.parameters)
        self.optimizer = optimizer
        self.epsilon, self.coefficient, self.use_clip, self.lars_filter = epsilon, coefficient, use_clip, lars_filter

    def __call__(self, gradients: Sequence[Tensor]) -> bool:
        decay = {id(p): group["weight_decay"] for group in self.optimizer.groups for p in group["params"]}
        rate, scaled = self.rate_now(), []
        for p, g in zip(self.parameters, gradients, strict=True):
            size, length = _whole_norms(p, g)
            ratio = self.coefficient * size / (length + decay[id(p)] * size + self.epsilon)
            ratio = torch.where((size > 0) & (length > 0), ratio, 1.0)
            scaled.append(g * ((ratio / rate).clamp(max=1.0) if self.use_clip else ratio) if self.lars_filter(p) else g)
        self._steps += 1
        return self.optimizer(scaled)

    construct = __call__

    def states(self) -> dict[str, tuple[Tensor, Any]]:
        return self.optimizer.states()

    def load_states(self, entries: dict[str, Tensor]) -> list[str]:
        return self.optimizer.load_states(entries)


__all__ = [
    "FTRL", "LARS", "AdaMax", "Adadelta", "Adagrad", "Adam", "AdamWeightDecay", "Lamb", "LazyAdam",
    "RMSProp",
]  # fmt: skip
