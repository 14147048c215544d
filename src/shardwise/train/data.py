"""``sw.DataLoader``: one order of samples for the whole job, of which every rank reads its part.

The order of an epoch is a permutation that follows from the seed and the epoch alone. A step takes the next samples of
it, and a rank of those the ones that the plan's layout of the inputs gives it. Where the run is, is one number, the
samples handed out in this epoch: it means the same for any number of ranks and any size of batch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, default_collate

from shardwise.errors import ShardwiseError, problem
from shardwise.graph.trees import flatten_with_path, leaf_name, unflatten
from shardwise.layouts.layout import Layout
from shardwise.runtime.initial.materialize import stable_seed
from shardwise.train.agreement import gather_values
from shardwise.train.parts import splits_in

Rows = tuple[int, int]  # [start, stop) of a batch


class DataLoader:
    """Batches of a data set, epoch after epoch with every ``for``; alike on every rank.

    ``dataset``: with ``len`` and ``[i]``, or an iterable one. ``par``: the parallel module that they are for, by itself
    or in another one, or any other module: one made with ``inputs="local"`` gets on each rank the samples of its own
    part, and of inputs that are split in other dims, too (sequence, features), its part of these; any other gets whole
    batches. ``batch_size``: of the whole step. ``shuffle``: another permutation in every epoch. ``drop_last``: leave
    out a last, smaller batch. ``seed_samples``: seed the generators of Python, NumPy and torch for every sample, so
    that random augmentations, too, are those of the seed, whatever ranks and workers there are. ``collate_fn`` and
    ``options``: as of ``torch.utils.data.DataLoader`` (``num_workers``, ``pin_memory``, ``persistent_workers``, ...);
    what it makes of samples must not depend on which they are together (pad to a fixed length).

    Every rank reads the whole of an iterable data set, which must give the same samples on each, and keeps its part;
    how many there were in a batch is compared between ranks. Its workers are not used.

    ``state_dict()`` says where the run is, counted in samples that were handed out; ``load_state_dict`` goes on there.
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
            raise ShardwiseError(f"batch_size is the number of samples of a step, from 1, not {batch_size!r}")
        taken = {"sampler", "batch_sampler"} & options.keys()
        if taken:
            what = f"{min(taken)}= would choose samples, and the loader does"
            raise ShardwiseError(problem(what, fix="give the data set in the order that is meant, and shuffle=False"))
        self.dataset, self.par, self.batch_size = dataset, par, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self.cursor = self._turn = 0
        self._collate = collate_fn or default_collate
        self._is_iterable = isinstance(dataset, IterableDataset)
        self._parts = _BatchParts(par)
        self._loader: TorchLoader[Any] | None = None
        if not self._is_iterable:
            samples: Any = _Seeded(dataset, seed) if seed_samples else _Samples(dataset)
            sampler: Any = _BatchSampler(self)
            self._loader = TorchLoader(samples, batch_sampler=sampler, collate_fn=self._collate, **options)
            if not self._length:
                raise ShardwiseError("the data set has no samples")
            if splits_in(par):
                self._check_alike()
        elif shuffle or seed_samples or options:
            what = "an iterable data set gives its samples in its own order, in this process"
            raise ShardwiseError(problem(what, fix="shuffle=False, no seed_samples, and no workers; or one with len"))

    def _check_alike(self) -> None:
        """Raise ShardwiseError, on all ranks, where they would not draw the same samples."""
        settings = {
            "samples in the data set": self._length,
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
                    raise ShardwiseError(problem(what, fix="give every rank the same data set and settings"))

    @property
    def _length(self) -> int:
        """Of the data set, in samples."""
        dataset: Any = self.dataset
        return len(dataset)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        if self._is_iterable:
            raise TypeError("an iterable data set does not say how many samples it has")
        whole, rest = divmod(self._length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch; afterwards the next one begins. Raises ShardwiseError where a later iteration has
        begun, or the place in the data is another one: it is one for all."""
        self._turn = turn = self._turn + 1
        for count, batch in self._streamed() if self._loader is None else self._loaded(self._loader):
            self._check_turn(turn)
            self.cursor += count
            yield batch
        self._check_turn(turn)
        self.epoch, self.cursor = self.epoch + 1, 0

    def _check_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise ShardwiseError(
                problem(
                    "the loader's place in the data was changed during an iteration, by another one or by "
                    "load_state_dict: samples would be lost or repeated",
                    fix="make a loader of its own for evaluation, and begin a new loop where the place is loaded",
                )
            )

    def _loaded(self, loader: TorchLoader[Any]) -> Iterator[tuple[int, Any]]:
        """(samples of the step, this rank's part of its batch)."""
        for batch in loader:
            count = min(self.batch_size, self._length - self.cursor)
            yield count, self._parts.cut(batch, count)

    def _streamed(self) -> Iterator[tuple[int, Any]]:
        dataset: Any = self.dataset
        stream = itertools.islice(iter(dataset), self.cursor, None)
        while True:
            samples = list(itertools.islice(stream, self.batch_size))
            counts = gather_values(len(samples))
            if len(set(counts)) > 1:
                raise ShardwiseError(
                    problem(
                        f"the ranks' data sets do not give the same samples: after {self.cursor:,} they have "
                        f"{', '.join(map(str, counts[:8]))} more for a batch",
                        fix="let every rank read the same stream; the loader takes each rank's part of it",
                    )
                )
            if len(samples) < self.batch_size and (self.drop_last or not samples):
                return
            start, stop = self._parts.rows(len(samples))
            local_samples = samples[start:stop] or samples[:1]
            yield len(samples), self._parts.cut(self._collate(local_samples), len(samples))

    def steps(self) -> Iterator[Sequence[int]]:
        """The samples of every step of the rest of the epoch, over all ranks."""
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
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "length": length,
            "shuffle": self.shuffle,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ShardwiseError for a data set of another length, and for a loader that is shuffled otherwise."""
        current = self.state_dict()
        for name, what in (("length", "samples in the data set"), ("seed", "seed"), ("shuffle", "shuffle")):
            if state[name] != current[name]:
                raise ShardwiseError(
                    problem(
                        f"the run had {what} {state[name]!r}, and goes on with {current[name]!r}: samples would be "
                        "lost or repeated",
                        fix="give the same data set and seed, or start a new epoch: load without data=",
                    )
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises as ``check_state_dict``, and goes on where it was as before."""
        self.check_state_dict(state)
        self._turn += 1
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])


class _BatchSampler:
    """What torch's loader asks for the samples of this rank, batch by batch. It goes on ahead of what is handed out."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for samples in self.loader.steps():
            start, stop = self.loader._parts.rows(len(samples))
            # A rank without a sample learns from another what one looks like.
            indices = samples[start:stop] or samples[:1]
            yield [(self.loader.epoch, index) for index in indices]

    def __len__(self) -> int:
        return len(self.loader)


class _Samples(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.dataset[key[1]]


class _Seeded(_Samples):
    """Every sample finds generators of its own, and the process those that it had."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        super().__init__(dataset)
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed = stable_seed(self.seed, "sample", *map(str, key))
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            return super().__getitem__(key)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


class _BatchParts:
    """Which part of a batch is this rank's."""

    def __init__(self, par: torch.nn.Module) -> None:
        self.layouts: dict[str, Layout] = {}
        self.with_samples: frozenset[str] = frozenset()
        splits = splits_in(par)
        local = [path for path, split in splits.items() if split.inputs == "local"]
        if local and len(splits) > 1:
            what = f"the batches are for one of the parallel modules {', '.join(splits)}, and nothing says for which"
            raise ShardwiseError(problem(what, fix="give that one as par="))
        if local:
            split = splits[local[0]]
            self.position, self.layouts = split.device_number, split.plan.input_layouts
            samples = next((entry.shape[0] for entry in split.plan.inputs if entry.shape), None)
            self.with_samples = frozenset(
                entry.name for entry in split.plan.inputs if entry.shape and entry.shape[0] == samples
            )

    def rows(self, num_samples: int) -> Rows:
        """The samples of a batch that this rank needs for some input."""
        ranges = [self._range(self.layouts[name], 0, num_samples) for name in self.with_samples]
        return (min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else (0, num_samples)

    def cut(self, batch: Any, num_samples: int) -> Any:
        """This rank's part of what was collated of its samples."""
        if not self.layouts:
            return batch
        first, last = self.rows(num_samples)
        arguments = ((), dict(batch)) if isinstance(batch, Mapping) else (_positional(batch), {})
        leaves, spec = flatten_with_path(arguments)
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
        """[start, stop) of a dim of an input of so many rows, as ranks that pass parts divide it."""
        axes = [axis for atom in layout.dims[dim] for axis in atom.axes]
        coordinates = layout.mesh.coordinates(self.position)
        count, position = layout.mesh.size_of(axes), 0
        for axis in axes:
            position = position * layout.mesh.sizes[axis] + coordinates[axis]
        return position * size // count, (position + 1) * size // count


def _positional(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


__all__ = ["DataLoader"]
