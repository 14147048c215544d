"""Seconds of a message that is joined with its products (``programs.fused_products``), as torch's operators run it.

``torch.distributed._symmetric_memory`` multiplies one part per rank. In turn, on two streams, it copies the part of
another rank and multiplies it, or multiplies a part and copies it. Let a part's products take ``p``, and its copy
``c``. Its own part a rank has already. So n parts are done after the longest of ``n p``, ``c + (n - 1) p`` and
``(n - 1) c + p``: two machines in a row, and every part passes both in the same order (Johnson, "Optimal two- and
three-stage production schedules with setup times included", 1954). What is exposed is the shorter of ``p`` and ``c``
where they overlap best, and all that a copy takes longer than a part's products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from shardwise.costs.cluster import Device
from shardwise.costs.kernels import KernelCall, KernelWork, kernel_seconds, work_of
from shardwise.graph.ir import Ref
from shardwise.programs.forms import Form
from shardwise.programs.fused_products import FusedProduct

# Barriers of a group that overlap with nothing: ahead of the first copy, between the first part and its copy, at the
# end. Around every copy that takes a product's result there are two more.
_BARRIERS = 3


@dataclass(frozen=True)
class FusedProductCost:
    """What one costs. ``parts``: ranks of its group; ``message``: seconds of the whole message by itself; ``barrier``:
    seconds in which ranks meet."""

    instruction: FusedProduct
    forms: Mapping[str, Form]
    device: Device
    parts: int
    message: float
    barrier: float

    @property
    def products(self) -> float:
        """Return the seconds of the products of all parts."""
        each = works(self.instruction, self.forms, self.parts)
        return self.parts * sum(kernel_seconds(self.device, work) for work in each)

    @property
    def moves(self) -> float:
        """Return the seconds in which values are copied, or added up, on the device itself."""
        return moved_bytes(self.instruction, self.forms) / self.device.bytes_per_second()

    @property
    def seconds(self) -> float:
        """Return the seconds of all, if the host starts kernels early enough."""
        others, product = self.parts - 1, self.products / self.parts
        copy = self.message / others + (0 if self.instruction.gathers else 2 * self.barrier)
        longest = max(self.products, copy + others * product, others * copy + product)
        return longest + self.moves + _BARRIERS * self.barrier

    @property
    def num_kernels(self) -> int:
        """Return the number of kernels, copies and barriers that the host starts."""
        others, products = self.parts - 1, self.parts * len(self.instruction.transposed)
        return products + (others + 2 if self.instruction.gathers else 3 * others + 1) + _BARRIERS


def works(one: FusedProduct, forms: Mapping[str, Form], parts: int = 1) -> list[KernelWork]:
    """Return the work of each product on one of some equal parts of the rows."""
    left = one.forms[0] if one.gathers else forms[one.operands[0]]
    rows, width = prod(left.shape[:-1]) // parts, left.shape[-1]
    made = []
    for name, is_transposed in zip(one.operands[1:], one.transposed, strict=True):
        weight = forms[name]
        shapes = (rows, width), (width, weight.shape[0 if is_transposed else 1])
        sides = [Form.contiguous(shape, left.dtype, False) for shape in shapes]
        result = Form.contiguous((rows, shapes[1][1]), left.dtype, False)
        call = KernelCall(torch.ops.aten.mm.default, (Ref("left"), Ref("right")), ())
        made.append(work_of(call, sides, [result]))
    return made


def moved_bytes(one: FusedProduct, forms: Mapping[str, Form]) -> float:
    """Return the bytes that are read and written beside products and messages. Operators work with ``dim`` first, so
    values that lie otherwise are copied."""
    left, results = forms[one.operands[0]].num_bytes, sum(form.num_bytes for form in one.forms)
    if one.gathers:  # into symmetric memory, and into the whole
        return 4.0 * left + one.is_turned * 2 * (left + results)
    return float(product_bytes(one, forms) + results + one.is_turned * 2 * left)


def product_bytes(one: FusedProduct, forms: Mapping[str, Form]) -> int:
    """Return the bytes of a product that is scattered."""
    left = forms[one.operands[0]]
    return left.num_bytes // left.shape[-1] * one.forms[0].shape[-1]


def symmetric_bytes(one: FusedProduct, forms: Mapping[str, Form]) -> int:
    """Return the bytes of symmetric memory that an operator takes: of what a rank gives, or of two parts of a
    product."""
    return forms[one.operands[0]].num_bytes if one.gathers else 2 * one.forms[0].num_bytes
