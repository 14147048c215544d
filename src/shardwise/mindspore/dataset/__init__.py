"""Datasets for training programs (``import shardwise.mindspore.dataset as ds``)."""

from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.sources import GeneratorDataset, NumpySlicesDataset

__all__ = ["Dataset", "GeneratorDataset", "NumpySlicesDataset"]
