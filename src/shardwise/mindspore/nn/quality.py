"""Measures of image quality for images (N, C, H, W): parts of the table of ``nn.simple``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwise.mindspore.named import Function

Tensor = torch.Tensor


def _weighted(x: Tensor, size: int, sigma: float) -> Tensor:
    """Return Gaussian-weighted means of windows."""
    distances = torch.arange(size, dtype=x.dtype) - (size - 1) / 2
    bell = torch.softmax(-distances.square() / (2 * sigma**2), 0)
    kernel = torch.outer(bell, bell).expand(x.shape[1], 1, size, size)
    return F.conv2d(x, kernel.to(x), groups=x.shape[1])


def _similar(
    img1: Tensor, img2: Tensor, max_val: float = 1.0, filter_size: int = 11, filter_sigma: float = 1.5,
    k1: float = 0.01, k2: float = 0.03,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the similarity per channel [n, c], and its part without means (Wang et al. 2004, equation 13)."""
    first, second, squares, product = (
        _weighted(x, filter_size, filter_sigma) for x in (img1, img2, img1.square() + img2.square(), img1 * img2)
    )
    c1, c2 = (k1 * max_val) ** 2, (k2 * max_val) ** 2
    of_means = (2 * first * second + c1) / (first.square() + second.square() + c1)
    rest = (2 * (product - first * second) + c2) / (squares - first.square() - second.square() + c2)
    return (of_means * rest).mean((2, 3)), rest.mean((2, 3))


def _at_scales(img1: Tensor, img2: Tensor, power_factors: Any, **settings: Any) -> Tensor:
    """Return the similarity at several scales, each half the previous one (Wang et al. 2003, equation 7)."""
    parts = []
    for level, power in enumerate(power_factors):
        whole, rest = _similar(img1, img2, **settings)
        parts.append((whole if level + 1 == len(power_factors) else rest).relu() ** power)
        img1, img2 = F.avg_pool2d(img1, 2), F.avg_pool2d(img2, 2)
    return torch.stack(parts).prod(0).mean(1)


def _slopes(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences between each pixel and the one below, and the one on the right; 0 at the ends."""
    return F.pad(images.diff(dim=2), (0, 0, 0, 1)), F.pad(images.diff(dim=3), (0, 1))


def _middle(image: Tensor, central_fraction: float) -> Tensor:
    begins = [int((size - size * central_fraction) / 2) for size in image.shape[-2:]]
    height, width = (size - 2 * begin for size, begin in zip(image.shape[-2:], begins, strict=True))
    return image[..., begins[0] : begins[0] + height, begins[1] : begins[1] + width]


QUALITY: dict[str, Function] = {
    "CentralCrop": lambda image, *, central_fraction: _middle(image, central_fraction),
    "ImageGradients": lambda images: _slopes(images),
    "MSSSIM": lambda img1, img2, *, max_val=1.0, power_factors=(0.0448, 0.2856, 0.3001, 0.2363, 0.1333), filter_size=11,
    filter_sigma=1.5, k1=0.01, k2=0.03: _at_scales(
        img1, img2, power_factors, max_val=max_val, filter_size=filter_size, filter_sigma=filter_sigma, k1=k1, k2=k2),
    "PSNR": lambda img1, img2, *, max_val=1.0: 10 * torch.log10(max_val**2 / (img1 - img2).square().mean((1, 2, 3))),
    "SSIM": lambda img1, img2, *, max_val=1.0, filter_size=11, filter_sigma=1.5, k1=0.01, k2=0.03: _similar(
        img1, img2, max_val, filter_size, filter_sigma, k1, k2)[0].mean(1),
}  # fmt: skip
