"""Parts of a graph on placements of their own, on virtual ranks, equal the graph on one device."""

from __future__ import annotations

import random
from collections import Counter
from unittest import mock

import pytest

from graph.parts import carriers, cut_graph, random_cut
from graph.test_cut import captured_model
from models import zoo_own, zoo_transformers
from models.tiny_models import bert, gpt2, llama, resnet
from programs.building import random_program
from programs.stages import check_stages, chosen_stage, random_stage
from shardwise.layouts.conversions import CELLS, Cell
from shardwise.layouts.mesh import Mesh
from shardwise.layouts.placement import Placement, check_placements

TOLERANCE = 1e-10
TWO = (Placement(Mesh(dp=2), (0, 1)), Placement(Mesh(tp=2), (2, 3)))
UNEQUAL = (Placement(Mesh(dp=2), (0, 1)), Placement(Mesh(dp=2, tp=2), (2, 3, 4, 5)))
LOOPED = (Placement(Mesh(dp=2), (0, 1)), Placement(Mesh(tp=3), (2, 3, 4)), Placement(Mesh(tp=2), (0, 1)))
ALONE = (Placement(Mesh(a=2, b=2), (0, 1, 2, 3)), Placement(Mesh(one=1), (4,)), Placement(Mesh(x=5), (5, 6, 7, 8, 9)))


@pytest.mark.parametrize("places", [TWO, UNEQUAL], ids=["2 and 2", "2 and 4"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_data_parallel_before_tensor_parallel_equals_one_device(name: str, places: tuple[Placement, ...]) -> None:
    """The first layer of a transformer splits samples, the second one columns and heads, as one writes it by hand."""
    graph, data = captured_model({"gpt2": gpt2(), "llama": llama()}[name])
    check_placements(places, sum(len(place.ranks) for place in places))
    layer = "transformer.h.1." if name == "gpt2" else "model.layers.1."
    first = next(op.name for op in graph.ops if op.name.startswith(layer))
    found = cut_graph(graph, [first])
    columns = ("attn.c_attn", "mlp.c_fc", "gate_proj", "up_proj", "q_proj", "k_proj", "v_proj", "lm_head")
    stages = [
        chosen_stage(found.parts[0], places[0], found.sends(0), "data_parallel", {}),
        chosen_stage(found.parts[1], places[1], found.sends(1), "auto", dict.fromkeys(columns, "n@tp")),
    ]
    assert check_stages(found, graph, data, places, stages.__getitem__) <= TOLERANCE
    halves = [
        stages[1].storage[s.value] for s in stages[1].part.sources if s.names[0].endswith(columns_of_weights(columns))
    ]
    assert halves
    assert all("tp" in layout.positions for layout in halves)


def columns_of_weights(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.weight" for module in modules if module != "lm_head")


def test_a_broken_conversion_inside_a_stage_is_noticed() -> None:
    """The check is one: the cotangent of what tensor parallel ranks use differently is not summed."""
    graph, data = captured_model(llama())
    found = cut_graph(graph, [next(op.name for op in graph.ops if op.name.startswith("model.layers.1."))])
    strategies = dict.fromkeys(("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj"), "n@tp")
    with mock.patch.dict(CELLS, {("I", "R"): Cell("none", "none")}):
        stages = [
            chosen_stage(found.parts[0], TWO[0], found.sends(0), "stand_alone", {}),
            chosen_stage(found.parts[1], TWO[1], found.sends(1), "auto", strategies),
        ]
        assert check_stages(found, graph, data, TWO, stages.__getitem__) > 1e-3


MODELS = {
    "llama": (llama(), LOOPED),
    "bert": (bert(), ALONE),
    "resnet": (resnet(), UNEQUAL),
    "t5": (zoo_transformers.t5(), LOOPED),
    "dlrm": (zoo_own.OWN["dlrm"], LOOPED),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_under_random_strategies_equal_one_device(name: str) -> None:
    tiny, places = MODELS[name]
    graph, data = captured_model(tiny)
    rng = random.Random(name)
    found = random_cut(graph, rng, len(places))
    stages = [random_stage(found.parts[i], places[i], found.sends(i), rng) for i in range(len(places))]
    assert check_stages(found, graph, data, places, stages.__getitem__) <= TOLERANCE


@pytest.mark.parametrize("block", range(2))
def test_random_programs_on_random_placements_equal_one_device(block: int) -> None:
    features: Counter[str] = Counter()
    for seed in range(block * 20, (block + 1) * 20):
        program, rng = random_program(seed), random.Random(seed)
        places = rng.choice((TWO, UNEQUAL, LOOPED, ALONE))
        found = random_cut(program.graph, rng, len(places))
        if len(found.parts) < len(places):
            continue
        made = [random_stage(found.parts[i], places[i], found.sends(i), rng) for i in range(len(places))]
        error = check_stages(found, program.graph, program.sources, places, made.__getitem__)
        assert error <= TOLERANCE, f"random_program({seed}): {error}"
        features["programs"] += 1
        features["carried"] += any(map(carriers, found.crossings))
        for stage in made:
            layouts = [stage.storage[s.value] for s in stage.part.sources if s.kind == "activation"]
            features["sharded"] += any(layout.positions for layout in layouts)
            features["whole"] += any(not layout.positions for layout in layouts)
            features["uneven"] += any(not layout.is_even for layout in layouts)
    assert features["programs"] >= 15, features
    assert features["carried"] > 0, features
    assert min(features[name] for name in ("sharded", "whole", "uneven")) > 3, features
