"""``compile="graphs"`` on emulated GPUs: the numbers of the same kernels one by one, bit for bit, in few launches."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import shardwise as sw
from emulated_gpu.cases import (
    BATCH,
    TOLERANCE,
    Case,
    Trained,
    make_plan,
    train_all,
    train_alone,
    waits_of,
    worst_error,
)
from launch.gloo_ranks import RunRanks
from raising import raises
from runtime.interpreted import interpret_section
from shardwise.errors import PlanWarning
from shardwise.plans.quantities import format_bytes
from shardwise.runtime import compiled, cuda_graphs
from shardwise.runtime.emit import take_all

MICRO_BATCHES = {"global_batch": BATCH, "micro_batch": 2}
BY_ROUTER = {"event": 1, "aten::repeat_interleave.Tensor": 1}
ONE_LAYER = {name: f"{name} of one layer" for name in ("gpt2", "llama")}  # of each every kind of section is captured
ON_ONE = {
    "gpt2": Case(ONE_LAYER["gpt2"], {"dp": 1}),
    "llama, micro-batches": Case(ONE_LAYER["llama"], {"dp": 1}, MICRO_BATCHES),
}
ON_TWO = {
    "gpt2, tp": Case(ONE_LAYER["gpt2"], {"dp": 1, "tp": 2}, split=True),
    "llama, zero 3": Case(ONE_LAYER["llama"], {"dp": 2}, {"zero": 3}),
}
MORE = {
    "llama, dp": Case("llama", {"dp": 2}),
    "gpt2, zero 1, clipped": Case("gpt2", {"dp": 2}, {"zero": 1}, clip=0.1),
    "llama, zero 3, recomputed": Case("llama", {"dp": 2}, {"zero": 3, "recompute": "full"}),
    "gpt2, zero 2, micro-batches": Case("gpt2", {"dp": 2}, {"zero": 2, **MICRO_BATCHES}),
    "llama, local inputs": Case("llama", {"dp": 2}, {"zero": 2}, {"inputs": "local"}),
}

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def with_compile(case: Case, how: Any) -> Case:
    return Case(**{**vars(case), "parallelize": {**case.parallelize, "compile": how}})


def both_ways(cases: dict[str, Case]) -> dict[str, tuple[Case, str]]:
    plans = {name: make_plan(case).to_json() for name, case in cases.items()}
    return {
        f"{name} {how}": (with_compile(case, how), plans[name])
        for name, case in cases.items()
        for how in (True, "graphs")
    }


def check_equal(found: Trained, other: Trained) -> None:
    assert found.losses == other.losses
    for kind in ("gradients", "parameters"):
        for step, (ours, theirs) in enumerate(zip(getattr(found, kind), getattr(other, kind), strict=True)):
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name]), f"step {step}: {name}"


def check(cases: dict[str, Case], results: list[dict[str, Trained]]) -> None:
    for name, case in cases.items():
        alone = train_alone(case.model, case.optimizer, case.clip)
        for of_rank in results:
            plain, graphs = of_rank[f"{name} True"], of_rank[f"{name} graphs"]
            assert graphs.races == [], name
            check_equal(graphs, plain)
            assert worst_error(graphs, alone) < TOLERANCE, name
            assert waits_of(graphs) == [{}, {}], graphs.waits
            assert graphs.launches["graph"], name
            most = plain.launches.total() / (2 if case.ranks == 1 else 1)
            assert graphs.launches.total() < most, (graphs.launches, plain.launches)


def test_steps_on_one_gpu_are_those_of_single_kernels(run_gpu_ranks: RunRanks) -> None:
    results = run_gpu_ranks(train_all, 1, both_ways(ON_ONE))
    check(ON_ONE, results)
    assert results[0]["gpt2 graphs"].launches["graph"] == 2, "forward and backward"


@pytest.mark.parametrize("name", [*ON_TWO, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_so_are_those_on_two(name: str, run_gpu_ranks: RunRanks) -> None:
    cases = {name: (ON_TWO | MORE)[name]}
    check(cases, run_gpu_ranks(train_all, 2, both_ways(cases)))


class Net(nn.Module):
    """Returns a loss, and its prediction. With a buffer that every step writes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.second(self.drop(self.norm(self.first(x)).tanh())).squeeze(-1)
        return (found - y).square().mean(), found


