"""Files of checkpoints: what is written and read, and which stay."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from raising import raises
from shardwise.layouts.boxes import Box, boxes
from shardwise.layouts.layout import Windows
from shardwise.layouts.text import parse_layout
from shardwise.runtime.local_shards import shard
from shardwise.train import checkpoints, saving
from shardwise.train.files import CheckpointReader, StagedFile, StreamedFile
from shardwise.train.manifest import read_manifest
from shardwise.train.parts import TensorPart
from shardwise.train.sharing import WritePiece, file_of
from shardwise.train.stores import folder_of
from shardwise.train.values import decode, encode
from train.runs import saved

# --------------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    "text",
    ["[7@tp, 6]", "[7, 6@tp]", "[(3 4@tp), 5]", "[(3 4@tp 2), (2 3@dp)]", "[6@(dp,tp)]", "[(5 2@tp), 3@dp, 4]", "[]",
     "uneven"],
)  # fmt: skip
def test_boxes_are_what_a_device_holds(text: str) -> None:
    mesh = sw.Mesh(dp=2, tp=3)
    layout = parse_layout("[(2 4@tp), 3]" if text == "uneven" else text, mesh)
    if text == "uneven":
        layout = replace(layout, windows=(Windows.of_lengths(0, 1, [1, 0, 3]),))
    whole = torch.arange(math.prod(layout.shape)).reshape(layout.shape)
    for device in range(6):
        local = shard(whole, layout, mesh.coordinates(device))
        found = boxes(layout, mesh.coordinates(device))
        part = TensorPart(local, layout.shape, found)
        assert sum(box.numel for box in found) == local.numel()
        for box in found:
            cut = whole
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                cut = cut.narrow(dim, start, size)
            assert torch.equal(part.at(box), cut)


def test_a_part_is_read_and_verified_without_the_rest(tmp_path: Path) -> None:
    model = nn.Linear(256, 4096, bias=False)  # 4 MiB
    sw.save_checkpoint(tmp_path / "one", model, step=0)
    manifest = read_manifest(folder_of(tmp_path / "one"))
    for rows, columns, expected in (
        (slice(1024, 2048), slice(None), 2**20),
        (slice(0, 1), slice(3, 5), 2**18),
        (slice(None), slice(0, 1), 2**22),
        (slice(255, 257), slice(None), 2**19),
    ):
        reader = CheckpointReader(folder_of(tmp_path / "one"), manifest)
        want = model.weight.detach()[rows, columns]
        box = Box((rows.start or 0, columns.start or 0), tuple(want.shape), (0, 0))
        part = TensorPart(torch.zeros(want.shape), (4096, 256), (box,))
        reader.verify([("model.weight", part.boxes)])
        reader.read("model.weight", part)
        assert torch.equal(part.tensor, want)
        assert reader.num_bytes_read == expected


def test_single_numbers_move_no_tensor_off_the_lines_of_the_cache(tmp_path: Path) -> None:
    """A copy to where no line begins takes 1.4 times as long: AdamW keeps a number of every parameter."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters())
    model[1](model[0](torch.ones(2, 16)).double()).sum().backward()
    optimizer.step()
    sw.save_checkpoint(tmp_path / "one", model, optimizer, step=1)
    manifest = read_manifest(folder_of(tmp_path / "one"))
    starts = {name: stored.chunks[0].start for name, stored in manifest.tensors.items()}
    sizes = {name: math.prod(one.shape) * one.dtype.itemsize for name, one in manifest.tensors.items()}
    assert sum(size % 64 > 0 for size in sizes.values()) > 4
    assert all(starts[name] % 64 == 0 for name, size in sizes.items() if size % 64 == 0)
    assert all(starts[name] % one.dtype.itemsize == 0 for name, one in manifest.tensors.items())
    (file,) = manifest.files.values()
    assert file.num_bytes == sum(sizes.values())  # no gaps


