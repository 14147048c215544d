"""The attention of architectures of ``transformers``: what becomes of its masks, and that loss and gradients stay."""

from __future__ import annotations

import pytest
import torch

from graph.against_eager import check_against_eager
from graph.test_masks import attention_of, kind_of
from models.breadth import ARCHITECTURES, KNOWN, tiny_of
from models.zoo import ZOO
from shardwise.graph.ir import Op
from shardwise.graph.schema import arguments

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way

# Kinds of masks, and whether heads are grouped, of models whose attention is known from their papers.
EXPECTED = {
    "gpt2": {("causal", False)},
    "llama": {("causal", True)},
    "mistral": {("made", True)},  # a sliding window
    "bert": {("none", False)},
    "vit": {("none", False)},
}

HALF_ONLY = {"qwen3_moe"}  # its experts have no kernel for float64 when it runs by itself


def check(name: str, tolerance: float) -> set[tuple[str, bool]]:
    """The kinds of attention that the model calls, which equals its eager self without dropout."""
    torch.manual_seed(0)
    tiny = ZOO[name] if name in ZOO else tiny_of(name)
    model, inputs = tiny.build().eval(), tiny.inputs(2)
    doubled = {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    captured = check_against_eager(model, tolerance=tolerance, **doubled)

    def grouped(op: Op) -> bool:
        return bool(arguments(op)["enable_gqa"])

    return {(kind_of(op, captured), grouped(op)) for op in attention_of(captured)}


@pytest.mark.parametrize(
    "name", ["mistral", *(pytest.param(n, marks=pytest.mark.long) for n in EXPECTED if n != "mistral")]
)
def test_masks_of_well_known_models_are_what_their_papers_say(name: str):
    assert check(name, tolerance=1e-9) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - KNOWN.keys() - HALF_ONLY))
@pytest.mark.long
def test_an_architecture_computes_the_same_with_the_masks_that_are_known(name: str):
    check(name, tolerance=1e-6)  # some compute in float32 inside
