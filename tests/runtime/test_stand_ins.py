"""What stands for a model's submodules on ranks: its classes and modes are those of the model, what is added to it is
announced, and what it cannot do is refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import refusal

# Sums of at most 8 rows and 12 columns of float64 in another order, over three steps.
ROUNDING = 1e-13


class Backbone(nn.Module):
    """Keeps its norm in eval, and its first layer as it is, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.up = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.stem(x)).tanh())

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        self.stem.requires_grad_(False)
        return self


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.norm, self.head = Backbone(), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.backbone(x))).square().mean()


def freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
            for parameter in module.parameters():
                parameter.requires_grad_(False)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Without decay for what belongs to norms, as many scripts have it."""
    norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm1d) for p in m.parameters(recurse=False)]
    rest = [p for p in model.parameters() if not any(p is other for other in norms)]
    assert norms
    return [{"params": norms, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}]


def trained(stages: int | None) -> dict[str, Any]:
    """Training with modes and groups that a script makes of classes, beside one device."""
    torch.manual_seed(0)
    net, batches = Detector().double().train(), torch.randn(4, 8, 6, dtype=torch.float64)
    alone = copy.deepcopy(net)
    options: dict[str, Any] = (
        {"stages": stages, "micro_batch": 8, "schedule": "GPipe"}
        if stages
        else {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"}
    )
    par = sw.parallelize(net, sw.plan(net, batches[0], 2, **options))
    optimizers = [torch.optim.SGD(model.parameters() if stages else groups(model), lr=0.1) for model in (alone, par)]
    errors = []
    for number, batch in enumerate(batches):
        losses = []
        for model, optimizer in zip((alone, par), optimizers, strict=True):
            model.train(number != 2 or stages is not None)  # stages are planned for one mode of the norms
            if number == 3 and not stages:
                freeze_norms(model)
            optimizer.zero_grad()
            if model is alone:
                loss = model(batch)
                loss.backward()
            else:
                loss = par.step(batch)
            optimizer.step()
            losses.append(float(loss.detach()))
        errors.append(abs(losses[0] - losses[1]))
    held = dict(par.named_parameters())
    return {
        "errors": errors,
        "modes": [m.training for m in par.modules()] == [m.training for m in alone.modules()],
        "frozen": all(p.requires_grad == held[n].requires_grad for n, p in alone.named_parameters() if n in held),
        "trained": sum(p.requires_grad for p in held.values()),
    }


def test_modes_and_groups_by_class_are_those_of_one_device(run_ranks: RunRanks) -> None:
    for found in run_ranks(trained, 2, None):
        assert max(found["errors"]) < ROUNDING
        assert found["modes"]
        assert found["frozen"]
        assert found["trained"] == 4


def test_so_they_are_under_stages(run_ranks: RunRanks) -> None:
    for found in run_ranks(trained, 2, 2):
        assert max(found["errors"]) < ROUNDING
        assert found["modes"]
        assert found["frozen"]


class Taken(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.ones(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ getattr(self, self.name)).sum()


def said(action: Callable[[], Any]) -> str:
    with warnings.catch_warnings(action="error", category=sw.errors.PlanWarning):
        try:
            action()
        except (sw.ShardwiseError, sw.errors.PlanWarning) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def what_is_said() -> dict[str, str]:
    found = {}
    for name in ("step", "plan", "latest", "weight"):
        net, x = Taken(name), torch.randn(4, 4)
        plan = sw.plan(net, x, 2, mode="data_parallel")
        found[name] = said(lambda net=net, plan=plan: sw.parallelize(net, plan))
    net, x = Detector(), torch.randn(8, 6)
    par = sw.parallelize(net, sw.plan(net, x, 2, mode="data_parallel"))
    new: dict[str, Callable[[], Any]] = {
        "a module": lambda: setattr(par, "more", nn.Linear(3, 3)),
        "a module in a part": lambda: par.backbone.add_module("more", nn.Linear(3, 3)),
        "a parameter": lambda: setattr(par.head, "scale", nn.Parameter(torch.ones(3))),
        "a buffer": lambda: par.register_buffer("count", torch.ones(3)),
        "a mode of a part with its own": lambda: par.backbone.train(),
        "a value": lambda: setattr(par, "note", 3),
        "a mode": lambda: par.head.eval(),
    }
    found |= {name: said(add) for name, add in new.items()}
    par.train()
    file = io.BytesIO()
    torch.save(par.backbone, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(par).backbone):
        assert isinstance(other, Backbone)
        assert isinstance(other.up, nn.Linear)
        assert not isinstance(other.up, nn.BatchNorm1d)
        assert other.norm.training is False
        assert torch.equal(other.up.weight, par.backbone.up.weight)
    return found


def test_what_is_added_is_announced_and_names_that_are_taken_are_refused(run_ranks: RunRanks) -> None:
    for found in run_ranks(what_is_said, 2):
        for name in ("step", "plan", "latest"):
            assert found[name].startswith(f"PlanError: parameters or buffers of the module are called {name}")
        for name in ("a module", "a module in a part", "a parameter", "a buffer"):
            assert "was added to the stand-in of a" in found[name], found[name]
        assert "Backbone overrides train()" in found["a mode of a part with its own"]
        assert found["weight"] == found["a value"] == found["a mode"] == "nothing"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.blocks = 4, nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def embed(self, x: Tensor) -> Tensor:
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).square().mean()


def looked_at() -> dict[str, Any]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = Named()
    plan = sw.plan(net, x, 2, mesh=sw.Mesh(tp=2), strategies={"blocks.*": "n@tp", "head": "k@tp"})
    par = sw.parallelize(net, plan)
    copied = copy.deepcopy(par)
    return {
        "text": repr(par),
        "numbers": (par.heads, par.head.in_features, copied.heads),
        "absent": [hasattr(par, "nothing"), hasattr(par, "embed"), getattr(par, "module", None)],
        **{name: refusal(call) for name, call in {
            "embed": lambda: par.embed(x), "module": lambda: par.module,
        }.items()},
        "loss": float(par(x)),
    }  # fmt: skip


TEXT = """
Parallel(Named on Mesh(tp=2), rank 1 with 300 B
  (blocks): ModuleList(
    (0-2): 3 x Linear(
      weight: f32[6@tp, 6], here [3, 6]
      bias: f32[6@tp], here [3]
    )
  )
  (head): Linear(
    weight: f32[3, 6@tp], here [3, 3]
    bias: f32[3]
  )
)
""".strip()


def test_a_parallel_module_prints_its_layouts_and_names_what_it_does_not_have(run_ranks: RunRanks) -> None:
    _, found = run_ranks(looked_at, 2)
    assert found["text"] == TEXT
    assert found["numbers"] == (4, 6, 4)
    assert found["absent"] == [False, False, None]
    assert found["embed"].startswith("ModelAttributeError: embed is an attribute of the Named that was parallelized")
    assert "par(x, embed=True)" in found["embed"]
    assert "leave .module out" in found["module"]
