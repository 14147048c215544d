"""Files of rows (``from shardwise.mindspore.mindrecord import FileWriter``); ``dataset.MindDataset`` reads them."""

from shardwise.mindspore.dataset.records import FileWriter
from shardwise.mindspore.named import absent

__all__ = ["FileWriter"]
__getattr__ = absent(__name__, lambda: __all__, {"FileReader": "dataset.MindDataset"})
