"""Mixtures of experts in every form that people write come to products by expert, with the numbers of one device."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from graph.against_eager import check_against_eager
from models.breadth import tiny_of
from models.expert_models import (
    WIDTH,
    Added,
    Assigned,
    Batched,
    Dense,
    Einsum,
    ExpertChoice,
    Loop,
    Mixture,
    Modules,
    Stack,
)
from models.zoo_transformers import mixtral
from raising import raises
from shardwise.errors import PlanWarning
from shardwise.graph.capture import capture
from shardwise.graph.grouped import grouped_mm
from shardwise.graph.ir import Ref
from shardwise.plans.entries import SharedEntry

FORMS: dict[str, tuple[type[Mixture], int]] = {  # products
    "batched": (Batched, 2),
    "einsum": (Einsum, 3),
    "loop": (Loop, 2),
    "added": (Added, 2),
    "modules": (Modules, 3),
    "assigned": (Assigned, 3),
}
X = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(0))
MESHES = {
    "ep": sw.Mesh(ep=4),
    "dp x ep": sw.Mesh(dp=2, ep=2),
    "ep x tp": sw.Mesh(ep=2, tp=2),
    "dp x ep x tp": sw.Mesh(dp=2, ep=2, tp=2),
}


def exchanges(plan: Any) -> list[Any]:
    return [collective for collective in plan.collectives() if collective.kind == "row_exchange"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_to_products_by_expert(form: str) -> None:
    kind, products = FORMS[form]
    graph = check_against_eager(kind(), X.double()).graph
    found = [op for op in graph.ops if op.target is grouped_mm._opoverload]
    assert len(found) == products, graph
    assert len({op.operands[2] for op in found}) == 1, "one exchange"
    rows = X.numel() // WIDTH * 2
    assert max(value.numel for value in graph.values) <= rows * 12, "no matrix per row"
    assert len(graph.ops) < 50, "no operators per expert"


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.sampled(1)
def test_experts_of_transformers_are_products_in_every_setting(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    tiny = mixtral() if name == "mixtral" else tiny_of(name)
    module: Any = tiny.build().eval()
    module.set_experts_implementation(implementation)
    graph = check_against_eager(module, **tiny.inputs(2), tolerance=1e-9).graph
    found = [op for op in graph.ops if op.target is grouped_mm._opoverload]
    assert len(found) == 4, "two per layer"
    assert module.config._experts_implementation == implementation


def test_products_have_the_dtype_of_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(Batched(), (X,)).graph
    found = [op for op in graph.ops if op.target is grouped_mm._opoverload]
    assert [graph.by_name[op.results[0]].dtype for op in found] == [torch.bfloat16] * 2, graph
    assert len({op.operands[2] for op in found}) == 1, "one exchange"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("experts", [4, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.sampled(3)
def test_tokens_of_every_form_travel(form: str, mesh: str, experts: int) -> None:
    module, tp = FORMS[form][0](experts), "tp" in mesh
    plan = sw.plan(
        module, (X,), MESHES[mesh].num_devices, mesh=MESHES[mesh], strategies={"": "e@ep n@tp" if tp else "e@ep"}
    )
    sent = exchanges(plan)
    expected = {"batched": 3, "modules": 5, "assigned": 4}.get(form, 2)  # tokens, biases and results
    assert len(sent) >= expected if tp else len(sent) == expected, plan
    matrices = [
        at for name, at in plan.layouts.items() if "router" not in name and name.endswith(("weight", "up", "down"))
    ]
    assert matrices
    assert all(prod(at.max_local_shape) * 2 <= prod(at.shape) for at in matrices), plan
    report = sw.verify(module, (X,), plan)
    assert report.is_equal, report


@pytest.mark.parametrize("kind", [Modules, Assigned])
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": sw.Mesh(ep=4), "micro_batch": 2},
        {"mesh": sw.Mesh(ep=2), "micro_batch": 2, "stages": 2},
        {"mesh": sw.Mesh(dp=2, ep=2), "zero": 3},
        {"mesh": sw.Mesh(dp=2, ep=2), "zero": 1, "recompute": "full"},
    ],
    ids=["micro-batches", "stages", "zero 3", "zero 1, recompute"],
)
@pytest.mark.sampled(2)
def test_lists_of_experts_are_divided_under_every_lever(kind: type[Mixture], options: dict[str, Any]) -> None:
    module = Stack(kind)
    plan = sw.plan(module, (X,), 4, strategies={"layers.*.experts": "e@ep"}, **options)
    held = {name: at for stage in plan.stages for name, at in stage.layouts.items() if name.endswith("up.weight")}
    assert len(held) == 8
    assert all(prod(at.max_local_shape) * 2 <= prod(at.shape) for at in held.values()), held
    report = sw.verify(module, (X,), plan)
    assert report.ok, report


def test_experts_whose_matrices_no_axis_divides_stay_whole_with_a_warning() -> None:
    module, x = Modules(5), torch.randn(5, 8, WIDTH)
    with pytest.warns(PlanWarning, match=r"experts\.0\.gate\.weight"):
        plan = sw.plan(module, (x,), 5, mesh=sw.Mesh(ep=5), strategies={"": "e@ep"})
    assert str(plan.layouts["experts.0.gate.weight"]) == "[12, 8]"
    assert sw.verify(module, (x,), plan).is_equal


@pytest.mark.parametrize("kind", [ExpertChoice, Dense])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.sampled(2)
def test_experts_to_which_nothing_travels_are_split(kind: type[Mixture], mesh: str) -> None:
    module = kind()
    plan = sw.plan(module, (X,), MESHES[mesh].num_devices, mesh=MESHES[mesh])
    assert str(plan.layouts["up"]).startswith("[4@ep"), plan.layouts
    assert not exchanges(plan)
    report = sw.verify(module, (X,), plan)
    assert report.is_equal, report


class OneOdd(Modules):
    """The first expert computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[0].register_forward_hook(lambda own, args, out: out.tanh())


