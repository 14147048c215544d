"""Datasets: where rows come from, what is made of them, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shardwise.mindspore as ms
from raising import raises
from shardwise.mindspore import dataset as ds
from shardwise.mindspore.common import seed
from shardwise.mindspore.dataset import vision


@pytest.fixture(autouse=True)
def fresh_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "_seeds", {})
    monkeypatch.setattr(seed, "_generator", torch.Generator().manual_seed(0))


def get_dataset(batch_size: int, step_per_epoch: int, in_dim: int, out_dim: int) -> Callable[[], Iterator[Any]]:
    """As document 003 does it (with the arguments in the order in which it calls it)."""
    np.random.seed(1)
    input_data = np.random.rand(batch_size, in_dim).astype(np.float32)
    label_data = np.random.rand(batch_size, out_dim).astype(np.float32)

    def generate() -> Iterator[Any]:
        for _ in range(step_per_epoch):
            yield (input_data, label_data)

    return generate


class Indexed:
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return np.int64(index), np.full(2, index, np.float32)

    def __len__(self) -> int:
        return 7


def firsts(dataset: ds.Dataset) -> list[Any]:
    return [row[0].tolist() for row in dataset.create_tuple_iterator(num_epochs=1)]


def test_the_dataset_of_document_003_has_one_item_a_step_in_every_epoch() -> None:
    dataset = ds.GeneratorDataset(get_dataset(2, 4, 32, 16), ["input", "label"])
    assert (dataset.get_dataset_size(), len(dataset), dataset.get_col_names()) == (4, 4, ["input", "label"])
    np.random.seed(1)
    expected = np.random.rand(2, 32).astype(np.float32)
    iterator = dataset.create_dict_iterator()
    for _ in range(2):
        rows = list(iterator)
        assert len(rows) == 4
        for row in rows:
            assert row["input"].dtype == row["label"].dtype == torch.float32
            assert torch.equal(row["input"], torch.from_numpy(expected))
            assert row["label"].shape == (2, 16)


def test_items_are_copies() -> None:
    data = np.zeros(2, np.float32)
    (row,) = ds.GeneratorDataset(lambda: iter([(data,)]), ["x"])
    row[0] += 1
    assert data.tolist() == [0, 0]


def test_dtypes_stay_and_column_types_convert() -> None:
    def source() -> Iterator[Any]:
        yield 1.5, 2, True, torch.tensor([1.0]), np.float16(3)

    names = list("abcde")
    (row,) = ds.GeneratorDataset(source, names)
    kinds = [torch.float64, torch.int64, torch.bool, torch.float32, torch.float16]
    assert [item.dtype for item in row] == kinds
    (row,) = ds.GeneratorDataset(source, names, column_types=[torch.float32, np.int32, np.uint8, "float64", torch.int8])
    assert [item.dtype for item in row] == [torch.float32, torch.int32, torch.uint8, torch.float64, torch.int8]


def test_one_column_may_be_a_bare_array() -> None:
    assert firsts(ds.GeneratorDataset(lambda: iter(np.arange(3.0)), "x")) == [0, 1, 2]
    assert firsts(ds.GeneratorDataset([np.arange(2), np.arange(2)], ["x"], shuffle=False)) == [[0, 1], [0, 1]]
    assert firsts(ds.GeneratorDataset([[1, 2], [3, 4]], ["x"], shuffle=False)) == [[1, 2], [3, 4]]


def test_rows_come_as_tuples_or_dictionaries_of_tensors_or_arrays() -> None:
    dataset = ds.GeneratorDataset(Indexed(), ["i", "x"], shuffle=False)
    tensors = next(iter(dataset))
    assert isinstance(tensors, list)
    assert torch.equal(tensors[1], torch.zeros(2))
    arrays = next(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))
    assert isinstance(arrays["x"], np.ndarray)
    assert [list(row) for row in dataset.create_tuple_iterator(["i"], num_epochs=1)][3] == [torch.tensor(3)]
    with raises(ValueError, 'there is no column "y"'):
        dataset.create_tuple_iterator(["y"])


def test_an_iterator_gives_its_number_of_epochs_and_ends() -> None:
    iterator = ds.GeneratorDataset(Indexed(), ["i", "x"]).create_tuple_iterator(num_epochs=2)
    assert [len(list(iterator)) for _ in range(4)] == [7, 7, 0, 0]


# ------------------------------------------------------------------------------------------------------------ order


def test_rows_by_index_are_shuffled_differently_in_every_pass_and_alike_in_every_process() -> None:
    orders = []
    for _ in range(2):
        dataset = ds.GeneratorDataset(Indexed(), ["i", "x"])
        orders.append([firsts(dataset), firsts(dataset)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == sorted(orders[0][1]) == list(range(7))
    seed.set_seed(5)
    assert firsts(ds.GeneratorDataset(Indexed(), ["i", "x"])) != orders[0][0]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_are_equally_long_and_have_every_row(num_shards: int, shuffle: bool) -> None:
    shards = [
        ds.GeneratorDataset(Indexed(), ["i", "x"], shuffle=shuffle, num_shards=num_shards, shard_id=own)
        for own in range(num_shards)
    ]
    rows = [firsts(shard) for shard in shards]
    assert {len(one) for one in rows} == {-(-7 // num_shards)} == {len(shard) for shard in shards}
    assert {row for one in rows for row in one} == set(range(7))


def test_a_sampler_decides_the_order() -> None:
    assert firsts(ds.GeneratorDataset(Indexed(), ["i", "x"], sampler=[5, 5, 0])) == [5, 5, 0]
    assert firsts(ds.GeneratorDataset(Indexed(), ["i", "x"], shuffle=False, num_samples=2)) == [0, 1]
    assert len(ds.GeneratorDataset(Indexed(), ["i", "x"], num_samples=20)) == 7


@pytest.mark.parametrize("indices", [[4, 1], {4: 0, 1: 0}.keys(), iter((4, 1)), np.array([4, 1]), torch.tensor([4, 1])])
def test_a_sampler_takes_any_indices(indices: Any) -> None:
    sampler = ds.SubsetSampler(indices)
    for _ in range(2):
        assert firsts(ds.GeneratorDataset(Indexed(), ["i", "x"], sampler=sampler)) == [4, 1]
    assert sorted(ds.SubsetRandomSampler(set(map(int, sampler.indices)))) == [1, 4]
    assert ds.SubsetSampler(3).indices == [3]


def test_weights_of_a_sampler_are_numbers() -> None:
    for weights in ([0, 2, 0], torch.tensor([0.0, 2.0, 0.0])):
        assert list(ds.WeightedRandomSampler(weights, 3)) == [1, 1, 1]
    with pytest.raises(ValueError, match="could not convert"):
        ds.WeightedRandomSampler(["a"])


def test_a_buffer_shuffles_what_has_no_index() -> None:
    dataset = ds.GeneratorDataset(lambda: iter(np.arange(20)), ["x"]).shuffle(4)
    first, second = firsts(dataset), firsts(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert all(row <= place + 3 for place, row in enumerate(first))  # none is drawn before it is read
    assert firsts(ds.GeneratorDataset(lambda: iter(np.arange(20)), ["x"]).shuffle(4)) == first
    assert firsts(ds.GeneratorDataset(lambda: iter(np.arange(5)), ["x"]).shuffle(1)) == list(range(5))


# ------------------------------------------------------------------------------------------------------- operations


def plain() -> ds.Dataset:
    return ds.GeneratorDataset(Indexed(), ["i", "x"], shuffle=False)


def test_batches_are_stacked() -> None:
    assert firsts(plain().batch(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert firsts(plain().batch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]
    assert [row[1].shape for row in plain().batch(7)] == [(7, 2)]
    assert (len(plain().batch(3)), len(plain().batch(3, drop_remainder=True))) == (3, 2)
    assert plain().batch(3).batch(2).get_batch_size() == 6


def test_repetitions_follow_each_other() -> None:
    assert firsts(plain().repeat(2)) == [*range(7), *range(7)]
    assert len(plain().repeat(3)) == 21
    endless = plain().repeat().create_tuple_iterator(num_epochs=1)
    assert [int(next(endless)[0]) for _ in range(15)] == [i % 7 for i in range(15)]
    shuffled = ds.GeneratorDataset(Indexed(), ["i", "x"]).repeat(2)
    rows = firsts(shuffled) + firsts(shuffled)
    assert len({tuple(rows[i : i + 7]) for i in range(0, 28, 7)}) == 4


def test_rows_are_taken_and_skipped() -> None:
    assert firsts(plain().take(2)) == [0, 1]
    assert firsts(plain().take()) == list(range(7))
    assert firsts(plain().skip(5)) == [5, 6]
    assert firsts(plain().skip(2).take(3)) == [2, 3, 4]
    assert [len(plain().take(9)), len(plain().skip(9)), len(plain().skip(2).take(3))] == [7, 0, 3]


def test_functions_are_mapped_over_columns() -> None:
    assert firsts(plain().map(lambda i: i * 10).take(3)) == [0, 10, 20]
    dataset = plain().map([lambda x: x + 1, np.sum], input_columns="x")
    assert [row[1].item() for row in dataset.take(2)] == [2, 4]
    both = plain().map(lambda i, x: (x * i, i, i + 0.5), ["i", "x"], output_columns=["p", "q", "r"])
    assert both.get_col_names() == ["p", "q", "r"]
    assert [item.tolist() for item in list(both)[3]] == [[9, 9], 3, 3.5]
    last = plain().map(lambda x: (x, -x), "x", output_columns=["a", "b"])
    assert last.get_col_names() == ["i", "a", "b"]
    assert [item.tolist() for item in list(last)[2]] == [2, [2, 2], [-2, -2]]
    assert plain().project(["x", "i"]).get_col_names() == ["x", "i"]
    assert firsts(plain().project("x").take(2)) == [[0, 0], [1, 1]]


def test_a_generator_is_counted_when_asked_and_once() -> None:
    passes = []

    def source() -> Iterator[Any]:
        passes.append(1)
        yield from np.arange(5)

    dataset = ds.GeneratorDataset(source, ["x"]).batch(2)
    assert passes == []
    assert (len(dataset), len(dataset), len(passes)) == (3, 3, 1)


def test_arrays_are_sliced() -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3)
    named = ds.NumpySlicesDataset({"a": a, "b": b}, shuffle=False)
    assert (named.get_col_names(), firsts(named)) == (["a", "b"], a.tolist())
    assert next(iter(named))[0].dtype == torch.float32
    assert ds.NumpySlicesDataset((a, b)).get_col_names() == ["column_0", "column_1"]
    assert firsts(ds.NumpySlicesDataset([1, 2, 3], ["n"], shuffle=False)) == [1, 2, 3]
    assert sorted(firsts(ds.NumpySlicesDataset(a, num_shards=3, shard_id=1))) in [[row] for row in a.tolist()]


def test_files_of_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    schema = {"x": {"type": "float32", "shape": [-1, 2]}, "n": {"type": "int32"}, "s": {"type": "string"},
              "b": {"type": "bytes"}}  # fmt: skip
    rows = [{"x": np.full((i + 1, 2), i, np.float32), "n": i, "s": f"row {i}", "b": bytes([i, 7])} for i in range(5)]
    for count in (1, 2):
        file = tmp_path / f"{count}.mindrecord"
        writer = ms.mindrecord.FileWriter(str(file), count)
        writer.add_schema(schema, "rows")
        writer.write_raw_data(rows[:3])
        writer.write_raw_data(rows[3:])
        writer.commit()
        read = [*ds.MindDataset(str(file), shuffle=False).create_dict_iterator(1, output_numpy=True)]
        for own, row in zip(read, rows, strict=True):
            assert (own["x"].tolist(), own["n"], own["s"]) == (row["x"].tolist(), row["n"], row["s"])
            assert (own["b"].tobytes(), own["n"].dtype) == (row["b"], np.int32)
    part = ds.MindDataset([f"{file}1"], ["n"], shuffle=False, num_shards=2, shard_id=1)
    assert firsts(part) == [4]
    again = tmp_path / "saved.mindrecord"
    ds.MindDataset(str(file), shuffle=False).save(str(again))  # of its arrays, of several sizes
    read = ds.MindDataset(str(again), shuffle=False).create_tuple_iterator(num_epochs=1, output_numpy=True)
    for own, row in zip(read, rows, strict=True):
        assert (own[0].tolist(), own[3].tolist()) == (row["x"].tolist(), list(row["b"]))
    plain().save(str(again))
    assert firsts(ds.MindDataset(str(again), shuffle=False)) == firsts(plain())
    empty = ms.mindrecord.FileWriter(str(tmp_path / "empty"), 2)
    empty.add_schema({"n": {"type": "int32"}})
    empty.commit()
    assert len(ds.MindDataset(str(tmp_path / "empty"))) == 0


def test_rows_that_are_written_can_be_read_and_take_little_place(tmp_path: Path) -> None:
    def read(name: str, schema: Any, rows: list[dict[str, Any]]) -> list[Any]:
        writer = ms.mindrecord.FileWriter(str(tmp_path / name))
        writer.add_schema(schema)
        writer.write_raw_data(rows)
        writer.commit()
        found = ds.MindDataset(str(tmp_path / name), shuffle=False).create_tuple_iterator(
            num_epochs=1, output_numpy=True
        )
        return [row[0] for row in found]

    images = read("images", {"image": {"type": "bytes"}}, [{"image": own} for own in (
        b"", np.zeros(0, np.uint8), bytearray(b"a"), np.bytes_(b"bc"))])  # fmt: skip
    assert [own.tobytes() for own in images] == [b"", b"", b"a", b"bc"]
    words = ["", *np.array(["a", "\xe9\u4e2d"]), np.array("b"), "\ud800"]
    read_words = read("words", {np.str_("word"): {"type": np.str_("string")}}, [{"word": own} for own in words])
    assert [str(own) for own in read_words] == [str(own) for own in words]
    arrays = [np.arange(2.0 * n, dtype=np.float32).reshape(n, 2) for n in (3, 0, 1)]
    found = read(
        "arrays", {"x": {"type": "float32", "shape": [-1, 2]}}, [{"x": own} for own in [*arrays, arrays[0].ravel()]]
    )
    for own, want in zip(found, [*arrays, arrays[0]], strict=True):
        np.testing.assert_array_equal(own, want, strict=True)
    schema = {"label": {"type": "int32"}, "x": {"type": "float32", "shape": [4]}}
    many = [{"label": n, "x": np.full(4, n, np.float32)} for n in range(10_000)]
    assert read("many", schema, many) == [*range(10_000)]
    assert (tmp_path / "many").stat().st_size < 60 * len(many)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def column(values: list[Any], offsets: list[Any]) -> dict[str, torch.Tensor]:
    dtype = torch.float32 if values and isinstance(values[0], float) else torch.int32
    places = torch.tensor(offsets) if offsets else torch.tensor([], dtype=torch.int64)
    return {"values": torch.tensor(values, dtype=dtype), "offsets": places}


def full(*args: Any, **named: Any) -> None:
    raise OSError("the disk is full")


def test_files_of_rows_that_are_not_as_they_say_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, trace = tmp_path / "rows", tmp_path / "trace"
    numbers = {"n": {"type": "int32"}}

    def written(schema: Any, *values: Any, name: str = "rows") -> Path:
        writer = ms.mindrecord.FileWriter(str(tmp_path / name), overwrite=True)
        writer.add_schema(schema)
        writer.write_raw_data({"n": value} for value in values)
        writer.commit()
        return tmp_path / name

    def broken(entries: Any) -> Callable[[], Any]:
        def read() -> Any:
            written(numbers, 1, 2)
            torch.save(entries, file)
            return ds.MindDataset(str(file))

        return read

    foreign = "is not a file of mindrecord.FileWriter"
    (tmp_path / "other").write_bytes(b"not an archive")
    for make, message in (
        (lambda: ds.MindDataset(str(tmp_path / "other")), foreign),
        (broken({"schema": numbers, "files": ["rows"]}), foreign),
        *(
            (broken({"schema": numbers, "files": [name], "columns": columns}), foreign)
            for name, *columns in (
                ("../rows", column([1], [0, 1])),
                ("rows",),
                ("rows", column([1, 2], [0, 2])),
                ("rows", column([1], [0])),
                ("rows", column([1], [0, 2])),
                ("rows", column([1], [0, 2, 1])),
                ("rows", column([1.0], [0, 1])),
                ("rows", column([1], [])),
                ("rows", column([[1]], [0, 1])),
                ("rows", column([1], [0.0, 1.0])),
            )
        ),
        (broken(Evil(trace)), foreign),
        (lambda: ds.MindDataset(str(tmp_path / "none")), "there is no file"),
        (lambda: ds.MindDataset([]), ("dataset_files", "names no file")),
        (lambda: ds.MindDataset(str(written(numbers, 1)), ["y"]), 'no column "y"'),
        (
            lambda: ds.MindDataset([written(numbers), written({"n": {"type": "string"}}, name="words")]),
            ("'type'", "the schema"),
        ),
        (lambda: ms.mindrecord.FileWriter(str(written(numbers))), "exists"),
        (lambda: ms.mindrecord.FileWriter(str(written(numbers)), 2, overwrite=True), "read in place of"),
        (lambda: written({"n": {"type": "float"}}), "the type 'float'"),
        (lambda: written({"n": {"type": "int32", "shape": [-1, -1]}}), "at most one -1"),
        (lambda: written({"n": {"type": "bytes", "shape": [2]}}), ("[2]", "none for bytes")),
        (lambda: written(numbers, 1, 1.5), ("row 1: column 'n' is 1.5", "numbers that int32 holds")),
        (lambda: written(numbers, 2**40), "numbers that int32 holds"),
        (lambda: written(numbers, [1, 2]), ("[2] of int64", "the shape []")),
        (lambda: written({"n": {"type": "int32", "shape": [2, 3]}}, np.zeros((3, 2))), "the shape [2, 3]"),
        (lambda: written({"n": {"type": "bytes"}}, 5), "the schema says bytes"),  # bytes(5) would be five zeros
        (lambda: written({"n": {"type": "string"}}, np.array(["a", "b"])), "the schema says string"),
        (lambda: plain().filter(lambda *row: False).save(str(file)), "no rows"),
        (lambda: ds.GeneratorDataset([(1,), (1.5,)], ["n"], shuffle=False).save(str(file)), "float64 [], int64"),
        (lambda: ms.mindrecord.FileWriter(str(tmp_path / "new")).commit(), "no schema"),
    ):
        with raises((RuntimeError, ValueError), message):
            make()
    assert not trace.exists()
    kept = [own["n"] for own in ds.MindDataset(str(written(numbers, 7))).create_dict_iterator(1, output_numpy=True)]
    assert kept == [7]
    monkeypatch.setattr(torch, "save", full)
    with raises(OSError, "full"):
        written(numbers, 8)
    assert firsts(ds.MindDataset(str(file))) == [7]  # an error leaves what there was, and nothing beside it
    assert not [*tmp_path.glob(".*")]


def test_hues_are_turned() -> None:
    red = np.zeros((2, 2, 3), np.uint8)
    red[..., 0] = 200
    turned = ds.vision.RandomColorAdjust(hue=(1 / 3, 1 / 3))(red)
    assert abs(turned.astype(int) - [0, 200, 0]).max() <= 4  # a hue is one of 256
    with raises(ValueError, "within -0.5 to 0.5"):
        ds.vision.RandomColorAdjust(hue=0.6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ds.vision.Resize(3, "x"), lambda: ds.vision.Rotate(3, "x"), lambda: ds.vision.Pad((1, 2, 3)),
        lambda: ds.vision.CenterCrop("x"), lambda: ds.vision.RandomCrop(None),
        lambda: ds.vision.RandomResizedCrop("x"), lambda: ds.vision.RandomCropDecodeResize("x"),
        lambda: ds.vision.RandomCrop(2, (1, 2, 3)), lambda: ds.vision.Normalize("x", 1),
        lambda: ds.vision.RandomColorAdjust(contrast=None), lambda: ms.common.initializer.HeNormal(nonlinearity="x"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_when_a_transform_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make()


# --------------------------------------------------------------------------------------------------------- mistakes


def test_images_are_changed_as_said() -> None:
    image = np.random.RandomState(0).randint(0, 250, (6, 8, 3)).astype(np.uint8)
    for found, want in (
        (vision.RandomAffine((180, 180))(image), image[::-1, ::-1]),
        (vision.RandomAffine((0, 0), translate=(0, 0), scale=(1, 1), shear=(0, 0))(image), image),
        (vision._moved(image, 0, (0.25, 0), 1.0, 0), np.pad(image, ((0, 0), (2, 0), (0, 0)))[:, :8]),
        (vision.Pad((1, 2), 7)(image), np.pad(image, ((2, 2), (1, 1), (0, 0)), constant_values=7)),
        (vision.RandomSelectSubpolicy([[(vision.Invert(), 1), (vision.HorizontalFlip(), 1)]])(image),
         255 - image[:, ::-1]),
        (vision.Invert()(image.astype(int) + 60), 195 - image.astype(int)),
        (vision.Invert()(image / 100), 255 - image / 100),
        (vision.ConvertColor(vision.ConvertMode.COLOR_RGB2BGR)(image), image[..., ::-1]),
        (vision.ConvertColor(vision.ConvertMode.COLOR_GRAY2RGB)(image[..., :1]), image[..., [0, 0, 0]]),
    ):  # fmt: skip
        np.testing.assert_array_equal(found, want)
    with raises(TypeError, "float64 has no byte values", fix="ToType(np.uint8)"):
        vision.RandomSolarize()(image / 100)


def test_a_folder_per_class_is_a_dataset_of_images(tmp_path: Path) -> None:
    for name, colour in (("cat", 9), ("dog", 200)):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6), (colour,) * 3).save(tmp_path / name / "one.png")
    dataset = ds.ImageFolderDataset(str(tmp_path), decode=True, shuffle=False)
    (cat, zero), (dog, one) = dataset.create_tuple_iterator(output_numpy=True)
    assert (cat.shape, cat[0, 0].tolist(), dog[0, 0].tolist()) == ((6, 8, 3), [9] * 3, [200] * 3)
    assert (int(zero), int(one), dataset.num_classes()) == (0, 1, 2)
    assert dataset.batch(2).repeat(2).get_class_indexing() == {"cat": 0, "dog": 1}
    chosen = ds.ImageFolderDataset(str(tmp_path), class_indexing={"dog": 7})
    ((data, seven),) = chosen.create_tuple_iterator(output_numpy=True)
    assert (int(seven), data.ndim) == (7, 1)
    with raises(ValueError, "no images", fix="files in"):
        ds.ImageFolderDataset(str(tmp_path), extensions=[".jpg"])


def test_mistakes_are_named() -> None:
    def source() -> Iterator[Any]:
        yield 1, np.zeros(2)
        yield 2, np.zeros(3)

    mistakes: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: ds.GeneratorDataset(3, ["x"]), TypeError, "int is not a source of rows"),
        (lambda: ds.GeneratorDataset(source, []), TypeError, "names of columns"),
        (lambda: ds.GeneratorDataset(source, ["x", "x"]), ValueError, ('"x"', "two columns")),
        (lambda: ds.GeneratorDataset(source, ["x", "y"], shuffle=True), ValueError, "shuffle needs rows by index"),
        (
            lambda: ds.GeneratorDataset(source, ["x", "y"], num_shards=2, shard_id=0),
            ValueError,
            "num_shards needs rows",
        ),
        (lambda: ds.GeneratorDataset(source, ["x"], column_types=[1, 2]), TypeError, "'1'"),
        (lambda: ds.GeneratorDataset(source, ["x"], column_types=["int8", "int8"]), ValueError, "1 columns and 2"),
        (lambda: ds.GeneratorDataset(Indexed(), ["x"], num_shards=2), ValueError, ("num_shards", 2, "give both")),
        (lambda: ds.GeneratorDataset(Indexed(), ["x"], num_shards=2, shard_id=2), ValueError, "there are 2 shards"),
        (lambda: ds.GeneratorDataset(Indexed(), ["x"], shuffle=True, sampler=[1]), ValueError, "decides the order"),
        (lambda: list(ds.GeneratorDataset(source, ["a", "b", "c"])), RuntimeError, "gives 2 values a row"),
        (lambda: list(ds.GeneratorDataset(source, ["a", "b"]).batch(2)), RuntimeError, 'column "b" has rows of the'),
        (lambda: plain().batch(0), ValueError, "batch_size is 0"),
        (lambda: plain().batch(2.0), TypeError, ("batch_size", "of type float")),  # type: ignore[arg-type]
        (lambda: plain().map(abs, "y"), ValueError, 'no column "y"'),
        (lambda: list(plain().map(lambda i: (i, i))), RuntimeError, "output_columns"),
        (lambda: plain().map(abs, "i", output_columns="x"), ValueError, ('"x"', "two columns")),
        (lambda: list(ds.GeneratorDataset([np.array("a")], ["s"])), TypeError, 'column "s" holds'),
        (lambda: ds.NumpySlicesDataset((np.ones(2), np.ones(3))), ValueError, "[2], [3]"),
    ]
    for make, kind, message in mistakes:
        with raises(kind, message):
            make()


def test_a_used_up_iterator_is_no_second_epoch() -> None:
    dataset = ds.GeneratorDataset(iter(np.arange(3)), ["x"])
    with raises(RuntimeError, "cannot be counted"):
        len(dataset)
    assert firsts(dataset) == [0, 1, 2]
    with raises(RuntimeError, "only one pass"):
        firsts(dataset)


def test_lines_stay_in_the_order_of_their_file_unless_they_are_shuffled(tmp_path: Path) -> None:
    lines = [str(number) for number in range(40)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    read = {
        shuffle: [
            str(row[0])
            for row in ds.TextFileDataset(tmp_path / "lines.txt", shuffle=shuffle).create_tuple_iterator(
                output_numpy=True
            )
        ]
        for shuffle in (None, False, True)
    }
    assert read[None] == read[False] == lines
    assert read[True] != lines
    assert sorted(read[True]) == sorted(lines)
