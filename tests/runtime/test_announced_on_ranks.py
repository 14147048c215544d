"""What ranks do not do is refused or announced on each of them: autocast. Modules can be copied and stored
at any time."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import refusal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.none = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: Tensor, empty: Tensor) -> Tensor:
        nothing = torch.einsum("bi,ij->bj", empty, self.none)
        return (self.down(torch.tanh(self.up(x))) + nothing).square().mean()


def _box() -> type[Any]:
    """A class that no other process finds by its name."""

    @dataclass
    class Box:
        loss: Tensor

    return Box


class Boxed(Net):
    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, empty: Tensor) -> Any:
        return self.kind(super().forward(x, empty))


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 24).reshape(4, 6), torch.empty(4, 0)


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True, action="always") as found:
        result = call()
    return result, [str(w.message) for w in found if issubclass(w.category, sw.errors.PlanWarning)]


def autocast(call: Callable[[], Any]) -> str:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return refusal(call)


def announced_on_ranks() -> dict[str, Any]:
    plain = sw.plan(Net(), batch(), 2)
    par, messages = warned(lambda: sw.parallelize(Net(), plain))
    alone = Net()
    alone(*batch()).backward()
    loss = par(*batch())
    found = {
        "quiet": messages,
        "call": autocast(lambda: par(*batch())),
        "step": autocast(lambda: par.step(*batch())),
        "backward": autocast(loss.backward),
        "around everything": autocast(lambda: sw.parallelize(Net(), plain).step(*batch())),
    }
    found["split again"] = refusal(lambda: sw.parallelize(par, plain))
    found["of a function"] = refusal(lambda: sw.parallelize(Boxed(_box()), plain)(*batch()))
    loss.backward()
    parts = {name: p.grad.norm() for name, p in par.named_parameters() if p.shape == alone.get_parameter(name).shape}
    found["gradients"] = all(torch.allclose(parts[n], alone.get_parameter(n).grad.norm()) for n in parts)
    return {**found, "copies": _copies(alone)}


def _copies(alone: Net) -> tuple[str, str, str]:
    """A module whose replicas were compared, and whose program sends messages in a group of its own, is copied, and is
    stored and loaded, and goes on as it was; another rank's file is refused."""
    plan = sw.plan(Net(), batch(), 2, mode="data_parallel")
    checked = sw.parallelize(Net(), plan, check_replicas=1)
    assert list(plan.collectives(backward=True))
    first = checked.step(*batch())
    copied = copy.deepcopy(checked)
    same = torch.equal(copied.step(*batch()), first) and torch.allclose(alone(*batch()), first)

    def stored() -> None:
        file = io.BytesIO()
        torch.save(checked, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert torch.equal(again.step(*batch()), first)

    def stored_elsewhere() -> None:
        file, files = io.BytesIO(), [b"", b""]
        torch.save(checked, file)
        torch.distributed.all_gather_object(files, file.getvalue())
        torch.load(io.BytesIO(files[1 - torch.distributed.get_rank()]), weights_only=False)

    return ("copied" if same else "differs"), refusal(stored), refusal(stored_elsewhere)


def test_autocast_and_precision_are_refused_or_announced_on_ranks(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(announced_on_ranks, 2)):
        assert found["quiet"] == []
        for name in ("call", "step", "around everything"):
            assert 'torch.autocast("cpu") is active around a call of a parallel module' in found[name]
        assert "is active around the backward of a parallel module" in found["backward"]
        assert "the model is a Parallel, which cannot be captured" in found["split again"]
        assert "cannot send the captured program" in found["of a function"]
        assert found["gradients"]
        assert found["copies"][:2] == ("copied", "accepted")
        assert f"stored on rank {1 - rank} of 2 is loaded on rank {rank} of 2" in found["copies"][2]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.checkpointed = nn.Linear(6, 8), nn.Linear(8, 6), False

    def forward(self, x: Tensor) -> Tensor:
        def inside(h: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(h)))

        h = checkpoint(inside, x, use_reentrant=False) if self.checkpointed else inside(x)
        return h.square().mean()


def checkpointed_before_and_after_the_plan() -> list[tuple[list[str], bool]]:
    found = []
    for before in (True, False):
        net, x = Checkpointed(), batch()[0]
        net.checkpointed = before
        plan = sw.plan(net, x, 2, mode="data_parallel")
        net.checkpointed = True
        par = sw.parallelize(net, plan)
        loss, said = warned(lambda par=par, x=x: par.step(x))
        assert torch.allclose(loss, net(x).detach())
        found.append((said, any(op.again for op in plan.operators)))
    return found


def test_checkpointing_that_is_asked_for_after_the_plan_is_announced(run_ranks: RunRanks) -> None:
    for rank, ((said, again), (said_late, kept)) in enumerate(run_ranks(checkpointed_before_and_after_the_plan, 2)):
        assert (said, again, kept) == ([], True, False)
        assert [("the plan keeps all of them" in one) for one in said_late] == [True] * (rank == 0)
