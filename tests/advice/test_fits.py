"""``sw.fits``: what it says of a plan is the plan's, and what mends or improves is a plan of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.api import step_memory


class Texts(nn.Module):
    """A model over token ids, with a layer that is heavy enough to be split."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.up, self.down = (
            nn.Embedding(64, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return F.cross_entropy(self.head(x + self.down(F.gelu(self.up(x)))).flatten(0, 1), labels.flatten())


def asked(samples: int = 16) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        ids = torch.zeros(samples, 32, dtype=torch.int64)
        return Texts(), (ids, ids)


def test_its_figures_are_those_of_the_plan_and_of_arithmetic() -> None:
    module, batch = asked()
    answer = sw.fits(module, batch, "h100-1x2", seconds=0, price_per_hour=3.0)
    plan = sw.plan(module, batch, sw.Cluster.load("h100-1x2"))
    assert answer.step_seconds == plan.prediction.planned_seconds
    assert answer.memory is not None
    assert answer.memory.peak == step_memory(module, batch, plan).peak
    tokens, width = 16 * 32, 256
    assert answer.tokens == tokens
    products = 2 * tokens * (2 * 4 * width * width + 64 * width)
    assert answer.flops == 3 * products  # the first product's operand needs a gradient too: the embedding's
    assert answer.utilisation == answer.flops / answer.step_seconds / answer.peak_flops
    assert answer.price == pytest.approx(1e9 / tokens * answer.step_seconds / 3600 * 2 * 3.0)
    assert answer.untried  # no time was given


@pytest.mark.long
def test_changes_are_plans_that_cost_less_and_say_by_how_much() -> None:
    module, batch = asked()
    answer = sw.fits(module, batch, "h100-1x2", seconds=600)
    assert answer.ok
    assert 1 <= len(answer.options) <= 3
    assert [o.price for o in answer.options] == sorted(o.price for o in answer.options)
    assert all(option.fits and option.price < answer.asked.price for option in answer.options)
    assert "less device time a sample" in str(answer)
    twice = next(option for option in answer.options if option.samples == 32)
    _, larger = asked(32)
    again = sw.plan(module, larger, sw.Cluster.load("h100-1x2"))
    assert twice.step_seconds == again.prediction.planned_seconds


def test_what_does_not_fit_is_mended_and_the_mends_fit() -> None:
    module, batch = asked(64)
    plan = sw.plan(module, batch, sw.Cluster.load("h100-1x2"))
    needs = step_memory(module, batch, plan).peak.num_bytes
    limit = needs / 4
    answer = sw.fits(module, batch, "h100-1x2", memory_bytes=limit, seconds=600)
    assert not answer
    assert "no plan fits" in answer.asked.refused
    assert answer.options
    assert all(option.fits and option.peak_bytes <= limit for option in answer.options)
    assert "what would make it fit" in str(answer)


def test_other_errors_are_raised_as_by_plan() -> None:
    module, batch = asked()
    with pytest.raises(sw.ShardwiseError, match="unknown mode"):
        sw.fits(module, batch, "h100-1x2", mode="fast")
