"""Tensors of other kinds of numbers: labels, bytes and complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from rules.samples.calls import Sample, call

aten = torch.ops.aten


def _count(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 7 % 11).reshape(shape).to(dtype)


def _complex(*shape: int) -> Tensor:
    return torch.complex(_count(*shape).double(), 2 - _count(*shape).double()).requires_grad_()


KINDS: list[Sample] = [
    call(aten.pad.default, _count(3, 4), [0, 1], "constant", -100),  # labels, before they are shifted
    call(aten.pad.default, _count(3, 4, dtype=torch.bool), [0, 1]),
    call(aten.pad.default, _complex(3, 4), [0, 1]),
    call(aten.unfold.default, _count(3, 6, dtype=torch.int32), 1, 3, 2),
    call(aten.pixel_shuffle.default, _count(2, 4, 3, 3, dtype=torch.uint8), 2),
    call(aten.max_pool2d_with_indices.default, _count(2, 3, 4, 4), [2, 2]),
    call(aten.upsample_nearest2d.default, _count(2, 3, 4, 5, dtype=torch.uint8), [7, 3]),
    call(aten.upsample_bilinear2d.default, _count(2, 3, 4, 5, dtype=torch.uint8), [7, 3], True),  # rounded
    call(aten.fft_rfft.default, _count(3, 6)),
    call(aten.fft_fftshift.default, _count(3, 6, dtype=torch.int32), [1]),
    call(aten.embedding.default, _count(5, 3, dtype=torch.int32), _count(2, 4) % 5),
    call(aten.scatter_add.default, _complex(3, 5), 1, _count(3, 4) % 5, _complex(3, 4)),
    call(aten.index_add.default, _complex(3, 5), 1, _count(4) % 5, _complex(3, 4)),
    call(aten.conv1d.default, _complex(2, 2, 6), _complex(3, 2, 3), None, [1], [1]),
    call(aten.conv_transpose2d.input, _complex(1, 2, 3, 4), _complex(2, 2, 2, 3), None, [2, 2]),
]
