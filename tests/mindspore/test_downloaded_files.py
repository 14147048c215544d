"""Files that people download hold data: no code in them runs."""

from __future__ import annotations

import collections
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise
from raising import raises
from shardwise.mindspore import dataset as ds


class Runs:
    """What an attacker writes: reading it would make the file ``ran``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def entries(count: int, keys: tuple[bytes, ...]) -> dict[bytes, Any]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3072)).astype(np.uint8)
    return {b"data": pixels, **{key: list(range(count)) for key in keys}, b"filenames": [b"a.png"] * count}


KINDS: dict[str, tuple[Any, str, tuple[bytes, ...]]] = {
    "10": (ds.Cifar10Dataset, "data_batch_1", (b"labels",)),
    "100": (ds.Cifar100Dataset, "train", (b"fine_labels", b"coarse_labels")),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_read_as_they_were_pickled(kind: str, protocol: int, tmp_path: Path) -> None:
    dataset, name, keys = KINDS[kind]
    content = entries(4, keys)
    labels = [np.arange(4), np.arange(4, dtype=">i8"), list(np.arange(4, dtype=np.int16)), tuple(range(4))]
    for given in labels:
        for pixels in (content[b"data"], np.asfortranarray(content[b"data"])):
            odd = collections.OrderedDict({**content, keys[0]: given, b"data": pixels, b"more": {1.5, 2j, None}})
            (tmp_path / name).write_bytes(pickle.dumps(odd, protocol=protocol))
            rows = list(dataset(tmp_path, shuffle=False).create_tuple_iterator(output_numpy=True))
            assert len(rows) == 4
            for number, (image, *found) in enumerate(rows):
                assert np.array_equal(image, content[b"data"][number].reshape(3, 32, 32).transpose(1, 2, 0))
                assert [int(label) for label in found] == [number] * len(keys)


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_the_files_does_not_run(kind: str, tmp_path: Path) -> None:
    dataset, name, keys = KINDS[kind]
    ran = tmp_path / "ran"
    content = entries(2, keys)
    attacks: dict[str, Any] = {
        "a command": Runs(os.system, f"touch {ran}"),
        "a file": Runs(open, str(ran), "w"),
        "an expression": Runs(eval, f"open({str(ran)!r}, 'w')"),
        "an attribute": Runs(getattr, Path, "touch"),
        "a class": Runs(Path, str(ran)),
        "numpy's loader": Runs(np.load, str(ran)),
        "a function of numpy's": Runs(np.frompyfunc, print, 1, 1),
        "objects": np.array([Runs(os.mkdir, str(ran)), 1], dtype=object),
        "objects without code": np.array([1, "a"], dtype=object),
        "fields": np.zeros(2, dtype=[("a", "O"), ("b", "i8")]),
    }
    for protocol in (0, 2, 5):
        for what, attack in attacks.items():
            for key in (b"data", keys[0], b"more"):
                (tmp_path / name).write_bytes(pickle.dumps({**content, key: attack}, protocol=protocol))
                with raises(ValueError, name, "cannot be read: it"):
                    dataset(tmp_path)
                assert not ran.exists(), what


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_named(kind: str, tmp_path: Path) -> None:
    dataset, name, keys = KINDS[kind]
    whole = pickle.dumps(entries(2, keys))
    contents: list[bytes] = [
        b"",
        b"no pickle",
        whole[:100],
        whole[:-1],
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": 3}),
    ]
    contents += [pickle.dumps({**entries(2, keys), keys[0]: [1]}), pickle.dumps({b"labels": [1, 2]})]
    for content in contents:
        (tmp_path / name).write_bytes(content)
        with raises(ValueError, name):
            dataset(tmp_path)


# Where the package reads pickles, and whose they are.
READERS = {
    "graph/function_operator.py": "arguments of a function, which the same job captured",
    "graph/impure_reads.py": "the state of this process's generator",
    "mindspore/dataset/files.py": "data sets, with the reader above",
    "mindspore/nn/own_backward.py": "attributes of a cell, which the same job captured",
    "runtime/agree.py": "what the ranks of a job send each other",
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
