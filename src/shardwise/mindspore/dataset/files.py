"""Rows from local files in common formats of small data sets."""

from __future__ import annotations

import csv
import gzip
import io
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import ConcatDataset

from shardwise.errors import problem
from shardwise.mindspore.dataset.records import RecordFile, written_with
from shardwise.mindspore.dataset.sources import GeneratorDataset
from shardwise.mindspore.dataset.values import Array
from shardwise.mindspore.dataset.vision import decoded

# Settings of file datasets after their own ones.
ROWS = {"num_samples": None, "num_parallel_workers": None, "shuffle": None}
PARTS = {"sampler": None, "num_shards": None, "shard_id": None, "cache": None}
LINES = {"num_samples": None, "num_parallel_workers": None, "shuffle": True, "num_shards": None, "shard_id": None,
         "cache": None}  # fmt: skip


class Listed:
    """Rows by index, each read on request."""

    def __init__(self, rows: Sequence[Any], read: Any = None) -> None:
        self.rows, self.read = rows, read

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] if self.read is None else self.read(self.rows[index])


class Files(GeneratorDataset):
    """Base of file datasets: ``listed`` takes their own settings, and returns rows, a function that reads a row (None:
    rows as they are), and the columns. Sampling, shuffling and sharding settings are those of GeneratorDataset."""

    columns: tuple[str, ...] = ("image", "label")
    listed: Callable[..., tuple[Sequence[Any], Any, Sequence[str]]]

    def _take(self, values: dict[str, Any]) -> None:
        general = {name: values.pop(name) for name in (*ROWS, *PARTS) if name in values}
        general.pop("cache")
        if self.settings["shuffle"] is True:  # lines of texts: None leaves them in the order of the file
            general["shuffle"] = bool(general["shuffle"])
        rows, read, columns = self.listed(**values)
        made = {"source": Listed(rows, read), "column_names": list(columns), "column_types": None}
        super()._take({**GeneratorDataset.settings, **general, **made})


def paths_of(dataset_files: Any) -> list[Path]:
    """Return the paths of one file or several."""
    return [Path(dataset_files)] if isinstance(dataset_files, (str, Path)) else [*map(Path, dataset_files)]


