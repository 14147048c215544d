"""The tape of a deferred initialisation: which operators filled which storages, and how to run them again.

A tape is a straight list of operators over *storages*. A tensor is a storage seen through a dtype, an offset, sizes and
strides (``StorageRef``). View operators are therefore not on the tape; ``.data``, ``nn.Parameter`` and tied weights are
the same storage and need no special case. Every operator that draws random numbers records the draw after which its
generator stood (``Draw``).

``InitTape.replay`` runs the tape once, on CPU, and yields each wanted tensor after its last write. One backward walk
(``_schedule``) finds the operators to run, like a compiler's dead code elimination:

* an operator runs if it writes a storage that is wanted, or that a later running operator reads;
* a fill that covers its whole storage ends the life of its previous content, so weights that are drawn twice (the
  reset of ``nn.Linear``, then the model's own) take memory only from the second draw on;
* an operator with an unused result still runs if it draws numbers that later draws follow on its generator; its
  result is dropped at once.

A storage is freed after the last operator that reads it. The peak is about the largest tensor and its temporaries.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from shardwise.errors import ShardwiseError
from shardwise.runtime.initial.bitwise_elementwise import apply_elementwise

DEFAULT_GENERATOR = 0  # the index of torch's global CPU generator on every tape

# The index of the draw that comes before all others: the generator was seeded and nothing was drawn.
SEEDED = -1


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A tensor as a window on a storage. ``covers``: it reaches every byte of the storage, each once.

    ``conjugate``, ``negative``: torch's lazy bits; the values in memory are still to be conjugated or negated.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    covers: bool
    conjugate: bool = False
    negative: bool = False


@dataclass(frozen=True, slots=True)
class TapeConstant:
    """A real tensor that an operator reads. ``version``: its version counter when it was recorded."""

    tensor: torch.Tensor
    version: int

    def value(self) -> torch.Tensor:
        """Return the tensor. Raises ShardwiseError if it was written to since it was recorded."""
        if self.tensor._version != self.version:
            raise ShardwiseError(
                f"a tensor of shape {list(self.tensor.shape)} that initialises the model "
                "was changed after it was recorded",
                fix="pass the constructor a copy: tensor.clone()",
            )
        return self.tensor.detach()


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """A generator by its index on the tape; ``DEFAULT_GENERATOR`` is torch's global one."""

    index: int


@dataclass(frozen=True, slots=True)
class Draw:
    """An operator's use of a generator: it continues after draw ``after`` (an entry's index or ``SEEDED``), or from a
    whole generator state.

    Nearly always ``after`` is the entry's predecessor on the generator. ``torch.manual_seed``, ``fork_rng`` and
    ``set_rng_state`` in the model's constructor change that.
    """

    generator: int
    after: int | torch.Tensor


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One operator call. Tensors in ``args`` and ``kwargs`` are StorageRefs and TapeConstants; ``results``: by
    position, the tensors in new storages that it creates.

    ``reads``, ``writes``, ``overwrites``: storages; those in ``overwrites`` are filled whole, whatever was in them.
    ``default_dtype``: torch's, when the operator was called.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[StorageRef | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    default_dtype: torch.dtype
    draw: Draw | None = None

    @property
    def creates(self) -> frozenset[int]:
        return frozenset(ref.storage for ref in self.results if ref is not None)

    @property
    def is_elementwise(self) -> bool:
        """Return whether an element of the one result depends only on the same elements of the arguments."""
        if torch.Tag.pointwise not in self.target.tags or len(self.results) > 1:
            return False
        nested = (self.kwargs, [arg for arg in self.args if isinstance(arg, (list, tuple))])
        return not any(
            isinstance(leaf, (StorageRef, TapeConstant, GeneratorRef)) for leaf in pytree.tree_leaves(nested)
        )


