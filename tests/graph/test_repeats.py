"""Repeated layers are traced once, and the graph is that of a plain capture; whatever differs is captured plainly."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import shardwise as sw
from shardwise.graph import capture as captures
from shardwise.graph.capture import Capture, capture
from shardwise.graph.functionalize import Functionalizer
from shardwise.graph.tracing import trace

IDS = torch.zeros(2, 8, dtype=torch.int64)
SIZES: dict[str, Any] = {
    "num_hidden_layers": 5, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50,
}  # fmt: skip
OFF = {"use_cache": False, "num_key_value_heads": 1}


def llama(**more: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **{**OFF, **more}))


def gemma() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**{**SIZES, **OFF, "num_hidden_layers": 10}, head_dim=8, sliding_window=4))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, **OFF, num_local_experts=4))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES))  # with dropout


def t5() -> nn.Module:
    own = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 6, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=50, use_cache=False, **own))


def both(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Capture, Capture, int]:
    """A capture, the plain one, and how many layers were not traced."""
    repeats = []

    def counted(self: Functionalizer, node: Any) -> Any:
        repeats.append(node)
        return original(self, node)

    original = Functionalizer._repeat
    with patch.object(Functionalizer, "_repeat", counted):
        found = capture(model, args, kwargs)
    with patch.object(captures, "trace", lambda *own, **others: trace(*own, **{**others, "repeats": False})):
        plain = capture(model, args, kwargs)
    return found, plain, len(repeats)


def same(found: Capture, plain: Capture) -> bool:
    return (found.graph, found.segments, found.annotations) == (plain.graph, plain.segments, plain.annotations)


@pytest.mark.parametrize("build", [llama, bert, mixtral], ids=lambda build: build.__name__)
@pytest.mark.sampled(1)
def test_the_graph_is_that_of_a_plain_capture(build):
    found, plain, repeats = both(build().train(), input_ids=IDS, labels=IDS)
    assert same(found, plain)
    assert repeats == SIZES["num_hidden_layers"] - 3, "the first, the second and the last are traced"


@pytest.mark.long
@pytest.mark.parametrize(("build", "most"), [(gemma, 4), (t5, 4)], ids=lambda own: getattr(own, "__name__", ""))
def test_layers_of_several_kinds_are_told_apart(build, most):
    found, plain, repeats = both(build().train(), input_ids=IDS, labels=IDS)
    assert same(found, plain)
    assert repeats == most


def test_what_covers_a_layer_covers_its_repeats():
    model = llama()
    for layer in model.model.layers:
        sw.recompute(layer)
    found, plain, repeats = both(model, input_ids=IDS, labels=IDS)
    assert same(found, plain)
    assert [segment.name for segment in found.segments] == [f"model.layers.{i}" for i in range(5)]
    assert repeats


class Layer(nn.Module):
    """A layer with a number, of which subclasses read it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class ReadsItsNumber(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (2.0 if self.number % 3 == 2 else 1.0)


class ReadsItsAttributes(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (2.0 if vars(self)["number"] == 3 else 1.0)


class GetsAnAttribute(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (2.0 if self.__dict__.get("number", 0) == 3 else 1.0)


class CopiesItself(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (2.0 if vars(copy.copy(self)).get("number", 0) == 3 else 1.0)


class HandsItsNumberOn(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * of_number(self)


def of_number(layer: Any) -> float:
    return 2.0 if getattr(layer, "number", 0) == 3 else 1.0


class WritesItsNumber(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        self.number = 0
        return super().forward(x)


def counted() -> int:
    counted.calls += 1
    return counted.calls


counted.calls = 0


class CountsElsewhere(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * float(counted() % 8)


class KeepsState(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        self.seen = True
        return super().forward(x)


class WritesItsInput(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        x.mul_(0.5)
        return y + x


class WritesABuffer(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().forward(x) - self.mean


class ReplacesABuffer(WritesABuffer):
    def forward(self, x: torch.Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return Layer.forward(self, x) - self.mean


class ReturnsAView(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)[:1].expand_as(x)


class HandsOn(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return x


class MakesAConstant(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class WithoutGradient(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = self.up(x).abs().mean()
        return super().forward(x) / scale


class Draws(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return F.dropout(super().forward(x), 0.1) + torch.rand_like(x)


class Stack(nn.Module):
    def __init__(self, kind: type[Layer], count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(number) for number in range(count))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * 1.0
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("kind", "repeats"),
    [
        (Layer, 2),  # the input of the first needs no gradient
        (ReadsItsNumber, 0),  # every number is a kind of its own
        (ReadsItsAttributes, 0),
        (GetsAnAttribute, 0),
        (CopiesItself, 0),
        (HandsItsNumberOn, 0),
        (WritesItsNumber, 0),
        (KeepsState, 0),
        (WritesItsInput, 2),
        (WritesABuffer, 2),
        (ReplacesABuffer, 0),
        (ReturnsAView, 2),
        (HandsOn, 3),
        (WithoutGradient, 2),
        (Draws, 2),
    ],
    ids=lambda own: getattr(own, "__name__", ""),
)
@pytest.mark.sampled(4)
def test_layers_that_do_more_than_compute(kind, repeats):
    found, plain, counted = both(Stack(kind), X)
    assert same(found, plain)
    assert counted == repeats


@pytest.mark.parametrize("kind", [CountsElsewhere, MakesAConstant], ids=lambda own: own.__name__)
def test_what_only_a_witness_or_the_body_shows_is_captured_plainly(kind):
    class CountsAnew(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            counted.calls = 0  # or the next call would be another
            return super().forward(x)

    found, plain, _ = both(CountsAnew(kind), X)
    scales = [[op.args[1] for op in own.graph.ops if "mul" in op.name] for own in (found, plain)]
    assert len(found.graph.ops) == len(plain.graph.ops)
    assert len(found.constants) == len(plain.constants)
    assert kind is MakesAConstant or len(set(scales[0])) == len(set(scales[1]))


def test_ties_hooks_and_other_callers_are_seen():
    model = Stack(Layer, 8)
    model.layers[5].up.weight = model.layers[4].up.weight
    model.layers[3].register_forward_hook(lambda module, given, result: result + 1.0)
    model.layers[6].down.weight.requires_grad_(False)
    found, plain, repeats = both(model, X)
    assert same(found, plain)
    assert 0 < repeats < 5


def test_a_capture_leaves_the_model_as_it_was():
    model = Stack(ReadsItsNumber)
    before = [dict(vars(layer)) for layer in model.layers]
    capture(model, (X,))
    assert [dict(vars(layer)) for layer in model.layers] == before


class Shared:
    """What all layers see, and the loop over them changes."""

    special = False


FILE = Shared()
MODE = "usual"


class Told(nn.Module):
    of_class = Shared()

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.inside, self.scale, self.linear = shared, [{"of": shared}], 1.0, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale
        told = self.inside[0]["of"].special or self.of_class.special or FILE.special or MODE != "usual"
        return y * 100 if told or not self.linear.training else y


class Telling(nn.Module):
    """Its loop tells a layer in the middle that it is another one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.shared = how, Shared()
        self.layers = nn.ModuleList(Told(self.shared) for _ in range(8))

    def tell(self, layer: Any, special: bool) -> None:
        objects = {"shared": self.shared, "class": Told.of_class, "file": FILE}
        if self.how in objects:
            objects[self.how].special = special
        elif self.how == "text of the file":
            globals()["MODE"] = "special" if special else "usual"
        elif self.how == "attribute":
            layer.scale = 7.0 if special else 1.0
        elif self.how == "training of a part":
            layer.linear.train(not special)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            self.tell(layer, i == 4)
            x = layer(x)
        self.tell(layer, False)
        return x.sum()


HOWS = ["shared", "class", "file", "text of the file", "attribute", "training of a part"]


@pytest.mark.parametrize("how", HOWS)
def test_what_a_loop_tells_a_layer_in_the_middle_is_in_the_graph(how):
    found, plain, _ = both(Telling(how), torch.randn(2, 4))
    assert same(found, plain)
    assert [arg for op in found.graph.ops for arg in op.args].count(7.0 if how == "attribute" else 100) == 1
