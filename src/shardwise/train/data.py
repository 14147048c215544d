"""``sw.DataLoader``: one global order of samples, of which every rank reads its part.

The order of an epoch is a permutation that depends only on the seed and the epoch. A step takes the next samples, and a
rank reads those that the plan's input layout assigns to it. The position of the run is a single number: the samples
consumed in this epoch. It is valid for any number of ranks and any batch size.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, default_collate

from shardwise.errors import ShardwiseError
from shardwise.graph.trees import flatten_with_path, leaf_name, unflatten
from shardwise.layouts.layout import Layout
from shardwise.runtime.agree import gather_values
from shardwise.runtime.initial.materialize import stable_seed
from shardwise.runtime.stage import with_samples_in
from shardwise.train.parts import random_states, set_random_states, splits_in

Rows = tuple[int, int]  # [start, stop) of a batch


class DataLoader:
    """Data loader with one sample order for all ranks. Every ``for`` loop runs one epoch.

    ``state_dict()`` holds the position, counted in consumed samples; ``load_state_dict`` continues from there.

    Every rank reads an iterable data set completely and keeps its part; all ranks must get the same samples. The number
    of samples per batch is compared between ranks. With ``num_workers`` the batches are those of torch's loader with as
    many workers: each worker iterates over a copy of the data set, which divides the samples by ``get_worker_info()``
    (as data sets of Hugging Face do). A data set with ``set_epoch`` is told the epoch. A run continues at its position:
    a data set with ``state_dict`` and ``load_state_dict``, read without workers, goes there by itself, of others the
    consumed samples are read again and dropped.

    Args:
        dataset: a data set with ``len`` and ``[i]``, or an iterable one.
        par: the module that gets the batches. If it is, or contains, a parallel module with ``inputs="local"``, each
            rank gets its part of the samples, and its part of other split dims (sequence, features). Otherwise every
            rank gets whole batches.
        batch_size: samples per step, over all ranks.
        shuffle: whether to use a new permutation in every epoch.
        seed: seed of the permutations, and of the samples with ``seed_samples``.
        drop_last: whether to skip a last, smaller batch.
        seed_samples: seed the generators of Python, NumPy and torch for every sample, so that random augmentations do
            not depend on the number of ranks and workers.
        collate_fn: as of ``torch.utils.data.DataLoader``; each sample's result must not depend on the others in its
            batch (pad to a fixed length).
        options: other options of ``torch.utils.data.DataLoader`` (``num_workers``, ``pin_memory``, ...). Of an iterable
            data set they need ``num_workers``.

    Raises:
        ShardwiseError: an invalid option, an empty data set, or a loader that differs between ranks.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        par: torch.nn.Module,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        seed_samples: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ShardwiseError(f"batch_size must be a number of samples per step, 1 or more; got {batch_size!r}")
        taken = {"sampler", "batch_sampler"} & options.keys()
        if taken:
            what = f"{min(taken)}= is not allowed: the loader chooses the samples itself"
            raise ShardwiseError(what, fix="order the data set as you need it, and give shuffle=False")
        self.dataset, self.par, self.batch_size = dataset, par, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self.cursor = self._turn = self._count = 0
        self._collate = collate_fn or default_collate
        self._is_iterable = isinstance(dataset, IterableDataset)
        self._parts = _BatchParts(par)
        self._loader: TorchLoader[Any] | None = None
        self._stream_state: Any = None  # where a stateful data set continues; None: at the start of the epoch
        self._num_workers = int(options.get("num_workers", 0))
        if not self._is_iterable:
            samples: Any = _Samples(dataset, seed if seed_samples else None)
            sampler: Any = _BatchSampler(self)
            self._loader = TorchLoader(samples, batch_sampler=sampler, collate_fn=self._collate, **options)
            if not self._length:
                raise ShardwiseError("the data set has no samples")
        elif shuffle or seed_samples:
            what = "an iterable data set is read in its own order: it takes no shuffle or seed_samples"
            raise ShardwiseError(what, fix="shuffle=False and no seed_samples; or a map-style set")
        elif not self._num_workers and (unused := options.keys() - {"num_workers"}):
            what = f"an iterable data set without workers is read in this process, which takes no {min(unused)}="
            raise ShardwiseError(what, fix="give num_workers=, or leave the option out")
        elif self._num_workers:
            stream: Any = dataset
            options = {**options, "collate_fn": list, "drop_last": drop_last}
            self._loader = TorchLoader(stream, batch_size=batch_size, **options)
        if splits_in(par):
            self._check_same_on_all_ranks()

    def _check_same_on_all_ranks(self) -> None:
        settings = {
            "samples in the data set": None if self._is_iterable else self._length,
            "workers": self._num_workers if self._is_iterable else None,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
        everywhere = gather_values(settings)
        for rank, other in enumerate(everywhere):
            for name, value in other.items():
                if value != everywhere[0][name]:
                    what = f"{everywhere[0][name]!r} {name} on rank 0, {value!r} on rank {rank}"
                    what = f"ranks differ in their loaders: {what}"
                    raise ShardwiseError(what, fix="give every rank the same data set and settings")

    @property
    def _length(self) -> int:
        dataset: Any = self.dataset
        return len(dataset)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        if self._is_iterable:
            raise TypeError("an iterable data set has no length")
        whole, rest = divmod(self._length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, then advance to the next epoch. Raises ShardwiseError if a newer
        iteration has begun or a position was loaded meanwhile: all iterations share one position."""
        self._turn = turn = self._turn + 1
        try:
            for count, batch in self._streamed() if self._is_iterable else self._loaded():
                self._check_turn(turn)
                self.cursor += count
                self._count = count
                yield batch
            self._check_turn(turn)
        except GeneratorExit:  # the loop was left: at its last batch the epoch has ended, or the next loop were empty
            if (
                turn == self._turn
                and not self._is_iterable
                and self.cursor >= min(len(self) * self.batch_size, self._length)
            ):
                self._end_epoch()
            raise
        self._end_epoch()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the rows of the latest batch, such as labels to compare with ``par.predict``. Collective.

        Args:
            part: this rank's rows, as the loader gave them, of any shape behind the first dim.

        Returns:
            The rows of the whole batch in its order, on the device of ``part``; not differentiable.
        """
        if not self._parts.layouts:
            return part
        first, last = self._parts.rows(self._count)
        whole = part.new_empty((self._count, *part.shape[1:]))
        for start, rows in gather_values((first, part.detach().cpu()[: last - first])):
            whole[start : start + len(rows)] = rows.to(part.device)
        return whole

    def _end_epoch(self) -> None:
        self.epoch, self.cursor, self._stream_state = self.epoch + 1, 0, None

    def _check_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise ShardwiseError(
                "the loader's position was changed during an iteration, by another iteration or by "
                "load_state_dict: samples would be lost or repeated",
                fix="use a separate loader for evaluation, and begin a new loop after load_state_dict",
            )

    def _loaded(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of samples of the step, this rank's part of its batch)."""
        assert self._loader is not None, "a data set with indices has torch's loader"
        for batch in self._loader:
            count = min(self.batch_size, self._length - self.cursor)
            yield count, self._parts.cut(batch, count)

    def _streamed(self) -> Iterator[tuple[int, Any]]:
        """Yield as ``_loaded`` does; every rank reads all samples."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        batches = self._batches_of_stream()
        while True:
            samples = next(batches, [])
            counts = gather_values(len(samples))
            if len(set(counts)) > 1:
                raise ShardwiseError(
                    f"the ranks' data sets do not give the same samples: after {self.cursor:,} they have "
                    f"{', '.join(map(str, counts[:8]))} more for a batch",
                    fix="let every rank read the same stream; the loader takes each rank's part of it",
                )
            if not samples:
                return
            if self._goes_there:
                self._stream_state = self.dataset.state_dict()  # type: ignore[attr-defined]
            start, stop = self._parts.rows(len(samples))
            local_samples = samples[start:stop] or samples[:1]
            yield len(samples), self._parts.cut(self._collate(local_samples), len(samples))

    def _batches_of_stream(self) -> Iterator[list[Any]]:
        """Yield the samples of all ranks that remain in the epoch, batch by batch."""
        dataset: Any = self.dataset
        if self._loader is None:
            skipped = self.cursor
            if self._goes_there and self._stream_state is not None:
                dataset.load_state_dict(self._stream_state)
                skipped = 0
            stream = itertools.islice(iter(dataset), skipped, None)
            while len(samples := list(itertools.islice(stream, self.batch_size))) == self.batch_size:
                yield samples
            if samples and not self.drop_last:
                yield samples
            return
        batches, skipped = iter(self._loader), 0
        while skipped < self.cursor:
            batch = next(batches, None)
            skipped += len(batch or ())
            if batch is None or skipped > self.cursor:
                raise ShardwiseError(
                    f"the saved run had consumed {self.cursor:,} samples, and no batch of this loader ends there",
                    fix="give the same data set, batch_size and num_workers as when it was saved",
                )
        yield from batches

    @property
    def _goes_there(self) -> bool:
        """Return whether the data set returns to a position by itself. With workers its copies have read ahead."""
        has_both = all(hasattr(self.dataset, name) for name in ("state_dict", "load_state_dict"))
        return self._is_iterable and has_both and not self._num_workers

    def steps(self) -> Iterator[Sequence[int]]:
        """Yield the sample indices of each remaining step of the epoch, over all ranks."""
        length = self._length
        order: Sequence[int] = range(length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(stable_seed(self.seed, "epoch", str(self.epoch)))
            order = torch.randperm(length, generator=generator).tolist()
        for start in range(self.cursor, length, self.batch_size):
            samples = order[start : start + self.batch_size]
            if len(samples) == self.batch_size or not self.drop_last:
                yield samples

    def state_dict(self) -> dict[str, Any]:
        length = None if self._is_iterable else self._length
        state = {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "length": length,
            "shuffle": self.shuffle,
        }
        return state | ({"stream": self._stream_state} if self._goes_there else {})

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ShardwiseError if the state is of a data set with another length, seed or shuffle setting."""
        current = self.state_dict()
        for name, what in (("length", "samples in the data set"), ("seed", "seed"), ("shuffle", "shuffle")):
            if state[name] != current[name]:
                raise ShardwiseError(
                    f"the saved run had {what} {state[name]!r}, and this loader has {current[name]!r}: samples "
                    "would be lost or repeated",
                    fix="give the same data set and seed, or start a new epoch: load without data=",
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises ShardwiseError like ``check_state_dict``, and then changes nothing."""
        self.check_state_dict(state)
        self._turn += 1
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])
        self._stream_state = state.get("stream")


class _BatchSampler:
    """Batch sampler for torch's loader: this rank's sample indices. It runs ahead of the consumed batches."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for samples in self.loader.steps():
            start, stop = self.loader._parts.rows(len(samples))
            # A rank without samples loads another one, to get the right structure and shapes.
            indices = samples[start:stop] or samples[:1]
            yield [(self.loader.epoch, index) for index in indices]

    def __len__(self) -> int:
        return len(self.loader)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the host's random states of Python, NumPy and torch after the block."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)


class _Samples(Dataset[Any]):
    """Samples by (epoch, index). ``seed``: seeds the random generators for each sample; None: not seeded."""

    def __init__(self, dataset: Dataset[Any], seed: int | None) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        if self.seed is None:
            return self.dataset[key[1]]
        with same_random_numbers():
            seed = stable_seed(self.seed, "sample", *map(str, key))
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            return self.dataset[key[1]]


class _BatchParts:
    """Cuts this rank's part out of batches."""

    def __init__(self, par: torch.nn.Module) -> None:
        self.layouts: dict[str, Layout] = {}
        self.with_samples: frozenset[str] = frozenset()
        splits = splits_in(par)
        local = [path for path, split in splits.items() if split.inputs == "local"]
        if local and len(splits) > 1:
            what = f"par= contains several parallel modules ({', '.join(splits)}): it is unclear which gets the batches"
            raise ShardwiseError(what, fix="pass that module as par=")
        if local:
            split = splits[local[0]]
            self.position, self.layouts = split.device_number, split.plan.input_layouts
            self.with_samples = with_samples_in(split.plan)

    def rows(self, num_samples: int) -> Rows:
        """Return the range of a batch's samples that this rank needs for any input."""
        ranges = [self._range(self.layouts[name], 0, num_samples) for name in self.with_samples]
        return (min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else (0, num_samples)

    def cut(self, batch: Any, num_samples: int) -> Any:
        """Cut this rank's part out of the collated samples of ``rows``."""
        if not self.layouts:
            return batch
        first, last = self.rows(num_samples)
        leaves, spec = flatten_with_path(arguments_of(batch))
        parts = []
        for path, leaf in leaves:
            layout = self.layouts.get(leaf_name(path)) if isinstance(leaf, torch.Tensor) else None
            if layout is not None and leaf.ndim == len(layout.dims):
                with_samples = leaf_name(path) in self.with_samples
                for dim, size in enumerate(leaf.shape):
                    start, stop = self._range(layout, dim, num_samples if with_samples and dim == 0 else size)
                    offset = first if with_samples and dim == 0 else 0
                    leaf = leaf.narrow(dim, start - offset if last > first else 0, stop - start)
            parts.append(leaf)
        args, kwargs = unflatten(parts, spec)
        return kwargs if isinstance(batch, Mapping) else args if isinstance(batch, (tuple, list)) else args[0]

    def _range(self, layout: Layout, dim: int, size: int) -> Rows:
        axes = [axis for atom in layout.dims[dim] for axis in atom.axes]
        count, position = layout.mesh.size_of(axes), layout.mesh.index_along(axes, self.position)
        return position * size // count, (position + 1) * size // count


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and named arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}
