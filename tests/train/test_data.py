"""The samples of a run are those of its seed, in one order, whatever ranks and workers there are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from train.runs import split


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), torch.rand(()).item()])


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(self.length)


def loader_of(layouts: dict[str, str], mesh: sw.Mesh, device: int, dataset: Any, batch_size: int, **more: Any) -> Any:
    """As on a device of a mesh, of a module with ``inputs="local"``."""
    from shardwise.layouts.text import parse_layout

    loader = sw.DataLoader(dataset, nn.Identity(), batch_size, **more)
    loader._parts.layouts = {name: parse_layout(text, mesh) for name, text in layouts.items()}
    loader._parts.position = device
    loader._parts.with_samples = frozenset(layouts)
    return loader


def test_eight_six_and_eight_ranks_lose_and_repeat_no_sample() -> None:
    dataset = TensorDataset(torch.arange(1000))
    want = [x for batch in iter(sw.DataLoader(dataset, nn.Identity(), 24, seed=3)) for x in batch[0].tolist()]
    assert sorted(want) == list(range(1000))
    assert want != sorted(want)
    seen: list[int] = []
    state = None
    for ranks, batch_size, steps in ((8, 24, 10), (6, 18, 11), (8, 24, 100)):
        mesh = sw.Mesh(dp=ranks)
        loaders = [
            loader_of({"args[0]": f"[{batch_size}@dp]"}, mesh, rank, dataset, batch_size, seed=3)
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        batches = [iter(loader) for loader in loaders]
        for _ in range(steps):
            parts = [next(batch, None) for batch in batches]
            if parts[0] is None:
                assert parts == [None] * ranks
                break
            seen += [x for part in parts for x in part[0].tolist()]
        states = [loader.state_dict() for loader in loaders]
        assert states == [states[0]] * ranks
        state = states[0]
    assert seen == want
    assert state is not None
    assert (state["epoch"], state["cursor"]) == (1, 0)


def test_inputs_that_are_split_in_several_dims_are_read_in_parts() -> None:
    tokens, labels = torch.arange(480).view(20, 24), torch.arange(20)
    mesh = sw.Mesh(dp=2, cp=3)
    layouts = {"kwargs['ids']": "[8@dp, 24@cp]", "kwargs['labels']": "[8@dp]"}
    read: list[int] = []

    class Pairs(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> dict[str, Any]:
            read.append(index)
            return {"ids": tokens[index], "labels": labels[index], "scale": 2.0}

    for device in range(6):
        own = mesh.coordinates(device)
        loader = loader_of(layouts, mesh, device, Pairs(), 8, shuffle=False)
        batches = list(loader)
        dp, cp = own["dp"], own["cp"]
        sizes = [(4, 8), (4, 8), (2, 8)]
        assert [tuple(batch["ids"].shape) for batch in batches] == sizes
        starts = [4 * dp, 8 + 4 * dp, 16 + 2 * dp]
        for batch, start, (size, _) in zip(batches, starts, sizes, strict=True):
            assert torch.equal(batch["ids"], tokens[start : start + size, 8 * cp : 8 * cp + 8])
            assert torch.equal(batch["labels"], labels[start : start + size])
        assert len(read) == 10  # a half, for two rows of devices
        read.clear()


def test_workers_epochs_and_augmentations_follow_the_seed() -> None:
    def epochs(ranks: int, **more: Any) -> list[torch.Tensor]:
        mesh = sw.Mesh(dp=ranks)
        loaders = [
            loader_of({"args[0]": "[4@dp, 3]"}, mesh, r, Augmented(), 4, seed_samples=True, **more)
            for r in range(ranks)
        ]
        return [torch.cat(parts) for _ in range(2) for parts in zip(*(list(loader) for loader in loaders), strict=True)]

    want = epochs(1)
    for other in (epochs(2), epochs(4), epochs(1, num_workers=2)):
        assert all(map(torch.equal, want, other))
    assert [len(batch) for batch in want] == [4, 4, 2] * 2
    assert not torch.equal(want[0], want[3])
    assert [len(batch) for batch in epochs(2, drop_last=True)] == [4, 4] * 2


def test_streams_go_on_where_they_were() -> None:
    loader = sw.DataLoader(Stream(10), nn.Identity(), 4, shuffle=False)
    batches = iter(loader)
    first = next(batches)
    again = sw.DataLoader(Stream(10), nn.Identity(), 3, shuffle=False)
    again.load_state_dict(loader.state_dict())
    assert [first.tolist(), *(batch.tolist() for batch in again)] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [batch.tolist() for batch in again] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


class Divided(IterableDataset[Any]):
    """Divides its samples among workers, and goes to a position by itself, as data sets of Hugging Face do."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.start, self.position, self.read = length, 0, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        start, self.start = self.start, 0
        for number in range(first + start, self.length, step):
            self.position, self.read = number + 1, self.read + 1
            yield torch.tensor(100 * self.epoch + number)


