"""Optimizer states that wait on the host: the update is that of one device, two groups at a time are on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwise as sw
from costs.live_bytes import LiveBytes
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.api import step_memory
from shardwise.costs.optimizers import temporary_bytes
from shardwise.errors import PlanWarning, ShardwiseError
from shardwise.programs import state_groups
from shardwise.runtime import cpu_optimizer, host_copies
from shardwise.runtime.guards.elementwise_optimizers import bare_step
from shardwise.runtime.local_shards import shard

WIDTH = 128  # a weight of 128 KiB in float64; one of 64 KiB on each of two ranks
GROUP = 1 << 17  # bytes: several groups
KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "momentum": lambda parameters, **how: torch.optim.SGD(parameters, 0.1, momentum=0.9, **how),
}
FUSED = ("adamw", "adam", "adagrad", "momentum")
WAYS = [(kind, way) for kind in KINDS for way in ("foreach", "single", "fused") if way != "fused" or kind in FUSED]


def make(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def optimizer_of(kind: str, way: str, module: nn.Module) -> torch.optim.Optimizer:
    how = {"foreach": way == "foreach"} if way != "fused" else {"fused": True}
    groups = [[*module.parameters()][::2], [*module.parameters()][1::2]]
    optimizer: torch.optim.Optimizer = KINDS[kind]([{"params": own} for own in groups], **how)
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"] / 2
    return optimizer


def parallel(optimizer: str, **how: Any) -> sw.Parallel:
    settings: dict[str, Any] = {"mesh": sw.Mesh(dp=sw.world_size()), "mode": "data_parallel", "zero": 1, **how}
    with warnings.catch_warnings(action="ignore", category=PlanWarning):  # on CPUs it gains nothing
        plan = sw.plan(make(), batch(), sw.world_size(), loss=loss, optimizer=optimizer, **settings)
        par = sw.parallelize(make(), plan, loss=loss)
    assert isinstance(par, sw.Parallel)
    return par


def trained(par: sw.Parallel, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        par.step(batch())
        optimizer.step()


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: p.detach() for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        found |= {f"{name}.{key}": v for key, v in optimizer.state[parameter].items() if isinstance(v, torch.Tensor)}
    return found


# ---------------------------------------------------------------------------------------------------------- equal


def every_kind() -> list[tuple[str, int, float]]:
    """(which, tensors that differ from those of an update on the device, the largest difference to one device)."""
    found = []
    with mock.patch.object(state_groups, "GROUP_BYTES", GROUP):
        here, there = parallel("adamw"), parallel("adamw on host")
        assert all(p.numel() < WIDTH * WIDTH for p in there.parameters()), "the plan splits nothing"
        begun = make().state_dict()
        for kind, way in WAYS:
            alone = make()
            for par in (here, there):
                with torch.no_grad():
                    for name, p in par.named_parameters():
                        p.copy_(shard(begun[name], par.layouts[name], par.coordinates))
            optimizers = [optimizer_of(kind, way, module) for module in (here, there, alone)]
            given = [list(group["params"]) for group in optimizers[1].param_groups]
            for par, own in zip((here, there), optimizers, strict=False):
                trained(par, own)
            for _ in range(3):
                optimizers[2].zero_grad()
                loss(alone(batch())).backward()
                optimizers[2].step()
            assert all(
                a is b
                for own, group in zip(given, optimizers[1].param_groups, strict=True)
                for a, b in zip(own, group["params"], strict=True)
            )
            ours, others = states(there, optimizers[1]), states(here, optimizers[0])
            assert len(ours) > len(begun)
            assert ours.keys() == others.keys()
            differ = sum(not torch.equal(ours[name], others[name]) for name in ours)
            far = max(
                float((p.detach() - shard(own.detach(), there.layouts[name], there.coordinates)).abs().max())
                for (name, own), p in zip(alone.named_parameters(), there.parameters(), strict=True)
            )
            found.append((f"{kind} {way}", differ, far))
    return found


def test_every_optimizer_updates_as_on_the_device_and_as_on_one_device(run_ranks: RunRanks) -> None:
    """Bit for bit as with the states on the device, which updates the same shards; and as one device: float64, where
    gradients are sums of 8 samples in another order and steps are of .1 at most (a root of a sum of squares near 1e-4
    makes some thousand times of the rounding)."""
    for rank in run_ranks(every_kind, 2):
        assert [kind for kind, differ, _ in rank if differ] == []
        assert max(far for *_, far in rank) < 1e-11


def goes_on(folder: str) -> list[float]:
    """The losses after a checkpoint that was saved with states on the host, under several plans."""
    found = []
    with mock.patch.object(state_groups, "GROUP_BYTES", GROUP):
        par = parallel("adamw on host")
        optimizer = torch.optim.AdamW(par.parameters(), lr=0.01)
        trained(par, optimizer)
        sw.save_checkpoint(f"{folder}/one", par, optimizer, step=3)
        kept = states(par, optimizer)
        for name, how in (("adamw on host", {"zero": 3}), ("adamw", {}), ("adamw on host", {"zero": None})):
            other = parallel(name, **how)
            again = torch.optim.AdamW(other.parameters(), lr=0.01)
            sw.load_checkpoint(f"{folder}/one", other, again)
            if how.get("zero", 1):
                assert all(torch.equal(own, kept[key]) for key, own in states(other, again).items())
            trained(other, again, 2)
            found.append(float(other.step(batch())))
        trained(par, optimizer, 2)
        found.append(float(par.step(batch())))
    return found


def test_checkpoints_are_those_of_any_other_plan(run_ranks: RunRanks, tmp_path: Path) -> None:
    for *others, own in run_ranks(goes_on, 2, str(tmp_path)):
        assert max(abs(other - own) for other in others) < 1e-13


def in_stages() -> float:
    with mock.patch.object(state_groups, "GROUP_BYTES", GROUP):
        settings = {"stages": 2, "micro_batch": 4, "mesh": sw.Mesh(dp=1), "mode": "data_parallel", "zero": None}
        with warnings.catch_warnings(action="ignore", category=PlanWarning):
            plan = sw.plan(make(), batch(), 2, loss=loss, optimizer="adamw on host", **settings)
            par = sw.parallelize(make(), plan, loss=loss)
        alone, log = make(), []
        optimizer, other = torch.optim.AdamW(par.parameters()), torch.optim.AdamW(alone.parameters())
        copy = cpu_optimizer.start_copy
        with mock.patch.object(cpu_optimizer, "start_copy", lambda *given: (log.append(given), copy(*given))[1]):
            trained(par, optimizer)  # type: ignore[arg-type]
        assert log, "states go to the host"
        for _ in range(3):
            other.zero_grad()
            loss(alone(batch())).backward()
            other.step()
    whole = dict(alone.named_parameters())
    return max(float((p - whole[name]).abs().max()) for name, p in par.named_parameters())


def test_states_of_stages_wait_too(run_ranks: RunRanks) -> None:
    assert max(run_ranks(in_stages, 2)) < 1e-13


def test_verify_steps_with_such_an_optimizer() -> None:
    plan = sw.plan(make(), batch(), h100(), loss=loss, optimizer="adamw on host", mesh=sw.Mesh(dp=2), zero=1)
    assert sw.verify(make(), batch(), plan, loss=loss, steps=2).ok


# ------------------------------------------------------------------------------------------- what a device holds


class Held:
    """A module alone with states on the host, as ``parallelize`` leaves it."""

    def __init__(self, kind: str = "adamw", **how: Any) -> None:
        self.module = make()
        cpu_optimizer.place_states(self.module, "adamw on host")
        self.optimizer = KINDS[kind](self.module.parameters(), **how)

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


@pytest.mark.parametrize(("kind", "way"), [way for way in WAYS if way[0] in ("adamw", "rmsprop", "momentum")])
def test_two_groups_are_on_the_device_at_once(kind: str, way: str) -> None:
    """Measured where the device is the host: what an update makes besides the states that wait."""
    with mock.patch.object(state_groups, "GROUP_BYTES", GROUP):
        held = Held(kind, **({"fused": True} if way == "fused" else {"foreach": way == "foreach"}))
        held.step()
        held.step()
        sizes = [(p.nbytes, p.nbytes) for p in held.module.parameters()]
        groups, count = state_groups.state_groups(sizes), {"adamw": 2}.get(kind, 1)
        assert len(groups) == 4, "a weight each, the last with the small ones"
        here = [count * sum(size for size in group if state_groups.is_offloaded(size)) for group in groups]
        most = max(
            own + after + temporary_bytes(f"{kind} {way}", group, foreach=False)
            for own, after, group in zip(here, [*here[1:], 0], groups, strict=True)
        )
        for parameter in held.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with LiveBytes() as live:
            held.optimizer.step()
    assert most <= live.peak < most + 100 * len(sizes)


def h100() -> sw.Cluster:
    return sw.Cluster.load("h100").with_nodes(1, 2)


def test_bytes_and_seconds_are_in_the_plan() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), torch.empty(64, 4096)
    settings: dict[str, Any] = {"loss": loss, "mesh": sw.Mesh(dp=2), "mode": "auto", "search": "dynamic_programming"}
    layouts = {f"{i}.weight": "[4096, 4096]" for i in range(8)}
    here, there = (
        sw.plan(model, x, h100(), optimizer=name, layouts=layouts, **settings)
        for name in ("adamw fused", "adamw fused on host")
    )
    weight, states_of_all = 4096 * 4096 * 4, 8 * 2 * 4096 * 4096 * 4
    before, after = (step_memory(model, x, plan, loss=loss) for plan in (here, there))
    assert after.host_bytes == states_of_all
    assert before.peak_of["update"].num_bytes - after.peak_of["update"].num_bytes == states_of_all - 2 * 2 * weight
    rate = h100().device.host_bandwidth
    took = there.prediction.simulated_seconds - here.prediction.simulated_seconds
    # The states of eight weights one after another, and the last ones' way back; updates are hidden but for theirs.
    assert 9 * 2 * weight / rate < took < 9 * 2 * weight / rate + 8 * 2e-3
    assert "on the host from step to step: states of adamw for 8 of 16 parameters, up to 1 GiB a device" in str(there)
    assert "optimizer" in str(here.diff(there))
    assert here.digest != there.digest
    assert sw.Plan.from_json(there.to_json()).digest == there.digest


# ---------------------------------------------------------------------------------------------------- on a GPU


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        self.log.append(f"kernels wait for {event.what}")

    def record_event(self) -> Event:
        return Event(self.log[-1], self.log)


class Event:
    def __init__(self, what: str, log: list[str]) -> None:
        self.what, self.log = what, log

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.what}")


def test_beside_a_gpu_copies_run_in_both_directions_and_end_with_the_step() -> None:
    log: list[str] = []
    main, streams = Stream("main", log), {True: Stream("out", log), False: Stream("in", log)}
    pinned = []

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        log.append(f"{int(source.shape[0])} {'in' if target.is_cuda else 'out'}")

    def host_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.shape[0])
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, rows in (("a", 1 << 14), ("b", 1 << 15), ("c", 1 << 16)):
                setattr(self, name, nn.Parameter(torch.empty(rows, dtype=torch.float32, device="cuda")))

    with (
        FakeTensorMode(),
        mock.patch.object(state_groups, "GROUP_BYTES", 1),
        mock.patch.object(host_copies, "_stream", lambda device, to_host: streams[to_host]),
        mock.patch.object(cpu_optimizer, "host_memory", host_memory),
        mock.patch.object(torch.cuda, "current_stream", return_value=main),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch.Tensor, "is_pinned", return_value=True),
    ):
        module = Model()
        cpu_optimizer.place_states(module, "adamw on host")
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, foreach=False)
        step = bare_step(type(optimizer).step)

        def logged(own: torch.optim.Optimizer) -> None:
            rows = [p.shape[0] for group in own.param_groups for p in group["params"]]
            with mock.patch.object(torch.Tensor, "copy_", original):
                step(own)
            log.append(f"{rows[0]} updated")

        original = torch.Tensor.copy_
        for _ in range(2):
            log.clear()
            for parameter in module.parameters():
                parameter.grad = torch.empty_like(parameter)
            with mock.patch.object(torch.Tensor, "copy_", copy):
                cpu_optimizer._step_by_groups(logged, optimizer)
    a, b, c = 1 << 14, 1 << 15, 1 << 16
    assert pinned == [a, b, c], "once, and used again"
    assert log == [
        f"{a} in",
        f"kernels wait for {a} in",
        f"{b} in",
        f"{a} updated",
        f"{a} out",
        f"kernels wait for {b} in",
        f"kernels wait for {a} out",
        f"{c} in",
        f"{b} updated",
        f"{b} out",
        f"kernels wait for {c} in",
        f"kernels wait for {b} out",
        f"{c} updated",
        f"{c} out",
        f"host waits for {c} out",
    ]


# ------------------------------------------------------------------------------------------------------ refused


class Counting(torch.optim.SGD):
    """Counts its steps by itself: three updates of a part would be three steps."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