def test_what_is_written_through_a_window_is_what_a_copy_would_be() -> None:
    def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.arange(math.prod(shape), dtype=dtype).reshape(shape)

    parts = {
        "columns": TensorPart.whole(counted(9, 12)[:, 3:8]),
        "turned": TensorPart.whole(counted(6, 5, 4).permute(2, 0, 1)),
        "strided": TensorPart.whole(counted(40, dtype=torch.float64)[::2]),
        "number": TensorPart.whole(torch.tensor(7.0)),
        "nothing": TensorPart.whole(counted(0, 3)),
        "flags": TensorPart.whole(counted(5, 5) % 3 == 0),
        "a box": TensorPart(counted(4, 6), (8, 6), (Box((2, 0), (4, 6), (0, 0)),)),
    }
    pieces = [WritePiece(name, part.tensor.dtype, part.shape, (0,) * part.tensor.ndim, tuple(part.tensor.shape))
              for name, part in parts.items() if name != "a box"]  # fmt: skip
    file = file_of("one", [*pieces, WritePiece("a box", torch.float32, (8, 6), (3, 1), (2, 4))])
    whole = StagedFile.empty(file, pinned=False)
    whole.fill(parts)
    for size in (8, 64, 72, file.num_bytes):
        streamed = StreamedFile(file, parts, torch.empty(size, dtype=torch.uint8))
        found = (bytes(streamed.part(at, min(at + size, file.num_bytes))) for at in range(0, file.num_bytes, size))
        assert b"".join(found) == whole.buffer.numpy().tobytes()


def test_saves_that_wait_and_weights_that_go_out_need_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes, real = nn.Linear(1024, 5000), list[int](), torch.empty  # 20 MB

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append((made := real(*args, **kwargs)).nbytes)
        return made

    monkeypatch.setattr(StagedFile, "empty", None)
    monkeypatch.setattr(torch, "empty", noted)
    sw.save_pretrained(model, tmp_path / "weights")
    assert 2**22 < max(sizes) <= 2**23
    written = load_file(tmp_path / "weights/model.safetensors")
    assert torch.equal(written["weight"], model.weight)
    assert torch.equal(written["bias"], model.bias)


