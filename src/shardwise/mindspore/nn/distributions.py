"""Distributions: cells over torch's, each a line of a table with the reference's parameters.

Parameters may be set by the constructor or by every call: ``Normal(0.0, 1.0).prob(x)`` is ``Normal().prob(x, 0.0,
1.0)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import distributions

from shardwise.errors import problem
from shardwise.mindspore.calls import outside
from shardwise.mindspore.common.seed import drawn
from shardwise.mindspore.named import TABLES
from shardwise.mindspore.nn.cell import Cell
from shardwise.mindspore.tensor import as_torch

Tensor = torch.Tensor
Made = Callable[..., Any]


class Distribution(Cell):
    """Base of distributions: ``parameters_of`` are the names of its parameters, ``make`` is torch's class."""

    parameters_of: ClassVar[tuple[str, ...]] = ()
    make: Made

    def __init__(self, *values: Any, seed: int | None = None, dtype: Any = None, name: str = "", **named: Any) -> None:
        super().__init__()
        self.default, self.seed, self.name = (
            dict.fromkeys(self.parameters_of) | self._by_name(values, named),
            seed,
            name,
        )

    def _by_name(self, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        if len(values) > len(self.parameters_of) or (foreign := named.keys() - set(self.parameters_of)):
            wrong = ", ".join(sorted(foreign)) if len(values) <= len(self.parameters_of) else repr(values[-1])
            what = f"{type(self).__name__} has no parameter {wrong}"
            raise TypeError(problem(what, fix=f"its parameters are {', '.join(self.parameters_of)}"))
        return dict(zip(self.parameters_of, values, strict=False)) | named

    def of(self, *values: Any, **named: Any) -> Any:
        """Return torch's distribution with these parameters, or the defaults of the constructor."""
        given = {name: value for name, value in self._by_name(values, named).items() if value is not None}
        chosen = self.default | given
        if missing := [name for name in self.parameters_of if chosen[name] is None]:
            what = f"{type(self).__name__} has no {missing[0]}"
            raise ValueError(problem(what, fix="give it here or in the constructor"))
        tensors = [value if isinstance(value, Tensor) else as_torch(value) for value in chosen.values()]
        floats = [value if value.is_floating_point() else value.float() for value in tensors]
        return type(self).make(*floats, validate_args=not torch.compiler.is_exporting())  # capture has no data to check

    def sample(self, shape: tuple[int, ...] = (), *parameters: Any, **named: Any) -> Any:
        """Return random values: ``shape`` of each."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=drawn(self.seed))))
            return outside(self.of(*parameters, **named).sample(torch.Size(shape)))

    def kl_loss(self, dist: str, *parameters: Any) -> Any:
        """Return the divergence KL(self || other). The other's parameters come first, then optionally its own."""
        if dist != type(self).__name__:
            raise ValueError(problem(f"{type(self).__name__} is compared with {dist!r}", fix=repr(type(self).__name__)))
        count = len(self.parameters_of)
        return outside(distributions.kl_divergence(self.of(*parameters[count:]), self.of(*parameters[:count])))

    def cross_entropy(self, dist: str, *parameters: Any) -> Any:
        """Return the entropy plus the divergence KL(self || other)."""
        divergence = self.kl_loss(dist, *parameters)
        return divergence + outside(self.of(*parameters[len(self.parameters_of) :]).entropy())

    def construct(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method of that name."""
        return getattr(self, name)(*args, **kwargs)


def _method(name: str, function: Callable[..., Any], *, has_value: bool) -> Callable[..., Any]:
    """Return a method: ``function`` of torch's distribution, and of its first argument if ``has_value``."""

    def answer(self: Distribution, distribution: Any, *value: Any) -> Any:
        try:
            return outside(function(distribution, *value))
        except NotImplementedError as error:
            what = f"{type(self).__name__} has no {name}: torch.distributions does not compute it"
            raise NotImplementedError(problem(what, fix="write it from log_prob or prob")) from error

    if has_value:
        return lambda self, value, *parameters, **named: answer(self, self.of(*parameters, **named), as_torch(value))
    return lambda self, *parameters, **named: answer(self, self.of(*parameters, **named))


_OF_VALUE: dict[str, Callable[[Any, Any], Any]] = {
    "log_prob": lambda d, x: d.log_prob(x), "prob": lambda d, x: d.log_prob(x).exp(), "cdf": lambda d, x: d.cdf(x),
    "log_cdf": lambda d, x: d.cdf(x).log(), "survival_function": lambda d, x: 1 - d.cdf(x),
    "log_survival": lambda d, x: torch.log1p(-d.cdf(x)),
}  # fmt: skip
_OF_ALL: dict[str, Callable[[Any], Any]] = {
    "mean": lambda d: d.mean, "sd": lambda d: d.stddev, "var": lambda d: d.variance, "mode": lambda d: d.mode,
    "entropy": lambda d: d.entropy(),
}  # fmt: skip
for _name, _function in (_OF_VALUE | _OF_ALL).items():
    setattr(Distribution, _name, _method(_name, _function, has_value=_name in _OF_VALUE))

CLASSES = {
    name: type(name, (Distribution,), {
        "parameters_of": tuple(words), "make": staticmethod(getattr(distributions, name)),
        "__module__": __name__, "__doc__": f"Parameters: {' '.join(words)}.",
    }) for name, *words in (row.split() for row in TABLES["nn"]["distributions"].split(";"))
}  # fmt: skip
globals().update(CLASSES)

__all__ = ["Distribution", *CLASSES]
