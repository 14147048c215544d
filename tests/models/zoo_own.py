"""The zoo's models written here: a U-Net, two recommenders and an LSTM language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.tiny_models import CLASSES, VOCABULARY, TinyModel, token_inputs

TABLES = (11, 7, 50)


def convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.GroupNorm(2, channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Ronneberger et al. 2015: down twice, up twice (transposed convolution; interpolation), skips concatenated."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first = convolutions(3, channels)
        self.second = convolutions(channels, 2 * channels)
        self.bottom = convolutions(2 * channels, 4 * channels)
        self.up_second = nn.ConvTranspose2d(4 * channels, 2 * channels, 2, stride=2)
        self.after_second = convolutions(4 * channels, 2 * channels)
        self.up_first = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * channels, channels, 1)
        )
        self.after_first = convolutions(2 * channels, channels)
        self.head = nn.Conv2d(channels, CLASSES, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first = self.first(images)
        second = self.second(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        up = self.after_second(torch.cat((second, self.up_second(bottom)), 1))
        up = self.after_first(torch.cat((first, self.up_first(up)), 1))
        return F.cross_entropy(self.head(up), labels)


def unet_inputs(batch: int) -> dict[str, Any]:
    return {"images": torch.randn(batch, 3, 8, 8), "labels": torch.randint(0, CLASSES, (batch, 8, 8))}


class DLRM(nn.Module):
    """Naumov et al. 2019: bags of categorical features and dense ones meet in pairwise products."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in TABLES)
        self.bottom = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        count = len(TABLES) + 1
        self.top = nn.Sequential(nn.Linear(width + count * (count - 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        own = self.bottom(dense)
        vectors = torch.stack(
            [own, *(table(ids) for table, ids in zip(self.tables, categories.unbind(1), strict=True))], 1
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        score = self.top(torch.cat((own, products), 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicks)


def dlrm_inputs(batch: int) -> dict[str, Any]:
    """Bags of three per feature and sample: ``categories`` is [sample, feature, 3]."""
    return {
        "dense": torch.rand(batch, 6),
        "categories": torch.stack([torch.randint(0, size, (batch, 3)) for size in TABLES], 1),
        "clicks": torch.randint(0, 2, (batch,)).float(),
    }


class WideAndDeep(nn.Module):
    """Cheng et al. 2016: a linear model of crossed features beside a deep one of embedded features."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wide = nn.Embedding(64, 1)
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in TABLES)
        self.deep = nn.Sequential(
            nn.Linear(len(TABLES) * width + 6, 32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, 16),
            nn.ReLU(),
            nn.Linear(16, 1),
        )

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        crossed = (categories[:, 0] * TABLES[1] + categories[:, 1]) % 64
        embedded = [table(ids) for table, ids in zip(self.embeddings, categories.unbind(1), strict=True)]
        score = self.deep(torch.cat((*embedded, dense), 1)) + self.wide(crossed)
        return F.binary_cross_entropy(torch.sigmoid(score.squeeze(1)), clicks)


def wide_and_deep_inputs(batch: int) -> dict[str, Any]:
    inputs = dlrm_inputs(batch)
    return inputs | {"categories": inputs["categories"][:, :, 0]}


class LSTM(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.LSTM(width, 24, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(input_ids))
        return F.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


OWN = {
    "unet": TinyModel(UNet, unet_inputs, {"[fsba]*.[03]": "co@tp", "up_*[d1]": "co@tp", "head": "co@tp"}),
    "dlrm": TinyModel(DLRM, dlrm_inputs, {"tables.*": "v@tp", "bottom.0": "n@tp", "top.0": "n@tp"}),
    "wide_and_deep": TinyModel(
        WideAndDeep, wide_and_deep_inputs, {"wide": "v@tp", "embeddings.*": "v@tp", "deep.0": "n@tp", "deep.3": "n@tp"}
    ),
    "lstm": TinyModel(LSTM, token_inputs, {"embedding": "v@tp", "head": "n@tp"}),
}
