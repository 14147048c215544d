"""``shardwise::grouped_mm``: multiplies every row by the matrix of its expert (a mixture-of-experts layer).

Row ``r`` of the result is row ``r // each`` of ``x`` times the matrix of expert ``experts[r]``. Rows may be in any
order, so that they are split as the samples are: only local rows are sorted. A shard of the experts gets the numbers of
its experts, atom by atom. Rows of experts elsewhere give 0, so results of shards add up.

``skips``: rows of experts from the number of experts on give 0, such as those behind the last offset of PyTorch's
operator, which it leaves as they are. Otherwise they are an error.

``is_sorted``: the rows are sorted by expert already, as rows are that traveled to the owners of their experts. Then
slices are read and written; otherwise rows are gathered into this order and put back.

On GPUs that have the kernel all experts are one ``torch._grouped_mm``, whose sizes stay on the device. Elsewhere there
is one product per expert that has rows, and the host reads where these begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from shardwise.graph.custom_operators import global_indices
from shardwise.graph.ir import Graph, Op
from shardwise.graph.operator_library import ATOMS, kernel

_PARTS = f"{ATOMS}, bool skips=False, bool is_sorted=False"


def _sorted_rows(
    experts: torch.Tensor,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    skips: bool = False,
    is_sorted: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the positions of the rows sorted by local expert (None: they are sorted), those of experts elsewhere last,
    and one past the last row of each local expert. Raises IndexError for an expert that there is not."""
    experts = experts.to(torch.int64).contiguous()
    mine = global_indices(sizes, offsets, lengths, device=experts.device).flatten()
    if is_sorted:
        return None, torch.searchsorted(experts, mine, right=True)
    _refuse_unknown(experts, prod(sizes), skips)
    count = mine.shape[0]
    places = torch.searchsorted(mine, experts)
    if count:
        places = places.masked_fill(mine[places.clamp(max=count - 1)] != experts, count)
    by_expert, order = places.sort(stable=True)
    return order, torch.searchsorted(by_expert, torch.arange(count, device=mine.device), right=True)


def _refuse_unknown(experts: torch.Tensor, count: int, skips: bool) -> None:
    """Raise IndexError for an expert that is none of ``count``; on a GPU, whose numbers the host does not wait for,
    fail there. ``skips``: numbers from ``count`` on are allowed."""
    if not experts.shape[0]:
        return
    lowest, highest = experts.aminmax()
    what = f"there are experts 0 to {count - 1}"
    if experts.is_cuda:
        is_known = lowest >= 0 if skips else (lowest >= 0) & (highest < count)
        torch._assert_async(is_known, f"grouped_mm: a row is of an unknown expert; {what}")
        return
    for expert in (int(lowest), int(highest)):
        if expert < 0 or (expert >= count and not skips):
            dropped = (
                f"; rows of padding: drop them, result.masked_fill(expert >= {count}, 0)" if expert == count else ""
            )
            raise IndexError(f"grouped_mm: a row is of expert {expert}; {what}{dropped}")


def has_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether all experts are one kernel that waits for no host: ``torch._grouped_mm`` of bfloat16 on GPUs from
    Hopper on (on others it copies the sizes to the host). It reads rows of whole 16 bytes."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0) and all(n and n % 8 == 0 for n in weight.shape[1:])


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix, or one per expert, in memory that the kernel can read: a dim without gaps, 16 bytes a step."""
    strides = sorted(matrix.stride()[-2:])
    fits = strides[0] == 1 and not strides[1] % 8 and not matrix.stride(0) % 8 and not matrix.data_ptr() % 16
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)


def _sizes(ends: torch.Tensor, num_rows: int) -> list[int]:
    """Return how many rows each expert has, and how many are of none. The host waits for them."""
    return [end - start for start, end in pairwise((0, *ends.tolist(), num_rows))]


def _by_expert(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply sorted rows [r, k] by weight [e, k, n] -> [r, n]; rows past the last end give 0."""
    if has_kernel(rows, weight):
        result = torch._grouped_mm(_aligned(rows.contiguous()), _aligned(weight), offs=ends.int())
        elsewhere = torch.arange(rows.shape[0], device=ends.device) >= ends[-1:]
        return result.masked_fill_(elsewhere.unsqueeze(1), 0)  # which the kernel does not write
    result, sizes = rows.new_empty(rows.shape[0], weight.shape[2]), _sizes(ends, rows.shape[0])
    *groups, _ = rows.split(sizes)
    *products, elsewhere = result.split(sizes)
    for group, matrix, product in zip(groups, weight.unbind(), products, strict=True):
        if group.shape[0]:
            torch.mm(group, matrix, out=product)
    elsewhere.zero_()
    return result


