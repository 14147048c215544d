"""Gradients on ranks as autograd has them on one device: who is called with them, and where they flow."""

from __future__ import annotations

import warnings
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from proving import prove
from raising import raises
from shardwise.errors import PlanError, ShardwiseError


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
    if dist.is_initialized() and dist.get_world_size() > 1:
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


def test_hooks_of_parameters_without_gradients_are_not_called(run_cases) -> None:
    cases = [(False, sw.Mesh(d=2), strategies) for strategies in ({"a": "m@d"}, {"a": "n@d", "b": "n@d"})]
    expected = called(*cases[0])
    assert [len(names) for names in expected] == [4, 4, 8]
    assert run_cases(called, 2, cases) == [[expected] * 2] * len(cases)


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
    with warnings.catch_warnings(action="ignore"):
        how = {"mode": "data_parallel"} if strategies is None else {"strategies": strategies}
        par = sw.parallelize(net, sw.plan(net, (x,), 2, mesh=sw.Mesh(d=2), **how))
    optimizer = torch.optim.SparseAdam(par.parameters())
    par.step(x)
    with pytest.raises(ShardwiseError) as refused:
        optimizer.step()
    torch.optim.Adam(par.parameters()).step()
    return str(refused.value)


def test_an_optimizer_for_sparse_gradients_is_refused_with_a_way_out(run_cases) -> None:
    for text in chain(*run_cases(sparse, 2, [(None,), ({"table": "e@d"},)])):
        assert "that of a parameter" in text
        assert "torch.optim.Adam or AdamW" in text


# ---------------------------------------------------------------------------------------------- gradients of inputs