def image_of(path: Path, decode: bool) -> Array:
    """Return the bytes of an image, or its pixels."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    return decoded(data) if decode else data


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
        images, labels = (
            np.concatenate([_idx(path) for path in _matching(folder, [f"{p}-{kind}*ubyte*" for p in prefixes], kind)])
            for kind in ("images", "labels")
        )
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


class _Dtype:
    """Placeholder for a numeric dtype while a pickle is read."""

    def __init__(self, text: Any, *_: Any) -> None:
        self.text = text.decode() if isinstance(text, bytes) else text
        if not re.fullmatch(r"[biuf][1248]", self.text):
            raise pickle.UnpicklingError(f"it has an array of {self.text}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode() if isinstance(state[1], bytes) else state[1]
        self.text = order.replace("|", "=") + self.text

    def array(self, data: bytes, shape: Any = (), order: Any = "C") -> Array:
        return np.frombuffer(data, np.dtype(self.text)).reshape(shape, order=order)


class _Reconstructed:
    """Placeholder for an array while a pickle is read."""

    array: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        self.array = dtype.array(data, shape, "F" if is_fortran else "C")


class _ArrayReader(pickle.Unpickler):
    """Unpickler of arrays, texts, numbers and their containers. A pickle names functions that run while it is read:
    only these are allowed."""

    _harmless: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Reconstructed,
        ("numpy.core.multiarray", "scalar"): lambda dtype, data: dtype.array(data)[()],
        ("numpy.core.numeric", "_frombuffer"): lambda data, dtype, shape, order: dtype.array(data, shape, order),
        ("numpy", "ndarray"): _Reconstructed,
        ("numpy", "dtype"): _Dtype,
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
        ("builtins", "complex"): complex,
        ("collections", "OrderedDict"): dict,
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # bytes in Python 2's pickle protocols
    }

    def find_class(self, module: str, name: str) -> Any:
        place = module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins"), name
        if place not in self._harmless:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which would be executed")
        return self._harmless[place]


def _unpickled(path: Path) -> dict[Any, Any]:
    """Return the entries of a pickled dict of arrays, texts and numbers. Raises ValueError for any other pickle."""
    try:
        entries = _ArrayReader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        return {key: getattr(value, "array", value) for key, value in entries.items()}
    except Exception as error:  # a damaged pickle may raise any error
        what = f"{path} cannot be read: {error}"
        fix = "the files of the data set, as they are distributed; np.savez_compressed keeps arrays of your own"
        raise ValueError(problem(what, fix=fix)) from error


class Cifar10Dataset(Files, dataset_dir=..., usage=None, **ROWS, **PARTS):
    """CIFAR-10's files (binary or Python's): images (32, 32, 3) of bytes and labels."""

    names: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("data_batch_*",), "test": ("test_batch*",)}
    labels: ClassVar[tuple[bytes, ...]] = (b"labels",)

    def listed(self, dataset_dir: Any, usage: str | None) -> Any:
        paths = _matching(folder_of(dataset_dir), _usage(usage, self.names), "batch")
        return [row for path in paths for row in self._rows(path)], None, self.columns

    def _rows(self, path: Path) -> list[tuple[Array, ...]]:
        count = len(self.labels)
        if path.suffix == ".bin":
            table = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, count + 3072)
            pixels, labels = table[:, count:], list(table[:, :count].astype(np.uint32).T)[::-1]
        else:
            entries = _unpickled(path)
            try:
                pixels, labels = entries[b"data"], [np.asarray(entries[key], np.uint32) for key in self.labels]
                if {pixels.dtype, *map(len, labels)} != {np.dtype(np.uint8), len(pixels.reshape(-1, 3072))}:
                    raise ValueError("the numbers of pixels and labels differ")
            except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
                what = f"{path} lacks the images or labels of {type(self).__name__}: {error}"
                raise ValueError(problem(what, fix="the files of the data set, as they are distributed")) from error
        images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return list(zip(images, *labels, strict=True))


class Cifar100Dataset(Cifar10Dataset):
    """CIFAR-100's files: images, fine and coarse labels."""

    names: ClassVar[dict[str, tuple[str, ...]]] = {"train": ("train*",), "test": ("test*",)}
    labels = (b"fine_labels", b"coarse_labels")
    columns = ("image", "fine_label", "coarse_label")


class ImageFolderDataset(
    Files, dataset_dir=..., **ROWS, sampler=None, extensions=None, class_indexing=None, decode=False, num_shards=None,
    shard_id=None, cache=None,
):  # fmt: skip
    """A folder per class with images: their bytes, or pixels if ``decode``, and the class index, in the order of names
    or by ``class_indexing``."""

    def listed(self, dataset_dir: Any, extensions: Any, class_indexing: Any, decode: bool) -> Any:
        folder = folder_of(dataset_dir)
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self._numbers = class_indexing or {name: i for i, name in enumerate(names)}
        endings = tuple(extension.lower() for extension in extensions or (".jpg", ".jpeg", ".png", ".bmp"))
        rows = [
            (path, number)
            for name, number in self._numbers.items()
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in endings
        ]
        if not rows:
            raise ValueError(problem(f"{folder} has no images in folders of classes", fix=f"files in {endings}"))
        return rows, lambda row: (image_of(row[0], decode), np.array(row[1], np.int32)), self.columns

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


class MindDataset(GeneratorDataset):
    """The rows of files that ``mindrecord.FileWriter`` wrote. A name means all files that were written with it, a list
    only these. Rows are shuffled unless ``shuffle=False``; other arguments are those of ``GeneratorDataset``."""

    def __init__(
        self, dataset_files: str | Path | Sequence[str | Path], columns_list: Sequence[str] | None = None,
        num_parallel_workers: int | None = None, shuffle: bool | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        paths = written_with(dataset_files) if isinstance(dataset_files, (str, Path)) else paths_of(dataset_files)
        if not paths:
            raise ValueError(problem("dataset_files names no file", fix="a name, or a list of names"))
        files = [RecordFile(paths[0], columns_list)]
        files += [RecordFile(path, files[0].names) for path in paths[1:]]
        for path, file in zip(paths, files, strict=True):
            if file.schema != files[0].schema:
                what = f"{path} has the schema {file.schema}, and {paths[0]} has {files[0].schema}"
                raise ValueError(problem(what, fix="a MindDataset of each, and concat"))
        super().__init__(ConcatDataset(files), list(files[0].names), shuffle=shuffle, **settings)