class OneMissing(Loop):
    """The last expert computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts -= 1

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(chosen == expert)
            out.index_add_(0, token, tokens[token] @ self.up[expert] @ self.down[expert] * weights[token, choice, None])
        return out


class Shared(OneMissing):
    """All experts have the weights of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts += 1
        self.up = nn.Parameter(self.up.detach().flip(0))

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(chosen == expert)
            of_last = tokens[token] @ self.up[self.num_experts - 1 - expert] @ self.down[expert]
            out.index_add_(0, token, of_last * weights[token, choice, None])
        return out


@pytest.mark.parametrize("kind", [OneOdd, OneMissing, Shared])
@pytest.mark.sampled(1)
def test_loops_that_are_no_product_stay_and_are_exact(kind: type[Mixture]) -> None:
    module = kind()
    graph = check_against_eager(module, X.double()).graph
    assert not any(op.target is grouped_mm._opoverload for op in graph.ops)
    plan = sw.plan(kind(), (X,), 2, mesh=sw.Mesh(dp=2))
    assert sw.verify(kind(), (X,), plan).is_equal


class Looped(Mixture):
    """One expert per token, by a mask; variants change the ids, the start or the rows."""

    ids: torch.dtype = torch.int64

    def __init__(self) -> None:
        super().__init__()
        self.square, self.bias = nn.Parameter(torch.randn(4, WIDTH, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(1, -1)
        return (self.loop(tokens, chosen.reshape(-1).to(self.ids)) * weights).square().mean()

    def loop(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = self.start(tokens)
        for expert in range(4):
            mask = chosen == expert
            out[mask] = self.rows(tokens[mask], expert)
        return out

    def start(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tokens)

    def rows(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        return rows @ self.square[expert] + self.bias[expert]


class SmallIds(Looped):
    ids = torch.uint8


class FloatIds(Looped):
    ids = torch.float64


class Overwritten(Looped):
    """Every row of a start that has a gradient is overwritten: the gradient is zero, not None."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH))

    def start(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.base.expand(len(tokens), WIDTH).clone()


class Pairs(Looped):
    """Two rows have one choice."""

    def loop(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows = tokens.unflatten(0, (-1, 2))
        out = torch.zeros_like(rows)
        for expert in range(4):
            mask = (chosen[::2] == expert).unsqueeze(1).expand(-1, 2)
            out[mask] = self.rows(rows[mask], expert)
        return out.flatten(0, 1)


class Checkpointed(Looped):
    def rows(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().rows, rows, expert, use_reentrant=False)
        return result


class Broadcast(Mixture):
    """The tokens of the first sample meet the experts of all: a dim of size 1 is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows = torch.einsum("tai,taio->tao", tokens[:2].unsqueeze(0), self.square[chosen])
        return (rows * weights.unsqueeze(-1)).sum(1)


class Mixed(Broadcast):
    """Between two products, a value per row meets repeated tokens, and a chain of operators reads a value twice."""

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, experts = tokens.repeat_interleave(2, 0).unsqueeze(1), chosen.reshape(-1)
        hidden = torch.bmm(rows, self.square[experts]).tanh() * rows
        for _ in range(12):
            hidden = hidden * torch.sigmoid(hidden)
        return torch.bmm(hidden, self.square[experts]).view(-1, 2, WIDTH).sum(1)


@pytest.mark.parametrize("kind", [Looped, SmallIds, FloatIds, Overwritten, Pairs, Checkpointed, Broadcast, Mixed])
def test_what_resembles_a_product_by_expert_has_the_numbers_of_eager(kind: type[Mixture]) -> None:
    captured = check_against_eager(kind(), X.double())
    products = [op for op in captured.graph.ops if op.target is grouped_mm._opoverload]
    assert len(products) == {Pairs: 0, Broadcast: 0, Mixed: 2}.get(kind, 1), captured.graph
    assert len(captured.graph.ops) < 120, "no operator is emitted twice for every reader"
    assert bool(captured.segments) == (kind is Checkpointed), "the model's own recomputation is kept"


class Put(Added):
    """Rows added by ``index_put_``."""

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(chosen == expert)
            rows = tokens[token] @ self.up[expert] @ self.down[expert] * weights[token, choice, None]
            out.index_put_((token,), rows, accumulate=True)
        return out


class Summed(Added):
    """The sum is written out, from a start with a gradient, and the places of tokens have two dims."""

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, out = tokens.unflatten(0, (4, -1)), tokens.unflatten(0, (4, -1)) * 2
        weights, chosen = (x.unflatten(0, (4, -1)) for x in (weights, chosen))
        for expert in range(self.num_experts):
            i, j, choice = torch.where(chosen == expert)
            out[i, j] = rows[i, j] @ self.up[expert] @ self.down[expert] * weights[i, j, choice, None] + out[i, j]
        return out.flatten(0, 1)


@pytest.mark.parametrize("kind", [Put, Summed])
def test_rows_added_by_an_index_are_products_by_expert(kind: type[Mixture]) -> None:
    graph = check_against_eager(kind(), X.double()).graph
    assert sum(op.target is grouped_mm._opoverload for op in graph.ops) == 2, graph


class Twice(Added):
    """A token may have one expert twice: PyTorch adds one of the two rows, which one is not defined."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        return self.mix(tokens, weights, (chosen * 2) % 4).square().mean()


class IfRows(Added):
    """Experts without rows are left out."""

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(chosen == expert)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, tokens[token] @ self.up[expert] @ self.down[expert] * weights[token, choice, None])
        return out


class IfAny(Added):
    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            mask = (chosen == expert).any(-1)
            if mask.any():
                out[mask] += tokens[mask] @ self.up[expert] @ self.down[expert]
        return out


class Chunks(Added):
    """DeepSeek's inference: rows sorted by expert, in chunks whose sizes the host reads."""

    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.view(-1).argsort()
        counts = self.counts(chosen.view(-1).bincount(minlength=self.num_experts))
        chunks = zip(tokens[order // 2].split(counts), self.up, self.down, strict=True)
        rows = torch.cat([chunk @ up @ down for chunk, up, down in chunks])
        back = torch.empty_like(rows)
        back[order] = rows
        return (back.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def counts(self, counts: torch.Tensor) -> list[int]:
        return counts.tolist()


class NumpyChunks(Chunks):
    def counts(self, counts: torch.Tensor) -> list[int]:
        return [int(n) for n in counts.cpu().numpy()]


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        (Twice, "index_add_"),
        (IfRows, "leave the condition out"),
        (IfAny, "leave the condition out"),
        (Chunks, "F.grouped_mm"),
        (NumpyChunks, "F.grouped_mm"),
    ],
)
def test_what_fixed_shapes_do_not_hold_is_refused_with_its_line(kind: type[Mixture], fix: str) -> None:
    file = "expert_models.py" if kind is Twice else "test_expert_forms.py"
    with raises(sw.errors.CaptureError, source=file, fix=fix):
        capture(kind(), (X,))


class Scaled(Looped):
    """The factor of an expert has another dtype than its rows, which stay as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        return self.loop(tokens.bfloat16(), self.router(tokens).topk(1, -1).indices.reshape(-1))

    def rows(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        return (rows @ self.square[expert].bfloat16()) * self.bias[expert, 0]


def test_factors_of_experts_do_not_change_the_dtype_of_rows() -> None:
    graph = capture(Scaled(), (X,)).graph
    (output,) = graph.outputs
    assert isinstance(output, Ref)
    assert graph.by_name[output.name].dtype == Scaled()(X).dtype == torch.bfloat16


def test_a_strategy_of_one_of_the_experts_names_where_to_write_it() -> None:
    with raises(sw.errors.LayoutError, "n@dp", fix="loop"):
        sw.plan(Modules(), (X,), 2, mesh=sw.Mesh(dp=2), strategies={"experts.*.up": "n@dp"})


class Chosen(nn.Module):
    """Products with the matrices of experts that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 3))

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x[:, None], self.weight[experts]).square().sum()


@pytest.mark.parametrize("strategy", ["e@ep", "s@ep"])
def test_numbers_of_experts_are_those_of_an_index(strategy: str) -> None:
    module, x = Chosen(), torch.randn(6, WIDTH)
    plan = sw.plan(module, (x, torch.arange(6) % 4), 2, mesh=sw.Mesh(ep=2), strategies={"": strategy})
    assert sw.verify(module, (x, torch.tensor([0, 1, -1, 3, -4, 2])), plan).is_equal
    for wrong in (4, -5):
        with raises(IndexError, wrong, "out of bounds"):
            sw.verify(module, (x, torch.tensor([0, 1, wrong, 3, 2, 2])), plan)


class TwoProducts(Batched):
    def mix(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, of_rows = tokens.repeat_interleave(2, 0), chosen.reshape(-1)
        hidden = torch.bmm(rows.unsqueeze(1), self.up[of_rows]).squeeze(1)
        results = torch.bmm(torch.tanh(hidden).unsqueeze(1), self.down[of_rows]).squeeze(1)
        return (results * weights.reshape(-1, 1)).view(-1, 2, WIDTH).sum(1)


def test_products_of_one_row_may_be_split_over_other_axes() -> None:
    """Keys that arrived for the first product are not those of the second one, whose rows are elsewhere."""
    module, x = TwoProducts(), torch.randn(8, 8, WIDTH)
    plan = sw.plan(module, (x,), 4, mesh=sw.Mesh(a=2, b=2), strategies={"": "K@a"}).plan
    (second,) = (entry for entry in plan.only_stage.operators if entry.name == "/grouped_mm_1")
    other = tuple(
        replace(entry, strategy="K@b s.0@a") if entry is second else entry for entry in plan.only_stage.operators
    )
    shared = (SharedEntry("/index", "[128@b] keyed(a)"),)
    plan = plan.revised(operators=other, conversions=None, shared=shared)
    report = sw.verify(module, (x,), plan)
    assert report.ok, report
