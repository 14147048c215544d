"""Files that say more about an image than its class, and records of TensorFlow: bytes written by hand are read."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

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


def test_images_come_with_what_is_known_of_them(tmp_path: Path) -> None:
    for folder in ("JPEGImages", "SegmentationClass", "Annotations", "ImageSets/Main", "ImageSets/Segmentation"):
        (tmp_path / folder).mkdir(parents=True)
    Image.new("RGB", (8, 6), (9, 9, 9)).save(tmp_path / "JPEGImages" / "one.jpg")
    Image.new("RGB", (8, 6), (1, 2, 3)).save(tmp_path / "SegmentationClass" / "one.png")
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>5</xmax><ymax>6</ymax></bndbox>"
    one, other = (f"<object><name>{name}</name><truncated>1</truncated>{box}</object>" for name in ("dog", "cat"))
    (tmp_path / "Annotations" / "one.xml").write_text(f"<annotation>{one}{other}</annotation>")
    for task in ("Main", "Segmentation"):
        (tmp_path / "ImageSets" / task / "train.txt").write_text("one\n")
    dataset = ds.VOCDataset(str(tmp_path), task="Detection", decode=True, extra_metadata=True)
    (row,) = dataset.create_dict_iterator(output_numpy=True)
    assert dataset.get_class_indexing() == {"cat": 0, "dog": 1}
    assert dataset.batch(1).repeat(2).get_class_indexing() == {"cat": 0, "dog": 1}
    assert row["image"].shape == (6, 8, 3)
    assert (row["bbox"].tolist(), row["label"].tolist()) == ([[1, 2, 4, 4]] * 2, [[1], [0]])
    assert (row["truncate"].tolist(), row["difficult"].tolist()) == ([[1], [1]], [[0], [0]])
    assert row["_meta-filename"] == "one"
    pixels = ds.VOCDataset(str(tmp_path), decode=True, class_indexing={})
    ((_, target),) = pixels.create_tuple_iterator(output_numpy=True)
    assert target[0, 0].tolist() == [1, 2, 3]
    with raises(ValueError, "val.txt"):
        ds.VOCDataset(str(tmp_path), usage="val")
    told = {"images": [{"id": 4, "file_name": "one.jpg"}, {"id": 5, "file_name": "bare.jpg"}],
            "categories": [{"id": 7, "name": "dog"}],
            "annotations": [{"image_id": 4, "category_id": 7, "bbox": [1, 2, 3, 4], "keypoints": [1, 2, 2],
                             "num_keypoints": 1}]}  # fmt: skip
    (tmp_path / "told.json").write_text(json.dumps(told))
    coco = ds.CocoDataset(str(tmp_path / "JPEGImages"), annotation_file=str(tmp_path / "told.json"))
    ((_, boxes, classes, crowd),) = coco.create_tuple_iterator(output_numpy=True)
    assert (boxes.tolist(), classes.tolist(), crowd.tolist()) == ([[1, 2, 3, 4]], [[7]], [[0]])
    assert coco.get_class_indexing() == {"dog": [7]}
    points = ds.CocoDataset(str(tmp_path / "JPEGImages"), str(tmp_path / "told.json"), "Keypoint")
    ((_, places, count),) = points.create_tuple_iterator(output_numpy=True)
    assert (places.tolist(), count.tolist()) == ([[1, 2, 2]], [[1]])
