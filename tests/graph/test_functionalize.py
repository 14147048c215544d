"""In-place operators, writes through views and buffers: the graph has values only and computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graph.against_eager import check_against_eager, operators


def module(function, **tensors):
    """A module that calls ``function(self, x)``, with parameters and buffers (names beginning with "b")."""

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            for name, tensor in tensors.items():
                if name.startswith("b"):
                    self.register_buffer(name, tensor)
                else:
                    setattr(self, name, nn.Parameter(tensor))

        def forward(self, x):
            return function(self, x)

    return Calls()


def assign_column(self, x):
    y = x * self.w
    y[:, 0] = x[:, 1]
    return y


def assign_row_slice(self, x):
    y = x * self.w
    y[1:3] += 2 * y[0:2]
    y[0][1] = 5
    return y * y


def write_after_view(self, x):
    y = x * self.w
    flat = y.view(-1)
    transposed = y.t()
    flat[3:5].mul_(3)
    transposed[1].zero_()
    return y + flat.view(4, 3), transposed


def write_into_parts(self, x):
    y = x * 2
    a, b = y.split([1, 2], dim=1)
    a.copy_(b[:, :1])
    for row in y.unbind(0):
        row.add_(1)
    b.fill_(2)
    return y


def masked(self, x):
    y = x * self.w
    y.masked_fill_(x > 0, 1.0)
    y[:, 1].clamp_(min=0)
    return F.relu(y, inplace=True)


def fresh(self, x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1] * self.w[1:]
    z = torch.empty_like(x).copy_(y)
    z.unsqueeze(0).squeeze(0).permute(1, 0)[0].sub_(1)
    return z, torch.full((2,), 7, dtype=torch.int64).add_(1)


def integers(self, x):
    count = torch.arange(3)
    count += 2
    count[0] = 9
    return x * self.w + count


def index_put(self, x):
    y = x * self.w
    y[torch.tensor([0, 2]), torch.tensor([1, 1])] = 4.0
    return y


def diagonal(self, x):
    y = (x * self.w)[:3]
    y.diagonal().add_(1)
    return y


def narrow_and_expand(self, x):
    y = x * 2
    y.narrow(0, 1, 2).mul_(2)
    y.flatten()[0].add_(1)
    y.chunk(2, dim=0)[1].neg_()
    y.chunk(4, dim=0)[2].mul_(3)
    return y


def out_argument(self, x):
    y, z = torch.empty_like(x), torch.zeros(2, 4, 3, dtype=x.dtype)
    torch.add(x, 1, out=y)
    torch.div(x, 2, out=z[1])
    return y * self.w, z


PROGRAMS = [
    assign_column, assign_row_slice, write_after_view, write_into_parts, masked, fresh, integers, index_put, diagonal,
    narrow_and_expand, out_argument,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_writes_become_values(program):
    torch.manual_seed(0)
    check_against_eager(module(program, w=torch.randn(3)), torch.randn(4, 3, dtype=torch.float64))


def test_an_inplace_operator_keeps_the_dtype_of_what_it_writes():
    def halves(self, x):
        y = x.to(torch.float32) * 1
        y.add_(self.w)
        return y

    captured = check_against_eager(
        module(halves, w=torch.randn(3)), torch.randn(4, 3, dtype=torch.float64), tolerance=1e-5
    )
    assert captured.graph.by_name[captured.graph.outputs[0].name].dtype == torch.float32


def test_writes_to_buffers_are_mutations():
    def counts(self, x):
        self.b_count += 1
        with torch.no_grad():
            self.b_mean.mul_(0.9).add_((x * self.w).mean(0), alpha=0.1)
        self.b_row[0].copy_(x[0].detach())
        self.b_new = self.b_new + x.sum() * self.w.sum()
        return x * self.w + self.b_mean

    tensors = {
        "b_count": torch.tensor(0),
        "b_mean": torch.zeros(3),
        "b_row": torch.zeros(2, 3),
        "b_new": torch.zeros(()),
    }
    captured = check_against_eager(module(counts, w=torch.randn(3), **tensors), torch.randn(4, 3, dtype=torch.float64))
    assert {buffer for buffer, _ in captured.graph.mutations} == set(tensors)
    assert all(not captured.graph.by_name[name].requires_grad for _, name in captured.graph.mutations)


def test_a_buffer_that_is_only_read_is_no_mutation():
    captured = check_against_eager(
        module(lambda self, x: x + self.b, b=torch.ones(3)), torch.randn(4, 3, dtype=torch.float64)
    )
    assert captured.graph.mutations == ()


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(3), (6, 3)),
        (nn.BatchNorm1d(3, affine=False), (6, 3, 5)),
        (nn.BatchNorm2d(3, momentum=0.3), (4, 3, 2, 2)),
        (nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 2)),
        (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.ReLU(inplace=True)), (6, 3)),
    ],
    ids=str,
)
def test_batch_norm_in_training_is_sums_and_updates_its_statistics(norm, shape):
    torch.manual_seed(0)
    captured = check_against_eager(norm.train(), torch.randn(shape, dtype=torch.float64), calls=2)
    assert "batch_norm.default" not in operators(captured)
    assert len(captured.graph.mutations) == len([*norm.buffers()])


def test_a_batch_norm_called_twice_updates_its_statistics_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.norm(x) * 2 + 1)

    check_against_eager(Twice(), torch.randn(5, 3, dtype=torch.float64))


def test_spectral_norm_updates_its_vectors():
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)).double()
    captured = check_against_eager(layer, torch.randn(2, 3, dtype=torch.float64), calls=2)
    assert len(captured.graph.mutations) == 2


def test_batch_norm_in_evaluation_stays():
    captured = check_against_eager(nn.BatchNorm1d(3).eval(), torch.randn(5, 3, dtype=torch.float64))
    assert operators(captured) == ["batch_norm.default"]
    assert captured.graph.mutations == ()
