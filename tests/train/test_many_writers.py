"""Checkpoints of many ranks, which are threads here: each element is written once, and the manifest is in parts."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from pathlib import Path

import pytest
import torch

import shardwise as sw
from raising import raises
from shardwise.layouts.boxes import Box, boxes
from shardwise.layouts.layout import Layout
from shardwise.layouts.placement import Placement
from shardwise.layouts.text import parse_layout
from shardwise.train import sharing
from shardwise.train.files import CheckpointReader, StagedFile
from shardwise.train.manifest import Cover, Manifest, StoredTensor, read_manifest
from shardwise.train.parts import TensorPart
from shardwise.train.peers import assign_keepers
from shardwise.train.saving import SaveJob, _save, make_room
from shardwise.train.sharing import Writers, describe_parts
from shardwise.train.stores import Folder, folder_of
from shardwise.train.values import dtype_name

Layouts = dict[str, tuple[Layout, Placement]]


def part_of(whole: torch.Tensor, layout: Layout, place: Placement, rank: int) -> TensorPart:
    found = boxes(layout, place.coordinates(rank))
    here = whole[found[0].rows] if found else whole[:0]
    return TensorPart(here, tuple(whole.shape), found, (layout, place))


def layouts_of(mesh: sw.Mesh, first: int = 0, **texts: str) -> Layouts:
    place = Placement(mesh, tuple(range(first, first + mesh.num_devices)))
    return {name: (parse_layout(text, mesh), place) for name, text in texts.items()}


def parts_of(rank: int, values: dict[str, torch.Tensor], layouts: Layouts) -> dict[str, TensorPart]:
    """Return what a rank holds: parts in layouts, a number that all have, and its generators."""
    parts = {"step": TensorPart.whole(torch.tensor(7.0)), f"random.{rank}": TensorPart.whole(torch.tensor([rank]))}
    for name, (layout, place) in layouts.items():
        if rank in place.ranks:
            parts[name] = part_of(values[name], layout, place, rank)
    return parts


def save(folder: Folder, every: list[dict[str, TensorPart]]) -> None:
    """Save on all ranks at once. Equal offers are one object, as ``gather_values`` returns them."""
    seen: dict[str, list[sharing.Offer]] = {}
    offers = [seen.setdefault(json.dumps(offer), offer) for offer in map(describe_parts, every)]
    writers, num_ranks, at_zero = Writers(offers), len(every), ExitStack()
    token = make_room(folder, at_zero)

    def of_rank(rank: int) -> None:
        files = [StagedFile.empty(file, pinned=False) for file in writers.files_of(rank)]
        for file in files:
            file.fill(every[rank])
        manifest = Manifest(step=3, num_ranks=num_ranks, tensors=writers.tensors())
        _save(SaveJob(folder, token, rank, num_ranks, files, manifest, None, 60.0))

    with at_zero, ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(of_rank, range(num_ranks)))


def read(reader: CheckpointReader, name: str, box: Box) -> torch.Tensor:
    stored = reader.manifest.tensors[name]
    part = TensorPart(torch.empty(box.sizes, dtype=stored.dtype), stored.shape, (box,))
    reader.verify([(name, [box])])
    reader.read(name, part)
    return part.tensor


@pytest.fixture(params=["folder", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return folder_of(tmp_path / "step-3" if request.param == "folder" else f"memory://{tmp_path}/step-3")


MESH = sw.Mesh(dp=9, tp=8)
VALUES = {"up": torch.randn(144, 64), "down": torch.randn(64, 24), "bias": torch.randn(64)}


def test_a_rank_reads_the_parts_of_the_manifest_that_it_needs(folder: Folder) -> None:
    layouts = layouts_of(MESH, up="[144@(dp,tp), 64]", down="[64@tp, 24]", bias="[64]")
    every = [parts_of(rank, VALUES, layouts) for rank in range(72)]
    save(folder, every)
    root = read_manifest(folder)
    assert sorted(root.parts, key=lambda name: int(name.split("-")[1])) == sorted(
        (name for name in folder.names() if name.startswith("part-") and int(name.split("-")[1]) <= 64),
        key=lambda name: int(name.split("-")[1]),
    )
    assert not any(name.startswith(("written-", "failed-")) for name in folder.names())
    assert all(f"random.{rank}" not in root.tensors for rank in range(8, 72))
    for rank in (0, 9, 71):
        reader = CheckpointReader(folder, root)
        part = every[rank]["up"]
        assert torch.equal(read(reader, "up", part.boxes[0]), part.tensor)
        stored = reader.random_of(rank)
        assert stored is not None
        assert read(reader, f"random.{rank}", Box.whole(stored.shape)).tolist() == [rank]
        assert len(root.parts) - len(reader.manifest.parts) == (rank > 7), "of nine parts one at most is read"
    reader = CheckpointReader(folder, root)
    for name, value in VALUES.items():
        assert torch.equal(read(reader, name, Box.whole(value.shape)), value)
    assert read(reader, "step", Box.whole(())) == 7.0


def test_parts_name_parts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.train.saving._FANOUT", 2)
    layouts = layouts_of(sw.Mesh(dp=9), up="[144@dp, 64]")
    save(folder, [parts_of(rank, VALUES, layouts) for rank in range(9)])
    root = read_manifest(folder)
    assert {int(name.split("-")[1]) for name in root.parts} == {2, 4, 8}  # and 4 names 6
    reader = CheckpointReader(folder, root)
    assert torch.equal(read(reader, "up", Box((16 * 7, 0), (16, 64), (0, 0))), VALUES["up"][112:128])
    assert {int(name.split("-")[1]) for name in reader.manifest.parts} == {2, 8}
    assert torch.equal(read(reader, "up", Box.whole((144, 64))), VALUES["up"])


def test_a_part_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "step-3")
    save(folder, [parts_of(rank, VALUES, layouts_of(MESH, up="[144@(dp,tp), 64]")) for rank in range(72)])
    root, (path,) = read_manifest(folder), (tmp_path / "step-3").glob("part-16-*")
    text = path.read_text()
    other = next((tmp_path / "step-3").glob("part-24-*")).read_text()
    for content, why in ((text.replace("shard-00016", "shard-00017"), "damaged"), (other, "does not have every")):
        path.write_text(content)
        with raises(sw.errors.CheckpointError, why):
            read(CheckpointReader(folder, root), "up", Box((32, 0), (2, 64), (0, 0)))
    path.unlink()
    with raises(sw.errors.CheckpointError, "lacks a part", "part-16-"):
        read(CheckpointReader(folder, root), "up", Box((32, 0), (2, 64), (0, 0)))


@pytest.mark.parametrize("names", [["part-8-x.json"], ["part-16-x.json", "part-8-x.json"]])
def test_parts_that_name_themselves_or_each_other_are_refused(tmp_path: Path, names: list[str]) -> None:
    covers, w = {"w": Cover((0,), (4,), 4)}, StoredTensor(torch.float32, (4,), ())
    for part, named in zip(["part-8-x.json", *names], [*names, "part-8-x.json"], strict=True):
        (tmp_path / part).write_text(Manifest(num_ranks=9, tensors={}, parts={named: covers}).to_text())
    root = Manifest(num_ranks=9, tensors={"w": w}, parts={"part-8-x.json": covers})
    with raises(sw.errors.CheckpointError, "part-8-x.json", "name again"):
        read(CheckpointReader(folder_of(tmp_path), root), "w", Box.whole((4,)))


def test_parts_of_one_level_are_merged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, merged, whole = folder_of(tmp_path / "step-3"), list[int](), Manifest.with_parts
    save(folder, [parts_of(rank, VALUES, layouts_of(MESH, up="[144@(dp,tp), 64]")) for rank in range(72)])

    def counted(self: Manifest, added: dict[str, Manifest]) -> Manifest:
        merged.append(len(added))
        return whole(self, added)

    monkeypatch.setattr(Manifest, "with_parts", counted)
    assert torch.equal(read(CheckpointReader(folder, read_manifest(folder)), "up", Box.whole((144, 64))), VALUES["up"])
    assert merged == [8]


def test_a_save_in_which_a_rank_leaves_something_out_is_not_completed(tmp_path: Path) -> None:
    every = [parts_of(rank, VALUES, layouts_of(sw.Mesh(dp=9), up="[144@dp, 64]")) for rank in range(9)]
    files_of = Writers.files_of
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Writers, "files_of", lambda self, rank: [] if rank == 8 else files_of(self, rank))
        with raises(sw.errors.CheckpointError, "8,192", "9,216", "up"):
            save(folder_of(tmp_path / "step-3"), every)
    assert not (tmp_path / "step-3").exists()


# ------------------------------------------------------------------------------------------------- who writes what


@pytest.mark.parametrize(
    ("layouts", "num_ranks"),
    [
        (layouts_of(sw.Mesh(dp=4, tp=2), a="[4096, 256]", b="[64@tp, 4096]", c="[4096@(tp,dp), 128]"), 8),
        (layouts_of(sw.Mesh(dp=3, tp=2), a="[(2 512@tp), 300]", b="[7, 3]") | layouts_of(sw.Mesh(x=2), 6, c="[9]"), 8),
        (layouts_of(sw.Mesh(dp=6), a="[4, 2000000]", b="[0, 4]", c="[5@dp, 3]"), 6),
    ],
)  # fmt: skip
def test_every_element_is_written_once_by_a_rank_that_holds_it(layouts: Layouts, num_ranks: int) -> None:
    values = {name: torch.zeros(layout.shape) for name, (layout, _) in layouts.items()}
    every = [parts_of(rank, values, layouts) for rank in range(num_ranks)]
    writers, times = Writers(list(map(describe_parts, every))), {n: torch.zeros(v.shape) for n, v in values.items()}
    load = Counter[int]()
    for rank in range(num_ranks):
        for file in writers.files_of(rank):
            load[rank] += file.num_bytes
            for _, piece in file.pieces:
                part = every[rank][piece.name]
                common = [box.common(piece.offsets, piece.sizes) for box in part.boxes]
                assert any(box is not None and box.sizes == piece.sizes for box in common) or not prod(piece.sizes)
                if piece.name in times:
                    times[piece.name][Box(piece.offsets, piece.sizes, piece.offsets).rows] += 1
    assert all((count == 1).all() for count in times.values())
    assert all(dtype_name(torch.float32) == dtype for dtype, _ in writers.kinds.values())


def test_what_many_hold_is_written_in_equal_shares() -> None:
    (whole,) = layouts_of(sw.Mesh(dp=4), w="[4096, 256]").values()
    every = [{"w": part_of(torch.zeros(4096, 256), *whole, rank)} for rank in range(4)]
    writers = Writers(list(map(describe_parts, every)))
    files = [writers.files_of(rank) for rank in range(4)]
    assert [own[0].num_bytes for own in files] == [2**20] * 4
    assert [own[0].pieces[0][1].offsets for own in files] == [(0, 0), (1024, 0), (2048, 0), (3072, 0)]
    (halves,) = layouts_of(sw.Mesh(tp=2), w="[2@tp, 1024]").values()
    with raises(sw.ShardwiseError, "1,024", "2,048"):
        Writers([describe_parts({"w": part_of(torch.zeros(2, 1024), *halves, 0)})])


@pytest.mark.parametrize("holders", [(1,), (1, 3)])
def test_what_only_some_ranks_of_a_placement_hold_is_written_by_these(holders: tuple[int, ...]) -> None:
    (whole,) = layouts_of(sw.Mesh(dp=4), w="[8, 4]").values()
    every = [{"w": part_of(torch.zeros(8, 4), *whole, rank)} if rank in holders else {} for rank in range(4)]
    writers = Writers(list(map(describe_parts, every)))
    pieces = [piece for rank in range(4) for file in writers.files_of(rank) for _, piece in file.pieces]
    assert sum(prod(piece.sizes) for piece in pieces) == 32


def test_what_a_rank_computes_does_not_grow_with_the_number_of_ranks() -> None:
    def pieces(mesh: sw.Mesh) -> tuple[int, list[tuple[int, int]]]:
        layouts = layouts_of(
            mesh, **{f"w{i}": "[65536@(dp,tp), 8]" for i in range(20)}, **{f"b{i}": "[64]" for i in range(20)}
        )
        parts = {
            name: TensorPart(torch.empty(0), layout.shape, (), (layout, place))
            for name, (layout, place) in layouts.items()
        }
        offers = describe_parts(parts)
        writers = Writers([offers] * mesh.num_devices)
        copies = assign_keepers(writers, [rank // 8 for rank in range(mesh.num_devices)], 9)
        written = sum(len(file.pieces) for rank in (1, mesh.num_devices - 1) for file in writers.files_of(rank))
        return written, [(copy.writer, copy.keeper) for copy in copies]

    assert pieces(sw.Mesh(dp=8, tp=8)) == pieces(sw.Mesh(dp=2048, tp=8)) == (40, [(1, 9), (9, 17)])
