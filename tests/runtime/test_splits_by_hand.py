"""Uneven splits by hand, ``v@tp{10,20,30,4}``: numbers equal one device, tables stay as they are stored, and what does
not add up is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from layouts.placing import convert, scatter, worst_difference
from proving import prove
from raising import raises
from runtime.training import Trained, call_and_differentiate, check_ranks, train
from shardwise.api import step_memory
from shardwise.layouts.layout import Atom, Layout, Windows
from shardwise.layouts.redistribute import redistribute
from shardwise.layouts.strategy import Strategy, parse_cuts
from shardwise.layouts.text import format_layout, parse_layout
from shardwise.proof.virtual import VirtualCluster


class Words(nn.Module):
    """An embedding and a head, which may share their table."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8, padding_idx=2)
        self.head = nn.Linear(8, 64)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Bags(nn.Module):
    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(64, 8, mode=mode, padding_idx=3)
        self.fc = nn.Linear(8, 12)
        self.out = nn.Linear(12, 6)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.out(torch.tanh(self.fc(self.bag(ids))))).square().mean()


def words(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 64, (8, 6), generator=generator), torch.randint(0, 64, (8, 6), generator=generator)


def planned(axes: dict[str, int], strategies: dict[str, str], tied: bool = False) -> sw.Plan:
    settings: dict[str, Any] = {"mesh": sw.Mesh(axes), "strategies": strategies, "search": "sharding_propagation"}
    return sw.plan(Words(tied), words(), sw.Mesh(axes).num_devices, **settings)


def layout_of(plan: sw.Plan, name: object) -> str:
    return next(entry.layout for entry in plan.parameters if entry.name == name)


@pytest.mark.parametrize(
    ("axes", "strategy", "stored"),
    [
        ({"tp": 4}, "v@tp{10,20,30,4}", "f64[64@tp{0:10|10:30|30:60|60:64}, 8]"),
        ({"tp": 4}, "v@tp{0, 60, 0, 4}", "f64[64@tp{|0:60||60:64}, 8]"),
        ({"tp": 3}, "v@tp{60,1,3}", "f64[64@tp{0:60|60:61|61:64}, 8]"),
        ({"tp": 2}, "v@tp{32,32}", "f64[64@tp, 8]"),
        ({"dp": 2, "tp": 4}, "v@tp{10,20,30,4}", "f64[64@tp{0:10|10:30|30:60|60:64}, 8]"),
        ({"dp": 2, "tp": 2}, "v@(dp,tp){10,20,30,4}", "f64[64@(dp,tp){0:10|10:30|30:60|60:64}, 8]"),
        ({"dp": 2, "tp": 2}, "v@(tp,dp){10,20,30,4}", "f64[64@(tp,dp){0:10|10:30|30:60|60:64}, 8]"),
        ({"sp": 2, "tp": 2}, "v@tp{50,14} e@sp", "f64[64@tp{0:50|50:64}, 8@sp]"),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_a_table_is_stored_as_it_is_split_and_never_exchanged(axes: dict[str, int], strategy: str, stored: str) -> None:
    plan = planned(axes, {"embed": strategy})
    assert layout_of(plan, "embed.weight") == stored
    report = prove(Words(), words(), plan)
    assert report.max_error < 1e-12
    for entry in plan.conversions:
        if entry.value == "embed.weight":  # gradients of data parallelism, and nothing else
            assert not entry.forward
            assert [(c.kind, c.axes) for c in entry.backward] == [("all_reduce", "dp")]


@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 4}], ids=str)
def test_a_consumer_that_wants_the_table_otherwise_exchanges_rows(axes: dict[str, int]) -> None:
    plan = planned(axes, {"embed": "v@tp{10,20,30,4}", "head": "n@tp"}, tied=True)
    report = prove(Words(tied=True), words(), plan)
    assert report.max_error < 1e-12
    kinds = [
        c.kind for e in plan.conversions if e.value == "embed.weight" and e.op.startswith("head") for c in e.forward
    ]
    assert kinds == ["halo_exchange"]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str) -> None:
    mesh = sw.Mesh(dp=2, tp=2)
    plan = sw.plan(
        Bags(mode), words()[0], 4, mesh=mesh, strategies={"bag": "v@tp{50,14}"}, search="sharding_propagation"
    )
    assert layout_of(plan, "bag.weight") == "f64[64@tp{0:50|50:64}, 8]"
    report = prove(Bags(mode), words()[0], plan)
    assert report.max_error < 1e-12