class Twins:
    """The same module with CUDA graphs and without. ``found``: what each has computed so far, on the host."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        net = Net().double()
        plan = sw.plan(copy.deepcopy(net), self.batch(0), 1, mesh=sw.Mesh(dp=1))
        self.graphs, self.plain = (
            sw.parallelize(copy.deepcopy(net), plan, seed=3, compile=how, **settings) for how in ("graphs", True)
        )

    @staticmethod
    def batch(number: int, size: int = 4) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return tuple(torch.randn(size, *shape, generator=generator).double() for shape in ((6,), ()))

    def same(self, act: Callable[[sw.Parallel], Any]) -> Counter[str]:
        """Do the same with both, compare all tensors, and return the launches with graphs."""
        from emulated_gpu.device import gpu

        plain, before = act(self.plain), Counter(gpu.launches())
        graphs = act(self.graphs)
        launches = Counter(gpu.launches()) - before
        for found, want in ((graphs, plain), (self.state(self.graphs), self.state(self.plain))):
            for one, other in zip(tree_leaves(found), tree_leaves(want), strict=True):
                assert torch.equal(one.detach().cpu(), other.detach().cpu()), (one, other)
        return launches

    @staticmethod
    def state(par: sw.Parallel) -> list[Tensor]:
        return [*par.parameters(), *par.buffers(), *(p.grad for p in par.parameters() if p.grad is not None)]


def use_freely() -> None:
    """What users do beside plain steps. A wrong number is an error."""
    with mock.patch.object(compiled, "compile_with_inductor", interpret_section):
        _use_freely(Twins())


def _use_freely(twins: Twins) -> None:
    batch = twins.batch

    def steps(par: sw.Parallel, numbers: Sequence[int] = (1, 2, 3, 4)) -> list[Tensor]:
        optimizer = torch.optim.SGD(par.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        losses = []
        for number in numbers:
            optimizer.zero_grad()
            losses.append(par.step(*batch(number)))  # kept
            optimizer.step()
            schedule.step()
        assert len({float(loss) for loss in losses}) == len(losses)
        return losses

    def with_one_graph(par: sw.Parallel) -> list[Tensor]:
        results = []
        par.eval()
        with torch.no_grad():
            for number in range(4):
                results.append(par(*batch(number))[1])
                if number in (1, 2):  # at the same address
                    weight = par.get_parameter("first.weight")
                    weight.data = weight.data.t()
        par.train()
        return results

    end_capture = torch.cuda.CUDAGraph.capture_end

    def fail(graph: torch.cuda.CUDAGraph) -> None:
        end_capture(graph)
        raise RuntimeError("no room")

    with (
        mock.patch.object(torch.cuda.CUDAGraph, "capture_end", fail),
        raises(sw.ShardwiseError, "no room", fix="compile=True"),
    ):
        twins.same(with_one_graph)
    # CUDA drops a pool with its last graph, and captures nothing in it from then on.
    with pytest.warns(PlanWarning, match="in place"):
        assert twins.same(with_one_graph)["graph"] == 3, "one call reads a weight that lies otherwise"
    assert twins.same(steps)["graph"] == 6, "two of four steps capture and replay, and so does the second"
    same_batch = twins.same(lambda par: [par.step(*batch(1)) for _ in range(3)])  # gradients add up; masks differ
    assert same_batch["graph"] == 6

    def two_at_once(par: sw.Parallel) -> list[Tensor]:
        results = [par(*batch(number)) for number in (5, 6, 7)]
        for loss, found in reversed(results):
            (loss + found.sum()).backward()
        return [tensor for result in results for tensor in result]

    for _ in range(2):
        twins.same(two_at_once)
    assert twins.same(steps)["graph"] == 8, "as before"

    def again(par: sw.Parallel) -> list[Tensor]:
        loss, found = par(*batch(8))
        loss.backward(retain_graph=True)
        par.step(*batch(9))
        loss.backward()
        found.detach().mul_(2)  # the user's own
        return [loss, found]

    for _ in range(3):
        twins.same(again)

    def evaluate(par: sw.Parallel) -> list[Tensor]:
        loss, found = par(*batch(10))
        par.eval()
        with torch.no_grad():
            inside = [par(*batch(number))[1] for number in (11, 12)]
        with torch.inference_mode():
            inside += [par(*batch(number))[1] for number in (13, 14)]
        par.train()
        loss.backward()
        return [loss, found, *inside]

    for _ in range(2):
        twins.same(evaluate)

    def elsewhere(par: sw.Parallel) -> list[Tensor]:
        before = [p.data for p in par.parameters()]
        for p in par.parameters():
            p.data = p.data.clone()
        losses = steps(par)
        for p, data in zip(par.parameters(), before, strict=True):
            p.data = data.copy_(p.data)
        return losses

    assert not twins.same(elsewhere)["graph"]
    assert twins.same(steps)["graph"] == 8, "parameters are back"
    for size in (5, 6):
        twins.same(lambda par, size=size: [par.step(*batch(number, size)) for number in range(3)])
    captured = len(twins.graphs._calls._graphs.programs)
    with (
        mock.patch.object(cuda_graphs, "MOST_PROGRAMS", captured),
        pytest.warns(PlanWarning, match="pad batches to a few shapes"),
    ):
        assert not twins.same(lambda par: [par.step(*batch(number, 9)) for number in range(3)])["graph"]
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.cpu(), lambda x: x.cuda())

    def with_hooks(par: sw.Parallel) -> list[Tensor]:
        with hooks:
            loss, _ = par(*batch(3))
        loss.backward()
        return [loss]

    for _ in range(3):
        twins.same(with_hooks)
    profile = twins.graphs.profile(*batch(1), steps=1)
    assert profile.graph_bytes > sum(p.nbytes for p in twins.graphs.parameters()), "gradients are among the results"
    assert f"CUDA graphs keep {format_bytes(profile.graph_bytes)}" in str(profile)
    assert not record_of_races()


def record_of_races() -> list[str]:
    from emulated_gpu.device import record

    return list(record.races)


def test_results_stay_right_whatever_a_user_does(run_gpu_ranks: RunRanks) -> None:
    run_gpu_ranks(use_freely, 1)


def is_wrong(owner: Any, name: str, by: Any) -> bool:
    with mock.patch.object(owner, name, by):
        try:
            use_freely()
        except (AssertionError, RuntimeError):
            return True
    return False


def mutate() -> dict[str, bool]:
    copy_all, copies = cuda_graphs.copy_all, []

    def once(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        copies.append(len(targets))
        if copies.count(len(targets)) < 3:
            copy_all(targets, sources)

    return {
        "inputs": is_wrong(cuda_graphs, "copy_all", once),
        "outputs": is_wrong(cuda_graphs.CopyOut, "__call__", lambda _, operands: take_all(operands)),
        "in use": is_wrong(cuda_graphs._CapturedGraph, "is_free", lambda _: True),
    }


def test_mutants_are_found(run_gpu_ranks: RunRanks) -> None:
    assert run_gpu_ranks(mutate, 1) == [dict.fromkeys(("inputs", "outputs", "in use"), True)]
