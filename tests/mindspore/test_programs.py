"""The programs of the slides and of document 004 run as a user runs them, and give what one process gives.

Each is run in fresh ranks, most of them several to a set of ranks: from its file, with its arguments, in a context of
its own. Where a program is for one device "with one line changed", a test changes that line.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import shardwise.mindspore as ms
from shardwise.mindspore import context
from shardwise.mindspore.holding import holding_of
from shardwise.runtime.local_shards import shard

RunRanks = Callable[..., list[Any]]
Found = dict[str, Any]
ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "mindspore"
MODE, ALONE = "ParallelMode.AUTO_PARALLEL", "ParallelMode.STAND_ALONE"
LOSS = re.compile(r"^epoch: \d+ step: \d+, loss is (\S+)$", re.MULTILINE)


def run_program(
    folder: str, program: str, *arguments: str, changes: Sequence[tuple[str, str]] = ()
) -> tuple[str, dict[str, Any]]:
    """Run a program in this process as its only one: what it printed, and its variables at the end.

    ``changes``: (text, text) to put in its place; each must be in the program exactly once.
    """
    path = PROGRAMS / program
    source = path.read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{program} has {source.count(old)} times {old!r}"
        source = source.replace(old, new)
    ms.reset_auto_parallel_context()
    context.reset_context()
    ms.set_seed(0)
    printed, variables = io.StringIO(), {"__name__": "__main__", "__file__": str(path)}
    where = Path.cwd()
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        contextlib.redirect_stdout(printed),
    ):
        os.chdir(folder)
        try:
            exec(compile(source, str(path), "exec"), variables)
        finally:
            os.chdir(where)
    return printed.getvalue(), variables


def losses_in(printed: str) -> list[float]:
    return [float(value) for value in LOSS.findall(printed)]


# ------------------------------------------------------------------------------------- document 004: two devices


def two_devices_alone() -> Tensor:
    """Every row's loss in each of the 20 steps, in plain PyTorch: (steps, rows)."""
    weight = torch.empty(32, 16).normal_(0, 0.01, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    numbers = np.random.RandomState(1)
    x, label = (torch.from_numpy(numbers.rand(16, size).astype(np.float32)).double() for size in (32, 16))
    optimizer = torch.optim.SGD([weight], lr=1e-3, momentum=0.1)
    rows = []
    for _ in range(20):
        loss = -(label * torch.relu(x @ weight).log_softmax(-1)).sum(-1)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        rows.append(loss.detach())
    return torch.stack(rows)


def two_devices_with_one_line_changed(folder: str) -> str:
    line = 'ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2, full_batch=True)'
    alone = 'ms.set_auto_parallel_context(parallel_mode="stand_alone")'
    return run_program(folder, "auto_parallel/two_devices.py", changes=[(line, alone)])[0]


def test_the_two_device_example_prints_each_ranks_own_mean(run_ranks: RunRanks, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardwise.cli", "run", "-n", "2", "--log-dir", "log"]
    command += ["--preload", "shardwise.mindspore"]
    program = str(PROGRAMS / "auto_parallel" / "two_devices.py")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    subprocess.run([*command, program], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=600)
    rows = two_devices_alone()
    for rank in range(2):
        losses = losses_in((tmp_path / "log" / f"rank-{rank}.log").read_text())
        np.testing.assert_allclose(losses, rows.chunk(2, 1)[rank].mean(1), rtol=2e-6)
        names = sorted(path.name for path in (tmp_path / str(rank)).iterdir())
        assert names == ["CKP-4_4.ckpt", *(f"CKP-5_{step}.ckpt" for step in range(1, 5))]
    (printed,) = run_ranks(two_devices_with_one_line_changed, 1, str(tmp_path))
    np.testing.assert_allclose(losses_in(printed), rows.mean(1), rtol=2e-6)
    assert rows.mean(1).diff().max() < 0


# ------------------------------------------------------------------------------------------- document 004: BERT


def run_bert(folder: str, orders: list[str]) -> list[Found]:
    """What a rank's BERT printed and holds after each of the orders, and what torch was asked to send."""
    sys.path.append(str(PROGRAMS / "slides"))
    from issued import issued  # type: ignore[import-not-found]

    found = []
    for order in orders:
        with issued() as heard:
            _, ended = run_program(folder, "auto_parallel/bert_data_parallel.py", "--order", order)
        parameters = [parameter.detach().clone() for parameter in ended["optimizer"].parameters]
        counted = {"counted": ended["collectives"], "heard": [(own.kind, own.ranks, own.num_bytes) for own in heard]}
        found.append({"losses": ended["losses"], "parameters": parameters, **counted})
    return found


def bert_in_the_documents_order(folder: str, ranks: int) -> tuple[list[list[float]], list[Tensor]]:
    """Every rank's losses and the parameters, from one process that clips each rank's scaled gradients by itself."""
    changes = [("for number in range(options.steps):", "for number in range(0):")]
    _, made = run_program(folder, "auto_parallel/bert_data_parallel.py", changes=changes)
    network, parameters = made["network"], list(made["optimizer"].parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    scales, losses = [1024.0, 1024.0, 2048.0, 2048.0], []
    for number, scale in enumerate(scales):
        totals, sums = [], [torch.zeros_like(own) for own in parameters]
        for rank in range(ranks):
            ids, mask, lm_ids, positions, weights, label, segments = (
                part.chunk(ranks)[rank] for part in made["random_batch"](made["config"], 8, seed=number)
            )
            total = network(ids, mask, segments, lm_ids, positions, weights, label)[0]
            gradients = torch.autograd.grad(total * scale, parameters, allow_unused=True, materialize_grads=True)
            norm = float(torch.cat([own.flatten() for own in gradients]).norm())
            assert norm > 1, "clipping must do something"
            sums = [own + gradient / norm for own, gradient in zip(sums, gradients, strict=True)]
            totals.append(float(total.detach()))
        for own, gradient in zip(parameters, sums, strict=True):
            own.grad = (gradient / ranks / scale).as_subclass(Tensor)
        optimizer.step()
        losses.append(totals)
    return losses, [own.detach().clone() for own in parameters]


def test_the_bert_step_reduces_gradients_and_sends_nothing_else(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(run_bert, 4, str(tmp_path), ["document", "correct"], time_limit_seconds=120)
    ((alone,),) = run_ranks(run_bert, 1, str(tmp_path), ["correct"])
    ((by_rank, parameters),) = run_ranks(bert_in_the_documents_order, 1, str(tmp_path), 4)
    num_bytes = sum(own.numel() * 8 for own in parameters)
    for rank, (document, correct) in enumerate(ranks):
        for found in (document, correct):
            assert found["counted"] == [[("all_reduce", num_bytes)]] * 4
            assert found["heard"] == [("all_reduce", (0, 1, 2, 3), num_bytes)] * 4
        close(document["parameters"], parameters)
        close(document["losses"], [own[rank] for own in by_rank])
        close(correct["parameters"], alone["parameters"])
    close(np.mean([found["losses"] for _, found in ranks], axis=0), alone["losses"])
    differences = [float((a - b).abs().max()) for a, b in zip(parameters, alone["parameters"], strict=True)]
    assert max(differences) > 1e-4, "the two orders must not be the same"
    assert alone["heard"] == []


def close(found: Any, want: Any) -> None:
    for own, other in zip(found, want, strict=True):
        own, other = (torch.as_tensor(value, dtype=torch.float64) for value in (own, other))
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-13)


# --------------------------------------------------------------------------------------------- slides: products

W, GROUPS = (0, 1, 2, 3), {0: ((0, 1), (0, 2)), 1: ((0, 1), (1, 3)), 2: ((2, 3), (0, 2)), 3: ((2, 3), (1, 3))}


def run_products(folder: str) -> tuple[dict[str, Found], Found, Found, Found]:
    sys.path.append(str(PROGRAMS / "slides"))
    from issued import issued  # type: ignore[import-not-found]

    with issued() as heard:
        _, ended = run_program(folder, "auto_parallel/dense_matmul_net.py")
    sent = [(own.kind, own.ranks) for own in heard[-2:]]  # before, the ranks agree on the plan
    pairs: dict[str, Found] = {"documents 002 and 004": {"error": ended["error"], "forward": sent}}
    for name in ("reid", "dlrm", "transformer"):
        printed, ended = run_program(folder, f"slides/{name}_pair.py")
        pairs[name] = {"printed": printed, "error": ended["error"]} | {
            direction: [(own.kind, own.ranks) for own in ended[direction]] for direction in ("forward", "backward")
        }
    softmax = [run_softmax(folder, "16"), run_softmax(folder, "2000")]
    as_printed = [("torch.exp(logit - local_logit_max)", "torch.exp(logit)")]
    return pairs, *softmax, run_softmax(folder, "2000", as_printed)


def run_softmax(folder: str, scale: str, changes: Sequence[tuple[str, str]] = ()) -> Found:
    small = ("--classes", "64", "--features", "16", "--rows", "8", "--scale", scale, "--steps", "2")
    printed, ended = run_program(folder, "slides/distributed_softmax.py", *small, changes=changes)
    by_hand, ours = ([own.kind for own in ended[name]] for name in ("sent_by_hand", "sent_by_shardwise"))
    features = torch.nn.functional.normalize(ended["images"] @ ended["backbone"])
    logits = float(scale) * features @ torch.nn.functional.normalize(ended["fc"]).T
    whole = float(torch.nn.functional.cross_entropy(logits, ended["labels"]))
    losses = {"loss by hand": float(ended["by_hand"][0]), "loss": float(ended["ours"][0]), "whole": whole}
    return {"printed": printed, "errors": ended["errors"], "by hand": by_hand, "ours": ours} | losses


def test_pairs_of_products_and_a_softmax_over_classes_send_what_the_slides_say(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    for rank, (pairs, softmax, steep, as_printed) in enumerate(
        run_ranks(run_products, 4, str(tmp_path), time_limit_seconds=180)
    ):
        assert max(found["error"] for found in pairs.values()) < 1e-13
        pair, across = GROUPS[rank]
        # The all-gather at the end delivers z (among two gloo ranks by an exchange). Backward of the all-gather of Y is
        # a reduce-scatter (among gloo ranks an exchange whose rows are added up), of the all-to-all one the other way;
        # the all-reduces are of gradients of matrices that several ranks hold.
        assert pairs["reid"]["forward"] == [("all_gather", W), ("all_gather", W)]
        assert pairs["documents 002 and 004"]["forward"] == pairs["reid"]["forward"]
        assert pairs["reid"]["backward"] == [("all_to_all", W), ("all_reduce", W)]
        assert pairs["dlrm"]["forward"] == [("all_to_all", W), ("all_gather", W)]
        assert pairs["dlrm"]["backward"] == [("all_to_all", W), ("all_reduce", W)]
        assert pairs["transformer"]["forward"] == [("all_reduce", pair), ("all_to_all", across)]
        assert sorted(pairs["transformer"]["backward"]) == sorted([("all_reduce", pair), ("all_reduce", across)])
        for found in (softmax, steep):
            assert max(found["errors"][1:]) < 1e-12  # gradients
            assert found["loss"] == pytest.approx(found["whole"], rel=1e-12)
            # By hand: features, then maximum, sum and loss; the gradients of features and of the backbone.
            assert found["by hand"] == ["all_gather", *["all_reduce"] * 3, *["all_reduce"] * 2]
            # Ranks agree on the sizes of their parts, the labels are gathered as well, and features' gradients are
            # scattered (exchanged and added up) instead of sliced.
            assert found["ours"] == [*["all_gather"] * 3, *["all_reduce"] * 3, "all_to_all", "all_reduce"]
        assert softmax["errors"][0] < 1e-12  # the loss; a steep one by hand is bounded by the slide's eps
        assert np.isnan(as_printed["loss by hand"]), "without the maximum, large logits overflow"
        assert as_printed["loss"] == steep["loss"]
        assert ("ratio" in softmax["printed"]) == (rank == 0)


# ------------------------------------------------------------------------------- slides: automatic parallelism


def run_automatic(folder: str, mode: str, ranks: int) -> dict[str, list[float]]:
    changes = [(MODE, mode)] if mode != MODE else []
    found = {"dense_net": losses_in(run_program(folder, "slides/dense_net.py", changes=changes)[0])}
    changes = [("ms." + MODE, "ms." + mode)] if mode != MODE else []
    printed, ended = run_program(folder, "slides/train_networks.py", changes=changes)
    for name, part in zip(ended["networks"], re.split(r"^\w+$", printed, flags=re.MULTILINE)[1:], strict=True):
        found[name] = losses_in(part)
        split = [name for name, p in ended["networks"][name].named_parameters() if holding_of(p) is not None]
        assert bool(split) == (ranks > 1), "on several ranks the network must run by a plan"
    return found


def test_automatic_programs_have_the_losses_of_one_device_with_one_line_changed(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (alone,) = run_ranks(run_automatic, 1, str(tmp_path), ALONE, 1)
    assert list(alone) == ["dense_net", "reid", "dlrm", "wide_and_deep", "transformer"]
    for found in run_ranks(run_automatic, 4, str(tmp_path), MODE, 4, time_limit_seconds=180):
        for name, losses in alone.items():
            assert len(losses) >= 3
            assert losses[-1] < losses[0]
            np.testing.assert_allclose(found[name], losses, rtol=2e-5, err_msg=name)


# -------------------------------------------------------------------------------------------------- slides: ResNet

TINY = ("--layers", "1", "1", "--width", "8", "--image", "32", "--classes", "10", "--rows", "4", "--steps", "3",
        "--float64")  # fmt: skip


def run_resnet(folder: str) -> dict[tuple[str, bool], Found]:
    found = {}
    for mode in ("data_parallel", "auto_parallel"):
        for same in (True, False):
            arguments = (*TINY, "--mode", mode, *(["--same-rows"] if same else []))
            printed, ended = run_program(folder, "slides/train_resnet.py", *arguments)
            net = ended["net"]
            parameters = {name: (own.detach().clone(), holding_of(own)) for name, own in net.named_parameters()}
            batch = (ended["images"], ended["labels"])
            found[mode, same] = {"losses": losses_in(printed), "parameters": parameters, "batch": batch}
    return found


def train_resnet_alone(folder: str, images: np.ndarray, labels: np.ndarray) -> tuple[list[float], dict[str, Tensor]]:
    changes = [
        ("dataset = ds.GeneratorDataset([(images, labels)]", "dataset = ds.GeneratorDataset([GIVEN]"),
        ("options = parser.parse_args()", f"options = parser.parse_args(); GIVEN = np.load({folder!r} + '/rows.npz')"),
        ("[GIVEN]", "[(GIVEN['images'], GIVEN['labels'])]"),
    ]
    np.savez(f"{folder}/rows.npz", images=images, labels=labels)
    printed, ended = run_program(folder, "slides/train_resnet.py", *TINY, "--mode", "auto_parallel", changes=changes)
    return losses_in(printed), {name: own.detach().clone() for name, own in ended["net"].named_parameters()}


@pytest.mark.long
def test_resnet_trains_alike_in_both_modes_where_batch_statistics_agree(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(run_resnet, 2, str(tmp_path), time_limit_seconds=180)
    rows = [np.concatenate([found["auto_parallel", False]["batch"][i] for found in ranks]) for i in range(2)]
    ((losses, parameters),) = run_ranks(train_resnet_alone, 1, str(tmp_path), *rows)
    for rank, found in enumerate(ranks):
        local, whole = found["data_parallel", True], found["auto_parallel", True]
        np.testing.assert_allclose(local["losses"], whole["losses"], rtol=1e-9)
        assert local["losses"][-1] < local["losses"][0]
        for name, (own, held) in whole["parameters"].items():
            assert held is not None
            want = shard(local["parameters"][name][0], held.layout, held.layout.mesh.coordinates(rank))
            torch.testing.assert_close(own, want, rtol=1e-9, atol=1e-11)
        # With rows of their own, auto_parallel is one device with all rows.
        np.testing.assert_allclose(found["auto_parallel", False]["losses"], losses, rtol=1e-9)
        for name, (own, held) in found["auto_parallel", False]["parameters"].items():
            want = shard(parameters[name], held.layout, held.layout.mesh.coordinates(rank))
            torch.testing.assert_close(own, want, rtol=1e-9, atol=1e-11)
    # In data_parallel mode every rank normalises its rows by their own mean and variance: another network.
    local = np.mean([found["data_parallel", False]["losses"] for found in ranks], axis=0)
    assert abs(local - losses).max() > 1e-2
