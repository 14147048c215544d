"""Rows from local files with image annotations beyond a class, and from TFRecord files."""

from __future__ import annotations

import enum
import gzip
import json
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.dataset.files import PARTS, ROWS, Files, folder_of, image_of, paths_of
from shardwise.mindspore.dataset.transforms import numpys
from shardwise.mindspore.dataset.values import Array
from shardwise.mindspore.notes import note

IMAGES = {**ROWS, "decode": False, **PARTS, "extra_metadata": False, "decrypt": None}


class Shuffle(enum.StrEnum):
    """Scope of shuffling: over all rows, over files, or inside files."""

    GLOBAL, FILES, INFILE = "global", "files", "infile"


class Schema:
    """The columns of records: ``add_column(name, de_type, shape)``, or a JSON file with the same content."""

    def __init__(self, schema_file: Any = None) -> None:
        self.columns: dict[str, tuple[np.dtype[Any], tuple[int, ...] | None]] = {}
        if schema_file is not None:
            self.from_json(json.loads(Path(schema_file).read_text(encoding="utf-8")))

    def add_column(self, name: str, de_type: Any, shape: Sequence[int] | None = None) -> None:
        dtype = np.dtype(str) if de_type == "string" else numpys(de_type)
        self.columns[name] = dtype, None if shape is None else tuple(shape)

    def from_json(self, json_obj: Mapping[str, Any]) -> None:
        self.parse_columns(json_obj["columns"])

    def parse_columns(self, columns: Any) -> None:
        """Add columns from ``{"image": {"type": "uint8", "rank": 1}}``, or from a list of these with their names."""
        named = columns.items() if isinstance(columns, Mapping) else ((entry["name"], entry) for entry in columns)
        for name, entry in named:
            self.add_column(name, entry["type"], entry.get("shape"))


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protocol buffers message: their numbers, and a number or bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if not key & 7:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        size, place = _varint(data, place) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], place)
        yield key >> 3, data[place : place + size]
        place += size


def _numbers(values: Iterator[Any]) -> Iterator[int]:
    """Yield signed numbers. Bytes hold several packed ones."""
    for value in values:
        place, data = 0, value
        while isinstance(data, bytes) and place < len(data):
            value, place = _varint(data, place)
            yield value - (value >> 63 << 64)
        if isinstance(data, int):
            yield data - (data >> 63 << 64)


def _feature(data: bytes) -> list[bytes] | Array:
    """Return the values of a feature: bytes, float32 or int64."""
    for kind, content in _fields(data):
        values = (value for _, value in _fields(content))
        if kind == 1:
            return list(values)
        return np.frombuffer(b"".join(values), "<f4") if kind == 2 else np.array(list(_numbers(values)), np.int64)
    return []


def _example(record: bytes) -> dict[str, Any]:
    entries = (dict(_fields(entry)) for _, features in _fields(record) for _, entry in _fields(features))
    return {entry[1].decode(): _feature(entry.get(2, b"")) for entry in entries}


def _records(path: Path, compression: str) -> Iterator[bytes]:
    data = path.read_bytes()
    data = gzip.decompress(data) if compression == "GZIP" else zlib.decompress(data) if compression == "ZLIB" else data
    place = 0
    while place < len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        if place + size + 16 > len(data):
            raise RuntimeError(problem(f"{path} ends inside a record", fix="a file of TFRecord, compression_type="))
        yield data[place + 12 : place + 12 + size]
        place += size + 16


class TFRecordDataset(
    Files, dataset_files=..., schema=None, columns_list=None, **ROWS, num_shards=None, shard_id=None,
    shard_equal_rows=False, cache=None, compression_type=None,
):  # fmt: skip
    """Examples in TFRecord files. Without a ``schema`` columns have the files' types and one dim; texts are bytes.
    Shards are rows, not files."""

    def _take(self, values: dict[str, Any]) -> None:
        if values["shuffle"] == Shuffle.FILES:
            note("TFRecordDataset(shuffle=Shuffle.FILES) shuffles rows only if there are several files")
            values["shuffle"] = len(paths_of(values["dataset_files"])) > 1
        super()._take(values)

    def listed(self, dataset_files: Any, schema: Any, columns_list: Any, compression_type: Any, **_: Any) -> Any:
        compression = one_of("", "GZIP", "ZLIB")("compression_type", compression_type or "")
        files = paths_of(dataset_files)
        rows = [record for file in files for record in _records(file, compression)]
        if not rows:
            raise ValueError(problem(f"{[*map(str, files)]} have no records", fix="files of TFRecord"))
        parsed_schema = schema if isinstance(schema, Schema) or schema is None else Schema(schema)
        kinds = {} if parsed_schema is None else parsed_schema.columns
        names = list(columns_list or kinds or _example(rows[0]))

        def read(record: bytes) -> tuple[Array, ...]:
            features = _example(record)
            if missing := [name for name in names if name not in features]:
                raise RuntimeError(problem(f"a record has no {missing[0]}", fix=f"one of {', '.join(features)}"))
            return tuple(_as_schema(features[name], *kinds.get(name, (None, None))) for name in names)

        return rows, read, names


