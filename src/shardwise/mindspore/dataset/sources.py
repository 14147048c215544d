"""Datasets of Python objects, of arrays and of local files; and samplers, which decide the order of their rows."""

from __future__ import annotations

import csv
import enum
import gzip
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from shardwise.errors import problem
from shardwise.mindspore.checks import note, one_of
from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.records import RecordFile, written_with
from shardwise.mindspore.dataset.transforms import Array, Row, as_array, count_of, names_of, numpys
from shardwise.mindspore.dataset.vision import decoded
from shardwise.mindspore.named import SETTINGS, Function, WithSettings, classes_of
from shardwise.mindspore.protobuf import read_fields, read_varint


class Sampler(WithSettings, num_samples=None):
    """Base of samplers: ``__iter__`` yields indices; ``num_rows``: rows of the source, ``number``: of the pass."""

    num_rows = 0
    number = 0
    function: Function = staticmethod(lambda rows, chance, *, num_samples: range(rows))

    def __iter__(self) -> Iterator[int]:
        chance = np.random.default_rng([data_seed(), self.number])
        return iter(list(type(self).function(self.num_rows, chance, **self._chosen()))[: self.num_samples])


def _shard(rows: Sequence[int], count: int, number: int) -> list[int]:
    """Return every ``count``-th row from ``number`` on. Shards are equally long: the first rows repeat at the end."""
    return [rows[(number + i * count) % len(rows)] for i in range(-(-len(rows) // count))] if len(rows) else []


def _listed(name: str, indices: Any) -> list[Any]:
    return [indices] if isinstance(indices, (int, np.integer)) else list(indices)


# Functions of the number of rows, and of the random generator of the pass.
SAMPLERS = classes_of({
    "DistributedSampler": lambda rows, chance, *, num_shards, shard_id, shuffle=True, num_samples=None, offset=-1: (
        _shard(chance.permutation(rows) if shuffle else range(rows), num_shards, shard_id)),
    "RandomSampler": lambda rows, chance, *, replacement=False, num_samples=None: (
            chance.integers(0, rows, num_samples or rows) if replacement else chance.permutation(rows)),
    "SequentialSampler": lambda rows, chance, *, start_index=None, num_samples=None: range(start_index or 0, rows),
    "SubsetRandomSampler": lambda rows, chance, *, indices, num_samples=None: chance.permutation(indices),
    "SubsetSampler": lambda rows, chance, *, indices, num_samples=None: indices,
    "WeightedRandomSampler": lambda rows, chance, *, weights, num_samples=None, replacement=True: chance.choice(
            len(weights), num_samples or len(weights), replacement, weights / weights.sum()),
}, Sampler, __name__, checks={
    "indices": _listed, "weights": lambda _, weights: np.asarray(weights, float),
})  # fmt: skip
globals().update(SAMPLERS)


class GeneratorDataset(WithSettings, Dataset, **SETTINGS["dataset.GeneratorDataset"]):
    """A dataset of rows from Python.

    Only a source with ``__getitem__`` can be shuffled, which is its default, and sharded. Shard ``shard_id`` of
    ``num_shards`` has every ``num_shards``-th row. Shards are equally long: the first rows repeat at the end if the
    number is not divisible.

    Args:
        source: a function that returns an iterable (a generator function), an iterable, or an object with
            ``__getitem__`` and ``__len__``. An item is a tuple of arrays (tensors, numbers), or one array if there is
            one column.
        column_types: dtypes to which columns are converted.
        num_samples: the largest number of rows.
    """

    def _take(self, values: dict[str, Any]) -> None:
        Dataset.__init__(self, names_of(values["column_names"]))
        types, samples, shuffle, shards = (
            values[name] for name in ("column_types", "num_samples", "shuffle", "num_shards")
        )
        self._source, self._sampler = values["source"], values["sampler"]
        kinds = [numpys(kind) if isinstance(kind, torch.dtype) else np.dtype(kind) for kind in types or ()]
        if types is not None and len(kinds) != len(self._columns):
            what = f"there are {len(self._columns)} columns and {len(kinds)} column_types"
            raise ValueError(problem(what, fix="give one type for every column"))
        self._types = dict(zip(self._columns, kinds, strict=False))
        self._samples = None if samples is None else count_of("num_samples", samples)
        self._by_index = hasattr(self._source, "__getitem__") and hasattr(self._source, "__len__")
        if not (self._by_index or callable(self._source) or isinstance(self._source, Iterable)):
            fix = "give a generator function, an iterable, or an object with __getitem__ and __len__"
            raise TypeError(problem(f"a {type(self._source).__name__} is not a source of rows", fix=fix))
        self._shuffle = self._by_index and self._sampler is None if shuffle is None else shuffle
        self._shards = _shards(shards, values["shard_id"])
        requested = {"shuffle": shuffle, "sampler": self._sampler is not None, "num_shards": shards is not None}
        wrong = [name for name, is_set in requested.items() if is_set]
        if wrong and not self._by_index:
            what = f"{wrong[0]} needs rows by index, but the source (a {type(self._source).__name__}) has none"
            fix = "give an object with __getitem__ and __len__, or call .shuffle(buffer_size)"
            raise ValueError(problem(what, fix=fix))
        if "sampler" in wrong and len(wrong) > 1:
            raise ValueError(problem("a sampler decides the order by itself", fix="leave shuffle and num_shards out"))

    def rows(self, number: int) -> Iterator[Row]:
        return map(self._row, itertools.islice(self._items(number), self._samples))

    def _items(self, number: int) -> Iterator[Any]:
        if self._by_index:
            return (self._source[i] for i in self._order(number))
        if callable(self._source):
            return iter(self._source())
        if number and iter(self._source) is self._source:
            raise _used_up("the source is an iterator, which has only one pass")
        return iter(self._source)

    def _order(self, number: int) -> Sequence[int]:
        if self._sampler is not None:
            if isinstance(self._sampler, Sampler):
                self._sampler.num_rows, self._sampler.number = len(self._source), number
            return [int(i) for i in self._sampler]
        order = list(range(len(self._source)))
        if self._shuffle:
            np.random.default_rng([data_seed(), number]).shuffle(order)
        return _shard(order, *self._shards)

    def _row(self, item: Any) -> Row:
        if not isinstance(item, Mapping):
            is_alone = not isinstance(item, tuple | list) or len(self._columns) == 1 != len(item)
            values = (item,) if is_alone else item
            if len(values) != len(self._columns):
                what = f"the source gives {len(values)} values a row, but the columns are {', '.join(self._columns)}"
                raise RuntimeError(problem(what, fix="name as many columns as there are values"))
            item = dict(zip(self._columns, values, strict=True))
        arrays = {name: as_array(item[name]) for name in self._columns}
        return arrays | {name: arrays[name].astype(kind) for name, kind in self._types.items()}

    @cached_property
    def _count(self) -> int:
        if self._by_index:
            return len(self._order(0))
        if hasattr(self._source, "__len__"):
            return len(self._source)
        if not callable(self._source) and iter(self._source) is self._source:
            raise _used_up("the source is an iterator, whose rows cannot be counted without using them up")
        return sum(1 for _ in self._items(0))

    def get_dataset_size(self) -> int:
        """Return the number of rows per pass. If the source has no length, one pass is counted, once."""
        return self._count if self._samples is None else min(self._count, self._samples)


def _used_up(what: str) -> RuntimeError:
    return RuntimeError(problem(what, fix="give the generator function itself, without calling it"))


class NumpySlicesDataset(GeneratorDataset, **SETTINGS["dataset.NumpySlicesDataset"]):
    """The slices of arrays along dim 0. ``data`` is an array, a tuple of arrays, or a dictionary of them by column.
    Columns are named column_0, column_1, ... by default."""

    def _take(self, values: dict[str, Any]) -> None:
        data, names = values.pop("data"), values["column_names"]
        parts = list(data.values()) if isinstance(data, Mapping) else list(data) if isinstance(data, tuple) else [data]
        arrays = [as_array(part) for part in parts]
        lengths = {len(array) if array.ndim else 0 for array in arrays}
        if len(lengths) != 1 or not lengths - {0}:
            what = f"the arrays have the shapes {', '.join(str(list(array.shape)) for array in arrays)}"
            raise ValueError(problem(what, fix="give arrays of the same first size, at least 1"))
        default = list(data) if isinstance(data, Mapping) else [f"column_{i}" for i in range(len(arrays))]
        rows, names = list(zip(*arrays, strict=True)), default if names is None else names
        super()._take({**values, "source": rows, "column_names": names, "column_types": None})


class PaddedDataset(GeneratorDataset, padded_samples=...):
    """Rows that fill up others: ``data + PaddedDataset([{"image": zeros}])``. ``padded_samples``: a dictionary per row,
    whose columns are in alphabetical order."""

    def _take(self, values: dict[str, Any]) -> None:
        samples = values["padded_samples"]
        if not samples or not all(isinstance(sample, Mapping) and sample for sample in samples):
            raise ValueError(
                problem(f"padded_samples is {samples!r}", fix='a list of dictionaries: [{"image": zeros}]')
            )
        of_rows = {"source": list(samples), "column_names": sorted(samples[0]), "shuffle": False}
        super()._take({**GeneratorDataset.settings, **of_rows})


class DatasetCache:
    """A server that keeps rows, which there is not: accepted by datasets, which read rows again."""

    def __init__(self, session_id: int, size: int = 0, spilling: bool = False, **settings: Any) -> None:
        note("DatasetCache has no effect here: datasets read rows again")


def _shards(num_shards: int | None, shard_id: int | None) -> tuple[int, int]:
    if num_shards is None and shard_id is None:
        return 1, 0
    if num_shards is None or shard_id is None:
        what = f"num_shards is {num_shards} and shard_id is {shard_id}"
        raise ValueError(problem(what, fix="give both: num_shards=get_group_size(), shard_id=get_rank()"))
    if count_of("shard_id", shard_id, low=0) >= count_of("num_shards", num_shards):
        what = f"shard_id is {shard_id}, but there are {num_shards} shards"
        raise ValueError(problem(what, fix=f"give a number from 0 to {num_shards - 1}"))
    return num_shards, shard_id


# -- local files in common formats of small data sets ------------------------------------------------------------------


# Settings of file datasets after their own ones.
ROWS = {"num_samples": None, "num_parallel_workers": None, "shuffle": None}
PARTS = {"sampler": None, "num_shards": None, "shard_id": None, "cache": None}
LINES = {"num_samples": None, "num_parallel_workers": None, "shuffle": True, "num_shards": None, "shard_id": None,
         "cache": None}  # fmt: skip


class Files(GeneratorDataset):
    """Base of file datasets: ``listed`` takes their own settings, and returns rows, a function that reads a row (None:
    rows as they are), and the columns. Sampling, shuffling and sharding settings are those of GeneratorDataset."""

    columns: tuple[str, ...] = ("image", "label")
    listed: Callable[..., tuple[Sequence[Any], Any, Sequence[str]]]

    def _take(self, values: dict[str, Any]) -> None:
        general = {name: values.pop(name) for name in (*ROWS, *PARTS) if name in values}
        general.pop("cache", None)
        if self.settings["shuffle"] is True:  # lines of texts: None leaves them in the order of the file
            general["shuffle"] = bool(general["shuffle"])
        rows, self._read, columns = self.listed(**values)
        made = {"source": rows, "column_names": list(columns), "column_types": None}
        super()._take({**GeneratorDataset.settings, **general, **made})

    def _row(self, item: Any) -> Row:
        return super()._row(item if self._read is None else self._read(item))


def paths_of(dataset_files: Any) -> list[Path]:
    """Return the paths of one file or several."""
    return [Path(dataset_files)] if isinstance(dataset_files, (str, Path)) else [*map(Path, dataset_files)]


def folder_of(dataset_dir: Any) -> Path:
    folder = Path(dataset_dir)
    if not folder.is_dir():
        raise ValueError(problem(f"there is no folder {folder}", fix="the folder of the data set's files"))
    return folder


def _matching(folder: Path, names: Sequence[str], what: str) -> list[Path]:
    paths = [path for name in names for path in sorted(folder.glob(name))]
    if not paths:
        raise ValueError(problem(f"{folder} has no {what}: {', '.join(names)}", fix="the files of the data set"))
    return paths


def _idx(path: Path) -> Array:
    """Read an array in the format of MNIST's files."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rank = data[3] if len(data) > 3 and data[:3] == b"\0\0\x08" else 0
    if not rank:
        raise ValueError(problem(f"{path} is not a file of bytes in the idx format", fix="the files of MNIST"))
    shape = np.frombuffer(data, ">i4", rank, 4)
    return np.frombuffer(data, np.uint8, -1, 4 + 4 * rank).reshape(shape)


class MnistDataset(Files, dataset_dir=..., usage=None, **ROWS, **PARTS):
    """MNIST's files: images (28, 28, 1) of bytes and labels. ``usage``: "train", "test" or "all"."""

    def listed(self, dataset_dir: Any, usage: str | None) -> Any:
        folder, prefixes = folder_of(dataset_dir), _usage(usage, {"train": ("train",), "test": ("t10k",)})
        paths = (_matching(folder, [f"{p}-{kind}*ubyte*" for p in prefixes], kind) for kind in ("images", "labels"))
        images, labels = (np.concatenate([*map(_idx, files)]) for files in paths)
        return list(zip(images[..., None], labels.astype(np.uint32), strict=True)), None, self.columns


class FashionMnistDataset(MnistDataset):
    """Fashion-MNIST, in the same format."""


def _usage(usage: str | None, usages: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    every = tuple(dict.fromkeys(name for names in usages.values() for name in names))
    if usage in (None, "all"):
        return every
    if usage not in usages:
        raise ValueError(problem(f"usage is {usage!r}", fix=f"one of {', '.join(usages)}, all"))
    return usages[str(usage)]


class Cifar10Dataset(Files, dataset_dir=..., usage=None, **ROWS, **PARTS):
    """CIFAR-10's binary files: images (32, 32, 3) of bytes and labels."""

    names: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("data_batch_*",), "test": ("test_batch*",)}
    labels: ClassVar[tuple[str, ...]] = ("label",)

    def listed(self, dataset_dir: Any, usage: str | None) -> Any:
        paths = _matching(folder_of(dataset_dir), _usage(usage, self.names), "batch")
        return [row for path in paths for row in self._rows(path)], None, self.columns

    def _rows(self, path: Path) -> list[tuple[Array, ...]]:
        count = len(self.labels)
        data = np.frombuffer(path.read_bytes(), np.uint8)
        if path.suffix != ".bin" or len(data) % (count + 3072):
            what = f"{path} is not a binary file of {type(self).__name__}"
            raise ValueError(problem(what, fix="the binary version of the data set, as it is distributed"))
        table = data.reshape(-1, count + 3072)
        images = table[:, count:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return list(zip(images, *table[:, :count].astype(np.uint32).T[::-1], strict=True))


class Cifar100Dataset(Cifar10Dataset):
    """CIFAR-100's binary files: images, fine and coarse labels."""

    names: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("train*",), "test": ("test*",)}
    labels = ("fine_label", "coarse_label")
    columns = ("image", "fine_label", "coarse_label")


class ImageFolderDataset(Files, **SETTINGS["dataset.ImageFolderDataset"]):
    """A folder per class with images: their bytes, or pixels if ``decode``, and the class index, in the order of names
    or by ``class_indexing``."""

    def listed(self, dataset_dir: Any, extensions: Any, class_indexing: Any, decode: bool) -> Any:
        folder = folder_of(dataset_dir)
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self._numbers = class_indexing or {name: i for i, name in enumerate(names)}
        endings = tuple(extension.lower() for extension in extensions or (".jpg", ".jpeg", ".png", ".bmp"))
        rows = [(path, number) for name, number in self._numbers.items() for path in sorted((folder / name).iterdir())
                if path.suffix.lower() in endings]  # fmt: skip
        if not rows:
            raise ValueError(problem(f"{folder} has no images in folders of classes", fix=f"files in {endings}"))

        def read(row: tuple[Path, int]) -> tuple[Array, Array]:
            data = np.frombuffer(row[0].read_bytes(), np.uint8)
            return decoded(data) if decode else data, np.array(row[1], np.int32)

        return rows, read, self.columns

    def get_class_indexing(self) -> dict[str, int]:
        """Return class name -> class index."""
        return dict(self._numbers)

    def num_classes(self) -> int:
        return len(self._numbers)


class CSVDataset(Files, dataset_files=..., field_delim=",", column_defaults=None, column_names=None, **LINES):
    """Lines of CSV files. ``column_defaults``: values with the types of the columns (else text); ``column_names``: by
    default the first line."""

    def listed(self, dataset_files: Any, field_delim: str, column_defaults: Any, column_names: Any) -> Any:
        rows: list[tuple[Any, ...]] = []
        for file in paths_of(dataset_files):
            with open(file, newline="", encoding="utf-8") as lines:
                listed = list(csv.reader(lines, delimiter=field_delim))
            if column_names is None or tuple(listed[0]) == tuple(column_names):
                column_names, listed = listed[0], listed[1:]
            kinds = [str if value is None else type(value) for value in column_defaults or [None] * len(column_names)]
            rows += [tuple(kind(text) for kind, text in zip(kinds, line, strict=True)) for line in listed]
        return rows, None, column_names


class TextFileDataset(Files, dataset_files=..., **LINES):
    """Lines of files: the column "text"."""

    columns = ("text",)

    def listed(self, dataset_files: Any) -> Any:
        lines = [line for path in paths_of(dataset_files) for line in path.read_text(encoding="utf-8").splitlines()]
        return lines, None, self.columns


class MindDataset(Files, **SETTINGS["dataset.MindDataset"]):
    """The rows of files that ``mindrecord.FileWriter`` wrote. A name means all files that were written with it, a list
    only these. Rows are shuffled unless ``shuffle=False``."""

    def listed(self, dataset_files: str | Path | Sequence[str | Path], columns_list: Sequence[str] | None) -> Any:
        if isinstance(dataset_files, (str, Path)):
            files = written_with(dataset_files, columns_list)
        elif paths := paths_of(dataset_files):
            files = [RecordFile(paths[0], columns_list)]
            files += [RecordFile(path, files[0].names) for path in paths[1:]]
        else:
            raise ValueError(problem("dataset_files names no file", fix="a name, or a list of names"))
        for file in files:
            if file.schema != files[0].schema:
                what = f"{file.path} has the schema {file.schema}, and {files[0].path} has {files[0].schema}"
                raise ValueError(problem(what, fix="a MindDataset of each, and concat"))
        return ConcatDataset(files), None, files[0].names


# -- files of TFRecord -------------------------------------------------------------------------------------------------


# Scope of shuffling: over all rows, over files, or inside files.
Shuffle = enum.StrEnum("Shuffle", {"GLOBAL": "global", "FILES": "files", "INFILE": "infile"})


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


def _numbers(data: Any) -> list[int]:
    """Return signed numbers. Bytes hold several packed ones."""
    place, values = 0, [] if isinstance(data, bytes) else [data]
    while isinstance(data, bytes) and place < len(data):
        value, place = read_varint(data, place)
        values.append(value)
    return [value - (value >> 63 << 64) for value in values]


def _feature(data: bytes) -> list[bytes] | Array:
    """Return the values of a feature: bytes, float32 or int64."""
    for kind, content in read_fields(data):
        values = [value for _, value in read_fields(content)]
        if kind == 1:
            return values
        numbers = (number for value in values for number in _numbers(value)) if kind == 3 else ()
        return np.frombuffer(b"".join(values), "<f4") if kind == 2 else np.array([*numbers], np.int64)
    return []


def _example(record: bytes) -> dict[str, Any]:
    entries = (dict(read_fields(entry)) for _, features in read_fields(record) for _, entry in read_fields(features))
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


class TFRecordDataset(Files, **SETTINGS["dataset.TFRecordDataset"]):
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


__all__ = [
    "CSVDataset", "Cifar10Dataset", "Cifar100Dataset", "DatasetCache", "FashionMnistDataset", "GeneratorDataset",
    "ImageFolderDataset", "MindDataset", "MnistDataset", "NumpySlicesDataset", "PaddedDataset", "Sampler", "Schema",
    "Shuffle", "TFRecordDataset", "TextFileDataset", *SAMPLERS,
]  # fmt: skip
