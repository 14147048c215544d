"""``shardwise calibrate``: measure this machine with several ranks, fit a cluster model, and write it to a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import family, format_cluster, load, parse
from shardwise.costs.fit import Measurements, fit_cluster, format_residuals, residuals
from shardwise.costs.machine import family_of
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch.elastic import folder_of_launcher
from shardwise.launch.launcher import launch

# Largest relative difference between rounds of measurements on an idle machine.
_QUIET = 0.25


def calibrate(
    output: str | Path,
    *,
    num_ranks: int | None = None,
    points: str | Path | None = None,
    like: str | None = None,
    tiny: bool = False,
) -> tuple[Cluster, list[str]]:
    """Measure this machine and write its cluster description to ``output``.

    Args:
        output: path of the cluster file, which must end in ``.toml``.
        num_ranks: number of ranks that measure; by default one per GPU, or two without GPUs.
        points: a file of earlier measurements (by ``launch.measure``, on several machines if needed) to use instead.
        like: name of a bundled cluster of the same hardware, by default that of the GPU's name. Peaks, and values that
            were not measured (such as links with a single GPU), are taken from it.
        tiny: measure only a few small sizes, to test that calibration works.

    Returns:
        The fitted cluster, and one line per series of measurements with the error of the predictions. If the machine
        was busy, the first line is a warning with the difference between rounds.

    Raises:
        ShardwiseError: ranks fail, or files cannot be read or written.
    """
    output = Path(output)
    if output.suffix != ".toml":
        raise ShardwiseError(f"{output} is not a .toml file", fix="give a name that ends in .toml")
    reference = None if like is None else load(like)
    measured = _measure(num_ranks, tiny) if points is None else _read(points)
    family_name, is_named = family_of(measured.device)
    if reference is None and is_named:
        reference = family(family_name)
    fitted = fit_cluster(measured, output.stem, reference)
    # Compare the cluster as the file stores it, with rounded digits.
    cluster = parse(format_cluster(fitted), str(output))
    lines = format_residuals(residuals(cluster, measured))
    if measured.noise > _QUIET:
        busy = (
            f"this machine was busy: half of all measurements took more than {1 + measured.noise:.2f} times as long in "
            f"one round as in another (on a quiet one less than {1 + _QUIET:g} times); end other programs (nvidia-smi, "
            "top) and measure again"
        )
        lines = [busy, *lines]
    try:
        output.write_text(format_cluster(fitted, {**measured.facts, "residuals": lines}), encoding="utf-8")
    except OSError as error:
        raise ShardwiseError(f"cannot write the cluster file: {error}", fix="name another file") from error
    return cluster, lines


def _measure(num_ranks: int | None, tiny: bool) -> Measurements:
    import torch  # imported late: the command that starts ranks does not need torch

    num_ranks = num_ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 0) or 2
    with folder_of_launcher(tempfile.gettempdir(), "points") as folder:
        path = Path(folder) / "points.json"
        command: Sequence[str] = ["-m", "shardwise.launch.measure", str(path), *(["--tiny"] if tiny else [])]
        code = launch(command, num_ranks)
        if code:
            what = f"the ranks that measure ended with exit code {code}"
            raise LaunchError(what, fix="see their output above; try fewer ranks: --ranks 2")
        return _read(path)


def _read(path: str | Path) -> Measurements:
    try:
        return Measurements.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        what = f"cannot read the measurements {path}: {error!r}"
        raise ShardwiseError(what, fix="make them: -m shardwise.launch.measure points.json") from error
