"""Checkpoints in the reference's file format: a protobuf of tensors by name.

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

_NAMES = "Float16 BFloat16 Float32 Float64 Int8 Int16 Int32 Int64 UInt8 Bool Complex64"
TYPES = {name: DTYPES[name.lower()] for name in _NAMES.split()}
NAMES = {dtype: name for name, dtype in TYPES.items()}
_VARINT, _BYTES = 0, 2  # wire types


def is_zip(path: Path) -> bool:
    """Return whether a file is one of ``torch.save``."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a file, and its appended texts.

    Raises:
        ValueError: for another kind of file.
        NotImplementedError: for a value that is no tensor.
    """
    content, _, _ = path.read_bytes().partition(b"crc_num")  # a checksum may follow
    parts: dict[str, tuple[tuple[int, ...], str, bytes]] = {}
    try:
        for number, value in _fields(content):
            fields = dict(_fields(value)) if number == 1 else {}
            if 2 not in fields:
                fix = "save dense tensors"
                raise NotImplementedError(problem(f"{path} holds a value that is no tensor", fix=fix))
            tag, tensor = fields[1].decode(), list(_fields(fields[2]))
            dims = tuple(size for number, size in tensor if number == 1)
            kind = next(own.decode() for number, own in tensor if number == 2)
            data = next((own for number, own in tensor if number == 3), b"")
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


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the fields of a message: numbers, and bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while place < len(data):
        key = varint()
        if key & 7 == _VARINT:
            yield key >> 3, varint()
            continue
        length = varint() if key & 7 == _BYTES else 0
        if (not length and key & 7 != _BYTES) or place + length > len(data):
            raise IndexError(f"field {key >> 3} at byte {place}")
        place += length
        yield key >> 3, data[place - length : place]


def write(path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
    """Write whole tensors and appended values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for tag, value in {**tensors, **info}.items():
            file.write(_message(1, _message(1, tag.encode()) + _message(2, _tensor(tag, value))))


def _tensor(tag: str, value: Any) -> bytes:
    if isinstance(value, str):
        return _number(1, 0) + _message(2, b"str") + _message(3, value.encode("utf-32-le"))
    tensor = as_torch(value).detach().cpu().contiguous()
    if tensor.dtype not in NAMES:
        raise ValueError(problem(f"{tag} is {tensor.dtype}", fix=f"one of {', '.join(TYPES)}"))
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return b"".join(_number(1, size) for size in tensor.shape) + _message(2, NAMES[tensor.dtype].encode()) + (
        _message(3, data))  # fmt: skip


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _message(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
