"""Gradients on ranks as autograd has them on one device: who is called with them, and where they flow."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ShardwiseError


class Forked(nn.Module):
    """Two outputs that depend on parameters of their own, and parameters that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x.tanh())


def called(late: bool, mesh: sw.Mesh, strategies: dict[str, str]) -> list[list[str]]:
    """The parameters whose hooks are called, where the first output, the second and both are differentiated.
    ``late``: hooks are set on what ranks hold."""
    torch.manual_seed(0)
    net, x, seen = Forked(), torch.randn(4, 4), []
    hooks = {name: lambda gradient, name=name: (seen.append(name), gradient * 2)[1] for name, _ in sorted_of(net)}
    after = {name: lambda parameter, name=name: seen.append(f"{name} after") for name in hooks}

    def hooked(module: nn.Module) -> None:
        for name, parameter in sorted_of(module):
            parameter.register_hook(hooks[name])
            parameter.register_post_accumulate_grad_hook(after[name])

    if not late:
        hooked(net)
    if dist.is_initialized():
        plan = sw.plan(net, (x,), 2, mesh=mesh, strategies=strategies) if dist.get_rank() == 0 else None
        net = sw.parallelize(net, plan)
    if late:
        hooked(net)
    calls = []
    for which in ((0,), (1,), (0, 1)):
        outputs = net(x)
        sum(outputs[i].square().sum() for i in which).backward()
        calls.append(sorted(seen))
        seen.clear()
    return calls


def sorted_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted(module.named_parameters())


@pytest.mark.parametrize("strategies", [{"a": "m@d"}, {"a": "n@d", "b": "n@d"}])
def test_hooks_of_parameters_without_gradients_are_not_called(run_ranks, strategies) -> None:
    mesh = sw.Mesh(d=2)
    expected = called(False, mesh, strategies)
    assert [len(names) for names in expected] == [4, 4, 8]
    for have in run_ranks(called, 2, False, mesh, strategies):
        assert have == expected


def late_and_unused() -> list[str]:
    """Hooks that are set on what ranks hold, of parameters that forward does not use."""
    net, x, seen = Forked(), torch.randn(4, 4), []
    net = sw.parallelize(net, sw.plan(net, (x,), 2, mesh=sw.Mesh(d=2), mode="data_parallel"))
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda gradient, name=name: (seen.append(name), gradient * 2)[1])
    sum(output.sum() for output in net(x)).backward()
    return sorted(seen)


def test_hooks_that_are_set_on_ranks_are_not_called_for_unused_parameters(run_ranks) -> None:
    for seen in run_ranks(late_and_unused, 2):
        assert seen == ["a.bias", "a.weight", "b.bias", "b.weight"]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().sum()


def sparse(strategies: dict[str, str] | None) -> str:
    net, x = Table(), torch.arange(8) % 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {"mode": "data_parallel"} if strategies is None else {"strategies": strategies}
        par = sw.parallelize(net, sw.plan(net, (x,), 2, mesh=sw.Mesh(d=2), **how))
    optimizer = torch.optim.SparseAdam(par.parameters())
    par.step(x)
    with pytest.raises(ShardwiseError) as refused:
        optimizer.step()
    torch.optim.Adam(par.parameters()).step()
    return str(refused.value)


@pytest.mark.parametrize("strategies", [None, {"table": "e@d"}])
def test_an_optimizer_for_sparse_gradients_is_refused_with_a_way_out(run_ranks, strategies) -> None:
    for text in run_ranks(sparse, 2, strategies):
        assert "that of a parameter" in text
        assert "torch.optim.Adam or AdamW" in text
