"""What a program keeps from step to step (``programs.hoist_constants``), on this rank.

It is made at the first call, and anew where a buffer that it is made from is another tensor, has other memory, or was
written: PyTorch counts writes to a tensor, also those to its views. What it does not count is not seen: writes to a
buffer through ``.data``, NumPy or a pointer. Write ``buffer.copy_(...)`` under ``torch.no_grad()`` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from shardwise.programs.hoist_constants import fixed_sources
from shardwise.programs.rank_program import RankProgram
from shardwise.runtime.emit import Emitted


@dataclass(frozen=True, slots=True)
class _SourceVersion:
    """A source as it was read. The tensor and its memory are held: others cannot come to be at their places."""

    tensor: Tensor
    version: int
    memory: UntypedStorage
    place: int

    @staticmethod
    def of(tensor: Tensor) -> _SourceVersion:
        return _SourceVersion(tensor, tensor._version, tensor.untyped_storage(), tensor.data_ptr())

    def is_still(self, tensor: Tensor) -> bool:
        return self.tensor is tensor and self.version == tensor._version and self.place == tensor.data_ptr()


@dataclass
class Constants:
    """``program``: what makes the values, which ``emit`` emits when they are first asked for. ``tensors``: by
    name."""

    program: RankProgram
    emit: Callable[[RankProgram], Emitted]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _run: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]] | None = None
    _seen: tuple[_SourceVersion, ...] = ()

    def __post_init__(self) -> None:
        read = {name for instruction in self.program.forward for name in instruction.operands} & fixed_sources(
            self.program.spmd
        )
        self.positions = [i for i, source in enumerate(self.program.spmd.graph.sources) if source.value in read]

    def of(self, program: RankProgram, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What a variant of the program is given. ``tensors``: of all sources."""
        if not self.program.delivered:
            return ()
        read = [tensors[i] for i in self.positions]
        if any(tensor.is_inference() for tensor in read):  # nobody counts writes to these
            self.forget()
            tensors_of = self._make(tensors)
        else:
            same = len(self._seen) == len(read) and all(map(_SourceVersion.is_still, self._seen, read))
            if not self.tensors or not same:
                self.forget()  # before the new ones take memory
                self.tensors = self._make(tensors)
                self._seen = tuple(map(_SourceVersion.of, read))
            tensors_of = self.tensors
        return tuple(tensors_of[name] for name in program.given if name in tensors_of)

    def forget(self) -> None:
        """The next call makes them anew."""
        self.tensors, self._seen = {}, ()

    def _make(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        if self._run is None:
            self._run = self.emit(self.program).forward.forward
        with torch.inference_mode(False), torch.no_grad():
            delivered, _, _ = self._run(*tensors)
        return dict(zip(self.program.delivered, delivered, strict=True))


__all__ = ["Constants"]
