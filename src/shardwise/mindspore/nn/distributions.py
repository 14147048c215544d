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


class Distribution(Cell):
    """Base of distributions: ``parameters_of`` are the names of its parameters, ``make`` is torch's class."""

    parameters_of: ClassVar[tuple[str, ...]] = ()
    make: Callable[..., Any]

    def __init__(self, *values: Any, seed: int | None = None, dtype: Any = None, name: str = "", **named: Any) -> None:
        super().__init__()
        self.default, self.seed, self.name = self._by_name(values, named), seed, name

    def _by_name(self, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        wrong = [*map(repr, values[len(self.parameters_of) :]), *sorted(named.keys() - set(self.parameters_of))]
        if wrong:
            what = f"{type(self).__name__} has no parameter {wrong[0]}"
            raise TypeError(problem(what, fix=f"its parameters are {', '.join(self.parameters_of)}"))
        by_name = dict(zip(self.parameters_of, values, strict=False)) | named
        return {name: value for name, value in by_name.items() if value is not None}

    def of(self, *values: Any, **named: Any) -> Any:
        """Return torch's distribution with these parameters, or the defaults of the constructor."""
        chosen = self.default | self._by_name(values, named)
        if missing := [name for name in self.parameters_of if name not in chosen]:
            what = f"{type(self).__name__} has no {missing[0]}"
            raise ValueError(problem(what, fix="give it here or in the constructor"))
        tensors = [as_torch(chosen[name]) for name in self.parameters_of]
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
        return self.kl_loss(dist, *parameters) + self.entropy(*parameters[len(self.parameters_of) :])

    def construct(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method of that name."""
        return getattr(self, name)(*args, **kwargs)


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method: ``function`` of torch's distribution, and of the method's first argument if it takes two."""

    def computed(self: Distribution, *operands: Any) -> Any:
        try:
            return outside(function(*operands))
        except NotImplementedError as error:
            what = f"{type(self).__name__} has no {name}: torch.distributions does not compute it"
            raise NotImplementedError(problem(what, fix="write it from log_prob or prob")) from error

    if function.__code__.co_argcount == 2:
        return lambda self, value, *parameters, **named: computed(self, self.of(*parameters, **named), as_torch(value))
    return lambda self, *parameters, **named: computed(self, self.of(*parameters, **named))


_METHODS: dict[str, Callable[..., Any]] = {
    "log_prob": lambda d, x: d.log_prob(x), "prob": lambda d, x: d.log_prob(x).exp(), "cdf": lambda d, x: d.cdf(x),
    "log_cdf": lambda d, x: d.cdf(x).log(), "survival_function": lambda d, x: 1 - d.cdf(x),
    "log_survival": lambda d, x: torch.log1p(-d.cdf(x)), "mean": lambda d: d.mean, "sd": lambda d: d.stddev,
    "var": lambda d: d.variance, "mode": lambda d: d.mode, "entropy": lambda d: d.entropy(),
}  # fmt: skip
for _name, _function in _METHODS.items():
    setattr(Distribution, _name, _method(_name, _function))

CLASSES = {
    name: type(name, (Distribution,), {
        "parameters_of": tuple(words), "make": staticmethod(getattr(distributions, name)),
        "__module__": __name__, "__doc__": f"Parameters: {' '.join(words)}.",
    }) for name, *words in (row.split() for row in TABLES["nn"]["distributions"].split(";"))
}  # fmt: skip
globals().update(CLASSES)

__all__ = ["Distribution", *CLASSES]
