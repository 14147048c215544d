"""``deferred()``: build a module without its parameters, and record how to fill them.

Inside the context a tensor is created on the meta device: it has a shape, a dtype and a storage without memory. A
dispatch mode sees every operator below autograd and records those that create or change such tensors on a tape
(``runtime.initial.replay``). The link from a meta tensor to the tape is stored on its *storage*, which
``nn.Parameter(t)``, ``t.data``, views and tied weights share.

The constructor must behave as if it ran on the CPU. Three measures ensure this:

* ``device`` and ``is_meta`` of a recorded tensor answer as a CPU tensor would (torch's own initialisers skip meta
  tensors);
* an operator that gives Python a value (``.item()``, ``if tensor:``, ``tolist``) or a size that depends on values
  (``nonzero``) is computed, from the part of the tape that it needs;
* changes of the generator that are not draws (``torch.manual_seed``, ``fork_rng``) are detected: after each recorded
  draw the generator is seeded with a number that identifies the draw. The next draw then finds that number, an
  earlier draw's, or a state that the model set itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise.dispatch_mode import DispatchMode
from shardwise.errors import ShardwiseError
from shardwise.graph.origins import calling_line
from shardwise.graph.schema import written_arguments
from shardwise.programs.forms import is_dense
from shardwise.runtime.initial.partial_values import FILLS, Regions
from shardwise.runtime.initial.replay import (
    DEFAULT_GENERATOR,
    SEEDED,
    Draw,
    GeneratorRef,
    InitTape,
    StorageRef,
    TapeConstant,
    TapeEntry,
    op_name,
)

aten = torch.ops.aten

_LINK = "_shardwise_link"  # on a meta storage: (tape, storage index)
_SLOTS = "_shardwise_slots"  # on a module: (tape, its parameters and buffers when the context ended)
_MARK = 0x5348_4152_4400_0000  # seed that stands for "draw 0"; draw i is _MARK + 1 + i
_CONSTANT_COPY_BYTES = 1 << 20  # real tensors up to this size are copied onto the tape, larger ones are referred to

# Operators that overwrite their whole first tensor, whatever it held before.
_OVERWRITES = FILLS | {"zero_", "fill_", "copy_"}
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


@contextmanager
def deferred(seed: int = 0, *, values: Literal["parallel", "cpu"] = "parallel") -> Iterator[InitTape]:
    """Build modules inside with meta tensors as parameters, and a tape that can compute their values.

    Memory left uninitialised (``torch.empty``) is zero. The global generator, and generators passed explicitly, are
    restored when the context ends. ``device="meta"`` inside changes nothing.

    Args:
        seed: Seed of the random numbers.
        values: ``"parallel"``: every draw has random numbers of its own, and a rank computes only those of its shards
            (``runtime.initial.partial_values``). They have the same distributions, and are the same under every plan
            and number of ranks, but differ from those of the CPU's generator. ``"cpu"``: bit for bit what
            ``torch.manual_seed(seed)`` and the same code would have built on the CPU; every rank draws the whole model
            for it, one tensor at a time.

    Returns:
        A context manager that yields the ``InitTape``.

    Raises:
        ShardwiseError: With the line of user code, if something cannot be recorded: devices other than the CPU, random
            writes into tensors from outside.

    >>> with deferred(seed=3) as tape:
    ...     layer = nn.Linear(4, 2)
    >>> layer.weight.device.type, len(tape.entries) > 0
    ('meta', True)
    """
    if values not in ("parallel", "cpu"):
        raise ShardwiseError(f'values are "parallel" (each rank draws its part) or "cpu" (bit for bit), not {values!r}')
    tape = InitTape(seed, in_order=values == "cpu")
    recorder = TapeRecorder(tape)
    modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        modules.add(module)

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(note).remove)
        stack.callback(register_module_buffer_registration_hook(note).remove)
        stack.enter_context(recorder.recording())
        yield tape
    for module in modules:
        owned = {**module._parameters, **module._buffers}
        refs = {
            name: record[1] for name, tensor in owned.items() if tensor is not None and (record := find_record(tensor))
        }
        module.__dict__[_SLOTS] = tape, refs


def find_record(
    tensor: torch.Tensor, owner: nn.Module | None = None, name: str = ""
) -> tuple[InitTape, StorageRef] | None:
    """Return the tape that knows the tensor's value and the tensor's reference on it; None if nothing was recorded.

    The attribute ``name`` of an ``owner`` is found as of the end of its ``deferred()`` context, too: ``to(dtype)`` and
    ``copy.deepcopy`` of a module replace tensors.
    """
    link = _link(tensor)
    if link is not None:
        return link[0], _ref(tensor, link[1])
    tape, refs = vars(owner).get(_SLOTS, (None, {})) if owner is not None else (None, {})
    ref = refs.get(name)
    return (tape, ref) if ref is not None and ref.shape == tuple(tensor.shape) else None


class TapeRecorder(DispatchMode):
    """Records operators on a tape. ``adopt`` adds tensors from outside while recording."""

    def __init__(self, tape: InitTape) -> None:
        super().__init__()
        self.tape = tape
        self._paused = False
        self._adopted: list[tuple[torch.UntypedStorage, tuple[InitTape, int] | None]] = []  # with their previous links
        self._generators: list[torch.Generator] = [torch.default_generator]
        self._states: list[torch.Tensor] = []  # of the generators, as they were found

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._states = [torch.default_generator.get_state()]
        torch.default_generator.manual_seed(_MARK + 1 + SEEDED)
        try:
            with self, _AsOnCpu(self):
                yield
        finally:
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)
            for storage, link in self._adopted:
                setattr(storage, _LINK, link)

    def adopt(self, tensor: torch.Tensor) -> StorageRef:
        """Treat a tensor from outside as if it were created here by ``torch.empty``. Nothing is ever written to it."""
        link = _link(tensor)
        if link is None or link[0] is not self.tape:
            storage = tensor.untyped_storage()
            self._adopted.append((storage, link))
            link = (self.tape, self.tape.new_storage())
            setattr(storage, _LINK, link)
            whole = _ref(tensor, link[1])
            if not whole.covers:
                whole = StorageRef(link[1], tensor.dtype, 0, (storage.nbytes() // tensor.dtype.itemsize,), (1,), True)
            self._append_empty(whole)
        return _ref(tensor, link[1])

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a recorded tensor's current value; any other tensor itself."""
        link = _link(tensor)
        if link is None:
            return tensor
        paused, self._paused = self._paused, True
        try:
            tape = self._check_tape(link)[0]
            draws = None if tape.in_order else Regions(tape, tape.seed)
            return tape.value(_ref(tensor, link[1]), draws)
        finally:
            self._paused = paused

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if self._paused:
                return func(*args, **(kwargs or {}))
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        links = [link for tensor in tensors if (link := _link(tensor)) is not None]
        _require_cpu(func, kwargs.get("device"))
        if not links and tensors:
            return self._from_outside(func, args, kwargs, tensors)
        for link in links:
            self._check_tape(link)
        if func.is_view or (torch.Tag.inplace_view in func.tags and func is not aten.resize_.default):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta and _link(tensor) is None for tensor in written) or not _returns_tensors(func):
            return self._run(func, args, kwargs)
        return self._record(func, args, kwargs, written)

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:

        def real(leaf: Any) -> Any:
            return self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(real, (args, kwargs))
        return func(*args, **kwargs)

    def _from_outside(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Run an operator over unrecorded tensors; record it if it draws numbers or imports data."""
        if any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default:  # torch.tensor([1, 2]) and the like
            return self._record(aten.clone.default, args, {}, [])
        if not _is_random(func):
            return func(*args, **kwargs)
        if _written(func, args, kwargs):
            raise _problem(
                func, "draws random numbers into a tensor from outside", "create the tensor inside, or fill it before"
            )
        return self._record(func, args, kwargs, [])

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> Any:
        originals: dict[int, torch.Tensor] = {}

        def on_meta(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return None
            if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
                return leaf
            stand_in = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            originals[id(stand_in)] = leaf
            return stand_in

        meta_args, meta_kwargs = pytree.tree_map(on_meta, (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            factory = not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
            if factory or kwargs.get("device") is not None:
                meta_kwargs["device"], kwargs["device"] = torch.device("meta"), torch.device("cpu")
        before = pytree.tree_map(self._leaf, (args, kwargs))
        try:
            out = func(*meta_args, **meta_kwargs)
        except NotImplementedError as error:
            if written:
                raise _problem(
                    func, "changes a tensor and has no meta kernel", "make this change to the values with init="
                ) from error
            returned = self._run(func, args, kwargs)
            return pytree.tree_map_only(
                torch.Tensor, lambda x: self._record(aten.clone.default, (x,), {}, []), returned
            )
        results = tuple(
            self._new(leaf) if isinstance(leaf, torch.Tensor) and id(leaf) not in originals else None
            for leaf in pytree.tree_leaves(out)
        )
        if op_name(func) in _EMPTY and not written:
            for ref in results:
                assert ref is not None
                self._append_empty(ref)
        else:
            args, kwargs = before
            self._append(func, args, kwargs, results, frozenset(ref.storage for ref in map(self._leaf, written)))
        return pytree.tree_map(lambda leaf: originals.get(id(leaf), leaf), out)

    def _append_empty(self, ref: StorageRef) -> None:
        layout = {"dtype": ref.dtype, "device": torch.device("cpu")}
        self._append(aten.empty_strided.default, (ref.shape, ref.stride), layout, (ref,))

    def _append(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: tuple[StorageRef | None, ...],
        writes: frozenset[int] = frozenset(),
    ) -> None:
        refs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, StorageRef)]
        fills = op_name(func) in _OVERWRITES and args and isinstance(args[0], StorageRef) and args[0].covers
        overwrites = frozenset({args[0].storage}) if fills else frozenset()
        reads = frozenset(ref.storage for position, ref in enumerate(refs) if not (fills and position == 0))
        draw = self._draw(kwargs) if _is_random(func) else None
        dtype = torch.get_default_dtype()
        self.tape.entries.append(
            TapeEntry(func, args, dict(kwargs), results, reads, writes, overwrites - reads, dtype, draw)
        )

    def _draw(self, kwargs: Mapping[str, Any]) -> Draw:
        """Return the point from which the draw about to be recorded continues, and mark the generator with the draw."""
        given_generator = kwargs.get("generator")
        index = given_generator.index if isinstance(given_generator, GeneratorRef) else DEFAULT_GENERATOR
        generator, here = self._generators[index], len(self.tape.entries)
        after = generator.initial_seed() - _MARK - 1
        is_mark = (SEEDED if index == DEFAULT_GENERATOR else 0) <= after < here
        draw = Draw(index, after if is_mark else generator.get_state())
        generator.manual_seed(_MARK + 1 + here)
        return draw

    def _leaf(self, leaf: Any) -> Any:
        """Return an argument in the form stored on the tape."""
        if isinstance(leaf, torch.Generator):
            if not any(leaf is generator for generator in self._generators):
                self._generators.append(leaf)
                self._states.append(leaf.get_state())
            return GeneratorRef(next(i for i, generator in enumerate(self._generators) if generator is leaf))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        link = _link(leaf)
        if link is not None:
            return _ref(leaf, link[1])
        if leaf.is_meta:
            what = f"a meta tensor of shape {list(leaf.shape)} is used to initialise the model, but it has no values"
            raise ShardwiseError(what, source=calling_line(), fix="create it inside sw.deferred()")
        kept = leaf.clone() if leaf.untyped_storage().nbytes() <= _CONSTANT_COPY_BYTES else leaf
        return TapeConstant(kept, kept._version)

    def _new(self, tensor: torch.Tensor) -> StorageRef | None:
        """Return the reference of a new meta tensor; None if its storage is already on the tape."""
        if _link(tensor) is not None:
            return None
        index = self.tape.new_storage()
        setattr(tensor.untyped_storage(), _LINK, (self.tape, index))
        return _ref(tensor, index)

    def _check_tape(self, link: tuple[InitTape, int]) -> tuple[InitTape, int]:
        if link[0] is not self.tape:
            what = "a tensor recorded in one deferred() context is used in another"
            raise ShardwiseError(what, source=calling_line(), fix="build the whole model in one sw.deferred() context")
        return link


class _AsOnCpu(TorchFunctionMode):
    """Makes recorded tensors answer questions about themselves as CPU tensors would."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        tensor: Any = torch.Tensor
        self._answers = {
            tensor.device.__get__: torch.device("cpu"),
            tensor.is_meta.__get__: False,
            tensor.is_cpu.__get__: True,
        }
        self._values = frozenset({tensor.tolist, tensor.numpy, tensor.__array__, tensor.__repr__})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _require_cpu(func, "cuda" if func is torch.Tensor.cuda else kwargs.get("device"))
        if args and isinstance(args[0], torch.Tensor) and _link(args[0]) is not None:
            if func in self._answers:
                return self._answers[func]
            if func in self._values:
                return func(self._recorder.value(args[0]), *args[1:], **kwargs)
            if func is torch.Tensor.cpu:
                return args[0]
            if func is torch.Tensor.to:
                return _to(*args, **kwargs)
        return func(*args, **kwargs)


def _to(tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """Run ``tensor.to(...)`` with moves to the CPU ignored."""
    if args and isinstance(args[0], torch.Tensor):
        return tensor.to(args[0].dtype, copy=copy)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    chosen = tensor.dtype if dtype is None else dtype
    _require_cpu(torch.Tensor.to, device)
    return tensor.to(chosen, copy=copy, memory_format=memory_format or torch.preserve_format)


def _require_cpu(func: Callable[..., Any], device: torch.device | str | int | None) -> None:
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        fix = "build the model on the CPU: each rank moves its own shards to its device"
        raise _problem(func, f"makes a tensor on {torch.device(device)}", fix)


def _problem(func: Callable[..., Any], what: str, fix: str) -> ShardwiseError:
    name = str(func) if isinstance(func, OpOverload) else getattr(func, "__name__", str(func))
    return ShardwiseError(f"deferred() cannot record {name}: it {what}", source=calling_line(), fix=fix)


def _link(tensor: torch.Tensor) -> tuple[InitTape, int] | None:
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return None
    return getattr(tensor.untyped_storage(), _LINK, None)


def _ref(tensor: torch.Tensor, storage: int) -> StorageRef:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    covers = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes() and is_dense(shape, stride)
    return StorageRef(
        storage, tensor.dtype, int(tensor.storage_offset()), shape, stride, covers, tensor.is_conj(), tensor.is_neg()
    )


def _is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or any(
        argument.name == "generator" for argument in func._schema.arguments
    )


def _returns_tensors(func: OpOverload) -> bool:
    return not func._schema.returns or any("Tensor" in str(result.type) for result in func._schema.returns)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    if not func._schema.is_mutable:
        return []
    values = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    changed = [values.get(name) for name in written_arguments(func)]
    return [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, torch.Tensor)]
