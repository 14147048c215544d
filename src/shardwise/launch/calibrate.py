"""``shardwise calibrate``: starts ranks that measure this machine, fits a cluster to what they measured, writes it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import family, format_cluster, load, parse
from shardwise.costs.fit import Measurements, fit_cluster, format_residuals, residuals
from shardwise.costs.machine import family_of
from shardwise.errors import LaunchError, ShardwiseError, problem
from shardwise.launch.elastic import folder_of_launcher
from shardwise.launch.launcher import launch

# By how much rounds of measurements are apart where nothing else runs, at most.
_QUIET = 0.25


def calibrate(
    output: str | Path,
    *,
    num_ranks: int | None = None,
    points: str | Path | None = None,
    like: str | None = None,
    tiny: bool = False,
) -> tuple[Cluster, list[str]]:
    """The cluster that this machine is, written to ``output`` (TOML), and a line per series of measurements: how far
    predictions are from them.

    ``num_ranks``: by default one per GPU, or two where there is none.
    ``points``: measurements made before (by ``launch.measure``, on several machines perhaps), instead of new ones.
    ``like``: a bundled cluster of the same hardware: its peaks are taken, and the part of them that was reached; by
    default that of the GPU's name. What was not measured is as there: links, where there is one GPU.
    A machine that was busy is told in the first line, with how far rounds were apart.
    Raises ShardwiseError if ranks fail or files cannot be read or written.
    """
    output = Path(output)
    if output.suffix != ".toml":
        raise ShardwiseError(
            problem(f"{output} is not a .toml file", fix="name it so: cluster files are found by that")
        )
    known = None if like is None else load(like)
    measured = _measure(num_ranks or _num_devices(), tiny) if points is None else _read(points)
    family_name, is_named = family_of(measured.device)
    if known is None and is_named:
        known = family(family_name)
    fitted = fit_cluster(measured, output.stem, known)
    # What is compared is what the file says, with the digits that it has.
    cluster = parse(format_cluster(fitted), str(output))
    lines = [*_busy(measured), *format_residuals(residuals(cluster, measured))]
    try:
        output.write_text(format_cluster(fitted, {**measured.facts, "residuals": lines}), encoding="utf-8")
    except OSError as error:
        raise ShardwiseError(problem(f"cannot write the cluster file: {error}", fix="name another file")) from error
    return cluster, lines


def _busy(measured: Measurements) -> list[str]:
    if measured.noise <= _QUIET:
        return []
    return [
        f"this machine was busy: half of all measurements took more than {1 + measured.noise:.2f} times as long in one"
        f" round as in another (on a quiet one less than {1 + _QUIET:g} times); end other programs (nvidia-smi, top)"
        " and measure again"
    ]


def _num_devices() -> int:
    import torch  # here: the command that starts ranks needs none of it

    return (torch.cuda.device_count() if torch.cuda.is_available() else 0) or 2


def _measure(num_ranks: int, tiny: bool) -> Measurements:
    with folder_of_launcher(tempfile.gettempdir(), "points") as folder:
        path = Path(folder) / "points.json"
        command: Sequence[str] = ["-m", "shardwise.launch.measure", str(path), *(["--tiny"] if tiny else [])]
        code = launch(command, num_ranks)
        if code:
            what = f"the ranks that measure ended with exit code {code}"
            raise LaunchError(problem(what, fix="see their output above; try fewer ranks: --ranks 2"))
        return _read(path)


def _read(path: str | Path) -> Measurements:
    try:
        return Measurements.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        what = f"cannot read the measurements {path}: {error!r}"
        raise ShardwiseError(problem(what, fix="make them: -m shardwise.launch.measure points.json")) from error
