"""Terms of the loss that a step takes per micro-batch are those of gradient accumulation on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from proving import prove
from raising import raises
from shardwise.errors import PlanError, ShardwiseError

BATCH, EXPERTS = 8, 4
COEF = 0.3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=generator())


def labels(*shape: int) -> Tensor:
    found = torch.randint(0, 5, (BATCH, *shape), generator=generator(1))
    for i in range(BATCH):  # every micro-batch counts others
        found[i, : i * shape[0] // BATCH] = -100
    return found


MASK = (torch.rand(BATCH, 6, generator=generator(2)) < torch.linspace(0.3, 1, BATCH)[:, None]).float()
MASK[:, 0] = 1


def balance(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The load-balancing loss of Switch: experts x (share of the tokens x mean probability)."""
    probabilities = logits.softmax(-1).flatten(0, -2)
    chosen = F.one_hot(probabilities.topk(2, -1).indices, EXPERTS).sum(1).to(logits.dtype)
    if mask is None:
        return EXPERTS * (chosen.mean(0) * probabilities.mean(0)).sum()
    weight = mask.flatten()[:, None]
    return EXPERTS * ((chosen * weight).sum(0) * (probabilities * weight).sum(0)).sum() / weight.sum() ** 2


class Router(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.scores(x)
        return logits.softmax(-1), balance(logits)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = Router(width), nn.Parameter(0.3 * torch.randn(EXPERTS, width, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities, term = self.router(x)
        weights, chosen = probabilities.topk(2, -1)
        gates = torch.zeros_like(probabilities).scatter(-1, chosen, weights)
        return x + torch.einsum("bte,btd,efd->btf", gates, x, self.experts), term


class Base(nn.Module):
    """Returns the loss, and what it is the sum of: ``main``, and ``COEF`` times ``balance``."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.body, self.router, self.head = nn.Linear(width, width), nn.Linear(width, EXPERTS), nn.Linear(width, 5)

    def results(self, hidden: Tensor, y: Tensor, term: Tensor) -> dict[str, Tensor]:
        main = F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())
        return {"loss": main + COEF * term, "main": main, "balance": term}


class Switch(Base):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        logits = self.router(hidden)
        return self.results(hidden * logits.softmax(-1).amax(-1, keepdim=True), y, balance(logits))


class Masked(Base):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.results(hidden * mask[..., None], y, balance(self.router(hidden), mask))


class Layers(Base):
    """Terms of several layers, added up on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        total = x.new_zeros(())
        for layer in self.layers:
            x, term = layer(x)
            total = total + term
        return self.results(x, y, total)


class Divided(Base):
    """Divides by the number of tokens ahead of the sums."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        probabilities = self.router(hidden).softmax(-1) / (x.shape[0] * x.shape[1])
        chosen = (probabilities >= probabilities.amax(-1, keepdim=True)).to(x.dtype) * (1 / x.shape[0])
        return self.results(hidden, y, (chosen.sum((0, 1)) * probabilities.sum((0, 1))).sum())


class SharedSums(Base):
    """The mean probabilities and the number of valid labels are in the rest of the loss, too."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        mean = self.router(hidden).softmax(-1).mean((0, 1))
        count = (y >= 0).sum()
        weights = torch.arange(1.0, 1 + EXPERTS, dtype=x.dtype)
        results = self.results(hidden, y, mean.square().sum() * hidden.square().sum() / count)
        main = results["main"] + (mean * weights).sum() + hidden.abs().sum() / count
        return {**results, "main": main, "loss": main + COEF * results["balance"]}


class Dropping(Base):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = F.dropout(torch.tanh(self.body(x)), 0.3)
        logits = self.router(hidden)
        noise = torch.rand_like(logits)
        return self.results(F.dropout(hidden, 0.2), y, balance(logits + F.dropout(noise, 0.5)))


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.body(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.results(hidden, y, balance(self.router(hidden)))


class Learned(Base):
    """A learned weight of the term, which is added by a quarter twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        results = self.results(hidden, y, balance(self.router(hidden)))
        term = results["balance"]
        return {**results, "loss": results["main"] + 0.25 * term * self.weight.exp() - term / 4}


class Contrastive(nn.Module):
    """All of the loss is among the samples of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = F.normalize(self.left(F.dropout(x, 0.1)), dim=-1) @ F.normalize(self.right(y), dim=-1).T
        return F.cross_entropy(scores * 3, torch.arange(len(x)))


TOKENS = rows(6, 6), labels(6)
MODELS: dict[str, tuple[Any, tuple[Tensor, ...], list[str]]] = {
    "an output": (Switch, TOKENS, ["balance"]),
    "an operator": (Switch, TOKENS, ["/mul_1"]),
    "masked": (Masked, (*TOKENS, MASK), ["balance"]),
    "layers by module": (Layers, TOKENS, ["layers.*.router"]),
    "layers together": (Layers, TOKENS, ["balance"]),
    "divided ahead of the sum": (Divided, TOKENS, ["balance"]),
    "shared sums": (SharedSums, TOKENS, ["balance"]),
    "dropout": (Dropping, TOKENS, ["balance"]),
    "batch norm": (Normed, TOKENS, ["balance"]),
    "learned weight": (Learned, TOKENS, ["balance"]),
    "all of the loss": (Contrastive, (rows(6), rows(6) * 0.7), ["loss"]),
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    torch.manual_seed(0)
    kind, inputs, terms = MODELS[name]
    return kind(), inputs, terms


@pytest.mark.filterwarnings("ignore:running statistics", "ignore:a batch of 1")
@pytest.mark.parametrize("micro_batch", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_terms_per_micro_batch_are_proven_beside_one_device(name: str, micro_batch: int) -> None:
    module, inputs, terms = made(name)
    if (name, micro_batch) == ("all of the loss", 1):
        pytest.skip("one sample is like no other")
    plan = sw.plan(
        module, inputs, 2, mode="data_parallel", micro_batch=micro_batch, per_micro_batch=terms, optimizer="sgd"
    ).plan
    prove(module, inputs, plan)
    assert plan.per_micro_batch == tuple(terms)
    prove(module, tuple(x[:7] for x in inputs), plan)


SUGGESTED = {
    "an output": '"balance"',
    "all of the loss": '"loss"',
    "layers by module": '"balance"',
    "shared sums": '"balance"',
}


@pytest.mark.parametrize("name", SUGGESTED)
def test_the_refusal_names_the_term(name: str) -> None:
    module, inputs, _ = made(name)
    with raises(PlanError, fix=f"per_micro_batch=[{SUGGESTED[name]}]"):
        sw.plan(module, inputs, 2, mode="data_parallel", micro_batch=2)


class Hidden(Layers):
    """Returns the loss alone."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y)["loss"]


def test_the_refusal_names_operators_where_the_module_returns_no_term() -> None:
    torch.manual_seed(0)
    module = Hidden()
    with raises(PlanError, op="layers.0.router/mul") as caught:
        sw.plan(module, TOKENS, 2, mode="data_parallel", micro_batch=2)
    names = caught.value.fix.partition("per_micro_batch=[")[2].partition("]")[0].replace('"', "").split(", ")
    plan = sw.plan(module, TOKENS, 2, mode="data_parallel", micro_batch=2, per_micro_batch=names)
    prove(module, TOKENS, plan)
    assert names == ["layers.*.router/mul_1"]


WRONG: list[tuple[str, list[str], type[Exception], dict[str, Any]]] = [
    ("an output", ["balanse"], ShardwiseError, {"fix": "balance"}),
    ("an output", ["main"], PlanError, {"fix": "leave main out"}),
    ("an output", ["/mul_1", "main"], PlanError, {"fix": "leave main out"}),
    ("an output", ["/topk"], ShardwiseError, {"op": "/topk"}),
    ("an output", ["/sum"], ShardwiseError, {"op": "/sum"}),
    ("an output", ["body"], ShardwiseError, {"op": "body"}),
    ("layers together", ["balance", "layers.*.router"], ShardwiseError, {"fix": "layers.0.router/mul_1"}),
]


@pytest.mark.parametrize(("name", "terms", "error", "fields"), WRONG)
def test_what_is_no_such_term_is_refused(
    name: str, terms: list[str], error: type[Exception], fields: dict[str, Any]
) -> None:
    module, inputs, _ = made(name)
    with raises(error, "per_micro_batch", **fields):
        sw.plan(module, inputs, 2, mode="data_parallel", micro_batch=2, per_micro_batch=terms)


@pytest.mark.parametrize("terms", ["balance", 3, [1]])
def test_names_are_a_list_of_texts(terms: Any) -> None:
    module, inputs, _ = made("an output")
    with raises(ShardwiseError, "per_micro_batch", fix='["aux_loss"]'):
        sw.plan(module, inputs, 2, mode="data_parallel", micro_batch=2, per_micro_batch=terms)


class Elsewhere(Base):
    """What is made of the term beside the loss, or before it is added."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        term = balance(self.router(hidden))
        if self.what == "buffer":
            self.average.mul_(0.9).add_(term.detach())
        results = self.results(hidden, y, term)
        if self.what == "square":
            return {**results, "loss": results["main"] + term.square()}
        if self.what == "count":
            return {**results, "loss": results["main"] + term / (y >= 0).sum()}
        return results


@pytest.mark.parametrize(("what", "op"), [("buffer", "/add"), ("square", "/square"), ("count", "/div_3")])
def test_a_term_that_is_not_only_added_to_the_loss_is_refused(what: str, op: str) -> None:
    torch.manual_seed(0)
    with raises(PlanError, "per_micro_batch", "balance", op=op, fix="name a term"):
        sw.plan(Elsewhere(what), TOKENS, 2, mode="data_parallel", micro_batch=2, per_micro_batch=["balance"])


class Sized(Base):
    """The size of the batch divides what both the term and the rest read."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x)) / x.shape[0]
        return self.results(hidden, y, balance(self.router(hidden)))


class Constant(Base):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.results(hidden, y, balance(self.router(hidden)) * torch.tensor(1 / x.shape[0]))


@pytest.mark.parametrize("kind", [Sized, Constant])
def test_what_depends_on_the_size_of_the_batch_is_refused_if_it_cannot_be_that_of_both(kind: type[Base]) -> None:
    torch.manual_seed(0)
    with raises(PlanError, "per_micro_batch"):
        sw.plan(kind(), TOKENS, 2, mode="data_parallel", micro_batch=2, per_micro_batch=["balance"])


def test_a_plan_says_what_is_taken_per_micro_batch_and_so_does_its_file() -> None:
    module, inputs, terms = made("an output")
    plan = sw.plan(module, inputs, 2, mode="data_parallel", micro_batch=2, per_micro_batch=terms).plan
    line = next(line for line in str(plan).splitlines() if "per micro-batch" in line)
    assert line.endswith(": balance")
    loaded = sw.Plan.from_json(plan.to_json())
    assert (loaded, loaded.per_micro_batch, loaded.digest) == (plan, ("balance",), plan.digest)
    report = prove(module, inputs, loaded)
    assert any("balance" in note for note in report.notes), str(report)
    whole = sw.plan(module, inputs, 2, mode="data_parallel", per_micro_batch=terms).plan
    assert whole.terms == () and '"per_micro_batch"' not in whole.to_json()  # noqa: PT018
    assert ("per_micro_batch", "balance", "absent") in plan.diff(whole).settings
