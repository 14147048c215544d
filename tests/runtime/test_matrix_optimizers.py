"""Optimizers of whole matrices on shards are those of one device: Muon, Adafactor, LBFGS, Shampoo, 8-bit Adam; on real
gloo ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import StepLR

import shardwise as sw
from costs.live_bytes import LiveBytes
from launch.gloo_ranks import run_on_ranks
from raising import raises, refusal
from runtime.edges import batch, make
from runtime.staged_model import Staged, staged_batch
from runtime.training import check_close, check_ranks, state_of, step_or_differentiate, train
from shardwise.costs.optimizers import whole_matrix_bytes
from shardwise.runtime.guards.elementwise_optimizers import is_matrixwise, replace_step
from shardwise.runtime.hooks import watch_optimizers
from shardwise.runtime.local_shards import shard

SHARDED = {"up": "n@tp", "narrow": "n@tp", "tokens": "v@tp"}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, str], dict[str, Any]]] = {
    "tp": ({"tp": 2}, SHARDED, {}),
    "zero1": ({"dp": 2}, {}, {"zero": 1}),
    "zero3": ({"dp": 2}, {}, {"zero": 3}),
    "dp": ({"dp": 2}, {}, {}),
    "tp x zero3": ({"dp": 2, "tp": 2}, SHARDED, {"zero": 3}),
    "dp x uneven tp": ({"dp": 1, "tp": 3}, SHARDED, {}),
}


@sw.matrix_optimizer
class Shampoo(torch.optim.Optimizer):
    """A preconditioner per dim, in a list, as Shampoo and SOAP keep them."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient, state = p.grad.reshape(len(p) if p.ndim else 1, -1), self.state[p]
                if not state:
                    state["left"], state["right"] = torch.eye(len(gradient)).to(p), torch.eye(gradient.shape[1]).to(p)
                    state["step"] = 0
                state["step"] += 1
                state["left"] += gradient @ gradient.T
                state["right"] += gradient.T @ gradient
                update = power(state["left"]) @ gradient @ power(state["right"])
                p -= group["lr"] * (1.0 if self.steps == state["step"] else float("nan")) * update.reshape(p.shape)
        return loss


def power(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


class Adam8bit(torch.optim.Optimizer):
    """Adam with moments of 8 bits, with a scale for every 16 elements of the flattened parameter."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moments = [self._value(state, key, p) for key in ("mean", "square")]
                moments[0].lerp_(p.grad, 0.1)
                moments[1].lerp_(p.grad.square(), 0.05)
                p -= group["lr"] * moments[0] / (moments[1].sqrt() + 1e-3)
                for key, moment in zip(("mean", "square"), moments, strict=True):
                    self._keep(state, key, moment)

    def _value(self, state: Any, key: str, p: Tensor) -> Tensor:
        if key not in state:
            return torch.zeros_like(p)
        blocks = state[key].to(p.dtype) * state[f"{key}_scale"][:, None] / 127
        return blocks.reshape(-1)[: p.numel()].reshape(p.shape)

    def _keep(self, state: Any, key: str, moment: Tensor) -> None:
        flat = moment.reshape(-1)
        blocks = torch.cat([flat, flat.new_zeros(-len(flat) % 16)]).reshape(-1, 16)
        scale = blocks.abs().amax(1).clamp(min=1e-30)
        state[key], state[f"{key}_scale"] = (blocks / scale[:, None] * 127).round().to(torch.int8), scale


sw.matrix_optimizer(Adam8bit)


class MuonWithAdamW:
    """What people train with: Muon for matrices, AdamW for the rest, and a schedule of Muon's rate."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = list(params)
        self.muon = torch.optim.Muon([p for p in self.params if p.ndim == 2], lr=0.02, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW([p for p in self.params if p.ndim != 2], lr=0.01)
        self.schedule = StepLR(self.muon, 1, gamma=0.5)

    def zero_grad(self) -> None:
        for optimizer in (self.muon, self.adamw):
            optimizer.zero_grad()

    def step(self) -> None:
        for steps in (self.muon, self.adamw, self.schedule):
            steps.step()


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "Muon": MuonWithAdamW,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "Adafactor foreach": lambda params: torch.optim.Adafactor(params, lr=0.05, foreach=True),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "LBFGS without search": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=2),
    "Shampoo": Shampoo,
    "Adam8bit": Adam8bit,
}


