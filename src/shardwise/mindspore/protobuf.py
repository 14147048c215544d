"""Messages of protocol buffers, and checkpoints in the reference's file format: a protobuf of tensors by name.

``message Checkpoint { repeated Value value = 1; }``, ``Value { string tag = 1; TensorProto tensor = 2; }`` and
``TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3; }``. A large tensor is spread
over values of the same tag. Appended texts have the type "str" and are UTF-32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import problem
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


# -- checkpoints -------------------------------------------------------------------------------------------------------

_NAMES = "Float16 BFloat16 Float32 Float64 Int8 Int16 Int32 Int64 UInt8 Bool Complex64"
TYPES = {name: DTYPES[name.lower()] for name in _NAMES.split()}


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
