"""Arguments and outputs as flat lists of leaves: tensors, and constants that are a part of the program.

A dataclass is a node, like a tuple: it is registered with ``torch.utils._pytree`` on first use. A constant is a leaf
identified by its value (a number, a string, a dtype, an enum, a function without a closure). Anything else may change,
or hold tensors, without changing its identity, and is refused by name.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError, ShardwiseError, listed
from shardwise.graph.ir import Arg, Ref

_BY_VALUE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, torch.Size, np.generic),
    *(enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format, type, BuiltinFunctionType),
)
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})
_TENSORS = (
    "its tensors (in a tuple, list, dict or dataclass), or register the class with "
    "torch.utils._pytree.register_pytree_node"
)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return leaves and spec. Dataclasses are registered on sight."""
    return pytree.tree_flatten(tree, is_leaf=_register)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a call, (args, kwargs), and their spec, which is cached for calls of tensors alone."""
    leaves = [*args, *kwargs.values()]
    if all(type(leaf) is torch.Tensor for leaf in leaves):
        return leaves, _spec_of_leaves(len(args), tuple(kwargs))
    return flatten((args, kwargs))


@lru_cache(maxsize=256)
def _spec_of_leaves(count: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    """Return the spec of a call with ``count`` leaves by position, and others by name."""
    return flatten(((0,) * count, dict.fromkeys(names, 0)))[1]


def flatten_with_path(tree: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], pytree.TreeSpec]:
    """Return leaves with their paths, and the spec. Dataclasses are registered on sight."""
    return pytree.tree_flatten_with_path(tree, is_leaf=_register)


def output_names(output: Any) -> tuple[str, ...]:
    """Return the name of every leaf of what a model returns: ``loss``, ``states[0]``; empty for a bare tensor."""
    return tuple(_output_name(path) for path, _ in flatten_with_path(output)[0])


def _output_name(path: tuple[Any, ...]) -> str:
    name = ""
    for key in path:
        part = getattr(key, "key", getattr(key, "name", None))
        name += str(key) if part is None else f"{'.' * bool(name)}{part}"
    return name


def unflatten(leaves: Iterable[Any], spec: pytree.TreeSpec) -> Any:
    """Return the tree. The spec may come from another process, so its dataclasses are registered."""
    for node in _nodes(spec):
        if isinstance(node.type, type) and dataclasses.is_dataclass(node.type):
            _register_type(node.type)
    return pytree.tree_unflatten(list(leaves), spec)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return ``args[0]``, ``kwargs['labels']``, ``args[1]['mask'][0]``."""
    return ("args" if path[0].idx == 0 else "kwargs") + "".join(map(str, path[1:]))


def constant_text(leaf: Any) -> str:
    """Return a text that identifies a constant in every process."""
    if isinstance(leaf, (FunctionType, BuiltinFunctionType)):
        return f"{leaf.__module__}.{leaf.__qualname__}"
    if isinstance(leaf, frozenset):
        return f"{{{', '.join(sorted(map(constant_text, leaf)))}}}"
    return "a device" if isinstance(leaf, torch.device) else repr(leaf)