def test_what_cannot_be_done_in_groups_is_refused_and_nothing_is_changed() -> None:
    def refused(optimizer: torch.optim.Optimizer, message: str, step: Callable[[], Any] | None = None) -> None:
        before = [p.clone() for p in module.parameters()]
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with raises(ShardwiseError, message):
            (step or optimizer.step)()
        assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)

    module = make()
    cpu_optimizer.place_states(module, "adamw on host")
    refused(sw.elementwise_optimizer(Counting)(module.parameters(), 0.1), "count its steps per parameter")
    refused(torch.optim.Adam(module.parameters(), differentiable=True), "a differentiable update")
    compiled = torch.optim.Adam(module.parameters())
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        refused(compiled, "torch.compile wraps")


def test_an_optimizer_that_fails_has_its_parameters_again() -> None:
    held = Held()
    with raises(MemoryError, "no room"):
        cpu_optimizer._step_by_groups(mock.Mock(side_effect=MemoryError("no room")), held.optimizer)
    assert len(held.optimizer.param_groups[0]["params"]) == len([*held.module.parameters()])


def test_hooks_of_an_optimizer_see_the_whole_update() -> None:
    held, seen = Held(lr=0.1), []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append([len(group["params"]) for group in optimizer.param_groups])

    held.optimizer.register_step_pre_hook(look)
    held.optimizer.register_step_post_hook(look)
    held.step()
    assert seen == 2 * [[len([*held.module.parameters()])]]


def test_a_closure_runs_once_and_ahead_of_the_update() -> None:
    held, calls = Held(lr=0.1), []
    before = held.module[0].weight.detach().clone()

    def closure() -> torch.Tensor:
        calls.append(torch.equal(held.module[0].weight, before))
        held.optimizer.zero_grad()
        own = loss(held.module(batch()))
        own.backward()
        return own

    assert torch.equal(held.optimizer.step(closure), loss(make()(batch())))
    assert calls == [True]
    assert not torch.equal(held.module[0].weight, before)


def test_optimizers_without_states_and_devices_that_are_the_host_are_told() -> None:
    with raises(ShardwiseError, "sgd has", "no states"):
        sw.plan(make(), batch(), h100(), loss=loss, optimizer="sgd on host")
    with pytest.warns(PlanWarning, match=r"gains nothing"):
        sw.plan(make(), batch(), 2, loss=loss, optimizer="adamw on host", mode="data_parallel")