class Judge(nn.Module):
    """Other operators and other outputs by the flags of a call, beside parameters that only some calls read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.extra, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, mode: str = "d", features: bool = False, deep: int = 0):
        h = F.leaky_relu(self.up(x), 0.2)
        if mode == "g":
            h = h + self.extra(h).tanh()
        for _ in range(deep):
            h = self.extra(h).sigmoid() * 2
        score = self.down(h)
        return (score, h) if features else score


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 8)

    def forward(self, z: Tensor) -> Tensor:
        return self.down(self.up(z).relu())


DATA, TENSOR = sw.Mesh(dp=2), sw.Mesh(tp=2)
WAYS = {
    "data parallel": ({"mesh": DATA, "mode": "data_parallel"},) * 2,
    "split parameters": (
        {"mesh": DATA, "mode": "data_parallel", "zero": 3},
        {"mesh": TENSOR, "strategies": {"up": "n@tp"}},
    ),
    "split inputs": ({"mesh": TENSOR, "strategies": {"up": "k@tp"}},) * 2,
    "chosen": ({"mesh": DATA},) * 2,
}


def parallel_of(module: nn.Module, example: Tensor, how: dict, **settings: object) -> nn.Module:
    num_ranks = dist.get_world_size()
    return sw.parallelize(
        module, sw.plan(module, (example,), num_ranks, **how) if dist.get_rank() == 0 else None, **settings
    )


def adversaries(way: str) -> list[float]:
    """The losses of both, whose every step sees the parameters that all earlier ones made."""
    torch.manual_seed(0)
    maker, judge = Maker().double(), Judge().double()
    if dist.is_initialized() and dist.get_world_size() > 1:
        for_maker, for_judge = WAYS[way]
        maker = parallel_of(maker, torch.randn(6, 4, dtype=torch.float64), for_maker)
        judge = parallel_of(judge, torch.randn(6, 8, dtype=torch.float64), for_judge)
    torch.manual_seed(1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02, betas=(0.5, 0.9)) for m in (maker, judge)]
    losses = []
    for _ in range(4):
        real, noise = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
        judge.zero_grad()
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(maker(noise).detach())).mean()
        loss.backward()
        optimizers[1].step()
        losses.append(loss.item())
        maker.zero_grad()
        score, seen = judge(maker(noise), "g", features=True)
        wanted = judge(real, features=True)[1].detach()
        loss = F.softplus(-score).mean() + 0.1 * (seen - wanted).square().mean()
        loss.backward()
        optimizers[0].step()
        losses.append(loss.item())
    assert losses[-1] != losses[1]
    return losses


def test_two_parallel_modules_against_each_other_are_as_on_one_device(run_cases) -> None:
    expected = adversaries("on one device")
    for way, ranks in zip(WAYS, run_cases(adversaries, 2, [(way,) for way in WAYS]), strict=True):
        for losses in ranks:
            assert losses == pytest.approx(expected, rel=1e-12), way


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor, how: str = "product"):
        h = self.down(self.up(x).relu())
        if how == "itself":
            return h, x, x * 2, x.t()
        if how == "detached":
            return (h * y.detach(),)
        if how == "overwritten":
            z = y * 2
            z.fill_(3.0)
            return (h * z,)
        if how == "across samples":
            return (h - h.mean(0), h * y.sum(0))
        return (h * y,)


HOWS = ("product", "itself", "detached", "overwritten", "across samples")


def read(how: dict, num_samples: int) -> dict[str, list[Tensor | None]]:
    """The gradients of inputs, and of an encoder and the parameters of frozen or trained layers behind it."""
    torch.manual_seed(0)
    net, encoder = Read().double(), nn.Linear(8, 8).double()
    x, y = (torch.randn(num_samples, 8, dtype=torch.float64) for _ in range(2))
    if dist.is_initialized() and dist.get_world_size() > 1:
        plan = sw.plan(net, (x, y), dist.get_world_size(), **how) if dist.get_rank() == 0 else None
        net = sw.parallelize(net, plan)

    def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
        return sum((i + 1) * out.square().sum() for i, out in enumerate(outputs))

    found = {}
    for case in HOWS:
        inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        loss_of(net(*inputs, case)).backward()
        found[case] = [tensor.grad for tensor in inputs]
    net(x, y)  # and none again
    loss_of(net(encoder(x), y)).backward()
    found["encoder"] = [parameter.grad for parameter in encoder.parameters()]
    part = x.clone().requires_grad_()
    net(part, y, "itself")[2].sum().backward()
    found["one output"] = [part.grad]
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    part = x.clone().requires_grad_()
    found["all parameters frozen"] = [*torch.autograd.grad(loss_of(net(part, y)), part)]
    with torch.no_grad():
        assert not net(part, y)[0].requires_grad
    return found


ON_TWO = {
    "data parallel": ({"mesh": DATA, "mode": "data_parallel"}, 8),
    "parts of unequal size": ({"mesh": DATA, "mode": "data_parallel"}, 7),
    "split columns": ({"mesh": TENSOR, "strategies": {"up": "k@tp"}}, 8),
}
ON_FOUR = {"two axes": ({"mesh": sw.Mesh(dp=2, tp=2), "strategies": {"up": "m@dp n@tp"}}, 8)}


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_gradients_of_inputs_are_those_of_one_device(num_ranks: int, cases: dict, run_cases) -> None:
    for (how, num_samples), ranks in zip(cases.values(), run_cases(read, num_ranks, cases.values()), strict=True):
        expected = read(how, num_samples)
        for found in ranks:
            for name, gradients in expected.items():
                for have, want in zip(found[name], gradients, strict=True):
                    assert (have is None) == (want is None), name
                    if want is not None:
                        torch.testing.assert_close(have, want, msg=name)


def own_parts() -> tuple[Tensor, str]:
    """The gradient of a rank's own part of a batch, and the error for parts that are gathered."""
    torch.manual_seed(0)
    net, x = Judge().double(), torch.randn(8, 8, dtype=torch.float64)
    par = parallel_of(net, x, {"mesh": DATA, "mode": "data_parallel"}, inputs="local")
    part = x.chunk(2)[dist.get_rank()].clone().requires_grad_()
    par(part).square().sum().backward()
    with warnings.catch_warnings(action="ignore"):
        uneven = x.split([3, 5])[dist.get_rank()].clone().requires_grad_()
        with pytest.raises(ShardwiseError) as refused:
            par(uneven)
    return part.grad, str(refused.value)


def test_a_part_of_a_batch_gets_the_gradient_of_its_rows(run_ranks) -> None:
    torch.manual_seed(0)
    net, x = Judge().double(), torch.randn(8, 8, dtype=torch.float64).requires_grad_()
    net(x).square().sum().backward()
    for rank, (gradient, refused) in enumerate(run_ranks(own_parts, 2)):
        torch.testing.assert_close(gradient, x.grad.chunk(2)[rank])
        assert "args[0]" in refused
        assert 'inputs="global"' in refused