class Draws(Protocol):
    """Random numbers that depend on a draw's place on the tape, not on earlier draws (``initial.partial_values``)."""

    def draw(self, index: int, entry: TapeEntry) -> torch.Tensor | None:
        """Return the result of a draw; None if the operator has to run."""

    def key(self, index: int) -> str:
        """Return a key for the position of a draw."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class InitTape:
    """The recording of a ``deferred()`` context. Grows while the context is open, read-only afterwards.

    ``observed``: the model's constructor read random values (``.item()``, a loop until all samples fit), so the
    recorded operators are valid for ``seed`` only. ``in_order``: the CPU's generators produce the random numbers in
    sequence; otherwise each draw has numbers of its own (``initial.partial_values``).
    """

    seed: int
    entries: list[TapeEntry] = field(default_factory=list)
    num_storages: int = 0
    observed: bool = False
    in_order: bool = True
    # Generator states after draws, as far as `value` needed them.
    _states: dict[int, torch.Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> InitTape:
        return self  # a copied module has the same initial values

    def new_storage(self) -> int:
        self.num_storages += 1
        return self.num_storages - 1

    def seed_of(self, seed: int | None) -> int:
        """Return ``seed``, or the tape's own if it is None. Raises ShardwiseError if ``observed`` and the seed differs
        from the recorded one."""
        if seed not in (None, self.seed) and self.observed:
            raise ShardwiseError(
                f"cannot replay with seed {seed} a recording with seed {self.seed}: the constructor read random "
                "values while it was recorded, and may act differently on other values",
                fix=f"build the model under sw.deferred(seed={seed})",
            )
        return self.seed if seed is None else seed

    def replay(
        self, refs: Mapping[str, StorageRef], seed: int | None = None, draws: Draws | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every wanted tensor with its name, each once, in the order in which they are finished.

        ``draws``: source of random numbers, by default the generators in sequence. A tensor may share its storage with
        others and may still be read by later operators. Copy it before writing to it, and drop it before asking for the
        next, or both stay in memory. The caller's generator and default dtype are unchanged, also between two tensors.
        Raises ShardwiseError as ``seed_of`` does.
        """
        seed = self.seed_of(seed)
        names: dict[int, list[str]] = defaultdict(list)
        for name, ref in refs.items():
            names[ref.storage].append(name)
        scheduled, saved = _schedule(self.entries, names, known=(), in_order=draws is None)
        run, steps = _TapeRun(seed, draws=draws), iter(scheduled)
        while True:
            with _alone(run):
                for step in steps:
                    run.execute(step.index, self.entries[step.index], save=step.index in saved)
                    if step.ready:
                        break
                    run.free(step.frees)
                else:
                    return
            for storage in step.ready:
                for name in names[storage]:
                    yield name, run.tensor(refs[name])
            run.free(step.frees)

    def value(self, ref: StorageRef, draws: Draws | None = None) -> torch.Tensor:
        """Return the tensor's value at the end of the tape so far, computed from as few operators as possible."""
        steps, _ = _schedule(self.entries, (ref.storage,), known=self._states, in_order=draws is None)
        run = _TapeRun(self.seed, self._states, draws)
        with _alone(run):
            for step in steps:
                entry = self.entries[step.index]
                run.execute(step.index, entry, save=True)
                self.observed |= entry.draw is not None
                run.free(step.frees - {ref.storage})
            return run.tensor(ref)


@dataclass(frozen=True, slots=True)
class _ReplayStep:
    """Run entry ``index``; then storages ``ready`` have their final values, and ``frees`` are not read again."""

    index: int
    ready: tuple[int, ...]
    frees: frozenset[int]


def _schedule(
    entries: list[TapeEntry], needed: Iterable[int], known: Iterable[int], in_order: bool
) -> tuple[list[_ReplayStep], frozenset[int]]:
    """Return the steps that compute the storages ``needed``, and the draws whose generator state must be kept, since a
    draw other than the next continues there. ``known``: draws after which the generator's state is already known.
    ``in_order``: a draw continues another one."""
    live = set(needed)
    unfinished, untouched = set(live), set(live)
    known = frozenset(known)
    continued: set[int] = set()  # draws that a later running operator continues
    steps: list[_ReplayStep] = []
    draws: list[tuple[int, Draw]] = []
    for index in range(len(entries) - 1, -1, -1):
        if not live and not continued:
            break
        entry = entries[index]
        outputs = entry.writes | entry.creates
        if live.isdisjoint(outputs) and index not in continued:
            continue
        continued.discard(index)
        if entry.draw is not None and in_order:
            draws.append((index, entry.draw))
            after = entry.draw.after
            if isinstance(after, int) and after != SEEDED and after not in known:
                continued.add(after)
        touched = outputs | entry.reads
        ready = unfinished & outputs
        steps.append(_ReplayStep(index, tuple(sorted(ready)), frozenset((touched - live) | (touched & untouched))))
        untouched -= touched
        unfinished -= ready
        live -= entry.creates | entry.overwrites
        live |= entry.reads | (entry.writes - entry.overwrites)
    at: dict[int, int] = {}
    saved: set[int] = set()
    for index, draw in reversed(draws):
        if isinstance(draw.after, int) and draw.after not in (SEEDED, at.get(draw.generator)):
            saved.add(draw.after)
        at[draw.generator] = index
    return steps[::-1], frozenset(saved)