@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_with_workers_have_the_batches_of_torch_and_go_on(drop_last: bool) -> None:
    def loader(**more: Any) -> sw.DataLoader:
        options = {"shuffle": False, "num_workers": 2, "drop_last": drop_last} | more
        return sw.DataLoader(Divided(11), nn.Identity(), 2, **options)

    torchs = torch.utils.data.DataLoader(Divided(11), batch_size=2, num_workers=2, drop_last=drop_last)
    want = [batch.tolist() for batch in torchs]
    assert (len(want), want[:2]) == (5 if drop_last else 6, [[0, 2], [1, 3]])
    first = loader()
    assert [batch.tolist() for batch in first] == want
    assert [batch.tolist() for batch in first] == [[100 + x for x in batch] for batch in want]
    for stop in (1, 4):
        begun = loader()
        batches = iter(begun)
        seen = [next(batches).tolist() for _ in range(stop)]
        again = loader()
        again.load_state_dict(begun.state_dict())
        assert [*seen, *(batch.tolist() for batch in again)] == want
    other = loader(num_workers=1)
    other.load_state_dict(begun.state_dict() | {"cursor": 7})
    with raises(sw.ShardwiseError, "consumed 7 samples", fix="num_workers"):
        list(other)
    with raises(sw.ShardwiseError, "no pin_memory", fix="num_workers"):
        loader(num_workers=0, pin_memory=True)


def test_a_stream_that_knows_its_position_reads_nothing_again() -> None:
    loader = sw.DataLoader(Divided(10), nn.Identity(), 4, shuffle=False)
    list(loader)
    batches = iter(loader)
    assert next(batches).tolist() == [100, 101, 102, 103]
    state = loader.state_dict()
    assert (state["epoch"], state["cursor"], state["stream"]) == (1, 4, {"position": 4})
    stream = Divided(10)
    again = sw.DataLoader(stream, nn.Identity(), 3, shuffle=False)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[104, 105, 106], [107, 108, 109]]
    assert stream.read == 6, "no sample before the position"
    assert next(iter(again)).tolist() == [200, 201, 202]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loop_that_is_left_goes_on_and_behind_its_last_batch_with_the_next_epoch(drop_last: bool) -> None:
    loader = sw.DataLoader(TensorDataset(torch.arange(5)), nn.Identity(), 2, drop_last=drop_last, shuffle=False)
    assert [len(next(iter(loader))[0]) for _ in range(4)] == ([2, 2, 2, 2] if drop_last else [2, 2, 1, 2])
    assert (loader.epoch, loader.cursor) == ((2, 0) if drop_last else (1, 2))
    inside = iter(loader)
    state = [loader.state_dict() for _ in inside][-1]  # as it is saved in the loop's last turn
    loader.load_state_dict(state)
    assert not list(loader), "the rest of that epoch"


def test_another_data_set_is_refused() -> None:
    loader = sw.DataLoader(TensorDataset(torch.arange(9)), nn.Identity(), 4)
    state = loader.state_dict()
    for change, message in (
        ({"dataset": TensorDataset(torch.arange(8))}, ("samples in the data set 9", "has 8")),
        ({"seed": 1}, ("seed 0", "has 1")),
        ({"shuffle": False}, "shuffle True"),
    ):
        arguments: dict[str, Any] = {"dataset": TensorDataset(torch.arange(9)), **change}
        with raises(sw.ShardwiseError, message):
            sw.DataLoader(par=nn.Identity(), batch_size=4, **arguments).load_state_dict(state)
    for wrong in ({"batch_size": 0}, {"batch_size": 4, "sampler": [1]}):
        with pytest.raises(sw.ShardwiseError):
            sw.DataLoader(TensorDataset(torch.arange(9)), nn.Identity(), **wrong)
    with raises(sw.ShardwiseError, "own order", "shuffle=False"):
        sw.DataLoader(Stream(4), nn.Identity(), 2)


def on_ranks(folder: str) -> list[float]:
    """On a rank: a run in parts of batches, stopped and continued in the middle of an epoch."""
    ids, labels = torch.randint(0, 14, (2, 26, 5), generator=torch.Generator().manual_seed(1))
    par = split("dp2", inputs="local")
    optimizer = torch.optim.SGD(par.parameters(), lr=0.1)
    loader = sw.DataLoader(TensorDataset(ids, labels), par, 12, seed=5)
    losses = []

    def train(steps: int) -> None:
        for batch in loader:
            assert len(batch[0]) in (6, 1)
            losses.append(par.step(*batch).item())
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1
            if not steps:
                return

    train(2)
    sw.save_checkpoint(f"{folder}/two", par, optimizer, step=2, data=loader)
    train(1)
    kept = list(losses)
    sw.load_checkpoint(folder, par, optimizer, data=loader)
    losses.clear()
    train(1)
    assert kept[2:] == losses
    streams = sw.DataLoader(Stream(6 if dist.get_rank() else 5), par, 4, shuffle=False)
    with raises(sw.ShardwiseError, "after 4", "1, 2 more"):
        list(streams)
    return kept


