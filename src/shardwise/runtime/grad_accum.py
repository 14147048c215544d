"""Passes of one size on this rank: what a step does once (``programs.grad_accum_program``) runs around them, and the
gradients of passes add up on this rank alone. Passes follow each other, or are under way together, as those of a
pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from shardwise.errors import ShardwiseError, problem
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.compile_benchmark import CompiledVariant, TimedStep
from shardwise.runtime.emit import Emitted
from shardwise.runtime.hoisted_constants import Constants
from shardwise.runtime.step import Forward


def _add(source: str, total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


@dataclass
class GradAccumStep:
    """The programs of a pass and of what is done once (``programs.grad_accum_program.GradAccumProgram``), emitted.
    ``program``: a pass that does all of it by itself, not emitted; ``emitted``: a pass as it is written; ``constants``:
    what passes are given besides what is made ahead of them; ``compiling``: the pass that runs instead, always or while
    it is faster; ``add``: adds the gradient of a source to the sum of earlier passes."""

    program: RankProgram
    ahead: Emitted
    emitted: Emitted
    behind: Emitted
    constants: Constants
    compiling: CompiledVariant[Emitted] | None = None
    add: Callable[[str, Tensor, Tensor], None] = _add

    def begin(self, tensors: Sequence[Tensor], *, observed: bool = False) -> GradAccumState:
        """Cast and gather what all passes take. ``tensors``: of all sources; inputs are not read; ``observed``: the
        passes are, operator by operator, and run as they are written."""
        compiled, turn = None, TimedStep(compiled=False)
        if self.compiling is not None and not observed:
            compiled, turn = self.compiling.begin()
        emitted = compiled or self.emitted
        with torch.no_grad():
            ahead = self.ahead.forward.forward(*tensors)[0] if self.ahead.program.forward else ()
        return GradAccumState(self, emitted, turn, (*ahead, *self.constants.of(emitted.program, tensors)))


@dataclass
class GradAccumState:
    """Passes under way. ``emitted``: what runs them; ``sums``: source -> its gradient so far, as a pass makes it."""

    step: GradAccumStep
    emitted: Emitted
    turn: TimedStep
    prepared: tuple[Tensor, ...]
    sums: dict[str, Tensor] = field(default_factory=dict)

    def run(
        self, tensors: Sequence[Tensor], scale: Tensor | None = None, observed: Forward | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Forward and backward of a pass: (delivered, mutations). ``scale``: the cotangent of the loss (1);
        ``observed``: runs forward instead of the program's own."""
        program = self.emitted.program
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
            self.add(self.backward(kept, cotangents), tensors)
        return delivered, written

    def forward(self, tensors: Sequence[Tensor], observed: Forward | None = None) -> tuple[Any, Any, Any]:
        """Forward of a pass: (delivered, mutations, saved)."""
        with self.turn.timed():
            results: tuple[Any, Any, Any] = (observed or self.emitted.forward.forward)(*tensors, *self.prepared)
        return results

    def backward(self, saved: list[Any], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
        """Backward of a pass: source -> gradient. ``saved`` is emptied."""
        with self.turn.timed():
            gradients = self.emitted.backward.forward(saved, *cotangents)
        return dict(zip(self.emitted.program.gradients, gradients, strict=True))

    def add(self, gradients: Mapping[str, Tensor], read: Iterable[Tensor]) -> None:
        """Add the gradients that a pass has found. ``read``: what is read later; its memory is not added to."""
        in_use: list[_Extent] = []
        if not gradients.keys() <= self.sums.keys():
            in_use = [_extent(tensor) for tensor in (*read, *self.prepared)]
        for source, gradient in gradients.items():
            if source in self.sums:
                self.step.add(source, self.sums[source], gradient)
                continue
            # A compiler may return one tensor for two gradients: what is added to is nobody else's. Gradients that came
            # in one message lie beside each other.
            memory, first, last = _extent(gradient)
            is_shared = any(other == memory and first < end and start < last for other, start, end in in_use)
            self.sums[source] = gradient.clone() if is_shared else gradient
            in_use.append((memory, first, last))

    def end(self) -> dict[str, Tensor]:
        """Source -> the gradient of what is stored, of all passes together."""
        self.turn.is_complete = True
        behind = self.step.behind
        self.prepared = ()
        if behind.program.backward:
            with torch.no_grad():
                sums = [self.sums.pop(source) for source in behind.program.gradients]
                gradients = behind.backward.forward(sums)
            self.sums.update(zip(behind.program.gradients, gradients, strict=True))
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


_Extent = tuple[int, int, int]


def _extent(tensor: Tensor) -> _Extent:
    """A tensor's memory, and between which bytes of it the elements lie."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage().data_ptr(), first, first + (reach + 1) * tensor.itemsize * bool(tensor.numel())


def _through(hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]], value: Any) -> Any:
    """A value as hooks for saved tensors (saving on the CPU, quantising) give it back: backward follows at once."""
    pack, unpack = hooks
    return unpack(pack(value)) if isinstance(value, Tensor) else value


__all__ = ["GradAccumState", "GradAccumStep", "cotangent_of", "scale_of"]
