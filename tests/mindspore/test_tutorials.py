"""Programs on the usual topics of tutorials: on one process, and on two ranks with the same losses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise.mindspore as ms

RunRanks = Callable[..., list[Any]]
FOLDER = Path(__file__).parents[2] / "examples/mindspore/tutorials"


def program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"tutorial_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digits(folder: Path) -> None:
    """Files in MNIST's format: bright squares whose place is the label."""
    numbers = np.random.RandomState(0)
    for name, count in (("train", 32), ("t10k", 8)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = numbers.randint(0, 40, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[label * 2 : label * 2 + 8, 4:24] = 255
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())


def cifar(folder: Path) -> None:
    """A file in CIFAR-10's binary format."""
    numbers = np.random.RandomState(1)
    table = numbers.randint(0, 255, (16, 3073)).astype(np.uint8)
    table[:, 0] %= 10
    (folder / "data_batch_1.bin").write_bytes(table.tobytes())


def _on_rank(folder: str) -> dict[str, Any]:
    history, net = program("lenet").main(folder)
    weights = [p.asnumpy() for p in net.get_parameters()]
    ms.reset_auto_parallel_context()
    losses, scales, _ = program("bert_loss_scale").main()
    ms.reset_auto_parallel_context()
    wide, area, score = program("functional_loop").main(folder)
    ms.reset_auto_parallel_context()
    return {
        "lenet": (history.epoch, history.history["eval_loss"], weights), "bert": (losses, scales),
        "gpt": program("gpt_parallel").main(), "wide": (wide, area, score),
    }  # fmt: skip


def test_programs_of_tutorials_on_two_ranks_are_those_of_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    digits(tmp_path)
    one = _on_rank(str(tmp_path))
    two = run_ranks(_on_rank, 2, str(tmp_path), time_limit_seconds=120)
    assert one["lenet"][0] == {"epoch": [1, 2]}
    assert one["bert"][1] == [1024, 1024, 2048, 2048]  # the scale grows after two good steps
    assert one["gpt"][-1] < one["gpt"][0]
    for rank in two:
        assert rank["lenet"][0] == one["lenet"][0]
        np.testing.assert_allclose(rank["lenet"][1], one["lenet"][1], rtol=1e-4)
        for own, other in zip(rank["lenet"][2], one["lenet"][2], strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-6)
        assert rank["bert"][1] == one["bert"][1]
        np.testing.assert_allclose(rank["gpt"], one["gpt"], rtol=1e-5)
        np.testing.assert_allclose(rank["wide"][2], one["wide"][2], rtol=1e-5, atol=1e-7)
    for name in ("bert", "wide"):  # every rank has the loss of its rows
        means = np.mean([rank[name][0] for rank in two], 0)
        np.testing.assert_allclose(means, one[name][0], rtol=1e-4)


def _staged_on_rank(folder: str) -> dict[str, Any]:
    lstm = program("lstm_sentences").main(folder)
    ms.reset_auto_parallel_context()
    own = f"{folder}/of {ms.communication.get_group_size()}"
    staged = program("transformer_pipeline").pretrain(own)
    ms.reset_auto_parallel_context()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return {"lstm": lstm, "staged": staged, "tuned": program("transformer_pipeline").finetune(own)}


def test_stages_and_what_follows_from_their_files_are_those_of_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    one = _staged_on_rank(str(tmp_path))
    two = run_ranks(_staged_on_rank, 2, str(tmp_path), time_limit_seconds=300)
    for rank in two:
        np.testing.assert_allclose(rank["staged"], one["staged"], rtol=2e-5)
        assert rank["lstm"][1] == pytest.approx(one["lstm"][1], rel=1e-4)
        for name, weight in one["tuned"][1].items():
            np.testing.assert_allclose(rank["tuned"][1][name], weight, rtol=1e-3, atol=2e-5, err_msg=name)
    for name in ("lstm", "tuned"):  # every rank has the loss of its rows
        means = np.mean([rank[name][0] for rank in two], 0)
        np.testing.assert_allclose(means, one[name][0], rtol=1e-4, err_msg=name)


def test_mixed_precision_and_sentences_on_one_process(tmp_path: Path) -> None:
    cifar(tmp_path)
    module = program("amp_resnet")
    half, accuracy, net = module.train_images(str(tmp_path))
    full, _, _ = module.train_images(str(tmp_path), "O0")
    assert {str(p.dtype) for p in net.get_parameters()} == {"torch.float32"}
    assert 0 <= accuracy <= 1
    assert half != full
    np.testing.assert_allclose(half, full, rtol=0.02)  # float16 has 11 bits
    losses, scores = module.train_sentences()
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    assert scores.shape == (2,)
