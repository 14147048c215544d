"""Records of TensorFlow: bytes written by hand are read."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

import shardwise.mindspore as ms
from raising import raises
from shardwise.mindspore import dataset as ds


def _field(number: int, content: bytes) -> bytes:
    """Of a message of protocol buffers, shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


def _record(**features: tuple[int, bytes]) -> bytes:
    """An example of TensorFlow: per name which kind of list (1: texts, 2: float32, 3: int64) and its fields."""
    entries = (_field(1, name.encode()) + _field(2, _field(kind, data)) for name, (kind, data) in features.items())
    example = _field(1, b"".join(_field(1, entry) for entry in entries))
    return struct.pack("<Q", len(example)) + bytes(4) + example + bytes(4)


def test_records_of_tensorflow_are_read_by_name(tmp_path: Path) -> None:
    packed = _field(1, struct.pack("<2f", 1.5, -2.0))
    rows = [
        _record(text=(1, _field(1, b"ab")), x=(2, packed), label=(3, _field(1, b"\x96\x01\x03"))),
        _record(text=(1, _field(1, b"c")), x=(2, packed), label=(3, b"\x08\x07\x08" + b"\xff" * 9 + b"\x01")),
    ]
    file = tmp_path / "part.tfrecord"
    file.write_bytes(b"".join(rows))
    dataset = ds.TFRecordDataset(str(file), shuffle=False)
    (text, x, label), (_, _, other) = dataset.create_tuple_iterator(output_numpy=True)
    assert dataset.get_col_names() == ["text", "x", "label"]
    assert (text.tobytes(), x.tolist(), label.tolist(), other.tolist()) == (b"ab", [1.5, -2.0], [150, 3], [7, -1])
    schema = ds.Schema()
    schema.add_column("label", ms.int32, [2, 1])
    schema.add_column("text", "string")
    (tmp_path / "part.gz").write_bytes(gzip.compress(b"".join(rows)))
    told = ds.TFRecordDataset([tmp_path / "part.gz"], schema, ["label", "text"], shuffle=False, compression_type="GZIP")
    label, text = next(told.create_tuple_iterator(output_numpy=True))
    assert (label.tolist(), label.dtype, text.tolist()) == ([[150], [3]], np.int32, ["ab"])
    assert len(ds.TFRecordDataset(str(file), num_shards=2, shard_id=1)) == 1
    with raises(RuntimeError, "a record has no y"):
        next(ds.TFRecordDataset(str(file), columns_list=["y"]).create_tuple_iterator())
    file.write_bytes(rows[0][:-1])
    with raises(RuntimeError, "part.tfrecord", "ends inside a record"):
        ds.TFRecordDataset(str(file))