@pytest.mark.parametrize(
    ("chosen", "stored"),
    [
        ({"fc": "n@tp{5,7}", "out": "k@tp{5,7}"},
         {"fc.weight": "f64[12@tp{0:5|5:12}, 8]", "out.weight": "f64[6, 12@tp{0:5|5:12}]"}),
        ({"fc": "k@tp{1,7}", "out": "k@tp{12,0}"},
         {"fc.weight": "f64[12, 8@tp{0:1|1:8}]", "out.weight": "f64[6, 12@tp{0:12|}]"}),
        ({"fc": "n@(tp,dp){1,2,3,6}"}, {"fc.weight": "f64[12@(tp,dp){0:1|1:3|3:6|6:12}, 8]"}),
        ({"fc": "m@dp{3,5} n@tp{5,7}"}, {"fc.weight": "f64[12@tp{0:5|5:12}, 8]"}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled(2)
def test_products_are_split_by_hand_too(chosen: dict[str, str], stored: dict[str, str]) -> None:
    plan = sw.plan(Bags(), words()[0], 4, mesh=sw.Mesh(dp=2, tp=2), strategies=chosen, search="sharding_propagation")
    assert {name: layout_of(plan, name) for name in stored} == stored
    report = prove(Bags(), words()[0], plan)
    assert report.max_error < 1e-12


def test_a_plan_keeps_the_split_when_it_is_saved_printed_and_used_for_other_inputs(tmp_path: Path) -> None:
    plan = planned({"tp": 4}, {"embed": "v@tp{10,20,30,4}"})
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.digest == plan.digest
    assert loaded.strategies["embed/embedding"] == "v@tp{10,20,30,4}"
    assert "f64[64@tp{0:10|10:30|30:60|60:64}, 8]" in str(loaded)
    shorter = tuple(tensor[:3, :5] for tensor in words())
    prove(Words(), shorter, loaded)


def test_memory_is_that_of_the_device_with_most_rows() -> None:
    def parameters(strategy: str) -> int:
        plan = planned({"tp": 4}, {"embed": strategy, "head": "k@tp"})
        return step_memory(Words(), words(), plan).peak.parts["parameters"]

    assert parameters("v@tp{10,20,30,4}") - parameters("v@tp") == (30 - 16) * 8 * 8


@pytest.fixture(scope="module")
def uneven() -> sw.Plan:
    return planned({"dp": 2, "tp": 2}, {"embed": "v@tp{50,14}"})


def edited(plan: sw.Plan, name: object, layout: str) -> sw.Plan:
    body = json.loads(plan.to_json())
    body["stages"][0]["parameters"][name]["layout"] = layout
    return sw.Plan.from_json(json.dumps(body), edited=True)


@pytest.mark.parametrize(
    "layout", ["f64[64@tp{0:50|50:64}, 8@dp]", "f64[64@tp{0:3|3:64}, 8]", "f64[64@(dp,tp), 8]", "f64[64, 8@tp]"]
)
@pytest.mark.sampled(2)
def test_an_edited_plan_may_store_the_table_otherwise(layout: str, uneven: sw.Plan) -> None:
    report = prove(Words(), words(), edited(uneven, "embed.weight", layout))
    assert report.max_error < 1e-12


@pytest.mark.parametrize(
    "layout",
    ["f64[64@tp{0:50|40:64}, 8]", "f64[64@tp{0:50|51:64}, 8]", "f64[64@tp{14:64|0:14}, 8]", "f64[64@tp{0:50|50:60}, 8]",
     "f64[64@tp{0:50|50:64}, 8@dp{0:3|4:8}]"],
)  # fmt: skip
def test_a_plan_that_stores_a_row_twice_or_nowhere_is_refused(layout: str, uneven: sw.Plan) -> None:
    with raises(sw.PlanError, "embed.weight", layout, "every row"):
        edited(uneven, "embed.weight", layout)
    with raises(sw.PlanError, "3 windows", "64@tp", "2 devices"):
        edited(uneven, "embed.weight", "f64[64@tp{0:50|50:64|}, 8]")


@pytest.mark.parametrize(
    ("strategy", "words_of_message"),
    [
        ("v@tp{10,20,30}", "3 lengths {10,20,30} for factor v, which is split over 4 devices (tp)"),
        ("v@tp{10,20,30,5}", ("factor v has size 64", "10 + 20 + 30 + 5 = 65")),
        ("v@tp{10,20,x,5}", "an uneven split reads v@tp{10,20,30,4}"),
        ("v@tp{}", "an uneven split reads v@tp{10,20,30,4}"),
        ("v@tp{-1,20,41,4}", "an uneven split reads v@tp{10,20,30,4}"),
        ("v@tp{10,20,30,4", "a strategy reads"),
        ("R@tp{1,2,3,4}", "R is not a factor: only factors can be split unevenly"),
        ("v@tp.0{1,63} v@tp.1{1,63}", "factor v is split unevenly twice"),
        ("v@tp.0{1,63} v@tp.1", "2 lengths {1,63} for factor v, which is split over 4 devices"),
    ],
)
def test_what_does_not_add_up_is_refused(strategy: str, words_of_message: object) -> None:
    with raises(sw.ShardwiseError, words_of_message):
        planned({"tp": 4}, {"embed": strategy})


def test_factors_that_can_only_be_split_evenly() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.conv(x).flatten(2), -1).square().mean()

    for chosen, name in (({"conv": "y0@tp{3,5}"}, "y0"), ({"conv": "n@tp{1,3}"}, "n")):
        with raises(
            sw.errors.LayoutError,
            f"factor {name} of",
            "split evenly",
            op="conv/conv2d",
            source="test_splits_by_hand.py",
        ):
            sw.plan(
                Net(), torch.randn(4, 2, 8, 8), 2, mesh=sw.Mesh(tp=2), strategies=chosen, search="sharding_propagation"
            )


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_searches_by_price_say_that_they_price_even_splits_only(search: str) -> None:
    with raises(sw.errors.LayoutError, 'search="sharding_propagation"', op="embed", source="strategies['embed']"):
        sw.plan(Words(), words(), 4, search=search, mesh=sw.Mesh(tp=4), strategies={"embed": "v@tp{10,20,30,4}"})


def test_the_text_of_a_strategy() -> None:
    mesh = sw.Mesh(dp=2, tp=4)
    for text in ("v@tp{10,20,30,4}", "v@(tp,dp){1,2,3,4,5,6,7,36} n@sp", "n@dp v@tp{0,0,0,64}"):
        own = sw.Mesh(dp=2, tp=4, sp=2) if "sp" in text else mesh
        assert set(Strategy.parse(text, own).format(own).split()) == set(text.split())


LAYOUTS = [
    "[8@a{0:1|1:8}, 6]", "[8@a{0:6|6:8}, 6@b]", "[8@a{0:6|6:8}, 6@b{0:5|5:6}]", "[8@(a,b){0:1|1:3||3:8}, 6]",
    "[8@(b,a){0:1|1:3||3:8}, 6]", "[8@(a,b), 6]", "[8, 6]", "[8, 6] replicated(a,b)", "[8@b, 6@a]",
    "[8@a{0:1|1:8}, 6] replicated(b)", "[8@a{0:1|1:8}, 6] partial(sum@b)", "[8, 6] partial(sum@a,b)",
]  # fmt: skip


def moved_both_ways(source: Layout, target: Layout) -> list[str]:
    """The collectives of a redistribution that is exact, forward and backward, on the virtual cluster."""
    generator = torch.Generator().manual_seed(0)
    full, seed = (torch.randn(source.shape, dtype=torch.float64, generator=generator) for _ in range(2))
    cluster = VirtualCluster(source.mesh)
    before = [tensor.requires_grad_() for tensor in scatter(full, source, generator)]
    after = convert(cluster, [tensor * 1.0 for tensor in before], redistribute(source, target))
    assert worst_difference(after, target, full) < 1e-12, target
    kinds = [collective.kind for collective in cluster.record]
    torch.autograd.backward(after, [own.clone() for own in scatter(seed, target.dual, generator)])
    assert worst_difference([tensor.grad for tensor in before], source.dual, seed) < 1e-12, target
    return kinds


@pytest.mark.parametrize("source", LAYOUTS)
def test_any_uneven_split_becomes_any_other_layout_and_back(source: str) -> None:
    mesh = sw.Mesh(a=2, b=2)
    for target in LAYOUTS:
        kinds = moved_both_ways(parse_layout(source, mesh), parse_layout(target, mesh))
        assert source != target or not kinds


def test_windows_that_are_the_slices_are_no_windows_and_overlaps_are_not_left() -> None:
    mesh = sw.Mesh(a=2)
    assert (
        format_layout(Layout(mesh, ((Atom(8, ("a",)),),), (), (Windows.of_lengths(0, 0, (1, 7)),))) == "[8@a{0:1|1:8}]"
    )
    with raises(sw.errors.LayoutError, "[8@a{0:5|3:8}]", "[8]", "overlap"):
        redistribute(parse_layout("[8@a{0:5|3:8}]", mesh), parse_layout("[8]", mesh))


def train_on_rank(axes: dict[str, int], strategy: str, tied: bool) -> dict[str, Any]:
    """Three steps of AdamW with clipping, the rows of the table that are here, and the collectives of a forward."""
    par = sw.parallelize(Words(tied), planned(axes, {"embed": strategy}, tied) if dist.get_rank() == 0 else None)
    par._ranks.record = []
    par(*words())
    forward = [(c.kind, c.num_bytes) for c in par._ranks.record]
    par._ranks.record = None
    trained, state = train_words(par)
    start, length = par.plan.layouts["embed.weight"].atom_pieces(0, 0, par.coordinates)
    listed = [(c.kind, c.num_bytes) for c in par.plan.collectives()]
    return {"trained": trained, "state": state, "rows": (start, length), "forward": forward, "planned": listed}


def train_words(model: nn.Module) -> tuple[Trained, Tensor]:
    """Three steps, and a state of the table."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained = train(model, map(words, range(3)), optimizer, clip=0.5, differentiate=call_and_differentiate)
    return trained, optimizer.state[model.embed.weight]["exp_avg"]


TRAINED: list[tuple[dict[str, int], str, bool]] = [
    ({"tp": 4}, "v@tp{10,20,30,4}", False),
    ({"dp": 2, "tp": 2}, "v@tp{50,14}", True),
    ({"tp": 4}, "v@tp{0,60,0,4}", True),
]


def train_all() -> list[dict[str, Any]]:
    return [train_on_rank(*case) for case in TRAINED]


def test_ranks_train_as_one_process(run_ranks: RunRanks) -> None:
    found = run_ranks(train_all, 4)
    for number, (_, strategy, tied) in enumerate(TRAINED):
        check_training([rank[number] for rank in found], strategy, tied)


def check_training(ranks: list[dict[str, Any]], strategy: str, tied: bool) -> None:
    alone, state = train_words(Words(tied))
    lengths = parse_cuts(strategy)["v"]
    check_ranks([found["trained"] for found in ranks], alone)
    for rank, found in enumerate(ranks):
        start, length = found["rows"]
        assert length == lengths[rank % len(lengths)]
        torch.testing.assert_close(found["state"], state[start : start + length], rtol=1e-9, atol=1e-12)
        assert torch.equal(found["trained"].part_of("embed.weight", state), state[start : start + length])
        assert [kind for kind, _ in found["forward"]] == [kind for kind, _ in found["planned"]]
    for i, (_, num_bytes) in enumerate(ranks[0]["planned"]):  # of a halo, each rank counts what leaves it
        assert num_bytes == max(found["forward"][i][1] for found in ranks)
