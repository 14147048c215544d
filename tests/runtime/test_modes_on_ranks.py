"""Submodules in another mode than their model, and attributes that are set after the split: as on one device, or
refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message

# Sums of at most 8 rows and 12 columns of float64 in another order, over three steps.
ROUNDING = 1e-13


class Net(nn.Module):
    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.Dropout(0.5),
            nn.Linear(12, 3),
        )
        self.scale, self.table = 2.0, torch.ones(3, dtype=torch.float64)
        self.again = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.up(x).tanh()))
        return (self.down(h) * self.table).square().mean() * self.scale * self.rate


def set_modes(net: Any, training: bool, norm: bool, drop: bool = False) -> None:
    net.train(training)
    net.norm.train(norm)
    net.drop.train(drop)


# (the modes in which it is split, those of the steps): of the model, its norm and its dropout
MODES: dict[str, tuple[tuple[bool, bool], list[tuple[bool, bool]]]] = {
    "a frozen norm": ((True, False), [(True, False)] * 3),
    "a norm that is frozen later": ((True, True), [(True, True), (True, False), (True, True)]),
    "a norm that is thawed later": ((True, False), [(True, False), (True, True), (False, False)]),
    "a norm alone in training": ((False, True), [(False, True), (False, False), (True, True)]),
}


def tensor_parallel(net: nn.Module, batch: torch.Tensor) -> sw.Plan:
    return sw.plan(net, batch, 2, mesh=sw.Mesh(tp=2), strategies={"up": "n@tp", "down": "k@tp"})


def trained(name: str) -> list[float]:
    at_first, steps = MODES[name]
    torch.manual_seed(0)
    net, batches = Net().double(), torch.randn(3, 8, 6, dtype=torch.float64)
    set_modes(net, *at_first)
    alone = copy.deepcopy(net)
    plan = tensor_parallel(net, batches[0]) if dist.get_rank() == 0 else None
    par = sw.parallelize(net, plan)
    assert par.again is par.norm
    assert [m.training for m in par.modules()] == [m.training for m in net.modules()]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (alone, par)]
    errors = []
    for batch, modes in zip(batches, steps, strict=True):
        losses = []
        for module, optimizer in zip((alone, par), optimizers, strict=True):
            set_modes(module, *modes)
            optimizer.zero_grad()
            loss = module(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        errors.append(abs(losses[0] - losses[1]))
    assert int(par.norm.num_batches_tracked) == int(alone.norm.num_batches_tracked)
    return errors


def test_submodules_in_another_mode_are_as_on_one_device(run_cases: Callable[..., Any]) -> None:
    for name, ranks in zip(MODES, run_cases(trained, 2, [(name,) for name in MODES]), strict=True):
        assert max(max(errors) for errors in ranks) < ROUNDING, name


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (lambda par: setattr(par, "scale", 3.0), "scale is an attribute of the Net"),
    "a number of the class": (lambda par: setattr(par, "rate", 3.0), "rate is an attribute of the Net"),
    "a tensor": (lambda par: setattr(par, "table", torch.zeros(3)), "table is an attribute of the Net"),
    "forward": (lambda par: setattr(par.up, "forward", lambda x: x), "forward is an attribute of the Linear"),
    "a setting of a layer": (
        lambda par: setattr(par.norm, "momentum", 0.5),
        "momentum is an attribute of the BatchNorm1d",
    ),
    "a probability": (lambda par: setattr(par.drop, "p", 0.0), "p is an attribute of the Dropout"),
}


def changed() -> dict[str, str]:
    torch.manual_seed(0)
    net, batch = Net().double(), torch.randn(8, 6, dtype=torch.float64)
    par = sw.parallelize(net, sw.plan(net, batch, 2, mode="data_parallel"))
    messages = {name: message(lambda change=change: change(par)) for name, (change, _) in CHANGES.items()}
    par.note = "what the model has not is anybody's own"
    copy.deepcopy(par).train()
    return messages


def test_attributes_that_ranks_would_not_see_are_refused_by_name(run_ranks: RunRanks) -> None:
    for messages in run_ranks(changed, 2):
        for name, (_, what) in CHANGES.items():
            assert what in messages[name]


DRAWN: dict[str, Callable[[Any], Any]] = {
    "normal": lambda net: nn.init.normal_(net.up.weight),
    "uniform of .data": lambda net: nn.init.uniform_(net.up.weight.data),
    "truncated": lambda net: nn.init.trunc_normal_(net.up.weight),
    "xavier": lambda net: nn.init.xavier_uniform_(net.up.weight),
    "kaiming": lambda net: nn.init.kaiming_normal_(net.up.weight),
    "orthogonal": lambda net: nn.init.orthogonal_(net.up.weight),
    "eye": lambda net: nn.init.eye_(net.up.weight),
    "sparse": lambda net: nn.init.sparse_(net.up.weight, 0.5),
}


def drawn() -> tuple[dict[str, str], list[str], bool]:
    torch.manual_seed(0)
    net, batch = Net().double(), torch.randn(8, 6, dtype=torch.float64)
    plan = tensor_parallel(net, batch) if dist.get_rank() == 0 else None
    par = sw.parallelize(net, plan)
    messages = {}
    for name, draw in DRAWN.items():
        messages[name] = message(lambda draw=draw: draw(par))
        draw(Net())  # what is no shard is drawn
    nn.init.constant_(par.up.weight, 0.5)
    with warnings.catch_warnings(record=True, action="always") as caught:
        par.apply(lambda module: None)
    return messages, [str(warning.message) for warning in caught], bool((par.up.weight == 0.5).all())


def test_initial_values_of_shards_are_refused_and_apply_says_what_it_meets(run_ranks: RunRanks) -> None:
    for messages, said, is_constant in run_ranks(drawn, 2):
        assert messages.keys() == DRAWN.keys()
        assert all("torch.nn.init on a shard of up.weight" in message for message in messages.values())
        assert "which hold this rank's shards: change the model before sw.parallelize" in said[0]
        assert is_constant


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x).square().mean()


def named_as_ours() -> list[str]:
    found = []
    for name in ("step", "position"):
        net = Named(name)
        plan = sw.plan(net, torch.randn(4, 4), 2, mode="data_parallel")
        found.append(message(lambda net=net, plan=plan: sw.parallelize(net, plan)))
    return found


def test_a_submodule_with_a_name_of_parallel_modules_is_refused_by_name(run_ranks: RunRanks) -> None:
    """Of names that models have (a table of positions), none is taken."""
    for refused, position in run_ranks(named_as_ours, 2):
        assert "a submodule step" in refused
        assert position == ""


def load(net: Net, par: Any) -> None:
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})


def train(net: Net, par: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(8, 6, dtype=torch.float64)).backward()
    optimizer.step()
    optimizer.zero_grad()


# What is done to the module that was split, and what is said of it, if anything.
AFTERWARDS: dict[str, tuple[Callable[[Net, Any], Any], str]] = {
    "values": (load, "values of up.weight, values of up.bias"),
    "a number": (lambda net, par: setattr(net, "scale", 3.0), "scale is 3.0, and was 2.0"),
    "a setting of a layer": (lambda net, par: setattr(net.norm, "momentum", 0.5), "norm.momentum is 0.5, and was 0.1"),
    "a mode": (lambda net, par: net.drop.eval(), "drop.training is False, and was True"),
    "frozen": (lambda net, par: net.up.weight.requires_grad_(False), "up.weight.requires_grad is False, and was True"),
    "a mode of both": (lambda net, par: (net.eval(), par.eval()), ""),
    "it is trained itself": (train, ""),
}


class Marked(nn.Parameter):
    pass


def split_net(net: Net, batch: torch.Tensor) -> Any:
    return sw.parallelize(net, tensor_parallel(net, batch) if dist.get_rank() == 0 else None)


def changed_afterwards() -> tuple[dict[str, list[str]], list[str]]:
    batch, said = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), {}
    for name, (change, _) in AFTERWARDS.items():
        torch.manual_seed(0)
        net = Net().double()
        with warnings.catch_warnings(record=True, action="always") as caught:
            par = split_net(net, batch)
            for call in range(4):
                par.step(batch)
                if call == 1:
                    change(net, par)
        said[name] = [str(warning.message) for warning in caught if warning.category is sw.errors.PlanWarning]
    net.zero_grad()
    optimizers = [torch.optim.AdamW(Net().parameters()), torch.optim.SGD(net.parameters(), lr=0.1)]
    return said, [message(optimizer.step) for optimizer in optimizers]


def test_what_is_done_afterwards_to_the_module_that_was_split_is_announced(run_ranks: RunRanks) -> None:
    for said, (of_another, of_its_parameters) in run_ranks(changed_afterwards, 2):
        for name, (_, what) in AFTERWARDS.items():
            assert len(said[name]) == bool(what), said[name]
            assert all("the original module was changed after" in text and what in text for text in said[name])
        assert not of_another
        assert "SGD holds up.weight, up.bias" in of_its_parameters


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.student(x) - self.teacher(x)).square().mean()


def stored_and_loaded(folder: str) -> tuple[list[str], float, list[Any]]:
    """What rank 0 stored is loaded by all ranks; what a rank stored itself, and what one device stored."""
    batch, rank = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dist.get_rank()
    torch.manual_seed(0)
    net = Net().double().eval()
    net.up.bias.no_decay, net.down.bias = True, Marked(net.down.bias.detach())
    alone = copy.deepcopy(net)
    with warnings.catch_warnings(record=True, action="always") as caught:
        par = split_net(net, batch)
        for strategies in ({"student": "n@tp"}, {"student": "n@tp", "teacher": "n@tp"}):
            torch.manual_seed(0)
            taught = Taught().double()
            sw.parallelize(taught, sw.plan(taught, batch, 2, mesh=sw.Mesh(tp=2), strategies=strategies))
    optimizer = torch.optim.AdamW(par.parameters())
    par.step(batch)
    optimizer.step()
    for what, state in (("model", par.state_dict()), ("optimizer", optimizer.state_dict())):
        torch.save(state, f"{folder}/{what}-rank{rank}.pt")
    dist.barrier()
    messages = [
        message(lambda target=target, path=f"{folder}/{what}-rank{number}.pt": target.load_state_dict(torch.load(path)))
        for what, target in (("model", par), ("optimizer", optimizer))
        for number in (rank, 0)
    ]
    dist.barrier()
    par.load_state_dict(alone.state_dict())
    error = float((par(batch) - alone(batch)).detach().abs())
    return messages, error, [par.up.bias.no_decay, *(str(warning.message) for warning in caught)]


def test_shards_of_another_rank_are_not_loaded_and_whole_tensors_are_cut(run_ranks: RunRanks, tmp_path: Path) -> None:
    outcomes = run_ranks(stored_and_loaded, 2, str(tmp_path))
    for rank, (messages, error, (marked, *said)) in enumerate(outcomes):
        own, of_first, own_states, states_of_first = messages
        assert (own, own_states) == ("", "")
        if rank == 0:
            assert (of_first, states_of_first) == ("", "")
            assert "down.bias (Marked)" in said[0]
            assert "teacher.weight [6, 6] and student.weight [6@tp, 6]" in said[1]
            assert len(said) == 2
        else:
            assert "up.weight, up.bias" in of_first
            assert "are the shards of rank 0, but rank 1 holds other" in of_first
            assert "states of up.weight" in states_of_first
        assert error < ROUNDING
        assert marked
