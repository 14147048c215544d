"""Run the halves of a step node by node, each node through an observer: for profiles and checks of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from shardwise.costs.timeline import ONCE
from shardwise.programs.instructions import Instruction
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.emit import Emitted
from shardwise.runtime.step import CallableStep, GradAccumStep


@dataclass(frozen=True)
class Half:
    """An emitted instruction list. ``part``: ``"forward"``, ``"backward"``, or ``ONCE`` for work of a whole step."""

    module: fx.GraphModule
    program: RankProgram
    instructions: Sequence[Instruction]
    part: str
    is_backward: bool

    def target(self, node: fx.Node) -> Any:
        """Return the module that a node calls, or None."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def run(self, observer: Observer, *args: Any) -> Any:
        """Run the list with ``args``, as the module's ``forward`` does."""
        observer.begin(self)
        return _Interpreter(self, observer).run(*args)


class Observer:
    """Sees every node of the halves that it observes."""

    def begin(self, half: Half) -> None:
        """Note that a half starts."""

    def run(self, node: fx.Node, half: Half, values: Mapping[fx.Node, Any], call: Callable[[], Any]) -> Any:
        """Call ``call`` once and return its result. ``values``: those that later nodes still need."""
        return call()

    def add(self, source: str, total: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of a micro-batch to the sum of a source."""
        total.add_(gradient)


class _Interpreter(fx.Interpreter):
    def __init__(self, half: Half, observer: Observer) -> None:
        super().__init__(half.module)
        self.extra_traceback = False  # fx would add nodes of its own to the errors of operators
        self.half, self.observer = half, observer

    def run_node(self, n: fx.Node) -> Any:
        return self.observer.run(n, self.half, self.env, partial(super().run_node, n))


def halves_of(emitted: Emitted) -> tuple[Half, Half]:
    """Return forward and backward of an emitted program."""
    program = emitted.program
    return (
        Half(emitted.forward, program, program.forward, "forward", False),
        Half(emitted.backward, program, program.backward, "backward", True),
    )


@contextmanager
def observed(step: CallableStep | GradAccumStep, observer: Observer, others: Iterable[Half] = ()) -> Iterator[None]:
    """Within the context run all halves of a step, and ``others``, through an observer, uncompiled."""
    halves = [*halves_of(step.emitted), *others]
    if isinstance(step, GradAccumStep):
        ahead, behind = step.ahead, step.behind
        halves.append(Half(ahead.forward, ahead.program, ahead.program.forward, ONCE, False))
        halves.append(Half(behind.backward, behind.program, behind.program.backward, ONCE, True))
    for half in halves:
        vars(half.module)["forward"] = partial(half.run, observer)
    compiling, step.compiling = step.compiling, None
    if isinstance(step, GradAccumStep):
        add, step.add = step.add, observer.add
    try:
        yield
    finally:
        for half in halves:
            vars(half.module).pop("forward", None)
        step.compiling = compiling
        if isinstance(step, GradAccumStep):
            step.add = add