def test_a_save_whose_call_is_interrupted_never_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the module itself, which the script may change from then on."""
    model, real, threads = nn.Linear(8, 8), saving.write, list[threading.Thread]()

    def interrupted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        deadline = time.monotonic() + 60
        while not left.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        return real(*args)

    left = threading.Event()
    monkeypatch.setattr(saving, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sw.save_checkpoint(tmp_path / "step-1", model, step=1)
    left.set()
    threads[0].join(60)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1.incomplete"}
    assert "the call was interrupted" in (tmp_path / "step-1.incomplete" / "failed-0").read_text()


@pytest.mark.parametrize("place", ["patience_seconds", "_files", "Manifest", "Saving", "the thread"])
def test_a_save_that_fails_before_its_thread_runs_leaves_room_for_the_next(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, path = nn.Linear(3, 2), tmp_path / "step-1"
    fails = mock.Mock(side_effect=MemoryError("none left"))
    with monkeypatch.context() as patched:
        patched.setattr(*((threading.Thread, "start") if place == "the thread" else (checkpoints, place)), fails)
        with pytest.raises(sw.errors.CheckpointError, match="none left"):
            sw.save_checkpoint(path, net)
    assert not [entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".lock")]
    sw.save_checkpoint(path, net)
    assert read_manifest(folder_of(path)).step == 1


def test_a_save_whose_thread_ends_otherwise_is_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "write", mock.Mock(side_effect=SystemExit("ended")))
    with raises(sw.errors.CheckpointError, "SystemExit: ended"):
        sw.save_checkpoint(tmp_path / "step-1", nn.Linear(3, 2))


@pytest.mark.parametrize("refuses", [None, "the first", "the second"])
def test_large_files_go_past_the_cache_where_the_disk_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str | None
) -> None:
    ordinary, kinds = os.write, list[tuple[bool, int]]()

    def noted(descriptor: int, content: memoryview) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        kinds.append((direct, len(content)))
        number = sum(kind for kind, _ in kinds)
        if direct and refuses == {1: "the first", 2: "the second"}[number]:
            raise OSError(errno.EINVAL, "a device of other pages")
        return ordinary(descriptor, content)

    torch.manual_seed(0)
    model = nn.Linear(1024, 5000)  # 2 x 8 MiB and a rest that is no whole page
    sw.save_checkpoint(tmp_path / "ahead", model, step=0, blocking=False).wait()  # its memory is used again
    with torch.no_grad():
        model.weight.add_(1)
    monkeypatch.setattr(os, "write", noted)
    sw.save_checkpoint(tmp_path / "one", model, step=0, blocking=False).wait()
    monkeypatch.undo()
    manifest = read_manifest(folder_of(tmp_path / "one"))
    ((name, file),) = manifest.files.items()
    assert file.start % 4096 == 0
    assert (tmp_path / "one" / name).stat().st_size == file.start + file.num_bytes
    if any(direct for direct, _ in kinds):  # else it is a file system without it
        expected = {None: "ddo", "the first": "dodo", "the second": "ddoo"}[refuses]
        assert "".join("do"[not direct] for direct, size in kinds if size >= 2**20) == expected
    other = nn.Linear(1024, 5000)
    sw.load_checkpoint(tmp_path / "one", other)  # every block is verified
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


def test_values_come_back_as_they_were() -> None:
    for value in (
        None, True, -3, 2**70, 1.5, math.inf, "text", "$text", b"\0\1", [1, [2.5]], (1, ("a",)), {1, 2}, torch.bfloat16,
        {"a": {"b": (1, 2)}}, {1: 2, (3, 4): 5}, {"$tensor": 1}, Counter({3: 1}), {},
    ):  # fmt: skip
        again = decode(json.loads(json.dumps(encode(value, "it"))))
        assert again == value
        assert type(again) is type(value)
    assert math.isnan(decode(encode(math.nan, "it")))
    for tensor in (torch.randn(3, 2).bfloat16(), torch.tensor(4), torch.empty(0, 3), torch.tensor([True, False])):
        again = decode(encode([tensor], "it"))[0]
        assert torch.equal(again, tensor)
        assert again.dtype == tensor.dtype
    array = decode(encode(np.arange(4, dtype=np.uint32), "it"))
    assert array.tolist() == [0, 1, 2, 3]
    with raises(sw.ShardwiseError, "it['a'][1]", "builtin_function_or_method"):
        encode({"a": [1, print]}, "it")


def test_states_of_other_optimizers_schedulers_and_generators_come_back(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizers: list[Any], tools: list[Any], scaler: Any, steps: int) -> list[float]:
        drawn = []
        for _ in range(steps):
            loss = model(torch.randn(4, 6)).square().sum()
            scaler.scale(loss).backward()
            for one in (*optimizers, *tools[:2]):
                one.step()
            tools[2].step(loss.item())
            model.zero_grad()
            scaler.update(2.0 * scaler.get_scale())
            drawn += [loss.item(), random.random(), float(np.random.rand())]
        return drawn

    def make(seed: int) -> tuple[nn.Module, list[Any], list[Any], Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        pair: list[Any] = [
            torch.optim.NAdam(model[0].parameters(), lr=0.5 if seed else 0.01),
            torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
        ]
        schedulers: list[Any] = [
            torch.optim.lr_scheduler.MultiStepLR(pair[0], [2, 4]),
            torch.optim.lr_scheduler.LambdaLR(pair[1], lambda step: 0.9**step),
            torch.optim.lr_scheduler.ReduceLROnPlateau(pair[1], patience=0),
        ]
        return model, pair, schedulers, torch.amp.GradScaler("cpu", init_scale=4.0)

    first = make(0)
    run(*first, 3)
    model, pair, schedulers, scaler = first
    sw.save_checkpoint(tmp_path / "run", model, pair, step=3, schedulers=schedulers, scaler=scaler)
    want = run(*first, 4)
    second = make(1)
    run(*second, 2)
    model, pair, schedulers, scaler = second
    sw.load_checkpoint(tmp_path / "run", model, pair, schedulers=schedulers, scaler=scaler)
    assert run(*second, 4) == want


# ------------------------------------------------------------------------------------------------------------ retention


def test_a_policy_says_which_stay(tmp_path: Path) -> None:
    keep = sw.Keep(last=2, every=4, best="loss")
    for step, loss in enumerate([3.0, 0.5, 2.0, 1.0, 4.0, 5.0, 6.0], start=1):
        saved(tmp_path, step, metrics={"loss": loss}, keep=keep)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"step-2", "step-4", "step-6", "step-7"}
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-8.incomplete").mkdir()
    (tmp_path / "step-8.incomplete" / "notes").write_text("")  # whoever wrote that
    saved(tmp_path, 3, keep=sw.Keep(last=1))  # a run that went back: what it saves now stays
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"notes", "step-3", "step-7", "step-8.incomplete"}
    for wrong in ({}, {"last": 0}, {"every": True}, {"best": "loss", "order": "max"}):
        with pytest.raises(sw.ShardwiseError):
            sw.Keep(**wrong)