class Packed(nn.Module):
    """Documents one after the other in rows: none attends to another, nor foretells its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(9, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, documents: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(places)
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & causal
        logits = self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1))
        labels = torch.where(documents[:, 1:] == documents[:, :-1], ids[:, 1:], -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())


def packed_rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (36,), generator=generator).tolist()
    ids = torch.randint(0, 20, (sum(lengths),), generator=generator)
    documents = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)])
    places = torch.cat([torch.arange(n) for n in lengths])
    rows = {"ids": ids, "documents": documents, "places": places}
    return [{name: whole[at : at + 12] for name, whole in rows.items()} for at in range(0, len(ids) - 11, 12)]


def packed() -> dict[str, float]:
    """On a rank: how far the losses of rows of several documents are from one device's, batches split by samples and by
    positions."""
    found, rows = {}, packed_rows()
    example = default_collate(rows[:4])
    for axis, layout in (("dp", "[4@dp, 12]"), ("cp", "[4, 12@cp]")):
        torch.manual_seed(0)
        one, mesh = Packed().double(), sw.Mesh({axis: 2})
        layouts = {f"kwargs['{name}']": layout for name in example}
        plan = sw.plan(one, example, 2, mesh=mesh, layouts=layouts, search="sharding_propagation", mode="semi_auto")
        par = sw.parallelize(one, plan, inputs="local")
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (par, one)]
        apart = 0.0
        for part, whole in zip(sw.DataLoader(rows, par, 4), sw.DataLoader(rows, one, 4), strict=True):
            assert part["ids"].numel() * 2 == whole["ids"].numel() or axis == "dp"
            loss = one(**whole)
            loss.backward()
            apart = max(apart, abs(par.step(**part).item() - loss.item()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found[axis] = apart
    return found


def gathered() -> list[bool]:
    """Whether what ranks gather of their rows are the whole batches; the last has fewer rows than there are ranks."""
    par, rows = split("dp2", inputs="local"), TensorDataset(torch.arange(43), torch.rand(43, 2, 3))
    loader, equal = sw.DataLoader(rows, par, 6), []
    for parts, whole in zip(loader, sw.DataLoader(rows, nn.Identity(), 6), strict=True):
        equal += [torch.equal(loader.gather(part), rows) for part, rows in zip(parts, whole, strict=True)]
    return equal


def parts_and_packed_rows(folder: str) -> tuple[list[float], dict[str, float]]:
    assert gathered() == [True] * 16
    return on_ranks(folder), packed()


def test_ranks_train_on_their_parts_of_the_order(run_ranks: RunRanks, tmp_path: Path) -> None:
    everything = run_ranks(parts_and_packed_rows, 2, str(tmp_path))
    found = [losses for losses, _ in everything]
    assert all(apart < 1e-12 for _, packed_apart in everything for apart in packed_apart.values())
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(20)), Stream(20)], ids=["with len", "a stream"])
def test_the_place_in_the_data_is_that_of_one_loop(dataset: Any) -> None:
    loader = sw.DataLoader(dataset, nn.Identity(), 4, shuffle=False)
    with raises(sw.ShardwiseError, "position was", fix=("separate loader", "load_state_dict")):
        for _ in zip(loader, loader, strict=True):
            pass
    again = sw.DataLoader(dataset, nn.Identity(), 4, shuffle=False)
    inner = []

    def nested() -> None:
        for _ in again:  # an evaluation over the same loader inside
            inner.append(sum(1 for _ in again))

    with raises(sw.ShardwiseError, "position was", fix=("separate loader", "load_state_dict")):
        nested()
    assert inner == [4]
    last = sw.DataLoader(dataset, nn.Identity(), 20, shuffle=False)
    outer = iter(last)
    next(outer)
    assert list(last) == []  # the epoch was read
    with pytest.raises(sw.ShardwiseError):  # it would begin another one
        next(outer)
    assert last.epoch == 1
    moved = sw.DataLoader(dataset, nn.Identity(), 4, shuffle=False)
    running, before = iter(moved), moved.state_dict()
    next(running)
    moved.load_state_dict(before)
    with raises(sw.ShardwiseError, "position was", fix=("separate loader", "load_state_dict")):
        next(running)
    assert sum(1 for _ in moved) == 5


def unlike_loaders() -> None:
    rank = dist.get_rank()
    par = split("dp2", inputs="local")
    for more, name in (
        ({"length": 40 + rank}, "40 samples in the data set"),
        ({"seed": rank}, "seed"),
        ({"shuffle": rank == 0}, "shuffle"),
    ):
        settings: dict[str, Any] = {"length": 40, **more}
        length = settings.pop("length")
        dataset = TensorDataset(*torch.zeros(2, length, 5, dtype=torch.int64))
        with raises(sw.ShardwiseError, "their loaders", f"{name} on rank 0"):
            sw.DataLoader(dataset, par, 12, **settings)


def test_ranks_with_other_data_or_another_order_are_named(run_ranks: RunRanks) -> None:
    run_ranks(unlike_loaders, 2)
