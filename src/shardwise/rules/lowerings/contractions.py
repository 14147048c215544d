"""Contractions whose added operand must not be added once per part."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.nn.functional.linear(input, weight)
    return product if bias is None else product + bias


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return scaled(self, beta) + scaled(torch.mm(mat1, mat2), alpha)


def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return scaled(self, beta) + scaled(torch.mv(mat, vec), alpha)


def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return scaled(self, beta) + scaled(torch.bmm(batch1, batch2), alpha)


def addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return scaled(self, beta) + scaled(torch.bmm(batch1, batch2).sum(0), alpha)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
