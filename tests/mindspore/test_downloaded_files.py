"""Files that people download hold data: no code in them runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise
from raising import raises
from shardwise.mindspore import dataset as ds

KINDS: dict[str, tuple[Any, str, int]] = {
    "10": (ds.Cifar10Dataset, "data_batch_1", 1), "100": (ds.Cifar100Dataset, "train", 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_binary_files_are_read_and_others_named(kind: str, tmp_path: Path) -> None:
    dataset, name, labels = KINDS[kind]
    table = np.random.default_rng(0).integers(0, 256, (4, labels + 3072)).astype(np.uint8)
    (tmp_path / f"{name}.bin").write_bytes(table.tobytes())
    rows = list(dataset(tmp_path, shuffle=False).create_tuple_iterator(output_numpy=True))
    for (image, *found), row in zip(rows, table, strict=True):
        assert np.array_equal(image, row[labels:].reshape(3, 32, 32).transpose(1, 2, 0))
        assert found == row[:labels][::-1].tolist()
    for file, content in ((f"{name}.bin", table.tobytes()[:-1]), (name, table.tobytes())):
        (tmp_path / file).write_bytes(content)
        with raises(ValueError, name, "is not a binary file", fix="binary version"):
            dataset(tmp_path)


# Where the package reads pickles, and whose they are.
READERS = {
    "graph/function_operator.py": "arguments of a function, which the same job captured",
    "graph/impure_reads.py": "the state of this process's generator",
    "mindspore/nn/own_backward.py": "attributes of a cell, which the same job captured",
    "runtime/agree.py": "what the ranks of a job send each other",
    "runtime/rank_tree.py": "what the ranks of a job send each other",
    "runtime/faults.py": "what torch recorded in this process",
    "graph/exported.py": "programs, which say so",
}


def test_nothing_else_in_the_package_reads_pickles() -> None:
    package = Path(shardwise.__file__).parent
    unsafe = re.compile(
        r"pickle\.loads?\(|[.]Unpickler|allow_pickle=True|weights_only=False|export\.load\(|joblib|shelve|marshal|dill"
        r"|read_pickle|yaml\.(unsafe_)?load\("
    )
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if unsafe.search(path.read_text())}
    assert found == READERS.keys()
    loads = [line for path in package.rglob("*.py") for line in path.read_text().splitlines() if "torch.load(" in line]
    assert all("weights_only=True" in line or "fix" in line for line in loads), loads
