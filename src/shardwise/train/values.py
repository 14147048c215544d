"""JSON encoding of values other than stored tensors (optimizer settings, states of schedulers and generators).

Python types that JSON lacks become an object with one key that begins with ``$``. Decoding is safe for untrusted files:
it creates only these types, and never looks up or calls a name from the file.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardwise.errors import ShardwiseError
from shardwise.graph.trees import bytes_of
from shardwise.untrusted_text import MAX_NUMBER, shorten_repr

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def encode(value: Any, where: str) -> Any:
    """Encode a value for JSON. ``where``: its name in errors. Raises ShardwiseError for values that cannot be restored
    safely, such as functions and instances of classes."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) <= MAX_NUMBER else {"$int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":  # numbers
        return {"$array": encode(torch.from_numpy(np.ascontiguousarray(value)), where)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": [dtype_name(value.dtype), list(value.shape), _text(bytes_of(value))]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _text(bytes(value))}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        # Fast path for states of generators, which are many numbers: the checks run in C.
        plain = set(map(type, value)) == {int} and min(value) >= -MAX_NUMBER and max(value) <= MAX_NUMBER
        items = list(value) if plain else [encode(item, f"{where}[{at}]") for at, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    if isinstance(value, dict):
        pairs = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if isinstance(value, Counter):
            return {"$counter": [[encode(key, where), item] for key, item in pairs]}
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[encode(key, where), item] for key, item in pairs]}
    what = f"{where} is {_kind(value)}, which a checkpoint cannot hold: reading it would run code"
    fix = "use numbers, texts, None, tensors, arrays, and lists, tuples, sets and dicts of these"
    raise ShardwiseError(what, fix=fix)


def _kind(value: Any) -> str:
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def decode(value: Any) -> Any:
    """Decode a value of ``encode``. Raises ShardwiseError for anything that ``encode`` does not write."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: decode(item) for name, item in value.items()}
    reader = _READERS.get(key)
    if reader is None or len(value) != 1:
        raise ShardwiseError(f"{shorten_repr(value)} is no value of a checkpoint")
    try:
        return reader(value[key])
    except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError) as error:
        raise ShardwiseError(f"{key} of a checkpoint cannot be read: {shorten_repr(str(error))}") from error


def _tensor(value: Any) -> torch.Tensor:
    dtype, shape, text = value
    content = base64.b64decode(text, validate=True)
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape).clone()
        if (content)
        else torch.empty(shape, dtype=DTYPES[dtype])
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text[:400]),
    "$float": lambda text: float(text),
    "$tensor": _tensor,
    "$array": lambda value: _tensor(value["$tensor"]).numpy(),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$dtype": lambda name: DTYPES[name],
    "$tuple": lambda items: tuple(map(decode, items)),
    "$set": lambda items: set(map(decode, items)),
    "$counter": lambda pairs: Counter({decode(key): decode(item) for key, item in pairs}),
    "$dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
