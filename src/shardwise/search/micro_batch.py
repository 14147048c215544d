"""The division of a step's samples into micro-batches: the user's sizes, checked, and the candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.untrusted_text import shorten_repr

MOST_SAMPLES = 2**40  # of a step: all its divisors are looked for


@dataclass(frozen=True)
class MicroBatchOptions:
    """Candidates for the micro-batch. ``step``: the samples of an optimizer step; ``candidates``: sizes that may be
    chosen, largest first. ``is_asked``: whether the user gave a size. Otherwise sizes other than the step are tried
    only if that does not fit, and the least of them comes second: if it does not fit, none does."""

    step: int
    candidates: tuple[int, ...]
    is_asked: bool = True


@dataclass(frozen=True)
class MicroBatchOutcome:
    """A micro-batch that was planned: the seconds of its step, its peak, and why it is impossible, if it is."""

    micro_batch: int
    passes: int
    step_seconds: float = 0.0
    num_bytes: float = 0.0
    refused: str = ""


def batches_of(
    samples: int | None, global_batch: int | None, micro_batch: int | None, num_devices: int, *, chooses: bool
) -> MicroBatchOptions | None:
    """Return the options for the user's sizes and example inputs of some ``samples``; None: one micro-batch.

    ``chooses``: whether plans are compared by price. Raises ShardwiseError if the sizes contradict each other.
    """
    if global_batch is None and micro_batch is None:
        if not chooses or not samples or samples > MOST_SAMPLES:
            return None
        step, *smaller = _divisors(samples, num_devices)
        return MicroBatchOptions(step, (step, *smaller[-1:], *smaller[:-1]), is_asked=False)
    _check_size("global_batch", global_batch)
    _check_size("micro_batch", micro_batch)
    if samples is None or not samples:
        raise ShardwiseError(
            "global_batch and micro_batch count samples, and no example input has dims", fix="leave them out"
        )
    step = samples if global_batch is None else global_batch
    size = micro_batch
    if size is None and samples != step:
        size = samples
        if step % samples:
            what = f"global_batch is {step}, the example inputs have {samples} samples: {step} / {samples} is not whole"
            fix = "give example inputs whose number of samples divides it, or that have global_batch samples"
            raise ShardwiseError(what, fix=fix, section="micro-batch-size")
    if size is None:
        return MicroBatchOptions(step, _divisors(step, num_devices) if chooses else (step,))
    if samples not in (size, step):
        what = f"the example inputs have {samples} samples, neither those of a micro-batch ({size}) nor those of the "
        fix = "give the inputs of one micro-batch, or of the whole global batch"
        raise ShardwiseError(f"{what}global batch ({step})", fix=fix, section="micro-batch-size")
    if size > step or step % size:
        what = f"micro_batch is {size}, global_batch is {step}: {step} / {size} = {step / size:.4g} passes"
        fix = (
            "choose a micro_batch that divides it (a step over fewer samples, the last of an epoch, may be of any size)"
        )
        raise ShardwiseError(what, fix=fix, section="micro-batch-size")
    return MicroBatchOptions(step, (size,))


def _check_size(name: str, size: Any) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ShardwiseError(f"{name} is {size!r}", fix="a whole number of samples from 1")
    if size is not None and size > MOST_SAMPLES:
        raise ShardwiseError(f"{name} is {shorten_repr(size)}", fix=f"at most {MOST_SAMPLES:,} samples")


def _divisors(step: int, num_devices: int) -> tuple[int, ...]:
    """Return the divisors of a batch that may be worth a try, largest first: all of it by powers of two, powers of two,
    and what divides over all devices."""

    def is_power(number: int) -> bool:
        return number & (number - 1) == 0

    divisors = {d for n in range(1, int(step**0.5) + 1) if step % n == 0 for d in (n, step // n)}
    tried = (d for d in divisors if is_power(d) or is_power(step // d) or d % num_devices == 0)
    return tuple(sorted(tried, reverse=True))
