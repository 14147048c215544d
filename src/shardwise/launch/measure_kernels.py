"""Kernels that ``shardwise calibrate`` measures on a GPU, one of each kind that a cluster file can describe.

Small functions run once, forward and backward, below autograd, where PyTorch calls the same kernels as in a rank's
program. ``costs.kernels`` gives the work of every call, as for a plan; then the call is timed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.costs.fit import KernelTime
from shardwise.costs.kernels import KernelCall, KernelWork, work_of
from shardwise.costs.optimizers import update_of
from shardwise.dispatch_mode import OpRecorder
from shardwise.graph.ir import Ref
from shardwise.programs.forms import Form

Seconds = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Sizes of the measured kernels. ``rows`` by ``width``: of memory-bound kernels; ``heads``, ``positions``,
    ``head``: of attention (``head`` is the width); ``images``, ``side``: batch and side of images."""

    rows: int
    width: int
    heads: int
    positions: int
    head: int
    images: int
    side: int
    dtype: torch.dtype

    @staticmethod
    def of(tiny: bool) -> KernelSizes:
        """Return sizes that fill a GPU, as the layers of a model do; with ``tiny``, sizes for a test run."""
        if tiny:
            return KernelSizes(16, 32, 2, 16, 8, 1, 8, torch.float32)
        return KernelSizes(8192, 4096, 64, 4096, 128, 32, 56, torch.bfloat16)


def kernel_times(seconds: Seconds, device: torch.device, sizes: KernelSizes) -> Iterator[KernelTime]:
    """Yield the time of each kernel. ``seconds``: times a call on all ranks together."""
    for function, shapes in _functions(sizes):
        tensors = [torch.randn(shape, device=device, dtype=sizes.dtype).requires_grad_() for shape in shapes]
        with _KernelCallRecorder() as calls:
            result = function(*tensors)
            torch.autograd.grad(result, tensors, torch.ones_like(result), allow_unused=True)
        for call, work in calls.kernel_calls:
            yield KernelTime(work, seconds(call))
    yield _update(seconds, device, sizes)


def launch_seconds(issue: Callable[[Callable[[], Any], int], float], device: torch.device) -> float:
    """Return the host's seconds to launch a kernel. ``issue``: times a number of asynchronous calls."""
    small, out = torch.ones(16, device=device), torch.ones(16, device=device)
    return issue(partial(torch.add, small, small, out=out), 500)


def host_bandwidth(seconds: Seconds, device: torch.device, num_bytes: int) -> float:
    """Return the B/s of copies between the device and pinned host memory, in the slower direction."""
    here = torch.ones(num_bytes // 4, device=device)
    there = torch.empty(num_bytes // 4, pin_memory=device.type == "cuda")
    slower = max(
        seconds(partial(there.copy_, here, non_blocking=True)), seconds(partial(here.copy_, there, non_blocking=True))
    )
    return here.nbytes / slower


class _KernelCallRecorder(OpRecorder):
    """Records the calls whose kernel kind a cluster file describes, each with its work."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel_calls: list[tuple[Callable[[], Any], KernelWork]] = []

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], returned: Any) -> None:
        operands, results = _forms((args, kwargs)), _forms(returned)
        named: Any = tree_map(lambda leaf: Ref("value") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        work = work_of(KernelCall(func, tuple(named[0]), tuple(named[1].items())), operands, results)
        if work.kind:
            self.kernel_calls.append((partial(func, *args, **kwargs), work))


def _forms(tree: Any) -> Sequence[Form]:
    return [Form.of(leaf.detach()) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _functions(sizes: KernelSizes) -> list[tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]]:
    table = (sizes.rows, sizes.width)
    heads = (1, sizes.heads, sizes.positions, sizes.head)
    images, kernel = (sizes.images, 64, sizes.side, sizes.side), (64, 64, 3, 3)
    width = (sizes.width,)

    def labels(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(sizes.rows, device=x.device) % sizes.width

    def looked_up(weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(torch.arange(sizes.rows // 2, device=weight.device), weight)

    return [
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (heads, heads, heads)),
        (lambda x, w, b: F.layer_norm(x, width, w, b), (table, width, width)),
        (lambda x, w: F.rms_norm(x, width, w), (table, width)),
        (lambda x: torch.softmax(x, -1), (table,)),
        (lambda x: F.cross_entropy(x, labels(x)), (table,)),
        (lambda x: x.sum(-1), (table,)),
        (lambda x: x.sum(0), (table,)),
        (lambda x: F.dropout(x, 0.1), (table,)),
        (looked_up, (table,)),
        (lambda x, w: F.conv2d(x, w, padding=1), (images, kernel)),
        (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (images, (64,), (64,))),
        (lambda x: F.max_pool2d(x, 2), (images,)),
    ]


def _update(seconds: Seconds, device: torch.device, sizes: KernelSizes) -> KernelTime:
    """Time a fused AdamW over one parameter; the work is that of ``Prices.update``."""
    weight = torch.zeros(sizes.rows, sizes.width, device=device, dtype=sizes.dtype, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    update = update_of("adamw fused", foreach=device.type == "cuda")
    work = KernelWork("update", num_bytes=float(weight.nbytes * update.passes), scalars=weight.numel() * update.scalars)
    return KernelTime(work, seconds(optimizer.step))
