"""A remembered plan is the one that a search would find, and nothing that goes wrong with the cache changes it."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from raising import raises
from shardwise.planning import execute as planning
from shardwise.planning import fits as fitting
from shardwise.planning import plan_cache
from shardwise.planning.plan_cache import PlanCache, key_of
from shardwise.plans.nothing_fits import ResidentBytes


class Net(nn.Module):
    """Two layers; ``scale`` is a setting of its code, and ``wide`` of other batch sizes than the example's."""

    def __init__(self, width: int = 64, scale: float = 2.0, wide: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.scale, self.wide = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            scale,
            wide,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.up(x))
        return (self.scale * self.down(y)).square().mean()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(plan_cache, "_IMPORTED", inf)  # someone may edit the sources while tests run
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for every search."""
    said: list[str] = []
    real = planning.Planning.one_setting

    def noted(self: planning.Planning) -> Any:
        said.append("searched")
        return real(self)

    monkeypatch.setattr(planning.Planning, "one_setting", noted)
    return said


def net(change: Callable[[nn.Module], object] = lambda module: None, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        module = Net(**sizes)
    change(module)
    return module


def asked(module: nn.Module, cluster: Any = "h100-1x2", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    width = next(module.parameters()).shape[1]
    return sw.plan(module, torch.empty(16, width, dtype=dtype, device="meta"), cluster, **settings)


def test_the_second_answer_is_the_same_to_the_byte_and_explains_itself(folder: Path, searched: list[str]) -> None:
    first = asked(net())
    second = asked(net())
    assert searched == ["searched"]
    assert second.plan.to_json() == first.plan.to_json()
    assert str(second) == str(first)
    assert second.search_report is None
    assert str(second.report.explain("up/linear")) == str(first.report.explain("up/linear"))
    assert searched == ["searched"] * 2
    assert asked(net(), cache=False).plan.to_json() == first.plan.to_json()
    assert searched == ["searched"] * 3


class Halves(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


Halves.__name__ = Halves.__qualname__ = "Net"


def freeze(module: Any) -> None:
    module.up.weight.requires_grad_(False)


def forward_of(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(self.up(x)).sum()


def patch(module: Any) -> None:
    module.forward = MethodType(forward_of, module)


def hook(module: Any) -> None:
    module.up.register_forward_hook(lambda module, args, output: output + 1)


def mark(module: Any) -> None:
    sw.shard(module.up, "n@tp")


CHANGES: dict[str, Callable[[], Any]] = {
    "other code under the same name": lambda: asked(Halves(64)),
    "a hyperparameter": lambda: asked(net(scale=3.0)),
    "a width": lambda: asked(net(width=128)),
    "a patched forward": lambda: asked(net(patch)),
    "a frozen weight": lambda: asked(net(freeze)),
    "a hook": lambda: asked(net(hook)),
    "eval()": lambda: asked(net(lambda module: module.eval())),
    "a dtype": lambda: asked(net(lambda module: module.double()), dtype=torch.float64),
    "a cluster": lambda: asked(net(), "a100-80-1x2"),
    "a figure of the cluster": lambda: asked(net(), changed_cluster()),
    "devices": lambda: asked(net(), "h100-1x4"),
    "an optimizer": lambda: asked(net(), optimizer="sgd"),
    "a limit": lambda: asked(net(), memory_bytes=1e9),
    "a mesh": lambda: asked(net(), mesh=sw.Mesh(tp=2)),
    "layouts": lambda: asked(net(), layouts={"up.weight": "[256, 64]"}),
    "zero": lambda: asked(net(), zero=3),
    "precision": lambda: asked(net(), precision=sw.Precision(compute=torch.bfloat16, parameter=torch.float32)),
    "a micro-batch": lambda: asked(net(), micro_batch=8),
    "a strategy in the model": lambda: asked(net(mark), mesh=sw.Mesh(tp=2), search="dynamic_programming"),
    "strategies": lambda: asked(
        net(), mesh=sw.Mesh(tp=2), search="dynamic_programming", strategies={"up": "n@tp"}
    ),
}  # fmt: skip


def changed_cluster() -> sw.Cluster:
    cluster = sw.Cluster.load("h100-1x2")
    return replace(cluster, device=replace(cluster.device, kernel_latency=2 * cluster.device.kernel_latency))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(4)
def test_whatever_can_change_a_plan_is_another_question(change: str, folder: Path, searched: list[str]) -> None:
    asked(net())
    changed = CHANGES[change]()
    assert searched == ["searched"] * 2
    again = CHANGES[change]()
    assert again.plan.to_json() == changed.plan.to_json()


def test_a_switch_of_torch_is_another_question(folder: Path, searched: list[str]) -> None:
    asked(net())
    try:
        torch.backends.cuda.enable_math_sdp(False)
        asked(net())
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert searched == ["searched"] * 2


class ByBatch(Net):
    """Normalises, so that micro-batches are captured by themselves; ``threshold`` is read for small ones alone."""

    def __init__(self, threshold: int) -> None:
        super().__init__(64)
        self.norm, self.threshold = nn.BatchNorm1d(64), threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < self.threshold:
            x = F.gelu(x)
        return super().forward(self.norm(x))


def test_code_that_only_other_batch_sizes_run_is_noticed(folder: Path, searched: list[str]) -> None:
    """The example has 16 samples, and so has the graph that names the question; micro-batches have 8."""
    first, same, other = ByBatch(4), ByBatch(4), ByBatch(9)
    with warnings.catch_warnings(action="ignore"):
        for module in (first, same, other):
            answers = [asked(module, global_batch=16, micro_batch=8, cache=cache) for cache in (True, False)]
            assert answers[0].plan.to_json() == answers[1].plan.to_json()


@torch.library.custom_op("cachetest::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)


class OwnOperator(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(twice(x))


def test_an_operator_of_the_users_is_never_remembered(folder: Path, searched: list[str]) -> None:
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2):
            asked(OwnOperator())
    assert searched == ["searched"] * 2
    assert not folder.exists()


class OwnOperatorByBatch(ByBatch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(twice(x) if x.shape[0] == 8 else x)


def test_an_operator_of_the_users_at_another_batch_size_loses_no_plan(folder: Path, searched: list[str]) -> None:
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2):
            asked(OwnOperatorByBatch(4), global_batch=16, micro_batch=8)
    assert searched == ["searched"] * 2
    assert not folder.exists()


def test_a_refusal_and_warnings_are_remembered(folder: Path, searched: list[str]) -> None:
    module, captures = net(), list[planning.Planning]()
    request = planning.PlanRequest.of(module, torch.empty(16, 64, device="meta"), "h100-1x2")
    planning.execute(request, captures=captures)
    share = ResidentBytes.of(captures[0].captured.graph, "adamw", request.cluster.device).on_each(2)
    refusals = []
    for _ in range(2):
        with raises(sw.errors.NothingFits, section="nothing-fits") as caught:
            asked(module, memory_bytes=float(share))
        refusals.append(str(caught.value))
    assert len(searched) == 2, "the request above, and the first of these"
    assert refusals[0] == refusals[1]
    heard = []
    for _ in range(2):
        with warnings.catch_warnings(record=True, action="always") as caught_warnings:
            sw.plan(module, torch.empty(1, 64, device="meta"), "h100-1x2", mode="data_parallel")
        heard.append([(warning.category, str(warning.message)) for warning in caught_warnings])
    assert heard[0]
    assert heard[0] == heard[1]
    assert len(searched) == 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "a cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "nothing": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(os.urandom(4096)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another answer": lambda path: path.write_bytes(other_file(path).read_bytes()),
}


def other_file(path: Path) -> Path:
    PlanCache(path.parent / "other").write("another key", {"plan": "{}", "warnings": [], "captures": []})
    return next((path.parent / "other").iterdir())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_searched_again(damage: str, folder: Path, searched: list[str]) -> None:
    first = asked(net())
    (path,) = folder.iterdir()
    DAMAGES[damage](path)
    assert asked(net()).plan.to_json() == first.plan.to_json()
    assert searched == ["searched"] * 2


def test_what_is_no_answer_is_searched_again(folder: Path, searched: list[str]) -> None:
    first = asked(net())
    (path,) = folder.iterdir()
    text, refused = first.plan.to_json(), ["what", [], "fix", [], 0.0]
    for data in (
        {},
        {"plan": text},
        {"plan": text[:-2], "warnings": [], "captures": []},
        {"plan": 3, "warnings": [], "captures": []},
        {"refused": refused[:3], "warnings": [], "captures": []},
        {"refused": refused, "warnings": [["os"]], "captures": []},
        {"plan": text, "warnings": [], "captures": [[8, "a graph of other code"]]},
    ):
        PlanCache(folder).write(path.stem, data)
        assert asked(net()).plan.to_json() == first.plan.to_json()
    assert len(searched) == 8


def test_a_folder_that_cannot_be_written_or_a_full_disk_changes_nothing(
    folder: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = asked(net(), cache=False).plan.to_json()
    folder.write_text("a file in its place")
    assert asked(net()).plan.to_json() == without
    folder.unlink()
    full = lambda *args, **options: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # noqa: E731
    with monkeypatch.context() as disk:
        disk.setattr(os, "fdopen", full)
        assert asked(net()).plan.to_json() == without
    assert not [*folder.iterdir()], "the incomplete file is gone"
    (folder / "shardwise-killed.part").write_bytes(b"half of")
    assert asked(net()).plan.to_json() == without
    assert asked(net()).plan.to_json() == without
    assert len(searched) == 4


def test_the_folder_is_bounded_and_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path, most_bytes=2000)
    keys = [f"{number:064x}" for number in range(9)]
    foreign = [tmp_path / "mine.plan", tmp_path / "download.part"]
    for path in foreign:
        path.write_bytes(b"of another program")
        os.utime(path, (0, 0))
    for number in range(8):
        cache.write(keys[number], {"text": os.urandom(250).hex()})
        os.utime(tmp_path / f"{keys[number]}.plan", (number, number))
        if number >= 3:
            assert cache.read(keys[0]) is not None, "it was used since"
            os.utime(tmp_path / f"{keys[0]}.plan", (number + 0.5, number + 0.5))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert cache.read(keys[7]) is not None
    assert cache.read(keys[1]) is None
    old, new = tmp_path / "shardwise-old.part", tmp_path / "shardwise-new.part"
    old.write_bytes(b"x")
    os.utime(old, (0, 0))
    new.write_bytes(b"x")
    cache.write(keys[8], {})
    assert not old.exists()
    assert new.exists()
    assert all(path.exists() for path in foreign)


def test_it_can_be_off(folder: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for named in ("off", "0", "", "No", "false", "none"):
        monkeypatch.setenv("SHARDWISE_CACHE", named)
        assert PlanCache.of_user() is None
    monkeypatch.setenv("SHARDWISE_CACHE", "~/plans")
    assert PlanCache.of_user() == PlanCache(Path.home() / "plans")
    monkeypatch.delenv("SHARDWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert PlanCache.of_user() == PlanCache(folder / "shardwise")
    asked(net())
    assert [path.suffix for path in (folder / "shardwise").iterdir()] == [".plan"]
    shutil.rmtree(folder)
    asked(net(), cache=False)
    assert not folder.exists()


def test_a_plan_that_a_deadline_ended_is_not_kept(folder: Path) -> None:
    request = planning.PlanRequest.of(net(), torch.empty(16, 64, device="meta"), "h100-1x2", micro_batch=None)
    cache = PlanCache(folder)
    with warnings.catch_warnings(action="ignore"):
        for seconds in (4, 6, 8):
            try:
                planning.execute(request, seconds=seconds, clock=partial(next, iter(range(1000))), cache=cache)
            except sw.PlanError:
                continue
    assert not folder.exists()
    planning.execute(request, seconds=inf, cache=cache)
    assert len([*folder.iterdir()]) == 1


def test_suggestions_are_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = net(), torch.empty(16, 64, device="meta")
    first = sw.fits(module, x, "h100-1x2")
    tried: list[Any] = []
    real = fitting.plan_variants

    def noted(variants: Any, *args: Any, **options: Any) -> Any:
        return real((tried.append(variant[0]) or variant for variant in variants), *args, **options)

    monkeypatch.setattr(fitting, "plan_variants", noted)
    second = sw.fits(module, x, "h100-1x2")
    assert str(second) == str(first)
    assert second.as_data() == first.as_data()
    assert sorted(tried) == sorted(option.what for option in first.options)


def test_suggestions_that_time_cut_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = net(), torch.empty(16, 64, device="meta")
    with monkeypatch.context() as busy:
        busy.setattr(fitting, "SECONDS", -1.0)
        assert sw.fits(module, x, "h100-1x2").untried
    later = sw.fits(module, x, "h100-1x2")
    assert later.options
    assert not later.untried


def test_the_step_of_stages_is_remembered_exactly(folder: Path) -> None:
    with torch.device("meta"):
        module, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.empty(16, 64)
    settings: dict[str, Any] = {"loss": lambda y: y.square().mean(), "stages": 2, "seconds": 0}
    first, again, without = (sw.fits(module, x, "h100-1x2", **settings, cache=cache) for cache in (True, True, False))
    assert len([*folder.iterdir()]) == 2, "the plan and its suggestions"
    assert first.step == again.step == without.step
    assert str(first) == str(again)
    assert first.as_data() == again.as_data() == without.as_data()
    PlanCache(folder).write("a key", {"no": {("JSON",): object()}})
    assert PlanCache(folder).read("a key") is None


def test_a_page_has_the_figures_of_a_remembered_plan_beside_it(folder: Path, tmp_path: Path) -> None:
    first, other = asked(net()), [asked(net(), zero=3) for _ in range(2)]
    unpriced = [asked(net(), mode="data_parallel") for _ in range(2)]
    pages = []
    for number, beside in enumerate((*other, *unpriced)):
        first.report.write(tmp_path / f"{number}.html", other=beside)
        pages.append((tmp_path / f"{number}.html").read_text())
    assert pages[0] == pages[1]
    assert pages[2] == pages[3]


def test_nothing_is_kept_of_sources_that_changed_while_they_run(
    folder: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_cache._digest_of_sources.cache_clear()
    monkeypatch.setattr(plan_cache, "_IMPORTED", 0.0)
    for _ in range(2):
        asked(net())
    assert searched == ["searched"] * 2
    monkeypatch.setattr(plan_cache, "_IMPORTED", inf)
    monkeypatch.setattr(plan_cache, "__file__", str(folder / "shardwise" / "planning" / "plan_cache.py"))
    with pytest.raises(plan_cache.NoKey):  # an archive has no files
        plan_cache._digest_of_sources()
    monkeypatch.undo()
    monkeypatch.setattr(plan_cache, "_IMPORTED", inf)
    monkeypatch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(PermissionError(path)))
    with pytest.raises(plan_cache.NoKey):
        plan_cache._digest_of_sources()
    assert not folder.exists()


def test_keys_differ_by_type_order_and_nesting(folder: Path) -> None:
    values: list[Any] = [1, 1.0, True, "1", (1,), ((1,),), (1, 1), None, "", (), {1: 2}, ((1, 2),), 0.0, -0.0, b"1"]
    values += [torch.float32, "torch.float32", {"a": 1, "b": 2}, {"b": 2, "a": 1}, ("a", "bc"), ("ab", "c")]
    values += [torch.tensor([1.0]), torch.tensor([1]), torch.tensor([[1.0]]), torch.tensor([2.0]), {1, 2}, {1, 3}]
    keys = [key_of(value) for value in values]
    assert len({*keys}) == len(keys)
    assert key_of({3, 1, 2}) == key_of({2, 3, 1})
    conjugate = torch.tensor([1 + 2j]).conj()
    assert key_of(conjugate) == key_of(conjugate.resolve_conj())
    assert key_of(conjugate.imag) == key_of(torch.tensor([-2.0]))
    assert key_of(conjugate) != key_of(conjugate.conj())


def test_nothing_is_logged_where_nobody_listens() -> None:
    assert not logging.getLogger("shardwise.progress").isEnabledFor(logging.INFO)
