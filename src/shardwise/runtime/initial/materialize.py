"""The initial values of a module, one tensor at a time.

They depend on the module and the seed, never on a plan. The source of the values is chosen per tensor:

======================================  ===========================================================================
real (CPU or another device)            the tensor itself
without values, and ``init`` is given   ``init(name, tensor)`` fills it, or returns NotImplemented: see below
built under ``sw.deferred()``           its tape: a rank computes its own parts (``partial_values``); with
                                        ``values="cpu"`` it is replayed, bit for bit as the CPU would have built it
meta, from ``torch.device("meta")``     the initialisers of its modules, recorded now; a rank computes its parts
======================================  ===========================================================================

The last row calls the initialisers that PyTorch and Hugging Face models use, children first: every module's
``reset_parameters()`` (or ``_reset_parameters()``), then the ``_init_weights(module)`` of the closest module above that
has one. Each call has its own generator, seeded from the seed and the module's path, so a tensor's values do not depend
on the rest of the model.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ShardwiseError
from shardwise.layouts.text import format_dtype
from shardwise.runtime.initial.deferred import TapeRecorder, find_record
from shardwise.runtime.initial.partial_values import NotByParts, Regions
from shardwise.runtime.initial.replay import InitTape, StorageRef

# Fills the tensor, or returns its replacement, or NotImplemented for the module's own value.
Init = Callable[[str, torch.Tensor], Any]
# Name of a tensor without values -> (the tensor, its record).
Empty = dict[str, tuple[torch.Tensor, tuple[InitTape, StorageRef] | None]]


@dataclass(frozen=True, slots=True)
class PartialTensor:
    """A recorded tensor of which any part can be computed. ``dtype``: the one that the module has now."""

    regions: Regions
    ref: StorageRef
    dtype: torch.dtype

    def box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return rows ``[offset, offset + size)`` of every dim. Raises NotByParts."""
        return self.regions.box(self.ref, offsets, sizes).to(self.dtype)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, computed by parts or by replaying the tape."""
        try:
            return self.box((0,) * len(self.ref.shape), self.ref.shape)
        except NotByParts:
            ((_, tensor),) = self.regions.tape.replay({"": self.ref}, self.regions.seed, self.regions)
            return tensor.to(self.dtype)


def full_tensors(
    module: nn.Module, seed: int | None = None, init: Init | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``initial_values`` with every tensor whole."""
    for name, value in initial_values(module, seed, init):
        yield name, value.whole() if isinstance(value, PartialTensor) else value
        del value


def initial_values(
    module: nn.Module, seed: int | None = None, init: Init | None = None, known: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor | PartialTensor]]:
    """Yield ``(name, whole tensor or PartialTensor)`` for every parameter and buffer that is not ``known`` elsewhere.

    Tied tensors appear once, under their first name; the order is unspecified. Tensors computed here are on the CPU and
    in the module's current dtype; existing ones are detached, not copied. ``seed``: by default a recorded model's own,
    and 0 for a model on meta. ``init`` is called for every tensor without values, recorded or on meta. It fills the
    tensor that it is given (zeros), returns another one, or returns NotImplemented for the value that the tensor has
    without ``init``. Memory: the consumer must drop a tensor before it asks for the next; then the peak is about the
    largest tensor and its temporaries. The module is not changed. Raises ShardwiseError naming every tensor that
    nothing initialises (without ``init``: before the first one), for an ``init`` that would never be called, and for
    values that do not fit.
    """
    real: dict[str, torch.Tensor] = {}
    empty: Empty = {}
    for name, owner, tensor in _owned_tensors(module):
        if name in known:
            continue
        if tensor.is_meta:
            empty[name] = tensor, find_record(tensor, owner, name.rpartition(".")[2])
        else:
            real[name] = tensor
    left = empty
    if init is not None:
        if real and not empty and not known:
            what = f"init= would never be called: all {len(real)} parameters and buffers of the module have values"
            fix = 'build the module under sw.deferred() or torch.device("meta"), or omit init='
            raise ShardwiseError(what, fix=fix)
        left = {}
        for name, (tensor, recording) in empty.items():
            value = _filled(init, name, tensor, _seed_of(recording, seed))
            if value is None:
                left[name] = tensor, recording
            else:
                yield name, value
            del value
    yield from _own_values(module, left, seed)
    for name, tensor in real.items():
        yield name, tensor.detach()


def _own_values(
    module: nn.Module, empty: Empty, seed: int | None
) -> Iterator[tuple[str, torch.Tensor | PartialTensor]]:
    tapes: dict[InitTape, dict[str, StorageRef]] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, (tensor, recording) in empty.items():
        if recording is None:
            plain[name] = tensor
        else:
            tape, ref = recording
            tapes.setdefault(tape, {})[name] = ref
    if plain:
        tape, storage_refs = _record_initialisers(module, plain, _seed_of(None, seed))
        tapes[tape] = storage_refs
    for tape, storage_refs in tapes.items():
        own_seed = tape.seed_of(seed)  # equal to the tape's for recorded initialisers
        if tape.in_order:
            for name, tensor in tape.replay(storage_refs, own_seed):
                yield name, tensor.to(empty[name][0].dtype)
                del tensor
        else:
            regions = Regions(tape, own_seed)
            for name, ref in storage_refs.items():
                yield name, PartialTensor(regions, ref, empty[name][0].dtype)


