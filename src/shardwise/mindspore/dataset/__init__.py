"""Datasets for training programs (``import shardwise.mindspore.dataset as ds``)."""

from shardwise.mindspore.dataset import config, text, transforms, vision
from shardwise.mindspore.dataset.annotated import CocoDataset, Schema, Shuffle, TFRecordDataset, VOCDataset
from shardwise.mindspore.dataset.files import (
    Cifar10Dataset,
    Cifar100Dataset,
    CSVDataset,
    FashionMnistDataset,
    ImageFolderDataset,
    MindDataset,
    MnistDataset,
    TextFileDataset,
)
from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.pipeline import zipped as zip
from shardwise.mindspore.dataset.sources import SAMPLERS, GeneratorDataset, NumpySlicesDataset, Sampler
from shardwise.mindspore.named import absent

globals().update(SAMPLERS)
__all__ = [
    "CSVDataset", "Cifar10Dataset", "Cifar100Dataset", "CocoDataset", "Dataset", "FashionMnistDataset",
    "GeneratorDataset", "ImageFolderDataset", "MindDataset", "MnistDataset", "NumpySlicesDataset", "Sampler", "Schema",
    "Shuffle", "TFRecordDataset", "TextFileDataset", "VOCDataset", "config", "text", "transforms", "vision", "zip",
    *SAMPLERS,
]  # fmt: skip
_FILES = "GeneratorDataset, with a function that reads such files"
_OTHERS = ("CelebADataset", "CityscapesDataset", "IMDBDataset", "SpeechCommandsDataset")
__getattr__ = absent(__name__, lambda: __all__, dict.fromkeys(_OTHERS, _FILES))
