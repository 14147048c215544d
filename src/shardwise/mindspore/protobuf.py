"""Messages of protocol buffers, and checkpoints in the reference's file format: a protobuf of tensors by name.

``message Checkpoint { repeated Value value = 1; }``, ``Value { string tag = 1; TensorProto tensor = 2; }`` and
``TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3; }``. A large tensor is spread
over values of the same tag. Appended texts have the type "str" and are UTF-32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore.tensor import as_torch
from shardwise.mindspore.tensor_methods import DTYPES

VARINT, BYTES = 0, 2  # wire types
_FIXED = {1: 8, 5: 4}  # wire type -> bytes


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number that begins at ``place``, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the fields of a message: numbers, and bytes. Raises IndexError where it ends inside
    one."""
    place = 0
    while place < len(data):
        key, place = read_varint(data, place)
        if key & 7 == VARINT:
            value, place = read_varint(data, place)
            yield key >> 3, value
            continue
        length, place = read_varint(data, place) if key & 7 == BYTES else (_FIXED.get(key & 7, len(data)), place)
        if place + length > len(data):
            raise IndexError(f"field {key >> 3} at byte {place}")
        yield key >> 3, data[place : place + length]
        place += length


def varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def number(field: int, value: int) -> bytes:
    """Return a field with a number."""
    return varint(field << 3 | VARINT) + varint(value)


def message(field: int, value: bytes) -> bytes:
    """Return a field with bytes, a text or a message."""
    return varint(field << 3 | BYTES) + varint(len(value)) + value


# -- checkpoints -------------------------------------------------------------------------------------------------------

_NAMES = "Float16 BFloat16 Float32 Float64 Int8 Int16 Int32 Int64 UInt8 Bool Complex64"
TYPES = {name: DTYPES[name.lower()] for name in _NAMES.split()}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def is_zip(path: Path) -> bool:
    """Return whether a file is one of ``torch.save``."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a file, and its appended texts.

    Raises:
        ValueError: for another kind of file.
        NotImplementedError: for a value that is no tensor.
    """
    content, _, _ = path.read_bytes().partition(b"crc_num")  # a checksum may follow
    parts: dict[str, tuple[tuple[int, ...], str, bytes]] = {}
    try:
        for field, value in read_fields(content):
            fields = dict(read_fields(value)) if field == 1 else {}
            if 2 not in fields:
                fix = "save dense tensors"
                raise NotImplementedError(problem(f"{path} holds a value that is no tensor", fix=fix))
            tag, tensor = fields[1].decode(), list(read_fields(fields[2]))
            dims = tuple(size for field, size in tensor if field == 1)
            kind = next(own.decode() for field, own in tensor if field == 2)
            data = next((own for field, own in tensor if field == 3), b"")
            parts[tag] = dims, kind, parts.get(tag, (dims, kind, b""))[2] + data
        texts = {tag: data.decode("utf-32-le") for tag, (_, kind, data) in parts.items() if kind == "str"}
        tensors = {
            tag: torch.frombuffer(bytearray(data), dtype=TYPES[kind]).reshape(dims) if data else torch.empty(dims)
            for tag, (dims, kind, data) in parts.items() if kind != "str"
        }  # fmt: skip
        if not parts:
            raise IndexError("it is empty")
    except (IndexError, KeyError, StopIteration, UnicodeDecodeError, RuntimeError, AttributeError, TypeError) as error:
        what = f"{path} cannot be read as a checkpoint: {type(error).__name__} {error}"
        raise ValueError(problem(what, fix="a whole file that save_checkpoint of the reference wrote")) from error
    return tensors, texts


def write_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
    """Write whole tensors and appended values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for tag, value in {**tensors, **info}.items():
            file.write(message(1, message(1, tag.encode()) + message(2, _tensor(tag, value))))


def _tensor(tag: str, value: Any) -> bytes:
    if isinstance(value, str):
        return number(1, 0) + message(2, b"str") + message(3, value.encode("utf-32-le"))
    tensor = as_torch(value).detach().cpu().contiguous()
    if tensor.dtype not in NAMES:
        raise ValueError(problem(f"{tag} is {tensor.dtype}", fix=f"one of {', '.join(TYPES)}"))
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return b"".join(number(1, size) for size in tensor.shape) + message(2, NAMES[tensor.dtype].encode()) + (
        message(3, data))  # fmt: skip
