"""Datasets for training programs (``import shardwise.mindspore.dataset as ds``)."""

from shardwise.mindspore.dataset import config, files, sources, text, transforms, vision
from shardwise.mindspore.dataset.files import *
from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.pipeline import zipped as zip
from shardwise.mindspore.dataset.sources import *
from shardwise.mindspore.named import absent

__all__ = [
    "Dataset", "config", "text", "transforms", "vision", "zip", *files.__all__, *sources.__all__,
]  # fmt: skip
__getattr__ = absent(__name__, lambda: __all__)