def _as_schema(values: list[bytes] | Array, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> Array:
    if isinstance(values, list):
        texts = dtype is not None and dtype.kind == "U"
        array = np.array([text.decode() for text in values]) if texts else np.frombuffer(b"".join(values), np.uint8)
    else:
        array = values
    array = array if dtype is None or dtype.kind == "U" else array.astype(dtype)
    return array if shape is None else array.reshape(shape)


class _Annotated(Files):
    """Images with their annotations, and with ``extra_metadata`` their names: "_meta-filename"."""

    def listed(self, decode: bool, extra_metadata: bool, decrypt: Any, **own: Any) -> Any:
        if decrypt is not None:
            raise NotImplementedError(problem("decrypt=", fix="files that are not encrypted"))
        rows, read, columns = self.described(**own)

        def row(entry: Any) -> tuple[Any, ...]:
            values = read(entry)
            name = (np.array(values[0].stem),) if extra_metadata else ()
            return (*(image_of(value, decode) if isinstance(value, Path) else value for value in values), *name)

        return rows, row, (*columns, "_meta-filename") if extra_metadata else columns


class VOCDataset(_Annotated, dataset_dir=..., task="Segmentation", usage="train", class_indexing=None, **IMAGES):
    """Images in the Pascal VOC format. With ``task`` "Segmentation": the class image of the pixels. With "Detection":
    boxes (x, y, width, height), classes (numbered by name or by ``class_indexing``), and flags for difficult and
    truncated ones."""

    def described(self, dataset_dir: Any, task: str, usage: str, class_indexing: Any) -> Any:
        folder, is_detection = folder_of(dataset_dir), one_of("Segmentation", "Detection")("task", task) == "Detection"
        listed = folder / "ImageSets" / ("Main" if is_detection else task) / f"{usage}.txt"
        if not listed.is_file():
            raise ValueError(problem(f"there is no {listed}", fix="a usage for which the folder has a list"))
        names = [line.split()[0] for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
        objects = {name: self._objects(folder / "Annotations" / f"{name}.xml") for name in names if is_detection}
        class_names = sorted({str(entry[0]) for entries in objects.values() for entry in entries})
        self._numbers = dict(class_indexing or {name: number for number, name in enumerate(class_names)})

        def read(name: str) -> tuple[Any, ...]:
            image = folder / "JPEGImages" / f"{name}.jpg"
            if not is_detection:
                return image, folder / "SegmentationClass" / f"{name}.png"
            kept = [entry for entry in objects[name] if entry[0] in self._numbers]
            classes = np.array([[self._numbers[entry[0]]] for entry in kept], np.uint32)
            flags = (np.array([[entry[place]] for entry in kept], np.uint32) for place in (2, 3))
            return image, np.array([entry[1] for entry in kept], np.float32), classes, *flags

        columns = ("image", "bbox", "label", "difficult", "truncate") if is_detection else ("image", "target")
        return names, read, columns

    def _objects(self, path: Path) -> list[tuple[str, list[float], int, int]]:
        objects = []
        for entry in ElementTree.parse(path).getroot().iter("object"):
            x0, y0, x1, y1 = (float(entry.findtext(f"bndbox/{side}", "0")) for side in ("xmin", "ymin", "xmax", "ymax"))
            difficult, cut = (int(entry.findtext(flag, "0")) for flag in ("difficult", "truncated"))
            objects.append((entry.findtext("name", ""), [x0, y0, x1 - x0, y1 - y0], difficult, cut))
        return objects

    def get_class_indexing(self) -> dict[str, int]:
        """Return class name -> class index."""
        return dict(self._numbers)


class CocoDataset(_Annotated, dataset_dir=..., annotation_file=..., task="Detection", **IMAGES):
    """Images in the COCO format. With ``task`` "Detection": boxes (x, y, width, height), classes and crowd flags. With
    "Keypoint": points (x, y, visibility) and their numbers."""

    def described(self, dataset_dir: Any, annotation_file: Any, task: str) -> Any:
        folder, kind = folder_of(dataset_dir), one_of("Detection", "Keypoint")("task", task)
        annotations = json.loads(Path(annotation_file).read_text(encoding="utf-8"))
        self._classes = {entry["name"]: [int(entry["id"])] for entry in annotations.get("categories", [])}
        of_image: dict[int, list[Any]] = {}
        for entry in annotations["annotations"]:
            of_image.setdefault(entry["image_id"], []).append(entry)

        def read(image: Mapping[str, Any]) -> tuple[Any, ...]:
            entries, path = of_image[image["id"]], folder / image["file_name"]
            if kind == "Keypoint":
                points = np.array([entry["keypoints"] for entry in entries], np.float32)
                return path, points, np.array([[entry["num_keypoints"]] for entry in entries], np.uint32)
            boxes = np.array([entry["bbox"] for entry in entries], np.float32)
            words = ("category_id", "iscrowd")
            return path, boxes, *(np.array([[entry.get(word, 0)] for entry in entries], np.uint32) for word in words)

        columns = {"Detection": ("image", "bbox", "category_id", "iscrowd"),
                   "Keypoint": ("image", "keypoints", "num_keypoints")}[kind]  # fmt: skip
        return [image for image in annotations["images"] if image["id"] in of_image], read, columns

    def get_class_indexing(self) -> dict[str, list[int]]:
        """Return class name -> class index, in a list."""
        return dict(self._classes)


__all__ = ["CocoDataset", "Schema", "Shuffle", "TFRecordDataset", "VOCDataset"]
