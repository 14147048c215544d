"""The options of ``shardwise run --elastic``."""

from __future__ import annotations

import argparse

from shardwise.errors import LaunchError
from shardwise.launch.restart_policy import ElasticConfig

_DEFAULT = ElasticConfig()


def add_elastic_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("lost ranks")
    add = group.add_argument
    add("--elastic", action="store_true", help="continue without ranks or machines that die, hang or diverge")
    add("--min-ranks", type=int, metavar="K", help="the smallest number of ranks to continue with (default: all)")
    add("--spares", type=int, metavar="S", help="spare devices, which replace lost ones (0)")
    add(
        "--max-failures",
        type=int,
        metavar="N",
        help=f"end the job after this number of losses without a step in between ({_DEFAULT.max_failures})",
    )
    add(
        "--silent-after",
        type=float,
        metavar="SECONDS",
        help=f"a single rank without a heartbeat for this time is lost ({_DEFAULT.silent_seconds:g})",
    )
    add(
        "--idle-after",
        type=float,
        metavar="SECONDS",
        help="a rank that joins no collective for this time is lost, if all others wait in one or for messages of its "
        "stage (the time-out of collectives)",
    )
    add(
        "--wait-for-machines",
        type=float,
        metavar="SECONDS",
        help="wait this long for missing machines, at the start and if fewer than --min-ranks are left "
        f"({_DEFAULT.wait_seconds:g})",
    )


def elastic_settings(chosen: argparse.Namespace) -> ElasticConfig | None:
    """Return the elastic settings, None without ``--elastic``. Raises LaunchError for other options of the group."""
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
        what = f"{names} need --elastic"
        raise LaunchError(what, fix="add --elastic, or leave them out")
    return ElasticConfig(**settings, preload=chosen.preload) if chosen.elastic else None