def constants_of(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    """Return the constants of a call, a line each (``kwargs['features'] = True``); None counts as not passed."""
    pairs, _ = flatten_with_path(arguments)
    constants = ((leaf_name(path), x) for path, x in pairs if x is not None and not isinstance(x, torch.Tensor))
    return tuple(" ".join(f"{name} = {constant_text(leaf)}".split()) for name, leaf in constants)


def call_constants(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    """Return what distinguishes calls with the same shapes: constants, and which tensors get a gradient."""
    pairs, _ = flatten_with_path(arguments)
    names = (leaf_name(path) for path, x in pairs if isinstance(x, torch.Tensor) and x.requires_grad)
    return (*constants_of(arguments), *(f"{name} gets a gradient" for name in names))


def is_plain_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a tensor defined by shape, dtype and numbers: not sparse, not nested, and not of a class
    with its own operators."""
    if not isinstance(leaf, torch.Tensor) or _has_own_operators(type(leaf)):
        return False
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized


def is_plain_input(leaf: Any) -> bool:
    """Return whether a leaf is a plain tensor without attributes set by the user: a program would use those of the
    first call."""
    return is_plain_tensor(leaf) and not _marks(leaf)


def _marks(tensor: torch.Tensor) -> list[str]:
    """Return attributes set by the user; a fake tensor has some of its own."""
    fake_attributes = FakeTensor.__annotations__ if isinstance(tensor, FakeTensor) else ()
    return [name for name in vars(tensor) if not name.startswith("_") and name not in fake_attributes]


def _has_own_operators(kind: Any) -> bool:
    if kind in _PLAIN_TENSORS:
        return False
    override = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    plain: Any = torch.Tensor.__torch_function__
    functions = (plain.__func__, torch._C._disabled_torch_function_impl)
    return override not in functions or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def check_leaves(named: Iterable[tuple[str, Any]]) -> None:
    """Raise CaptureError naming the leaves that are neither plain tensors nor constants."""
    named = list(named)
    odd = [(name, x) for name, x in named if isinstance(x, torch.Tensor) and not is_plain_input(x)]
    if marked := [f"{name}.{mark}" for name, x in odd for mark in _marks(x) if is_plain_tensor(x)]:
        what = f"{listed(marked)}: a program ignores attributes set on a tensor"
        raise CaptureError(what, fix="pass it as a separate argument")
    if odd:
        shown = listed([f"{name} is {_odd_tensor(tensor)}" for name, tensor in odd])
        fix = "pass plain tensors: tensor.to_dense(), .dequantize(), .full_tensor(), or padded ones"
        raise CaptureError(f"{shown}: a plan splits plain tensors", fix=fix)
    unknown = [(name, leaf) for name, leaf in named if not isinstance(leaf, torch.Tensor) and not is_constant(leaf)]
    if unknown:
        shown = listed([f"{name} is a {type_name(leaf)}" for name, leaf in unknown])
        raise CaptureError(f"{shown}: capture cannot look inside it", fix=_fix(unknown[0][1]))


def flatten_output(output: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return leaves and spec of what a model returns. Objects of transformers that are no tree (key-value caches, which
    models return whether they are read or not) become ``NotCarried``.

    Raises CaptureError naming other objects that torch cannot flatten.
    """
    pairs, spec = flatten_with_path(output)
    named = [("".join(map(str, path)), leaf) for path, leaf in pairs]
    leaves = [NotCarried(type_name(leaf), name) if _is_by_product(leaf) else leaf for name, leaf in named]
    unknown = [
        f"output{name} is a {type_name(leaf)}"
        for (name, _), leaf in zip(named, leaves, strict=True)
        if not isinstance(leaf, (torch.Tensor, NotCarried)) and not is_constant(leaf)
    ]
    if unknown:
        raise CaptureError(f"{listed(unknown)}: its tensors cannot be returned", fix=f"return {_TENSORS}")
    return leaves, spec


class NotCarried:
    """Placeholder in an output for an object that is not sent from ranks. Any use raises ShardwiseError."""

    def __init__(self, kind: str, name: str) -> None:
        self.__dict__.update(_kind=kind, _name=name)

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return NotCarried, (self.__dict__["_kind"], self.__dict__["_name"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotCarried) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self.__reduce__()[1])

    def __repr__(self) -> str:
        return f"<{self.__dict__['_kind']}, not carried>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that are asked for, not used
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __iter__(self) -> Any:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        kind, name = self.__dict__["_kind"], self.__dict__["_name"]
        raise ShardwiseError(f"output{name} is a {kind}, which ranks lack", fix="run the module on one device")


def _is_by_product(leaf: Any) -> bool:
    return not is_constant(leaf) and any(kind.__module__.startswith("transformers.") for kind in type(leaf).__mro__)


def is_constant(leaf: Any) -> bool:
    """Return whether a leaf is identified by its value, so that a program may have it built in."""
    if isinstance(leaf, FunctionType):
        return leaf.__closure__ is None and not leaf.__defaults__ and not leaf.__kwdefaults__
    if isinstance(leaf, frozenset):
        return all(map(is_constant, frozenset.__iter__(leaf)))
    return isinstance(leaf, _BY_VALUE)


def constant_key(leaf: Any) -> object:
    """Return a key that is equal for constants that give the same program: ``1``, ``1.0`` and ``True`` differ, so do
    ``0.0`` and ``-0.0``; ``nan`` equals itself."""
    if isinstance(leaf, FunctionType):
        return FunctionType, leaf.__code__
    if isinstance(leaf, (list, tuple, frozenset)) and type(leaf) is not torch.Size:
        keys = map(constant_key, leaf)
        return type(leaf), frozenset(keys) if type(leaf) is frozenset else tuple(keys)
    if isinstance(leaf, np.generic):
        return type(leaf), leaf.tobytes()
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex, slice)) else leaf


def argument_key(arg: Arg, key_of: Callable[[str], object]) -> object:
    """Return a key of an argument, by keys of the values that it names."""
    if isinstance(arg, Ref):
        return Ref, key_of(arg.name)
    return tuple(argument_key(item, key_of) for item in arg) if isinstance(arg, tuple) else constant_key(arg)


def storage_of(value: Any) -> int:
    """Return a number that tensors have in common if they share memory; -1 for anything else."""
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else -1


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the numbers of a tensor as they lie in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def type_name(value: Any) -> str:
    """Return ``trainer.Batch``, or ``list`` for a builtin type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _odd_tensor(tensor: torch.Tensor) -> str:
    if _has_own_operators(type(tensor)):
        return f"a {type_name(tensor)}, which has operators of its own"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    return "a quantized tensor"


def _fix(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        return "pass torch.from_numpy(array)"
    if isinstance(leaf, FunctionType):
        return "pass a function without closure and defaults, or make it an attribute of the module"
    return f"pass {_TENSORS}"


def _register(node: Any) -> bool:
    """Register the class of a dataclass. Return False: it is no leaf."""
    kind = type(node)
    if dataclasses.is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES and not is_constant(node):
        _register_type(kind)
    return False


def _register_type(kind: type) -> None:
    if kind in pytree.SUPPORTED_NODES:
        return
    names = tuple(field.name for field in dataclasses.fields(kind))

    def taken(node: Any) -> tuple[list[Any], tuple[str, ...]]:
        present = tuple(name for name in names if hasattr(node, name))
        return [getattr(node, name) for name in present], present

    def taken_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        values, present = taken(node)
        return [(pytree.GetAttrKey(name), value) for name, value in zip(present, values, strict=True)], present

    def unflattened(values: Iterable[Any], present: Any) -> Any:
        node: Any = object.__new__(kind)  # frozen, with fields that __init__ does not take, or checks in it
        for name, value in zip(present, values, strict=True):
            object.__setattr__(node, name, value)
        return node

    pytree.register_pytree_node(
        kind,
        taken,
        unflattened,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=taken_with_keys,
    )


def _nodes(spec: pytree.TreeSpec) -> Iterable[pytree.TreeSpec]:
    yield spec
    for child in spec.children():
        yield from _nodes(child)
