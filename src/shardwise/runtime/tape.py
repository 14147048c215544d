"""A tape: the operators that built a model, in order, and how to play them again one finished tensor at a time.

The tape speaks of *storages* (blocks of memory, numbered) rather than of tensors: an operand is a storage and the geometry under which
the operator saw it. Views, ``.data``, ``detach`` and ``nn.Parameter`` therefore need no entry at all, and a parameter is found again
however often it was wrapped.

Playing it again needs little memory although models are commonly initialised twice (``nn.Linear`` fills its weight when it is built, the
model's own initialisation fills it once more at the end). ``_schedule`` walks the tape backwards, as a compiler looks for live
variables: a storage that is about to be overwritten as a whole is dead, so the first filling is played for its effect on the random
generator only, into memory that is given back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage; sizes, strides and the offset count elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @staticmethod
    def of(tensor: Tensor) -> Geometry:
        return Geometry(
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def view(self, storage: UntypedStorage) -> Tensor:
        """The CPU tensor of this geometry over ``storage``."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = torch.conj(tensor)
        return torch._neg_view(tensor) if self.negative else tensor


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that the tape makes."""

    storage: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the tape was given: a copy, so that later changes do not reach it."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Stream:
    """A random generator: 0 is torch's default one, the others were passed to operators by name."""

    number: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Before the call the generator was set: to ``state``, or to where call ``position`` had left it."""

    state: Tensor | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operator. Storages are numbers: ``creates`` are new, ``overwrites`` are changed as a whole without being read, ``writes`` in part."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Operand | None, ...]  # per tensor leaf of the result; None: an operand, or a view of one
    reads: frozenset[int]
    creates: frozenset[int]
    overwrites: frozenset[int]
    writes: frozenset[int]
    default_dtype: torch.dtype
    stream: int | None = None  # of a random operator
    reset: Reset | None = None

    @property
    def changes(self) -> frozenset[int]:
        return self.creates | self.overwrites | self.writes

    @property
    def is_empty(self) -> bool:
        """It allocates memory and leaves it as it is."""
        return self.target.overloadpacket in EMPTY


aten = torch.ops.aten
EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided)


@dataclass(eq=False, slots=True)
class Tape:
    """Calls in the order in which they were made, and the bytes of every storage. Only ``runtime.deferred`` adds to it."""

    calls: list[Call] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    restored: set[int] = field(default_factory=set)  # calls whose generator state is needed again

    def fills(self, storage: int) -> bool:
        """Whether any call gives the storage values, rather than only memory."""
        return any(storage in call.changes and not call.is_empty for call in self.calls)


@dataclass(frozen=True, slots=True)
class _Step:
    """A call to play, the storages that are ready after it, and those whose values nobody needs any more."""

    index: int
    finished: tuple[int, ...]
    dead: tuple[int, ...]


def _schedule(tape: Tape, wanted: Collection[int], every_random: bool) -> list[_Step]:
    """The calls that ``wanted`` needs. A random call that is needed needs all random calls before it; ``every_random`` asks for all."""
    live, touched, random = set(wanted), set[int](), every_random
    steps = []
    for index in reversed(range(len(tape.calls))):
        call = tape.calls[index]
        if live.isdisjoint(call.changes) and not (random and call.stream is not None):
            continue
        random = random or call.stream is not None
        storages = call.reads | call.changes
        finished = tuple(number for number in storages if number in wanted and number not in touched)
        steps.append(_Step(index, finished, tuple(storages - live)))
        touched |= storages
        live -= call.creates | call.overwrites
        live |= call.reads
    return steps[::-1]


class Replay:
    """One playing of a tape. The global random generator and the default dtype are as before between any two storages."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._storages: dict[int, UntypedStorage] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._saved: dict[int, Tensor] = {}

    def run(self, wanted: Collection[int], *, every_random: bool = False) -> Iterator[tuple[int, UntypedStorage]]:
        """Yields (number, storage) of every wanted storage as soon as it is finished, and forgets it."""
        for step in _schedule(self._tape, frozenset(wanted), every_random):
            call = self._tape.calls[step.index]
            result = self.execute(call.target, call.args, call.kwargs, call.default_dtype, call.stream, call.reset)
            self._keep(call, result)
            if step.index in self._tape.restored and call.stream is not None:
                self._saved[step.index] = self._generators[call.stream].get_state()
            del result
            for number in step.dead:
                self._storages.pop(number, None)
            for number in step.finished:
                yield number, self._storages.pop(number)

    def execute(
        self,
        target: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        default_dtype: torch.dtype,
        stream: int | None,
        reset: Reset | None,
    ) -> Any:
        """Calls the operator on real tensors. The state of its generator carries on from the random call before."""
        args, kwargs = tree_map(self._real, (args, kwargs))

        def call() -> Any:
            return target(*args, **kwargs)

        with torch.no_grad():
            if stream is None:
                return _under_default_dtype(default_dtype, call)
            generator = self._generators.setdefault(stream, torch.Generator())
            if reset is not None:
                state = reset.state if reset.position is None else self._saved[reset.position]
                assert state is not None, "a reset names a state or a position"
                generator.set_state(state)
            if stream > 0:
                return _under_default_dtype(default_dtype, call)
            outside = torch.default_generator.get_state()
            torch.default_generator.set_state(generator.get_state())
            try:
                return _under_default_dtype(default_dtype, call)
            finally:
                generator.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(outside)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, Operand):
            return leaf.geometry.view(self._memory(leaf.storage))
        if isinstance(leaf, Constant):
            return leaf.tensor.clone()
        if isinstance(leaf, Stream):
            return self._generators.setdefault(leaf.number, torch.Generator()) if leaf.number else None
        return leaf

    def _memory(self, number: int) -> UntypedStorage:
        if number not in self._storages:
            self._storages[number] = UntypedStorage(self._tape.num_bytes[number], device="cpu")
        return self._storages[number]

    def _keep(self, call: Call, result: Any) -> None:
        """Remembers the storages that the call created. Memory it leaves as it is becomes zeros: every rank must see the same."""
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor, operand in zip(tensors, call.results, strict=True):
            if operand is None or operand.storage in self._storages:
                continue
            if Geometry.of(tensor) == operand.geometry:
                self._storages[operand.storage] = tensor.untyped_storage()
            else:  # the CPU chose other strides than the recording was told
                operand.geometry.view(self._memory(operand.storage)).copy_(tensor)
            if call.is_empty:
                self._storages[operand.storage].fill_(0)


def _under_default_dtype(dtype: torch.dtype, call: Callable[[], Any]) -> Any:
    outside = torch.get_default_dtype()
    if dtype == outside:
        return call()
    torch.set_default_dtype(dtype)
    try:
        return call()
    finally:
        torch.set_default_dtype(outside)