def without_input_gradients(how: dict) -> str:
    net, x = Scored(), torch.randn(8, 8)
    par = parallel_of(net, x, how)
    with pytest.raises(ShardwiseError) as refused:
        par.step(x.requires_grad_())
    return str(refused.value)


class Other(Judge):
    def forward(self, x: Tensor, mode: str) -> Tensor:
        return self.down(self.up(x).relu()).exp()


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judge = Judge()

    def forward(self, x: Tensor, **flags: object):
        outputs = self.judge(x, **flags)
        return (outputs[0].square().mean(), outputs[1]) if isinstance(outputs, tuple) else outputs.square().mean()


STAGED = {"mesh": sw.Mesh(dp=1), "stages": 2}


def test_steps_that_bring_no_gradients_of_inputs_refuse_them(run_cases) -> None:
    for refused in chain(*run_cases(without_input_gradients, 2, [(PLANS["in passes"],), (STAGED,)])):
        assert "args[0] requires a gradient" in refused
        assert "detach" not in refused


def test_verify_compares_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    net = Read()
    inputs = [torch.randn(8, 8).requires_grad_() for _ in range(2)]
    for how in ({"mesh": DATA, "mode": "data_parallel"}, {"mesh": TENSOR, "strategies": {"net.up": "k@tp"}}):
        module = Scalar(net)
        report = prove(module, tuple(inputs), sw.plan(module, tuple(inputs), 2, **how))
        assert {d.name for d in report.differences if d.kind == "gradient"} >= {"args[0]", "args[1]"}


class Scalar(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(*inputs)[0].square().sum()


# ------------------------------------------------------------------------------------- flags that change operators

FLAGS = ({}, {"features": True}, {"mode": "g"}, {"deep": 2}, {}, {"mode": "g", "features": True}, {"features": False})
PLANS = {
    "data parallel": {"mesh": DATA, "mode": "data_parallel"},
    "searched": {"mesh": DATA},
    "split columns": {"mesh": TENSOR, "strategies": {"judge.up": "n@tp", "judge.down": "k@tp"}},
    "split storage": {"mesh": DATA, "mode": "data_parallel", "zero": 3},
    "in passes": {"mesh": DATA, "mode": "data_parallel", "micro_batch": 4},
    "stages": STAGED,
    "stages in passes": {"mesh": sw.Mesh(dp=1), "stages": 2, "micro_batch": 4},
}


def flagged(how: dict | None) -> list[list[Tensor]]:
    """Loss and parameters after a step with each of the flags."""
    torch.manual_seed(0)
    net, x = Scored().double(), torch.randn(8, 8, dtype=torch.float64)
    par = net if how is None else parallel_of(net, x, how)
    optimizer = torch.optim.AdamW(par.parameters(), lr=0.05)
    found = []
    for flags in FLAGS:
        optimizer.zero_grad()
        if how is None:
            outputs = par(x, **flags)
            loss = outputs[0] if isinstance(outputs, tuple) else outputs
            loss.backward()
        else:
            loss = par.step(x, **flags)
        optimizer.step()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sampled(1)
def test_a_flag_that_adds_operators_is_planned_like_other_shapes(name: str, run_ranks) -> None:
    expected = flagged(None)
    for losses in run_ranks(flagged, 2, PLANS[name]):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sampled(3)
def test_verify_proves_calls_with_other_flags(name: str) -> None:
    torch.manual_seed(0)
    net, x = Scored(), torch.randn(8, 8)
    plan = sw.plan(net, (x,), 2, **PLANS[name])
    for flags in FLAGS[:4]:
        report = sw.verify(net, (x,), plan, kwargs=flags, steps=1)
        assert report.ok, (flags, report)


def test_a_plan_says_which_flags_it_is_for_and_refuses_another_model_for_these(tmp_path) -> None:
    net, x = Scored(), torch.randn(8, 8)
    plan = sw.plan(net, (x,), 2, kwargs={"mode": "g"}, mesh=DATA, mode="data_parallel")
    assert plan.constants == ("kwargs['mode'] = 'g'",)
    plan.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json") == plan
    assert sw.plan(net, (x,), 2, mesh=DATA, mode="data_parallel").constants == ()
    net.judge.__class__ = Other
    with raises(PlanError, "judge.extra/add", "judge.extra/linear"):
        sw.verify(net, (x,), plan, kwargs={"mode": "g"})
