"""Tensors out of nothing, and out of a seed."""

from __future__ import annotations

import torch

from rules.samples.calls import Sample, call, plain, unsplit, x
from shardwise.graph.custom_operators import dropout, uniform

aten = torch.ops.aten

WINDOWS = [
    *(aten.hann_window.default, aten.hamming_window.default, aten.kaiser_window.default),
    *(aten.bartlett_window.default, aten.blackman_window.default),
]
PERIODIC = [
    *(aten.hann_window.periodic, aten.hamming_window.periodic, aten.kaiser_window.periodic),
    *(aten.bartlett_window.periodic, aten.blackman_window.periodic),
]
CONSTRUCTORS = [
    unsplit(aten.tril_indices.default, 3, 4),
    unsplit(aten.triu_indices.default, 4, 3, 1),
    call(aten.zeros.default, [3, 4]),
    call(aten.ones.default, [3, 4], dtype=torch.bool),
    call(aten.full.default, [5], 2.5),
    Sample(aten.empty.memory_format, ([3, 4],), {}, unspecified=True),
    unsplit(aten.scalar_tensor.default, 2.0),
    call(aten.arange.default, 6),
    call(aten.arange.start, 2, 8),
    call(aten.arange.start_step, 9, -3, -2),
    call(aten.arange.start_step, 0.0, 1.2, 0.2, dtype=torch.float64),
    call(aten.linspace.default, 0.0, 1.0, 6, dtype=torch.float64),
    unsplit(aten.linspace.Tensor_Tensor, plain(x()), plain(x()), 6, dtype=torch.float64),
    unsplit(aten.linspace.Tensor_Scalar, plain(x()), 1.0, 6, dtype=torch.float64),
    unsplit(aten.linspace.Scalar_Tensor, 1.0, plain(x()), 6, dtype=torch.float64),
    *(unsplit(op, 6, dtype=torch.float64) for op in WINDOWS),
    *(unsplit(op, 6, False, dtype=torch.float64) for op in PERIODIC),
    unsplit(aten.hamming_window.periodic_alpha, 6, True, 0.4, dtype=torch.float64),
    unsplit(aten.hamming_window.periodic_alpha_beta, 6, True, 0.4, 0.5, dtype=torch.float64),
    unsplit(aten.kaiser_window.beta, 6, True, 8.0, dtype=torch.float64),
    unsplit(aten.logspace.default, 0.0, 1.0, 6, dtype=torch.float64),
    unsplit(aten.logspace.Tensor_Tensor, plain(x()), plain(x()), 6, dtype=torch.float64),
    unsplit(aten.logspace.Tensor_Scalar, plain(x()), 1.0, 6, dtype=torch.float64),
    unsplit(aten.logspace.Scalar_Tensor, 1.0, plain(x()), 6, dtype=torch.float64),
    call(aten.eye.default, 6),
    call(aten.eye.m, 4, 6, dtype=torch.float64),
]

_SEED = torch.tensor(7)

DROPOUT = [
    call(dropout._opoverload, x(4, 6), _SEED, 0.4, 3, 6, [4, 6], [0, 0]),
    call(uniform._opoverload, _SEED, 3, [4, 6], [0, 0], [4, 6], [4, 6], torch.float64),
    unsplit(uniform._opoverload, _SEED, 0, [], [], [], [], torch.float32),
]
