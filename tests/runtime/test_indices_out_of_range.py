"""Labels and indices out of range over split classes and rows: an error as on one device, never another number."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.graph.capture import capture
from shardwise.graph.to_float64 import to_float64
from shardwise.plans.bind_stages import bound
from shardwise.programs.micro_batches import Passes
from shardwise.proof.ranks import VirtualRanks
from shardwise.proof.runs import RunStart, widened, widened_module

CLASSES, SAMPLES, WIDTH = 13, 8, 6  # parts of 7 and 6 classes
LABELS = torch.arange(SAMPLES)
WEIGHT = torch.linspace(0.5, 2, CLASSES)
Call = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.call = nn.Linear(WIDTH, CLASSES), call

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = self.call(self.head(x), labels)
        return loss if loss.dim() == 0 else (loss * torch.linspace(0.1, 1, loss.numel()).reshape(loss.shape)).sum()


def with_labels(*last: int) -> Tensor:
    return torch.cat([LABELS[: SAMPLES - len(last)], torch.tensor(last)])


def inputs(labels: Tensor) -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)), labels


def planned(model: nn.Module, example: tuple[Tensor, ...]) -> sw.Plan:
    strategies = {"head": "n@tp"}
    return sw.plan(model, example, 2, mesh=sw.Mesh(tp=2), strategies=strategies, search="sharding_propagation")


def on_virtual_ranks(model: nn.Module, example: tuple[Tensor, ...], plan: sw.Plan) -> None:
    captured = capture(model, example, {}, input_gradients=True)
    graph, args = to_float64(captured.graph), tuple(map(widened, example))
    bounds = {SAMPLES: bound(plan, graph, training=True, original=captured.graph)}
    start = RunStart(
        captured,
        widened_module(model),
        None,
        "sgd",
        args,
        {},
        Passes((SAMPLES,), None, (), {}, frozenset()),
        True,
        frozenset(),
    )
    VirtualRanks(start, plan, bounds).step(0)


def losses() -> dict[str, tuple[Call, int]]:
    found: dict[str, tuple[Call, int]] = {}
    for reduction in ("none", "mean", "sum"):
        for ignored in (-100, 3):
            for weight in (None, WEIGHT):
                options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignored}
                name = f"{reduction}, {ignored}, {'' if weight is None else 'weighted'}"

                def entropy(smoothing: float, weight: Tensor | None = weight, options: Any = options) -> Call:
                    return lambda z, y: F.cross_entropy(z, y, weight=_like(weight, z), label_smoothing=smoothing,
                                                        **options)  # fmt: skip

                def nll(z: Tensor, y: Tensor, weight: Tensor | None = weight, options: Any = options) -> Tensor:
                    return F.nll_loss(z.log_softmax(-1), y, weight=_like(weight, z), **options)

                found |= {f"entropy {name}": (entropy(0), ignored), f"smooth {name}": (entropy(0.1), ignored)}
                found[f"nll {name}"] = nll, ignored
    return found


def _like(weight: Tensor | None, scores: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(scores.dtype)


LOSSES = losses()


@pytest.mark.parametrize(  # every loss with a third of the options, all options with one of the losses
    "name",
    [pytest.param(name, marks=() if (i // 3 + i) % 3 == 0 else pytest.mark.long) for i, name in enumerate(LOSSES)],
)
@pytest.mark.sampled(3)
def test_labels_over_split_classes_are_as_on_one_device(name: str) -> None:
    call, ignored = LOSSES[name]
    model = Head(call)
    plan = planned(model, inputs(LABELS))
    assert sw.verify(model, inputs(with_labels(ignored, CLASSES - 1)), plan, steps=1).ok
    everything_ignored = sw.verify(model, inputs(torch.full((SAMPLES,), ignored)), plan, steps=1)
    assert everything_ignored.max_error == 0  # nan where that is the loss of one device
    assert ("nan" in everything_ignored.not_proven) == (" mean" in name)
    for label in (-1, CLASSES, CLASSES + 7, -101):
        wrong = inputs(with_labels(label, ignored))
        for run in (lambda wrong=wrong: model(*wrong), lambda wrong=wrong: on_virtual_ranks(model, wrong, plan)):
            with raises(IndexError, label, "bounds"):
                run()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.sampled(3)
def test_probabilities_over_split_classes(smoothing: float, weight: Tensor | None, reduction: str) -> None:
    model = Head(lambda z, y: F.cross_entropy(z, y, _like(weight, z), reduction=reduction, label_smoothing=smoothing))
    example = inputs(torch.rand(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(2)).softmax(-1))
    assert sw.verify(model, example, planned(model, example), steps=1).ok


def _split(strategy: str, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
    """``call`` on a table [classes, samples], indices and scores, its rows split."""
    return lambda z, i: sw.shard(call, strategy)(z.T * 1, i, z[:, :SAMPLES])


LOOKUPS: dict[str, Call] = {
    "one_hot": lambda z, i: (sw.shard(F.one_hot, "c@tp")(i, CLASSES) * z).sum(),
    "embedding": _split("v@tp", lambda w, i, _: F.embedding(i, w)),
    "gather": _split("v@tp", lambda w, i, _: w.gather(0, i[None])),
    "take_along_dim": _split("v@tp", lambda w, i, _: w.take_along_dim(i[:, None], 0)),
    "index_select": _split("v@tp", lambda w, i, _: w.index_select(0, i)),
    "index": _split("v0@tp", lambda w, i, _: w[i]),
    "scatter": _split("v@tp", lambda w, i, x: w.scatter(0, i[:, None].expand(x.shape), x)),
    "scatter_add": _split("v@tp", lambda w, i, x: w.scatter_add(0, i[:, None].expand(x.shape), x)),
    "index_put": _split("v0@tp", lambda w, i, x: w.index_put((i,), x)),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.sampled(3)
def test_indices_over_split_rows_are_as_on_one_device(name: str) -> None:
    model = Head(LOOKUPS[name])
    plan = planned(model, inputs(LABELS))
    for index in (CLASSES - 1, -1, -CLASSES, -CLASSES - 1, CLASSES, CLASSES + 7):
        example = inputs(with_labels(index))
        try:
            model(*example)
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error), match="out of"):
                on_virtual_ranks(model, example, plan)
        else:
            assert sw.verify(model, example, plan, steps=1).ok, index


# ------------------------------------------------------------------------------------------------------- real ranks

ON_RANKS = {"entropy mean, -100, ": "Target", "smooth sum, 3, weighted": "Target", "nll mean, -100, ": "Target",
            "one_hot": "index", "embedding": "index out of range"}  # fmt: skip


@cache
def model_of(name: str) -> Head:
    return Head(LOSSES[name][0] if name in LOSSES else LOOKUPS[name])


def errors_on_rank() -> dict[str, list[tuple[bool, str]]]:
    """By call, of a step with each label: whether it is an IndexError or a RuntimeError of torch's, and its text."""
    found: dict[str, list[tuple[bool, str]]] = {}
    for name in ON_RANKS:
        model = model_of(name)
        par = sw.parallelize(model, planned(model, inputs(LABELS)) if dist.get_rank() == 0 else None)
        par.step(*inputs(LABELS))
        found[name] = []
        for label in (-1, CLASSES + 7):
            try:
                found[name].append((False, str(par.step(*inputs(with_labels(label))))))
            except (IndexError, RuntimeError) as error:
                found[name].append((not isinstance(error, sw.ShardwiseError), str(error)))
            dist.barrier()
    return found


def test_every_real_rank_raises(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(errors_on_rank, 2)):
        for name, expected in ON_RANKS.items():
            for label, (is_own, text) in zip((-1, CLASSES + 7), found[name], strict=True):
                number = "" if name == "embedding" else f" {label} is out of bounds"
                assert is_own, f"rank {rank}, {name}, {label}: {text}"
                assert f"{expected}{number}" in text, f"rank {rank}, {name}, {label}"
