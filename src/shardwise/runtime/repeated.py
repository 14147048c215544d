"""Passes of one size on this rank: what a step does once (``programs.once``) runs around them, and the gradients of
passes add up on this rank alone. Passes follow each other, or are under way together, as those of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardwise.errors import ShardwiseError, problem
from shardwise.programs.rank_program import Program
from shardwise.runtime.constants import Constants
from shardwise.runtime.emit import Emitted
from shardwise.runtime.step import Forward


@dataclass
class RepeatedStep:
    """The programs of a pass and of what is done once (``programs.once.Repeated``), emitted. ``program``: a pass that
    does all of it by itself, not emitted; ``constants``: what passes are given besides what is made ahead of them;
    ``emit_plain``: emits a pass without compiling it, where ``each`` is compiled."""

    program: Program
    ahead: Emitted
    each: Emitted
    behind: Emitted
    constants: Constants
    emit_plain: Callable[[], Emitted] | None = None

    @property
    def emitted(self) -> Emitted:
        """A pass."""
        return self.each

    @cached_property
    def plain(self) -> Emitted:
        """A pass whose operators can be observed one by one."""
        return self.each if self.emit_plain is None else self.emit_plain()

    def begin(self, tensors: Sequence[Tensor]) -> Running:
        """Cast and gather what all passes take. ``tensors``: of all sources; inputs are not read."""
        with torch.no_grad():
            given = self.ahead.forward.forward(*tensors)[0] if self.ahead.program.forward else ()
        return Running(self, (*given, *self.constants.of(self.each.program, tensors)))


@dataclass
class Running:
    """Passes under way. ``sums``: source -> its gradient so far, as a pass makes it."""

    step: RepeatedStep
    given: tuple[Tensor, ...]
    sums: dict[str, Tensor] = field(default_factory=dict)

    def run(
        self, tensors: Sequence[Tensor], scale: Tensor | None = None, observed: Forward | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Forward and backward of a pass: (delivered, mutations). ``scale``: the cotangent of the loss (1);
        ``observed``: runs forward instead of the plain program's own."""
        emitted = self.step.each if observed is None else self.step.plain
        program = emitted.program
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with torch.no_grad():
            delivered, written, saved = self.forward(tensors, observed)
            kept = list(saved) if hooks is None else [_through(hooks, value) for value in saved]
            del saved
            named = zip(program.cotangents, delivered, strict=True)
            cotangents = [cotangent_of(value, scale) for name, value in named if name is not None]
            if not cotangents:
                raise ShardwiseError(
                    problem("the loss depends on no parameter that requires a gradient", fix="thaw a parameter")
                )
            found = emitted.backward.forward(kept, *cotangents)
            self.add(dict(zip(program.gradients, found, strict=True)), tensors)
        return delivered, written

    def forward(self, tensors: Sequence[Tensor], observed: Forward | None = None) -> tuple[Any, Any, Any]:
        """Forward of a pass: (delivered, mutations, saved)."""
        found: tuple[Any, Any, Any] = (observed or self.step.each.forward.forward)(*tensors, *self.given)
        return found

    def add(self, gradients: Mapping[str, Tensor], read: Iterable[Tensor]) -> None:
        """Add the gradients that a pass has found. ``read``: what is read later; its memory is not added to."""
        held: set[int] = set()
        if not gradients.keys() <= self.sums.keys():
            held = {_memory(tensor) for tensor in (*read, *self.given)}
        for source, gradient in gradients.items():
            if source in self.sums:
                self.sums[source].add_(gradient)
                continue
            # A compiler may return one tensor for two gradients: what is added to is nobody else's.
            self.sums[source] = gradient.clone() if _memory(gradient) in held else gradient
            held.add(_memory(gradient))

    def end(self) -> dict[str, Tensor]:
        """Source -> the gradient of what is stored, of all passes together."""
        behind = self.step.behind
        self.given = ()
        if behind.program.backward:
            with torch.no_grad():
                sums = [self.sums.pop(source) for source in behind.program.gradients]
                found = behind.backward.forward(sums)
            self.sums.update(zip(behind.program.gradients, found, strict=True))
        return self.sums


def cotangent_of(loss: Tensor, scale: Tensor | None) -> Tensor:
    """The cotangent of a loss that is multiplied by ``scale`` (None: 1) for backward."""
    return torch.ones_like(loss) if scale is None else scale.to(loss.dtype).expand_as(loss).clone()


def scale_of(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """By what a scaler multiplies losses now; None: by nothing."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _through(hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]], value: Any) -> Any:
    """A value as hooks for saved tensors (saving on the CPU, quantising) give it back: backward follows at once."""
    pack, unpack = hooks
    return unpack(pack(value)) if isinstance(value, Tensor) else value


__all__ = ["RepeatedStep", "Running", "cotangent_of", "scale_of"]
