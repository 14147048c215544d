"""Cache a program's hoisted constants (``programs.hoist_constants``) between steps, on this rank.

They are computed at the first call, and again when a buffer they depend on is another tensor, has other memory, or was
written: PyTorch counts writes to a tensor and its views. Uncounted writes go unnoticed: those through ``.data``, NumPy
or a pointer. Use ``buffer.copy_(...)`` under ``torch.no_grad()`` instead.
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
    """A source as it was read. Holds the tensor and its memory, so that no other can get the same id or address."""

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
    """The constants of a program. ``program``: computes them, emitted by ``emit`` on first use. ``tensors``: by
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
        """Return the constants that a variant of the program takes. ``tensors``: of all sources."""
        if not self.program.delivered:
            return ()
        read = [tensors[i] for i in self.positions]
        if any(tensor.is_inference() for tensor in read):  # PyTorch counts no writes to these
            self.forget()
            tensors_of = self._make(tensors)
        else:
            same = len(self._seen) == len(read) and all(map(_SourceVersion.is_still, self._seen, read))
            if not self.tensors or not same:
                self.forget()  # free them before the new ones are allocated
                self.tensors = self._make(tensors)
                self._seen = tuple(map(_SourceVersion.of, read))
            tensors_of = self.tensors
        return tuple(tensors_of[name] for name in program.given if name in tensors_of)

    def forget(self) -> None:
        self.tensors, self._seen = {}, ()

    def _make(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        if self._run is None:
            self._run = self.emit(self.program).forward.forward
        with torch.inference_mode(False), torch.no_grad():
            delivered, _, _ = self._run(*tensors)
        return dict(zip(self.program.delivered, delivered, strict=True))
