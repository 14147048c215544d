"""Products by expert: one kernel and a loop give the same numbers, and rows that travel keep their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import raises
from shardwise.graph import grouped
from shardwise.graph.custom_operators import global_indices
from shardwise.graph.grouped import grouped_mm, keys_of_rows, most_keys, order_by_owner
from shardwise.programs.keyed_rows import RowCounts

READS = ("tolist", "item", "__int__", "__bool__", "__float__")  # of tensors, for which a host waits on a GPU


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Take ``torch._grouped_mm`` on the CPU too, and no host's look at the experts; count what the host reads."""
    monkeypatch.setattr(grouped, "has_kernel", lambda x, weight: True)
    monkeypatch.setattr(grouped, "_refuse_unknown", lambda *_: None)
    reads: Counter[str] = Counter()
    for name in READS:
        monkeypatch.setattr(Tensor, name, _counted(name, getattr(Tensor, name), reads))
    return reads


def _counted(name: str, original: Callable[[Tensor], Any], reads: Counter[str]) -> Callable[[Tensor], Any]:
    def read(tensor: Tensor) -> Any:
        reads[name] += 1
        return original(tensor)

    return read


def weight_of(form: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if form == "transposed":
        return torch.randn(count, 24, 16, generator=generator).transpose(1, 2)
    if form == "of unaligned memory":
        return torch.randn(count * 16 * 24 + 1, generator=generator)[1:].view(count, 16, 24)
    return torch.randn(count, 16, 24, generator=generator)


# rows of experts, the parts of the experts that are here, rows of a token
CASES: dict[str, tuple[list[int], tuple[list[int], list[int], list[int]], int]] = {
    "all experts": ([1, 0, 3, 3, 0, 1, 1, 3], ([4], [0], [4]), 1),
    "an expert without rows, and none": ([1, 0, 9, 3, 0, 1, 1, 9], ([4], [0], [4]), 1),
    "several rows of a token": ([1, 0, 2, 3, 0, 1, 1, 3], ([4], [0], [4]), 2),
    "half of the experts": ([1, 0, 2, 3, 0, 1, 1, 2], ([4], [2], [2]), 2),
    "experts of every half": ([1, 0, 2, 3, 0, 1, 1, 2], ([2, 2], [0, 1], [2, 1]), 2),
    "no rows of these experts": ([0, 0, 1, 1], ([4], [2], [2]), 1),
    "one expert": ([0, 0, 0, 0], ([1], [0], [1]), 1),
    "no rows at all": ([], ([4], [0], [4]), 1),
}


@pytest.mark.parametrize("form", ["plain", "transposed", "of unaligned memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_one_kernel_multiplies_as_the_loop_and_waits_for_no_host(
    case: str, dtype: torch.dtype, form: str, kernel: Counter[str]
) -> None:
    experts, parts, each = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(experts) // each, 16, generator=generator).to(dtype).requires_grad_()
    numbers = global_indices(*parts, device=torch.device("cpu")).flatten().tolist()
    weight = weight_of(form, len(numbers)).to(dtype).requires_grad_()
    outward = torch.randn(len(experts), 24, generator=generator).to(dtype)
    kernel.clear()
    result = grouped_mm(x, weight, torch.tensor(experts, dtype=torch.int64), *parts)
    of_x, of_weight = torch.autograd.grad(result, (x, weight), outward)
    assert not kernel, "a product reads nothing on the host"

    chosen = [numbers.index(expert) if expert in numbers else None for expert in experts]
    nothing = (x.sum() + weight.sum()) * torch.zeros(24, dtype=dtype)
    rows = [nothing if e is None else x[i // each] @ weight[e] for i, e in enumerate(chosen)]
    expected = torch.stack(rows) if rows else torch.zeros(0, 24)
    close = {"rtol": 2e-2, "atol": 6e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(result, expected.to(dtype), **close)
    assert of_weight.stride() == torch.empty_like(weight).stride(), "in the memory order of the weight"
    if rows:
        for found, gradient in zip((of_x, of_weight), torch.autograd.grad(expected, (x, weight), outward), strict=True):
            torch.testing.assert_close(found, gradient, **close)
    else:
        assert not of_weight.count_nonzero()


def test_sorted_rows_are_multiplied_where_they_are(kernel: Counter[str]) -> None:
    experts = torch.tensor([2, 2, 3, 3, 3, 4])  # of experts 2 and 3, and one row of no expert
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(2, 16, 24, requires_grad=True)
    outward = torch.randn(6, 24)
    found = {}
    kernel.clear()
    for is_sorted in (False, True):
        result = grouped_mm(x, weight, experts, [2], [2], [2], False, is_sorted)
        found[is_sorted] = (result, *torch.autograd.grad(result, (x, weight), outward))
    assert not kernel
    torch.testing.assert_close(found[True], found[False], rtol=1e-6, atol=1e-6)
    assert not found[True][0][-1].count_nonzero()


@pytest.mark.parametrize(("num_keys", "owners"), [(8, 2), (7, 3), (5, 4), (3, 1), (4, 4)])
def test_owners_get_the_rows_of_their_keys_in_order_and_send_them_back(num_keys: int, owners: int) -> None:
    generator = torch.Generator().manual_seed(num_keys)
    keys = [torch.randint(num_keys + 2, (n,), generator=generator) for n in (9, 0, 17, 4)[:owners]]
    orders, counts = zip(*(order_by_owner(each, num_keys, True, owners) for each in keys), strict=True)
    assert all(each.shape == (1, owners, most_keys(num_keys, owners)) for each in counts)
    by_device = [RowCounts(counts[i], torch.stack([c[0, i] for c in counts]).unsqueeze(1)) for i in range(owners)]
    sent = [list(k[order].split(each.sent)) for k, order, each in zip(keys, orders, by_device, strict=True)]
    bounds = [i * num_keys // owners for i in range(owners)] + [num_keys + 9]
    for owner, each in enumerate(by_device):
        arrived = torch.cat([rows[owner] for rows in sent])
        assert each.received == [len(rows[owner]) for rows in sent]
        own = torch.cat(keys)
        own = own[(own >= bounds[owner]) & (own < bounds[owner + 1])].clamp(max=num_keys)
        received = torch.stack([c[0, owner] for c in counts]).unsqueeze(1)
        assert keys_of_rows(arrived, received, num_keys, owners, owner).tolist() == own.sort().values.tolist()
        in_order = each.by_key(arrived)
        assert in_order.clamp(max=num_keys).tolist() == own.sort().values.tolist()
        assert each.by_device(in_order).tolist() == arrived.tolist()


@pytest.mark.parametrize("wrong", [-1, 4, 9])
def test_a_key_of_no_expert_is_refused_before_rows_travel(wrong: int) -> None:
    keys = torch.tensor([0, wrong])
    with raises(IndexError, wrong, "0 to 3"):
        order_by_owner(keys, 4, False, 2)
    with raises(IndexError, wrong, "0 to 3"):
        grouped_mm(torch.ones(2, 16), torch.ones(2, 16, 24), keys, [4], [0], [2])
    if wrong > 0:
        assert not grouped_mm(torch.ones(2, 16), torch.ones(2, 16, 24), keys, [4], [0], [2], True)[1].count_nonzero()
