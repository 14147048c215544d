"""The full initial values of a module, one tensor at a time.

They depend on the module and the seed, never on a plan: every rank walks over the same values and keeps its slices.
Where the values come from is decided per tensor:

======================================  ===========================================================================
built under ``sw.deferred()``           its tape is replayed: bit for bit what the CPU would have built
real (CPU or another device)            the tensor itself
meta, and ``init`` is given             ``init(name, tensor)`` fills it
meta, from ``torch.device("meta")``     the initialisers of its modules, recorded now and replayed
======================================  ===========================================================================

The last row calls what PyTorch and Hugging Face models use themselves, children first: every module's
``reset_parameters()`` (or ``_reset_parameters()``), then the ``_init_weights(module)`` of the closest module above that
has one. Each call has a generator of its own, seeded from the seed and the module's path, so a tensor's values do not
depend on what else the model holds.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ShardwiseError, problem
from shardwise.runtime.initial.deferred import Recorder, recorded, recorded_slot
from shardwise.runtime.initial.replay import Ref, Tape

Init = Callable[[str, torch.Tensor], None]


def full_tensors(
    module: nn.Module, seed: int | None = None, init: Init | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields ``(name, full tensor)`` for every parameter and buffer of the module, tied ones once, under their first
    name, in no particular order.

    Tensors made here are on the CPU and in the dtype the module has now; real ones are detached, not copied. ``seed``:
    by default a recorded model's own, and 0 for a model on meta. ``init`` fills the plain meta tensors (zeros when it
    gets them) in place of their modules' initialisers. Memory: the consumer must drop a tensor before it asks for the
    next; then the peak is about the largest tensor and its temporaries. The module is not changed. Raises
    ShardwiseError before the first tensor, naming every tensor that nothing initialises.
    """
    tapes: dict[Tape, dict[str, Ref]] = {}
    dtypes: dict[str, torch.dtype] = {}
    real: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, owner, tensor in _owned_tensors(module):
        found = _recorded(name, owner, tensor)
        if found is not None:
            tape, ref = found
            tapes.setdefault(tape, {})[name] = ref
            dtypes[name] = tensor.dtype
        elif tensor.is_meta:
            plain[name] = tensor
        else:
            real[name] = tensor
    initialisers: tuple[Tape, dict[str, Ref]] | None = None
    if plain and init is None:
        initialisers = _record_initialisers(module, plain, 0 if seed is None else seed)

    for name, tensor in real.items():
        yield name, tensor.detach()
    for tape, wanted in tapes.items():
        for name, tensor in tape.replay(wanted, seed):
            yield name, tensor.to(dtypes[name])
            del tensor
    if initialisers is not None:
        yield from initialisers[0].replay(initialisers[1])
    elif init is not None:
        for name, tensor in plain.items():
            yield name, _filled(init, name, tensor, 0 if seed is None else seed)


def _owned_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """(canonical name, the module that holds it, tensor): parameters, then buffers, each tensor once."""
    named: tuple[Callable[[nn.Module], dict[str, Any]], ...] = (
        lambda owner: owner._parameters,
        lambda owner: owner._buffers,
    )
    seen: set[torch.Tensor] = set()
    lazy: list[str] = []
    for owned in named:
        for path, owner in module.named_modules():
            for key, tensor in owned(owner).items():
                if tensor is None or tensor in seen:
                    continue
                seen.add(tensor)
                name = f"{path}.{key}" if path else key
                if is_lazy(tensor):
                    lazy.append(name)
                else:
                    yield name, owner, tensor
    if lazy:
        raise ShardwiseError(
            problem(
                f"these parameters have no shape yet: {', '.join(lazy)}",
                fix="run the lazy modules once on an example input, or give them their sizes",
            )
        )


def _recorded(name: str, owner: nn.Module, tensor: torch.Tensor) -> tuple[Tape, Ref] | None:
    if not tensor.is_meta:
        return None
    found = recorded(tensor)
    if found is not None:
        return found
    found = recorded_slot(owner, name.rpartition(".")[2])
    return found if found is not None and found[1].shape == tuple(tensor.shape) else None


def _record_initialisers(module: nn.Module, plain: dict[str, torch.Tensor], seed: int) -> tuple[Tape, dict[str, Ref]]:
    """Calls the initialisers that concern the plain meta tensors, and records them.

    What they do to other tensors of the module has no effect.
    """
    meta = {id(tensor) for tensor in plain.values()}
    concerned = {
        path
        for path, sub in module.named_modules()
        if any(id(tensor) in meta for tensor in (*sub.parameters(), *sub.buffers()))
    }
    recorder = Recorder(Tape(seed))
    with recorder.recording(), torch.no_grad():
        wanted = {name: recorder.adopt(tensor) for name, tensor in plain.items()}
        for _, _, tensor in _owned_tensors(module):
            recorder.adopt(tensor)
        for path, kind, initialise in _initialisers(module):
            if path in concerned:
                torch.default_generator.manual_seed(stable_seed(seed, path, kind))
                initialise()
    tape = recorder.tape
    filled = {storage for entry in tape.entries for storage in entry.writes}
    missing = [name for name, ref in wanted.items() if ref.storage not in filled]
    if missing:
        raise ShardwiseError(
            problem(
                f"nothing initialises {len(missing)} of the module's meta tensors: {', '.join(missing)}",
                fix="build the model under sw.deferred(), or on the CPU, or give init=, a callable (name, tensor)",
            )
        )
    return tape, wanted


def _initialisers(module: nn.Module) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(module path, kind, call): all resets, then all ``_init_weights``, each children first.

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
    """(path, module, the ``_init_weights`` in force for it); a shared module once, under its first path."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    own = getattr(module, "_init_weights", None)
    in_force = own if callable(own) and len(inspect.signature(own).parameters) == 1 else above
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name, in_force, seen)
    yield path, module, in_force


def _filled(init: Init, name: str, meta: torch.Tensor, seed: int) -> torch.Tensor:
    tensor = torch.zeros(meta.shape, dtype=meta.dtype)
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(stable_seed(seed, name))
    try:
        with torch.no_grad():
            init(name, tensor)
    finally:
        torch.default_generator.set_state(state)
    return tensor


def stable_seed(seed: int, *path: str) -> int:
    """A generator seed for one place in a model: the same in every process and version of Python.

    >>> stable_seed(0, "layers.0")
    3267655600012413936
    """
    digest = hashlib.blake2b("\0".join((str(seed), *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