def _of_weight(rows: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the weight, in its memory order, from sorted rows and their gradients."""
    if has_kernel(rows, weight):
        turned = weight.stride(1) < weight.stride(2)  # a parameter [e, n, k], read as [e, k, n]
        left, right = (gradient, rows) if turned else (rows, gradient)
        product = torch._grouped_mm(_aligned(left.contiguous()).t(), _aligned(right.contiguous()), offs=ends.int())
        empty = ends == torch.cat((ends.new_zeros(1), ends[:-1]))
        product.masked_fill_(empty[:, None, None], 0)  # Blackwell's kernel leaves numbers there: pytorch issue 172439
        product = product.transpose(1, 2) if turned else product
        return product if product.stride() == weight.stride() else torch.empty_like(weight).copy_(product)
    result, sizes = torch.empty_like(weight), _sizes(ends, rows.shape[0])
    *groups, _ = rows.split(sizes)
    *gradients, _ = gradient.split(sizes)
    for group, cotangent, product in zip(groups, gradients, result.unbind(), strict=True):
        if group.shape[0]:
            torch.mm(group.t(), cotangent, out=product)
        else:
            product.zero_()
    return result


@kernel(lambda x, weight, experts, *here: x.new_empty(experts.shape[0], weight.shape[2]), _PARTS)
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *here: Any) -> torch.Tensor:
    """Multiply x [t, k] by weight [e, k, n] for experts [t * each] -> [t * each, n]. ``here``: the experts of
    ``weight``, as sizes, offsets and lengths of their atoms, ``skips`` and ``is_sorted``."""
    order, ends = _sorted_rows(experts, *here)
    if order is None:
        return _by_expert(x, weight, ends)
    order, num_rows = _computed_here(order, ends, x, weight), experts.shape[0]
    products = _by_expert(x.index_select(0, _tokens(order, num_rows, x)), weight, ends)
    shape = num_rows, weight.shape[2]
    result = products.new_empty(shape) if order.shape[0] == num_rows else products.new_zeros(shape)
    return result.index_copy_(0, order, products)


def _computed_here(order: torch.Tensor, ends: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the order without rows of experts elsewhere where the host knows how many these are."""
    return order if has_kernel(x, weight) else order[: int(ends[-1]) if ends.shape[0] else 0]


def _tokens(order: torch.Tensor, num_rows: int, x: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``x`` that sorted rows read."""
    return order if x.shape[0] == num_rows else order // (num_rows // max(x.shape[0], 1))


@kernel(lambda gradient, x, weight, experts, *here: torch.empty_like(x), _PARTS)
def _grouped_mm_of_x(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *here: Any
) -> torch.Tensor:
    order, ends = _sorted_rows(experts, *here)
    if order is None:
        return _by_expert(gradient, weight.transpose(1, 2), ends)
    order, num_rows = _computed_here(order, ends, gradient, weight), experts.shape[0]
    of_rows = _by_expert(gradient.index_select(0, order), weight.transpose(1, 2), ends)
    tokens = _tokens(order, num_rows, x)
    if x.shape[0] == num_rows == order.shape[0]:
        return torch.empty_like(x).index_copy_(0, tokens, of_rows)
    return torch.zeros_like(x).index_add_(0, tokens, of_rows)


@kernel(lambda gradient, x, weight, experts, *here: torch.empty_like(weight), _PARTS)
def _grouped_mm_of_weight(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *here: Any
) -> torch.Tensor:
    order, ends = _sorted_rows(experts, *here)
    if order is None:
        return _of_weight(x, gradient, weight, ends)
    order = _computed_here(order, ends, x, weight)
    rows = x.index_select(0, _tokens(order, experts.shape[0], x))
    return _of_weight(rows, gradient.index_select(0, order), weight, ends)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, experts, *ctx.here = inputs
    ctx.save_for_backward(x, weight, experts)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    # Two operators: the gradient of the weight is computed while that of the rows returns to where they came from.
    x, weight, experts = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.shardwise.grouped_mm_of_x.default(gradient, x, weight, experts, *ctx.here)
    if ctx.needs_input_grad[1]:
        of_weight = torch.ops.shardwise.grouped_mm_of_weight.default(gradient, x, weight, experts, *ctx.here)
    return of_x, of_weight, *[None] * 6


grouped_mm.register_autograd(_backward, setup_context=_setup)


def _fake_order(keys: torch.Tensor, num_keys: int, skips: bool, owners: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = keys.new_empty((1, owners, most_keys(num_keys, owners)), dtype=torch.int64)
    return keys.new_empty(keys.shape, dtype=torch.int64), counts


@kernel(_fake_order)
def order_by_owner(keys: torch.Tensor, num_keys: int, skips: bool, owners: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of keys [rows] sorted by key, and how many rows have each key of each owner [1, owners,
    keys].

    Owner i has the keys from ``i * num_keys // owners`` on. The last one gets the keys that are no one's, counted after
    its own: the product that reads them there makes zeros of them (``skips``; otherwise they are an IndexError)."""
    _refuse_unknown(keys, num_keys, skips)
    by_key, order = keys.to(torch.int64).clamp(max=num_keys).sort(stable=True)
    each = torch.arange(num_keys + 1, device=keys.device)
    ends = torch.searchsorted(by_key, each, right=True)
    owner = (((each + 1) * owners - 1) // num_keys).clamp(max=owners - 1)
    counts = ends.new_zeros(owners, most_keys(num_keys, owners))
    counts[owner, each - owner * num_keys // owners] = ends - torch.cat((ends.new_zeros(1), ends[:-1]))
    return order, counts.unsqueeze(0)


def most_keys(num_keys: int, owners: int) -> int:
    """Return how many keys an owner counts: the most that one has, and those that are no one's."""
    return -(-num_keys // owners) + 1


@kernel(lambda rows, received, *numbers: received.new_empty(rows.shape[0]))
def keys_of_rows(rows: torch.Tensor, received: torch.Tensor, num_keys: int, owners: int, owner: int) -> torch.Tensor:
    """Return the keys of the rows that an owner has, which are sorted by key.

    ``received``: how many rows of each of its keys every device sent it [devices, 1, keys]."""
    counts = received.sum(0).flatten()
    keys = owner * num_keys // owners + torch.arange(counts.shape[0], device=counts.device)
    return keys.repeat_interleave(counts, output_size=rows.shape[0])


def experts_of(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the expert of each of ``rows`` sorted rows. ``ends``: one past the last row of each expert."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


def stacked_weights(graph: Graph, op: Op) -> Op | None:
    """Return the operator that stacks the matrices of a product by expert, where each expert has its own (a list of
    modules); None for any other operator."""
    made = graph.producer.get(op.operands[1]) if op.target is grouped_mm._opoverload else None
    while made is not None and made.target is not torch.ops.aten.stack.default:
        made = graph.producer.get(made.operands[0]) if made.operands else None
    return made