class _TapeRun:
    """One execution of (a part of) a tape: the live storages and the states of the generators."""

    def __init__(self, seed: int, saved: dict[int, torch.Tensor] | None = None, draws: Draws | None = None) -> None:
        self.seed, self.draws = seed, draws
        self.saved = {} if saved is None else saved
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.generators: dict[int, torch.Generator] = {DEFAULT_GENERATOR: torch.default_generator}
        self.at: dict[int, int] = {}  # the last draw on each generator
        self.default_state: torch.Tensor | None = None  # of the global generator, while the run is suspended

    def execute(self, index: int, entry: TapeEntry, save: bool) -> None:
        """Run one entry; ``save`` keeps the generator's state after it."""
        torch.set_default_dtype(entry.default_dtype)
        if entry.draw is not None:
            self._seek(entry.draw, index)
        args, kwargs = pytree.tree_map(self._real, (entry.args, entry.kwargs))
        in_parts = None if self.draws is None else self._as_in_parts(self.draws, index, entry, args)
        if in_parts is not None and entry.writes:
            in_parts = args[0].copy_(in_parts)
        out = entry.target(*args, **kwargs) if in_parts is None else in_parts
        if any(ref is not None for ref in entry.results):
            operands = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            inputs = {operand.untyped_storage().data_ptr() for operand in operands}
            for ref, tensor in zip(entry.results, pytree.tree_leaves(out), strict=True):
                if ref is not None:
                    # torch.empty, as it is recorded: zeros, so that all ranks agree
                    cleared = entry.target is torch.ops.aten.empty_strided.default
                    self.storages[ref.storage] = _fitted(tensor, ref, inputs, cleared=cleared)
        if entry.draw is not None:
            self.at[entry.draw.generator] = index
            if save:
                self.saved[index] = self.generators[entry.draw.generator].get_state()

    @staticmethod
    def _as_in_parts(draws: Draws, index: int, entry: TapeEntry, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the result with the same bits as when its parts are computed alone; None if that does not apply."""
        if entry.draw is not None:
            return draws.draw(index, entry)
        if not entry.is_elementwise:
            return None
        if entry.writes:
            copy = args[0].clone(memory_format=torch.contiguous_format)
            return apply_elementwise(entry.target, (copy, *args[1:]), entry.kwargs, copy.shape)
        shape = next(ref.shape for ref in entry.results if ref is not None)
        return apply_elementwise(entry.target, args, entry.kwargs, shape)

    def free(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.storages.pop(storage, None)

    def tensor(self, ref: StorageRef) -> torch.Tensor:
        if ref.storage not in self.storages:
            assert ref.covers, f"storage {ref.storage} is read before it is filled"
            blank = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype)  # about to be overwritten whole
            self.storages[ref.storage] = blank.untyped_storage()
            return blank
        window: Any = torch.empty(0, dtype=ref.dtype)
        with torch.no_grad():
            window.set_(self.storages[ref.storage], ref.offset, ref.shape, ref.stride)
            window = torch.conj(window) if ref.conjugate else window
            seen: torch.Tensor = torch._neg_view(window) if ref.negative else window
        return seen

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, StorageRef):
            return self.tensor(leaf)
        if isinstance(leaf, GeneratorRef):
            return self.generators.setdefault(leaf.index, torch.Generator())
        if isinstance(leaf, TapeConstant):
            return leaf.value()
        return leaf

    def _seek(self, draw: Draw, index: int) -> None:
        """Set the generator to the state in which the draw found it, or to the draw's own seed."""
        generator = self.generators.setdefault(draw.generator, torch.Generator())
        if self.draws is not None:
            digest = hashlib.blake2b(self.draws.key(index).encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        elif isinstance(draw.after, torch.Tensor):
            generator.set_state(draw.after)
        elif draw.after == SEEDED:
            generator.manual_seed(self.seed)
        elif draw.after != self.at.get(draw.generator):
            generator.set_state(self.saved[draw.after])


@contextmanager
def _alone(run: _TapeRun) -> Iterator[None]:
    """Give the run the global generator, default dtype and grad mode within the context; restore them afterwards."""
    state, dtype = torch.default_generator.get_state(), torch.get_default_dtype()
    if run.default_state is not None:
        torch.default_generator.set_state(run.default_state)
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            yield
        run.default_state = torch.default_generator.get_state()
    finally:
        torch.default_generator.set_state(state)
        torch.set_default_dtype(dtype)


def _fitted(tensor: torch.Tensor, ref: StorageRef, inputs: set[int], cleared: bool) -> torch.UntypedStorage:
    """Return the storage of a new tensor, laid out as recorded, shared with no input. ``cleared``: zero it."""
    as_recorded = (tensor.shape, tensor.dtype) == (ref.shape, ref.dtype)
    assert as_recorded, f"recorded {ref}, replayed {tensor.shape} {tensor.dtype}"
    storage: Any = tensor.untyped_storage()
    same_strides = tensor.stride() == ref.stride and tensor.storage_offset() == ref.offset
    if not same_strides or (storage.data_ptr() in inputs and storage.nbytes() > 0):
        reach = sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True))
        memory = torch.zeros(ref.offset + reach + 1 if tensor.numel() else 0, dtype=ref.dtype)
        memory.as_strided(ref.shape, ref.stride, ref.offset).copy_(tensor)
        return memory.untyped_storage()
    if cleared:
        storage.fill_(0)
    untyped: torch.UntypedStorage = storage
    return untyped


def op_name(func: OpOverload) -> str:
    """Return the name of a PyTorch operator, such as ``normal_``."""
    return func._schema.name.removeprefix("aten::")
