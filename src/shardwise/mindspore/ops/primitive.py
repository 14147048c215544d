"""Primitives: operators as objects, which carry a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

import shardwise as sw
from shardwise.errors import problem
from shardwise.mindspore import context, strict

Strategy = tuple[tuple[int, ...], ...]


class Primitive:
    """An operator: ``ops.MatMul()(x, y)``. Subclasses compute on plain torch tensors in ``compute``.

    A strategy (one tuple of split counts per tensor operand) acts in the modes semi_auto_parallel and auto_parallel
    only. ``sums``: the operator sums over a dim, so that splitting it leaves partial sums. ``instance_name``: the
    attribute of the cell that holds the primitive; ``attrs``: what the printed IR shows as ``primitive_attrs``.
    """

    sums = False
    splittable = True

    def __init__(self, **attrs: Any) -> None:
        self.attrs: dict[str, Any] = attrs
        self.in_strategy: Strategy | None = None
        self.out_strategy: Strategy | None = None
        self.instance_name = ""

    @property
    def name(self) -> str:
        return type(self).__name__

    def compute(self, *args: Any) -> Any:
        raise NotImplementedError(f"{self.name} computes nothing")

    def check_strategy(self, strategy: Strategy, shapes: tuple[tuple[int, ...], ...]) -> None:
        """What strict mode asks of this operator beyond what it asks of all (``strict.check``)."""

    def shard(self, in_strategy: Any = None, out_strategy: Any = None) -> Self:
        """Fixes how the operator is split: ``ops.MatMul().shard(((2, 4), (4, 1)))``. Returns itself."""
        _check_instance(self, "shard", (in_strategy, out_strategy))
        self.in_strategy = strict.nested(self.name, "in_strategy", in_strategy, out_strategy)
        self.out_strategy = strict.nested(self.name, "out_strategy", out_strategy)
        self._note_strategies()
        return self

    def set_strategy(self, *strategies: Any) -> Self:
        """The old name of ``shard``; takes the strategies of the operands in one argument or in several."""
        _check_instance(self, "set_strategy", strategies)
        self.in_strategy = strict.nested(self.name, "strategy", strategies[0] if len(strategies) == 1 else strategies)
        self._note_strategies()
        return self

    def _note_strategies(self) -> None:
        self.attrs |= {"in_strategy": self.in_strategy, "out_strategy": self.out_strategy}

    def add_prim_attr(self, name: str, value: Any) -> Self:
        """Sets an attribute, such as ``"manual_split"`` or ``"primitive_target"``. Returns the primitive."""
        self.attrs[name] = value
        return self

    def del_prim_attr(self, name: str) -> Self:
        self.attrs.pop(name, None)
        return self

    def set_device(self, device_target: str) -> Self:
        return self.add_prim_attr("primitive_target", device_target)

    def set_prim_instance_name(self, name: str) -> Self:
        self.instance_name = name
        return self

    def recompute(self, mode: bool = True) -> Self:
        raise NotImplementedError(
            f"{self.name}.recompute(): recomputation follows in a later version; until then every result that backward "
            "needs is kept. torch.utils.checkpoint works inside construct."
        )

    def __call__(self, *args: Any) -> Any:
        call: Callable[..., Any] = self.compute
        options = context.options()
        if not (options.distributed and torch.compiler.is_exporting()):
            return call(*args)
        text = self.strategy_text(args)
        if self.in_strategy is not None and text is None:
            shapes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
            if options.strict:
                strict.check(self, self.in_strategy, shapes, options.devices)
            call = sw.shard(_named(call, self), self.in_strategy, self._out_strategy(shapes))
        elif text is not None:
            call = sw.shard(_named(call, self), text)
        result = call(*args)
        if self.sums and options.strict and self.out_strategy is None and isinstance(result, torch.Tensor):
            return sw.constrain(result, "summed")
        return result

    def strategy_text(self, args: tuple[Any, ...]) -> str | None:
        """A strategy in the library's words, where split counts can not say it."""
        return None

    def _out_strategy(self, shapes: tuple[tuple[int, ...], ...]) -> Strategy | None:
        return self.out_strategy

    def __repr__(self) -> str:
        return f"{self.name}<{self.in_strategy}>" if self.in_strategy else self.name


def _check_instance(primitive: Any, method: str, given: tuple[Any, ...]) -> None:
    if isinstance(primitive, Primitive):
        return
    given = tuple(own for own in (primitive, *given) if own is not None)
    meant = given[0] if len(given) == 1 else given
    raise TypeError(
        problem(
            f"{method} was called on the operator's class, not on an operator",
            fix=f"write ops.MatMul().{method}({meant!r}) instead of ops.MatMul.{method}(...): with () behind the name",
        )
    )


def _named(call: Callable[..., Any], primitive: Primitive) -> Callable[..., Any]:
    def named(*args: Any) -> Any:
        return call(*args)

    named.__name__ = primitive.instance_name or primitive.name
    return named
