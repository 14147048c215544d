"""Real text without a download: the documentation that Python bundles with itself."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data import topics

import torch
from torch import Tensor


def load_bytes() -> Tensor:
    """All of ``pydoc_data.topics`` as bytes: uint8, about half a million."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def batches(data: Tensor, batch_size: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless ``(ids, labels)``, both int64 [batch_size, context]: bytes and those that follow; the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(data) - context, (batch_size, 1), generator=generator)
        window = data[starts + offsets].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