def train_matrices(module: nn.Module, optimizer: Any, steps: Iterable[int] = range(3)) -> dict[str, Tensor]:
    """Three steps on a module of one device or of ranks; what its parameters are then."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return train(module, map(batch, steps), optimizer).state
    for number in steps:

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            return step_or_differentiate(module, batch(number))

        optimizer.step(closure)
    return state_of(module)


def trained(params: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in params if p.requires_grad]


@cache
def alone(optimizer: str) -> dict[str, Tensor]:
    model = make()
    return train_matrices(model, OPTIMIZERS[optimizer](trained(model.parameters())))


def split(layout: str) -> sw.Parallel:
    sizes, strategies, settings = LAYOUTS[layout]
    model, mesh = make(), sw.Mesh(sizes)
    plan = sw.plan(
        model, batch(), mesh.num_devices, mesh=mesh, strategies=strategies, search="sharding_propagation", **settings
    )
    return sw.parallelize(model, plan)


def put_back(module: nn.Module, initial: dict[str, Tensor]) -> None:
    """Give a module the values that it began with, for the next optimizer: a plan and its programs take long."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(initial[name])
            p.grad = None


def trains_on_ranks(layouts: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout in layouts:
        par = split(layout)
        initial = state_of(par)
        for name, make_optimizer in OPTIMIZERS.items():
            put_back(par, initial)
            optimizer = make_optimizer(trained(par.parameters()))
            parameters = train_matrices(par, optimizer)
            inner = getattr(optimizer, "muon", optimizer)
            names = {id(p): key for key, p in par.named_parameters()}
            states = {names[id(p)] for p, state in inner.state.items() if state}
            found[layout, name] = (parameters, states, [names[id(p)] for p in inner.param_groups[0]["params"]])
        found[layout, "layouts"] = (par.layouts, par.plan.mesh)
    return found


def check(layouts: tuple[str, ...], num_ranks: int, folder: Path) -> None:
    results = run_on_ranks(trains_on_ranks, num_ranks, (layouts,), folder, 240)
    for layout in layouts:
        of_plan, mesh = results[0][layout, "layouts"]
        for name in OPTIMIZERS:
            holders: list[str] = []
            for rank, found in enumerate(results):
                own, states, in_group = found[layout, name]
                for key, value in alone(name).items():
                    part = shard(value, of_plan[key], mesh.coordinates(rank)) if key in of_plan else value
                    where = f"{name} under {layout}: {key} on rank {rank}"
                    # Rounding of float64 sums in another order, made larger by three steps of eighth roots.
                    torch.testing.assert_close(own[key], part, rtol=1e-7, atol=1e-9, msg=where)
                holders += [key for key in states if of_plan[key].positions]
                assert set(in_group) <= set(own), "the optimizer has its shards again after a step"
            if "LBFGS" not in name:  # whose states are those of all parameters, on every rank
                assert len(holders) == len(set(holders)), f"each matrix has one owner: {holders}"
                assert bool(holders) == any(of_plan[key].positions for key in of_plan.keys() & alone(name).keys())


def test_optimizers_of_whole_matrices_are_those_of_one_device(tmp_path: Path) -> None:
    check(("tp", "zero1", "zero3", "dp"), 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp x zero3", "dp x uneven tp"])
def test_optimizers_of_whole_matrices_on_more_ranks(layout: str, tmp_path: Path) -> None:
    sizes = LAYOUTS[layout][0]
    check((layout,), sizes["dp"] * sizes["tp"], tmp_path)


# ------------------------------------------------------------------------------------------------------------ pipelines


def staged() -> Staged:
    torch.manual_seed(0)
    return Staged().double()


def trains_in_stages(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Two stages of two ranks under ZeRO 3, with an embedding that both have."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"mesh": sw.Mesh(dp=2), "zero": 3, "stages": 2, "micro_batch": 4}
    for name in kinds:
        model = staged()
        with warnings.catch_warnings(action="ignore"):
            plan = sw.plan(model, staged_batch(8), 4, search="sharding_propagation", **options)
        par = sw.parallelize(model, plan)
        optimizer = OPTIMIZERS[name](list(par.parameters()))
        if name == "LBFGS":
            par.step(*staged_batch(8))
            found[name] = refusal(lambda o=optimizer: o.step(lambda: torch.zeros(())))
        else:
            found[name] = train(par, STAGED_BATCHES, optimizer)
    return found


STAGED_BATCHES = [staged_batch(8, number) for number in range(3)]
STAGED_KINDS = ("Muon", "Adafactor", "Shampoo", "Adam8bit", "LBFGS")


@pytest.mark.long
def test_optimizers_of_whole_matrices_under_stages(tmp_path: Path) -> None:
    results = run_on_ranks(trains_in_stages, 4, (STAGED_KINDS,), tmp_path, 240)
    for name in STAGED_KINDS[:-1]:
        model = staged()
        alone = train(model, STAGED_BATCHES, OPTIMIZERS[name](list(model.parameters())))
        check_ranks([found[name] for found in results], alone, name, rtol=1e-7, atol=1e-9, of_losses=1e-7)
    for found in results:
        assert "under stages" in found["LBFGS"]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saves_and_loads(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    par, other = split("zero3"), split("tp")
    initial = state_of(par)
    for name in ("Adafactor", "Shampoo", "Adam8bit"):
        put_back(par, initial)
        optimizer = OPTIMIZERS[name](trained(par.parameters()))
        train_matrices(par, optimizer, range(2))
        sw.save_checkpoint(f"{folder}/{name}", par, optimizer, step=2)
        found[f"torch.save of {name}"] = refusal(lambda o=optimizer: torch.save(o.state_dict(), f"{folder}/one.pt"))
        again = OPTIMIZERS[name](trained(other.parameters()))
        sw.load_checkpoint(f"{folder}/{name}", other, again)
        if name == "Shampoo":
            again.steps = 2  # a count of the optimizer's own is in no state
        found[name] = train_matrices(other, again, range(2, 3)), other.layouts, other.plan.mesh
    return found


def test_states_of_whole_matrices_are_saved_once_and_load_under_any_plan(tmp_path: Path) -> None:
    results = run_on_ranks(saves_and_loads, 2, (str(tmp_path),), tmp_path, 240)
    for name in ("Adafactor", "Shampoo", "Adam8bit"):
        for rank, found in enumerate(results):
            own, layouts, mesh = found[name]
            for key, value in alone(name).items():
                part = shard(value, layouts[key], mesh.coordinates(rank)) if key in layouts else value
                torch.testing.assert_close(own[key], part, rtol=1e-7, atol=1e-9, msg=f"{name}: {key} on rank {rank}")
            assert found[f"torch.save of {name}"].startswith("ShardwiseError"), "a part of all states, under all names"
        model = make()
        optimizer = OPTIMIZERS[name](trained(model.parameters()))
        sw.load_checkpoint(tmp_path / name, model, optimizer)
        if name == "Shampoo":
            optimizer.steps = 2
        for key, value in train_matrices(model, optimizer, range(2, 3)).items():
            torch.testing.assert_close(value, alone(name)[key], rtol=1e-7, atol=1e-9)


# ----------------------------------------------------------------------------------------------------- what is refused


class Fails(Shampoo):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("in the middle of a step")


def edges_on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    par = split("tp")
    sw.matrix_optimizer(Fails)
    optimizer = Fails(trained(par.parameters()))
    par.step(*batch())
    found["fails"] = refusal(optimizer.step)
    names = {id(p): name for name, p in par.named_parameters()}
    found["after"] = [names[id(p)] for p in optimizer.param_groups[0]["params"]]

    grown = torch.optim.Adafactor([par.up.weight])
    grown.step()
    states = {key: value.clone() for key, value in grown.state[par.up.weight].items()}
    grown.add_param_group({"params": [par.tokens.weight, par.narrow.weight]})
    kept = grown.state.get(par.up.weight, {})
    found["grown"] = all(torch.equal(kept[key], value) for key, value in states.items())
    grown.step()
    optimizer = torch.optim.Muon([par.up.weight, par.tokens.weight, par.narrow.weight])
    optimizer.step()
    shards = sum(p.nbytes for p in optimizer.param_groups[0]["params"])
    whole = [sw.full_tensor(p) for p in optimizer.param_groups[0]["params"]]
    matrices = [(p.nbytes, tuple(p.shape)) for p in whole]
    with LiveBytes() as live:
        optimizer.step()
    found["live"] = [(live.peak, whole_matrix_bytes("muon", shards, matrices, 2)[1])]
    together = torch.optim.LBFGS([par.up.weight, par.tokens.weight, par.narrow.weight], max_iter=3, history_size=2)

    def closure() -> Tensor:
        for p in (par.up.weight, par.tokens.weight, par.narrow.weight):
            p.grad = p.detach().clone()  # of half their squares: the same on one device
        return torch.zeros((), dtype=torch.float64)

    together.step(closure)
    with LiveBytes() as live:
        together.step(closure)
    # All of its states may be new, and the shards' gradients are.
    found["live"].append((live.peak, sum(whole_matrix_bytes("lbfgs 2", shards, matrices, 2)) + 2 * shards))
    found["owned"] = [names[id(p)] for p, state in grown.state.items() if state]
    return found


def test_a_step_that_fails_leaves_the_optimizer_its_shards_and_owners_stay(tmp_path: Path) -> None:
    results = run_on_ranks(edges_on_ranks, 2, (), tmp_path, 240)
    for found in results:
        assert found["fails"] == "RuntimeError: in the middle of a step"
        assert {"up.weight", "tokens.weight"} <= set(found["after"])
        assert found["grown"]
    assert sorted(name for found in results for name in found["owned"]) == [
        "narrow.weight",
        "tokens.weight",
        "up.weight",
    ]
    assert all(found["owned"] for found in results)
    for live, counted in (pair for found in results for pair in found["live"]):
        assert counted / 3 <= live <= counted + 1000, "beside them there are numbers"


def test_a_class_is_declared_once_and_by_itself() -> None:
    class Derived(Shampoo):
        def power(self) -> None: ...

    assert is_matrixwise(Shampoo)
    assert is_matrixwise(Derived)
    assert not is_matrixwise(Fails), "it replaces the step"
    before = Shampoo.step
    assert sw.matrix_optimizer(Shampoo) is Shampoo
    assert Shampoo.step is before
    with raises(sw.ShardwiseError, "subclass of", "torch.optim.Optimizer"):
        sw.matrix_optimizer(Shampoo([nn.Parameter(torch.ones(1, 1))]))


# ------------------------------------------------------------------------------------------ optimizers with a history


class Late(torch.optim.Optimizer):
    """Normalised gradient descent, declared in the test, when a scheduler has been made."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p -= self.param_groups[0]["lr"] * p.grad / p.grad.norm()


class LateDerived(Late):
    """A class of which an optimizer is created before one of its base."""


class MuonByName(torch.optim.Muon):
    """A class that only its name tells from Muon."""


EARLY: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "Muon by name": lambda params: MuonByName([p for p in params if p.ndim == 2], lr=0.02),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "Late derived": LateDerived,
    "Late": Late,
}


def trains_with_an_early_scheduler() -> dict[str, Any]:
    """Schedulers, then the declaration and ``sw.parallelize``, as ``sw.prepare`` is used."""
    made = {}
    for name, make_optimizer in EARLY.items():
        model = make()
        optimizer = make_optimizer(trained(model.parameters()))
        made[name] = model, optimizer, StepLR(optimizer, 1, gamma=0.5), optimizer.step
    found: dict[str, Any] = {}
    sw.matrix_optimizer(Late)
    for name, (model, optimizer, schedule, step) in made.items():
        names = {id(p): key for key, p in model.named_parameters()}
        plan = sw.plan(model, batch(), 2, mesh=sw.Mesh(tp=2), strategies=SHARDED, search="sharding_propagation")
        par = sw.parallelize(model, plan)
        shards = dict(par.named_parameters())
        group = optimizer.param_groups[0]["params"]
        group[:] = [shards[names[id(p)]] for p in group]
        for number in range(3):
            optimizer.zero_grad()
            par.step(*batch(number))
            step() if number == 1 else optimizer.step()
            schedule.step()
        found[name] = {key: sw.full_tensor(p) for key, p in par.named_parameters()}
    return found


def test_a_step_that_a_scheduler_keeps_gathers_whole_matrices(tmp_path: Path) -> None:
    results = run_on_ranks(trains_with_an_early_scheduler, 2, (), tmp_path, 120)
    for name, make_optimizer in EARLY.items():
        model = make()
        optimizer = make_optimizer(trained(model.parameters()))
        schedule = StepLR(optimizer, 1, gamma=0.5)
        alone_then = train(model, map(batch, range(3)), optimizer, schedule).state
        for found in results:
            check_close(found[name], alone_then, rtol=1e-7, atol=1e-9, what=name)


def matrices_of(module: nn.Module) -> list[Tensor]:
    return [p for p in trained(module.parameters()) if p.ndim == 2]


def steps_together(par: sw.Parallel, optimizer: Any, model: nn.Module, on_one: Any, number: int) -> None:
    for each in (par, model):
        each.zero_grad()
    par.step(*batch(number))
    model(*batch(number)).backward()
    optimizer.step()
    on_one.step()


def differences(par: sw.Parallel, model: nn.Module) -> float:
    pairs = zip(par.parameters(), model.parameters(), strict=True)
    return max((sw.full_tensor(p) - q).abs().max().item() for p, q in pairs)


def histories_on_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    par, model = split("tp"), make()
    optimizer, on_one = torch.optim.Muon(matrices_of(par), lr=0.02), torch.optim.Muon(matrices_of(model), lr=0.02)
    for number in range(2):
        steps_together(par, optimizer, model, on_one, number)
    for each in (optimizer, on_one):
        each.param_groups[0]["params"].pop(0)
    steps_together(par, optimizer, model, on_one, 2)
    found["one parameter less"] = differences(par, model)

    par, optimizer = split("tp"), None
    model.load_state_dict(make().state_dict())
    on_one = torch.optim.Muon(matrices_of(model), lr=0.02)
    model(*batch()).backward()
    on_one.step()
    with torch.no_grad():
        for p, q in zip(par.parameters(), model.parameters(), strict=True):
            layout = par.layouts.get(next(name for name, each in par.named_parameters() if each is p))
            p.copy_(q if layout is None else shard(q, layout, par.coordinates))
    optimizer = torch.optim.Muon(matrices_of(par), lr=0.02)
    optimizer.load_state_dict(copy.deepcopy(on_one.state_dict()))  # whole: of one device
    sw.save_checkpoint(f"{folder}/loaded", par, optimizer, step=1)
    for number in (1, 2):
        steps_together(par, optimizer, model, on_one, number)
    sw.save_checkpoint(f"{folder}/stepped", par, optimizer, step=3)
    again = make()
    its = torch.optim.Muon(matrices_of(again), lr=0.02)
    sw.load_checkpoint(f"{folder}/stepped", again, its)
    pairs = zip(matrices_of(again), matrices_of(model), strict=True)
    momenta = [(its.state[p]["momentum_buffer"] - on_one.state[q]["momentum_buffer"]).abs().max() for p, q in pairs]
    found["loaded whole"] = differences(par, model), max(momenta).item()
    found["held"] = [p in optimizer.state for p in matrices_of(par)]

    eager = EagerMomentum(matrices_of(par))
    found["of shards"] = refusal(eager.step)
    return found


@sw.matrix_optimizer
class EagerMomentum(Shampoo):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"left": torch.eye(len(p)).to(p), "right": torch.eye(p.shape[1]).to(p), "step": 0}


def test_states_stay_with_their_parameters(tmp_path: Path) -> None:
    results = run_on_ranks(histories_on_ranks, 2, (str(tmp_path),), tmp_path, 120)
    for found in results:
        # Rounding of float64 sums in another order, in three steps.
        assert found["one parameter less"] < 1e-9
        assert max(found["loaded whole"]) < 1e-9, "parameters and saved momenta"
        assert "EagerMomentum made states of shards in its constructor" in found["of shards"]
    held = zip(*(found["held"] for found in results), strict=True)
    assert {sum(ranks) for ranks in held} == {1}, "one rank keeps the states of a matrix that is split"


@pytest.mark.parametrize("host_first", [False, True])
def test_a_class_that_inherits_a_step_gathers_and_its_base_steps_by_groups(host_first: bool) -> None:
    """Both replace the same step of torch, in either order, and each only once."""

    class Base(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Normed(Base):
        pass

    seen: list[str] = []

    def noting(what: str) -> Callable[..., Any]:
        def wrap(step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(what)
            return step(optimizer, *args, **kwargs)

        return wrap

    groups, whole = noting("groups"), noting("whole")
    order = [(Base, groups), (Normed, whole)]
    for kind, wrap in [*(order if host_first else order[::-1]), *order]:
        replace_step(kind, wrap)
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    Normed(model.parameters()).step()
    assert sorted(seen) == ["groups", "whole"]


def test_hooks_of_all_optimizers_are_set_again_where_a_process_forgot_them() -> None:
    called: list[Any] = []

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        called.append(optimizer)

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter])
    hooks: dict[int, Any] = optimizers._global_optimizer_pre_hooks  # type: ignore[assignment]
    before = dict(hooks)
    try:
        for _ in range(2):
            watch_optimizers(hook)
            watch_optimizers(hook)
            optimizer.step()
            hooks.clear()
        assert called == [optimizer] * 2
    finally:
        hooks.clear()
        hooks.update(before)
