"""The options of ``shardwise run --elastic``."""

from __future__ import annotations

import argparse

from shardwise.errors import LaunchError, problem
from shardwise.launch.restart_policy import ElasticConfig

_DEFAULT = ElasticConfig()


def add_elastic_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks that are lost")
    add = group.add_argument
    add("--elastic", action="store_true", help="go on without a rank, or a machine, that dies, hangs or differs")
    add("--min-ranks", type=int, metavar="K", help="go on with fewer ranks, down to these (as many as start)")
    add("--spares", type=int, metavar="S", help="further devices, which take the places of lost ones (0)")
    add(
        "--max-failures",
        type=int,
        metavar="N",
        help=f"losses without a step in between after which the job ends ({_DEFAULT.max_failures})",
    )
    add(
        "--silent-after",
        type=float,
        metavar="SECONDS",
        help=f"a rank that alone gives no sign of life for so long is lost ({_DEFAULT.silent_seconds:g})",
    )
    add(
        "--idle-after",
        type=float,
        metavar="SECONDS",
        help="so is one that comes to no collective for so long while all others wait in one, or for messages of "
        "its stage (their time-out)",
    )
    add(
        "--wait-for-machines",
        type=float,
        metavar="SECONDS",
        help="how long a job of several machines waits for those that are missing, at its start and where fewer than "
        f"--min-ranks are left ({_DEFAULT.wait_seconds:g})",
    )


def elastic_settings(chosen: argparse.Namespace) -> ElasticConfig | None:
    """None without ``--elastic``. Raises LaunchError for its options without it."""
    settings = {
        "min_ranks": chosen.min_ranks,
        "spares": chosen.spares,
        "max_failures": chosen.max_failures,
        "silent_seconds": chosen.silent_after,
        "idle_seconds": chosen.idle_after,
        "wait_seconds": chosen.wait_for_machines,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if not chosen.elastic and settings:
        names = "--min-ranks, --spares, --max-failures, --silent-after, --idle-after and --wait-for-machines"
        what = f"{names} are of elastic jobs"
        raise LaunchError(problem(what, fix="add --elastic, or leave them out"))
    return ElasticConfig(**settings, preload=chosen.preload) if chosen.elastic else None


__all__ = ["add_elastic_arguments", "elastic_settings"]
