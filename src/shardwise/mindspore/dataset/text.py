"""Texts as numbers: vocabularies, and functions of ``map`` on strings. A row's text is a string or an array of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.transforms import Array, Columns, Transform, names_of
from shardwise.mindspore.named import absent, classes_of


def _texts(x: Any) -> list[str]:
    """Return the strings of an array of any shape as a list."""
    return [item.decode() if isinstance(item, bytes) else str(item) for item in np.asarray(x).reshape(-1)]


def to_str(array: Any, encoding: str = "utf8") -> Array:
    """Decode bytes to strings."""
    return np.char.decode(array, encoding) if np.asarray(array).dtype.kind == "S" else np.asarray(array, str)


class Vocab:
    """A vocabulary of words and their ids, made by ``from_list``, ``from_dict``, ``from_file`` or ``from_dataset``.
    ``special_tokens`` come first, or with ``special_first=False`` last."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = dict(numbers)
        self._words = {number: word for word, number in self._numbers.items()}

    @classmethod
    def from_list(
        cls, word_list: Iterable[str], special_tokens: Sequence[str] | None = None, special_first: bool = True
    ) -> Vocab:
        words, special = list(word_list), list(special_tokens or ())
        listed = special + words if special_first else words + special
        if twice := [word for word, count in Counter(listed).items() if count > 1]:
            raise ValueError(problem(f"the word {twice[0]!r} occurs twice", fix="every word once"))
        return cls({word: number for number, word in enumerate(listed)})

    @classmethod
    def from_dict(cls, word_dict: dict[str, int]) -> Vocab:
        if wrong := [word for word, number in word_dict.items() if number < 0]:
            raise ValueError(problem(f"the number of {wrong[0]!r} is {word_dict[wrong[0]]}", fix="numbers from 0"))
        return cls(word_dict)

    @classmethod
    def from_file(
        cls, file_path: str, delimiter: str = "", vocab_size: int | None = None,
        special_tokens: Sequence[str] | None = None, special_first: bool = True,
    ) -> Vocab:  # fmt: skip
        """Read one word per line, up to ``delimiter``. ``vocab_size``: the largest number of words."""
        lines = Path(file_path).read_text().splitlines()
        words = [line.split(delimiter)[0] if delimiter else line for line in lines]
        return cls.from_list(words[:vocab_size], special_tokens, special_first)

    @classmethod
    def from_dataset(
        cls, dataset: Dataset, columns: Columns = None, freq_range: tuple[int | None, int | None] | None = None,
        top_k: int | None = None, special_tokens: Sequence[str] | None = None, special_first: bool = True,
    ) -> Vocab:  # fmt: skip
        """Collect the words of some columns, the most frequent first, and alphabetically among equally frequent ones.
        ``freq_range``: least and largest frequency; ``top_k``: the largest number of words."""
        counts: Counter[str] = Counter()
        for row in dataset.create_dict_iterator(num_epochs=1, output_numpy=True):
            for name in row if columns is None else names_of(columns):
                counts.update(_texts(row[name]))
        low, high = freq_range or (None, None)
        kept = [word for word, count in counts.items() if (low or 0) <= count <= (high or max(counts.values()))]
        ordered = sorted(kept, key=lambda word: (-counts[word], word))
        return cls.from_list(ordered[:top_k], special_tokens, special_first)

    def vocab(self) -> dict[str, int]:
        """Return word -> id."""
        return dict(self._numbers)

    def tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a word, or of each of several; -1 for unknown words."""
        if isinstance(tokens, str):
            return self._numbers.get(tokens, -1)
        return [self._numbers.get(word, -1) for word in _texts(tokens)]

    def ids_to_tokens(self, ids: Any) -> Any:
        """Return the word of an id, or of each of several; empty for unknown ids."""
        if np.ndim(ids) == 0:
            return self._words.get(int(ids), "")
        return [self._words.get(int(number), "") for number in np.asarray(ids).reshape(-1)]


class Lookup(Transform, vocab=..., unknown_token=None, data_type=np.int32):
    """Lookup of word ids. ``unknown_token``: the word that replaces those that the vocabulary lacks."""

    def _settle(self) -> None:
        self._numbers, unknown = self.vocab.vocab(), self.unknown_token
        if unknown is not None and unknown not in self._numbers:
            what = f"the vocabulary has no unknown_token {unknown!r}"
            raise ValueError(problem(what, fix=closest(unknown, self._numbers)))

    def __call__(self, words: Any) -> Array:
        numbers = [self._numbers.get(word, self._numbers.get(self.unknown_token)) for word in _texts(words)]
        if None in numbers:
            word = _texts(words)[numbers.index(None)]
            raise RuntimeError(problem(f"the vocabulary lacks {word!r}", fix="Lookup(vocab, unknown_token='<unk>')"))
        return np.array(numbers, self.data_type).reshape(np.shape(words))


class _Tokenizer(Transform):
    """``function`` returns the words of a string. ``with_offsets`` is refused."""

    def _settle(self) -> None:
        if self._chosen().get("with_offsets"):
            raise NotImplementedError(problem(f"{type(self).__name__}(with_offsets=True)", fix="PythonTokenizer"))

    def __call__(self, text: Any) -> Array:
        return np.array([word for string in _texts(text) for word in super(_Tokenizer, self).__call__(string)] or [""])


CLASSES = classes_of({
    "Truncate": lambda words, *, max_seq_len: (np.asarray(words)[:max_seq_len]),
}, Transform, __name__) | classes_of({
    "PythonTokenizer": lambda text, *, tokenizer: tokenizer(text),
    "WhitespaceTokenizer": lambda text, *, with_offsets=False: text.split(),
}, _Tokenizer, __name__)  # fmt: skip
globals().update(CLASSES)

__all__ = ["Lookup", "Vocab", "to_str", *CLASSES]
__getattr__ = absent(__name__, lambda: __all__)