def _seed_of(recording: tuple[InitTape, StorageRef] | None, seed: int | None) -> int:
    if seed is not None:
        return seed
    return 0 if recording is None else recording[0].seed


def _owned_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield (canonical name, owning module, tensor): parameters, then buffers, each tensor once."""
    seen: set[torch.Tensor] = set()
    lazy: list[str] = []
    for owned in ("_parameters", "_buffers"):
        for path, owner in module.named_modules():
            for key, tensor in getattr(owner, owned).items():
                if tensor is None or tensor in seen:
                    continue
                seen.add(tensor)
                name = f"{path}.{key}" if path else key
                if is_lazy(tensor):
                    lazy.append(name)
                else:
                    yield name, owner, tensor
    if lazy:
        what = f"these parameters have no shape yet: {', '.join(lazy)}"
        fix = "run the lazy modules once on an example input, or construct them with their sizes"
        raise ShardwiseError(what, fix=fix)


def _record_initialisers(
    module: nn.Module, plain: dict[str, torch.Tensor], seed: int
) -> tuple[InitTape, dict[str, StorageRef]]:
    """Call the initialisers that concern the plain meta tensors, and record them.

    Their effects on other tensors of the module are discarded.
    """
    meta = {id(tensor) for tensor in plain.values()}
    concerned = {
        path
        for path, sub in module.named_modules()
        if any(id(tensor) in meta for tensor in (*sub.parameters(), *sub.buffers()))
    }
    recorder = TapeRecorder(InitTape(seed, in_order=False))
    with recorder.recording(), torch.no_grad():
        storage_refs = {name: recorder.adopt(tensor) for name, tensor in plain.items()}
        for _, _, tensor in _owned_tensors(module):
            recorder.adopt(tensor)
        for path, kind, initialise in _initialisers(module):
            if path in concerned:
                torch.default_generator.manual_seed(stable_seed(seed, path, kind))
                initialise()
    tape = recorder.tape
    filled = {storage for entry in tape.entries for storage in entry.writes}
    missing = [name for name, ref in storage_refs.items() if ref.storage not in filled]
    if missing:
        what = f"nothing initialises {len(missing)} of the module's meta tensors: {', '.join(missing)}"
        fix = "build the model under sw.deferred(), or on the CPU, or pass init=, a callable (name, tensor)"
        raise ShardwiseError(what, fix=fix)
    return tape, storage_refs


def _initialisers(module: nn.Module) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield (module path, kind, call): all resets, then all ``_init_weights``, each children first.

    This is the order of a constructor that ends with ``self.apply(self._init_weights)``.
    """
    order = list(_children_first(module))
    for path, sub, _ in order:
        for kind in ("reset_parameters", "_reset_parameters"):
            reset = getattr(sub, kind, None)
            if callable(reset):
                yield path, kind, reset
                break
    for path, sub, init_weights in order:
        if init_weights is not None:
            yield path, "_init_weights", partial(init_weights, sub)


def _children_first(
    module: nn.Module, path: str = "", above: Callable[..., object] | None = None, seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module, Callable[..., object] | None]]:
    """Yield (path, module, the ``_init_weights`` in force for it); a shared module once, under its first path."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    defined = getattr(module, "_init_weights", None)
    in_force = defined if callable(defined) and len(inspect.signature(defined).parameters) == 1 else above
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name, in_force, seen)
    yield path, module, in_force


def _filled(init: Init, name: str, meta: torch.Tensor, seed: int) -> torch.Tensor | None:
    """Return the tensor that ``init`` gives; None if it leaves the tensor to the module."""
    tensor = torch.zeros(meta.shape, dtype=meta.dtype)
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(stable_seed(seed, name))
    try:
        with torch.no_grad():
            value = init(name, tensor)
    except LookupError as error:
        what = f"init= failed for {name}: {type(error).__name__}: {error}"
        fix = "let it return NotImplemented for unknown tensors, which then get the module's own values"
        raise ShardwiseError(what, fix=fix) from error
    finally:
        torch.default_generator.set_state(state)
    if value is NotImplemented:
        return None
    if value is not None and not isinstance(value, torch.Tensor):
        what = f"init= returned a {type(value).__name__} for {name}"
        fix = "fill the tensor passed to it, return a tensor, or return NotImplemented for the module's value"
        raise ShardwiseError(what, fix=fix)
    if value is not None and value.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        tensor = value.detach()  # not a view of the given tensor
    if (tensor.shape, tensor.dtype) != (meta.shape, meta.dtype):
        raise ShardwiseError(
            f"init= returned {name} as {format_dtype(tensor.dtype)}{list(tensor.shape)}, but the module has it as "
            f"{format_dtype(meta.dtype)}{list(meta.shape)}",
            fix=f"return that shape and dtype (value.to({meta.dtype})), or NotImplemented for the module's own value",
        )
    return tensor


def stable_seed(seed: int, *path: str) -> int:
    """Return a generator seed for one path in a model, the same in every process and version of Python.

    >>> stable_seed(0, "layers.0")
    3267655600012413936
    """
    digest = hashlib.blake2b("\0".join((str(seed), *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
