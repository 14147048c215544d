"""Public image models with the rows of their images split: halos everywhere, and the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import shardwise as sw
from models.tiny_models import CLASSES
from models.zoo_own import UNet
from proving import prove


def resnet() -> nn.Module:
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=CLASSES)
    return tf.ResNetForImageClassification(config)


def convnext() -> nn.Module:
    config = tf.ConvNextConfig(
        image_size=32, patch_size=4, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=CLASSES
    )
    return tf.ConvNextForImageClassification(config)


def labelled(*shape: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 16), "labels": torch.randint(0, CLASSES, (2,))}


def images(*shape: int) -> dict[str, torch.Tensor]:
    return {"images": torch.randn(2, 3, 32, 8), "labels": torch.randint(0, CLASSES, (2, 32, 8))}


MODELS: dict[str, tuple[Any, Any, str]] = {
    "resnet": (resnet, labelled, "resnet.embedder.embedder.convolution"),
    "convnext": (convnext, labelled, "convnext.embeddings.patch_embeddings"),
    "unet": (UNet, images, "first.0"),
}


@pytest.mark.parametrize(
    ("name", "axes"),
    [("resnet", {"dp": 2, "sp": 2}), ("convnext", {"sp": 4}), ("unet", {"sp": 4}), ("unet", {"dp": 2, "sp": 2})],
    ids=str,
)
@pytest.mark.sampled(1)
def test_image_models_whose_rows_are_split_equal_one_device(name: str, axes: dict[str, int]) -> None:
    make, inputs, first = MODELS[name]
    torch.manual_seed(0)
    model, given, mesh = make(), inputs(), sw.Mesh(**axes)
    plan = sw.plan(model, given, mesh.num_devices, mesh=mesh, strategies={first: "y0@sp"})
    prove(model, given, plan)
    halos = [entry for c in plan.conversions for entry in c.forward if entry.kind == "halo_exchange"]
    assert len(halos) >= 2
    split = [op for op in plan.operators if "conv" in op.target and "y0" in op.strategy]
    assert len(split) >= 0.75 * sum("conv" in op.target for op in plan.operators)
