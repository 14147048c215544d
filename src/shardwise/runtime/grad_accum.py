"""Run gradient accumulation over micro-batches on this rank. Once-per-step work (``programs.grad_accum_program``) runs
around them, and gradients are summed locally. Micro-batches run one after another, or overlap in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.compiled import CompiledVariant
from shardwise.runtime.emit import Emitted
from shardwise.runtime.guards.registry import memory_range
from shardwise.runtime.hoisted_constants import Constants
from shardwise.runtime.step import Forward


def _add(source: str, total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


@dataclass
class GradAccumStep:
    """The emitted programs of a micro-batch and of once-per-step work (``grad_accum_program.GradAccumProgram``).
    ``program``: a self-contained micro-batch, not emitted; ``emitted``: the eager micro-batch; ``constants``: its
    hoisted constants; ``compiling``: runs instead if it compiles; ``add``: adds a source's gradient to its
    sum."""

    program: RankProgram
    ahead: Emitted
    emitted: Emitted
    behind: Emitted
    constants: Constants
    compiling: CompiledVariant[Emitted] | None = None
    add: Callable[[str, Tensor, Tensor], None] = _add

    def begin(self, tensors: Sequence[Tensor], *, observed: bool = False) -> GradAccumState:
        """Cast and gather the values that all micro-batches use. ``tensors``: of all sources, inputs are not read;
        ``observed``: micro-batches are observed per operator, so they run eager."""
        emitted = (self.compiling.get() if self.compiling and not observed else None) or self.emitted
        with torch.no_grad():
            ahead = self.ahead.forward.forward(*tensors)[0] if self.ahead.program.forward else ()
        return GradAccumState(self, emitted, (*ahead, *self.constants.of(emitted.program, tensors)))


@dataclass
class GradAccumState:
    """Micro-batches under way. ``emitted``: the program that runs them; ``sums``: source -> its gradient so far."""

    step: GradAccumStep
    emitted: Emitted
    prepared: tuple[Tensor, ...]
    sums: dict[str, Tensor] = field(default_factory=dict)

    def forward(self, tensors: Sequence[Tensor], observed: Forward | None = None) -> tuple[Any, Any, Any]:
        """Run forward of a micro-batch: return (delivered, mutations, saved)."""
        results: tuple[Any, Any, Any] = (observed or self.emitted.forward.forward)(*tensors, *self.prepared)
        return results

    def backward(self, saved: list[Any], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run backward of a micro-batch: return source -> gradient. Empties ``saved``."""
        gradients = self.emitted.backward.forward(saved, *cotangents)
        return dict(zip(self.emitted.program.gradients, gradients, strict=True))

    def add(self, gradients: Mapping[str, Tensor], read: Iterable[Tensor]) -> None:
        """Add the gradients of a micro-batch. ``read``: tensors read later, whose memory must not be written."""
        in_use: list[tuple[int, int]] = []
        if not gradients.keys() <= self.sums.keys():
            in_use = [memory_range(tensor) for tensor in (*read, *self.prepared)]
        for source, gradient in gradients.items():
            if source in self.sums:
                self.step.add(source, self.sums[source], gradient)
                continue
            # A compiler may return one tensor for two gradients, so a sum needs memory of its own. Gradients of one
            # message are adjacent in one storage.
            first, last = memory_range(gradient)
            is_shared = any(first < end and start < last for start, end in in_use)
            self.sums[source] = gradient.clone() if is_shared else gradient
            in_use.append((first, last))

    def end(self) -> dict[str, Tensor]:
        """Finish the step: return source -> the gradient of the stored parameter, over all micro-batches."""
        behind = self.step.behind
        self.prepared = ()
        if behind.program.backward:
            with torch.no_grad():
                sums = [self.sums.pop(source) for source in behind.program.gradients]
                gradients = behind.backward.forward(sums)
            self.sums.update(zip(behind.program.gradients, gradients, strict=True))
        return self.sums


def cotangent_of(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return the cotangent of a loss that is multiplied by ``scale`` (None: 1) for backward."""
    return torch.ones_like(loss) if scale is None else scale.to(loss.dtype).expand_as(loss).clone()


def scale_of(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """Return the current loss scale of a scaler; None if it does not scale."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale
