"""Lookups that pair a dim's rows with their positions become views, gathers and scatters, with equal numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph.against_eager import check_against_eager, operators, run_graph
from shardwise.graph.capture import capture

B, S, H = 4, 5, 3


def numbers(*shape, high=S, low=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


LAST, NEGATIVE = numbers(B), numbers(B, low=-S)
SOME = numbers(B, 2)
# name: a lookup in x[B, S, H], w[S, B, S, H]
LOOKUPS = {
    "rows alone": lambda x, w: x[torch.arange(B)],
    "last token": lambda x, w: x[torch.arange(B), LAST],
    "negative": lambda x, w: x[torch.arange(B), NEGATIVE],
    "rows counted from the end": lambda x, w: x[torch.arange(-B, 0), LAST],
    "int32": lambda x, w: x[torch.arange(B, dtype=torch.int32), LAST.int()],
    "several tokens": lambda x, w: x[torch.arange(B)[:, None], SOME],
    "tokens for all rows": lambda x, w: x[torch.arange(B)[:, None], torch.tensor([4, 0, 4])],
    "every token": lambda x, w: x[torch.arange(B)[:, None], torch.arange(S)],
    "transposed": lambda x, w: x[torch.arange(B), torch.arange(S)[:, None]],
    "mask": lambda x, w: x[..., 0][torch.arange(B)[:, None, None, None], torch.arange(S)[None, None, None]],
    "repeated": lambda x, w: x[torch.arange(B)[:, None], LAST[:, None].expand(B, 7)],
    "expanded": lambda x, w: x[torch.arange(B)[None].expand(6, B)],
    "apart": lambda x, w: x[torch.arange(B), :, LAST % H],
    "apart, last first": lambda x, w: x[:, torch.arange(S), SOME.flatten()[:5] % H],
    "two chosen": lambda x, w: x[torch.arange(B)[:, None], SOME, SOME.flip(0) % H - H],
    "two chosen apart": lambda x, w: w[SOME, torch.arange(B)[:, None], :, SOME.flip(1) % H],
    "rows second": lambda x, w: w[:, torch.arange(B), LAST],
    "rows behind": lambda x, w: w[LAST, torch.arange(B)],
    "diagonal": lambda x, w: w[torch.arange(S), :, torch.arange(S)],
    "a list": lambda x, w: x[[0, 1, 2, 3], LAST],
    "counted by a sum": lambda x, w: x[torch.ones(B, dtype=torch.int64).cumsum(0) - 1, LAST],
    "one row": lambda x, w: x[:1][torch.arange(1), LAST[:1]],
    "put": lambda x, w: x.index_put((torch.arange(B), LAST), w[0, :, 0] * 2),
    "put a number": lambda x, w: x.index_put((torch.arange(B), NEGATIVE), torch.tensor(2.0).to(x.dtype)),
    "added": lambda x, w: x.index_put((torch.arange(B)[:, None], SOME), w[0, :, :2], accumulate=True),
    "added twice": lambda x, w: x.index_put((torch.arange(B)[:, None], SOME * 0), w[0, :, :2], accumulate=True),
    "added where all is": lambda x, w: x.index_put((torch.arange(B),), w[1, 0, 0], accumulate=True),
    "two put": lambda x, w: w.index_put((SOME, torch.arange(B)[:, None], SOME.flip(1)), x[:, :2]),
    "put in two dims": lambda x, w: w.index_put((LAST, torch.arange(B)), x),
}


class Lookup(nn.Module):
    def __init__(self, function):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.function = function
        self.x = nn.Parameter(torch.randn(B, S, H, generator=generator))
        self.w = nn.Parameter(torch.randn(S, B, S, H, generator=generator))

    def forward(self):
        return self.function(self.x * 1, self.w * 1)


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_by_counted_rows_is_element_wise_in_them(name):
    captured = check_against_eager(Lookup(LOOKUPS[name]))
    assert not [target for target in operators(captured) if target.startswith("index")]


KEPT = {
    "rows in another order": lambda x, w: x[torch.arange(B - 1, -1, -1), LAST],
    "some rows": lambda x, w: x[torch.arange(B - 1), LAST[1:]],
    "rows of an input": lambda x, w: x[LAST % B, LAST],
    "all rows overwritten": lambda x, w: x.index_put((torch.arange(B)[:, None], torch.arange(S)), w[0, 0]),
    "several values for an element": lambda x, w: x.index_put(
        (torch.arange(B)[None].expand(2, B),), w[:2, :, :1, :1], accumulate=True
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_lookups_stay_as_they_are(name):
    captured = check_against_eager(Lookup(KEPT[name]))
    assert [target for target in operators(captured) if target.startswith("index")]


@pytest.mark.parametrize("index", [(2, 5), (2, -6), (-5, 0), (4, 0)])
def test_an_index_out_of_range_raises_as_on_one_device(index):
    class Chosen(nn.Module):
        def forward(self, x, i, j):
            return x.transpose(0, 1)[i, torch.arange(B), j]

    i, j = (torch.tensor([0, 0, number, 0]) for number in index)
    example = (torch.randn(B, 4, 5), torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.int64))
    captured = capture(Chosen(), example)
    with pytest.raises((IndexError, RuntimeError)):
        run_graph(captured, Chosen(), (example[0], i, j), {})
