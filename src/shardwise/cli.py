"""The command ``shardwise``; ``COMMANDS`` lists its subcommands.

``shardwise run -n 8 train.py --lr 3e-4`` starts eight ranks of a script on this machine. ``shardwise run --hostfile
hosts.txt train.py`` runs on each of several machines and starts the ranks that the file gives it. ``shardwise calibrate
-o my.toml`` measures this machine, ``shardwise clusters`` lists the known clusters. ``shardwise plan model.py:build
--cluster h100-16x8 -o plan.json`` plans the model that ``build()`` returns. The other subcommands are in
``commands.plans``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import shtab

from shardwise.commands.command import EXIT_USAGE, Command, Parser, add_output, as_options
from shardwise.commands.json_output import cluster_data, show
from shardwise.commands.models import BuildError
from shardwise.commands.plans import PLAN_COMMANDS, run_rank_alone
from shardwise.commands.recipe import add_recipe, write_recipe
from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import families, format_cluster
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.hosts import Host, find_host, read_hostfile, read_rank_table
from shardwise.launch.job import JobSettings
from shardwise.launch.launcher import JobMachines, launch
from shardwise.launch.restart_policy import ElasticConfig
from shardwise.progress import show_progress

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
    add(
        "--keep-processes",
        action="store_true",
        default=None,
        help="begin again in the processes of the ranks that are left, where they come to a collective within seconds",
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
        "keeps": chosen.keep_processes,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if not chosen.elastic and settings:
        names = "--min-ranks, --spares, --max-failures, --silent-after, --idle-after, --wait-for-machines"
        what = f"{names} and --keep-processes need --elastic"
        raise LaunchError(what, fix="add --elastic, or leave them out")
    return ElasticConfig(**settings, preload=chosen.preload) if chosen.elastic else None


EXIT_BUILD = 1
EXIT_PIPE = 141  # the code that shells give a program ended by SIGPIPE
EXIT_INTERRUPT = 130  # and by SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``shardwise`` and return its exit code, 2 for any error that the user can fix."""
    parser = Parser(prog="shardwise", description="Trains an ordinary PyTorch model on many devices.")
    parser.add_argument("--version", action="version", version=_versions())
    shtab.add_argument_to(parser, "--print-completion", help="print a shell completion script")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        if command.has_json:
            subparser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
        subparser.set_defaults(execute=command.execute, options=subparser.options)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.execute(chosen)
        if sys.stdout is not None:  # closed before it started: >&-
            sys.stdout.flush()
    except ShardwiseError as error:
        print(f"shardwise: {as_options(str(error), chosen)}", file=sys.stderr)
        return EXIT_USAGE
    except BuildError as error:
        error.show()
        return EXIT_BUILD
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    return code


def _versions() -> str:
    """Return a text such as ``shardwise 0.1.0 (torch 2.13.0, Python 3.11.7)``."""
    versions = []
    for package in ("shardwise", "torch"):
        try:
            versions.append(version(package))
        except PackageNotFoundError:  # a checkout on PYTHONPATH
            versions.append("not installed")
    return f"shardwise {versions[0]} (torch {versions[1]}, Python {sys.version.split()[0]})"


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "shardwise run -n NUM_RANKS [options] (script.py | -m module) [arguments of the script ...]"
    add = parser.add_argument
    add("-n", "--num-ranks", type=int, help="ranks to start on this machine, usually one per GPU")
    add("-m", "--module", action="store_true", help="the script is the name of a module, as in python -m")
    add("--nnodes", type=int, metavar="N", help="machines that take part, each with its own shardwise run (1)")
    add("--node-rank", type=int, metavar="I", help="number of this machine, from 0 (0; with a file: found by name)")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--hostfile", metavar="FILE", help="machines and their ranks, one per line: node1 slots=8")
    files.add_argument("--rank-table", metavar="FILE", help="the same, as the JSON rank table of an Ascend cluster")
    add("--master-addr", metavar="HOST", help="address of machine 0 (127.0.0.1; with a file: the host of rank 0)")
    add("--master-port", type=int, metavar="PORT", help="a free port there (one machine: any; with a file: 29500)")
    add("--log-dir", metavar="DIR", help="write the whole output of every rank to DIR, as rank-3.log")
    add("--all", action="store_true", help="show the output of every rank, as mpirun does")
    add("--tag", action="store_true", help="show the output of every rank, each line prefixed with [rank 3]")
    add(
        "--exit-grace",
        type=float,
        metavar="SECONDS",
        help="stop the remaining ranks this long after one has ended with exit code 0 (never)",
    )
    add(
        "--preload",
        type=lambda names: tuple(filter(None, names.split(","))),
        default=(),
        metavar="MODULES",
        help="import these once, in a process that forks all ranks: torch,transformers",
    )
    add_elastic_arguments(parser)
    add(
        "--alone",
        type=int,
        metavar="RANK",
        help="measure one rank of a plan here, without the others: shardwise run --alone RANK PLAN MODEL",
    )
    add("command", nargs=argparse.REMAINDER, metavar="script.py ...", help="the script and its arguments")


def _run(chosen: argparse.Namespace) -> int:
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    if chosen.alone is not None:
        _check_alone(chosen)
        return run_rank_alone(chosen.alone, command)
    hosts, node_rank = _hosts(chosen)
    nnodes = 1 if chosen.nnodes is None else chosen.nnodes
    return launch(
        ["-m", *command] if chosen.module else command,
        chosen.num_ranks,
        JobMachines(hosts, nnodes, node_rank, chosen.master_addr, chosen.master_port),
        JobSettings(chosen.log_dir, chosen.tag, chosen.all, exit_grace_seconds=chosen.exit_grace),
        elastic=elastic_settings(chosen),
        preload=chosen.preload,
    )


def _check_alone(chosen: argparse.Namespace) -> None:
    """Raise LaunchError if ``--alone`` is combined with an option for several ranks."""
    others = {"-n": chosen.num_ranks, "--nnodes": chosen.nnodes, "-m": chosen.module or None}
    others |= {"--hostfile": chosen.hostfile, "--rank-table": chosen.rank_table, "--elastic": chosen.elastic or None}
    options = [option for option, value in others.items() if value is not None]
    if options:
        what = f"--alone runs one rank, and {options[0]} is for several"
        raise LaunchError(what, fix=f"leave out {options[0]}: shardwise run --alone RANK PLAN MODEL")


def _hosts(chosen: argparse.Namespace) -> tuple[tuple[Host, ...], int]:
    """Return the machines of the hostfile or rank table, if one is given, and the number of this machine."""
    path = chosen.hostfile or chosen.rank_table
    if path is None:
        return (), chosen.node_rank or 0
    if chosen.nnodes is not None or (chosen.rank_table and chosen.num_ranks is not None):
        option = "--nnodes" if chosen.nnodes is not None else "-n"
        raise LaunchError(f"{option} and {path} both give the number", fix=f"leave out {option}")
    hosts = read_hostfile(path, chosen.num_ranks) if chosen.hostfile else read_rank_table(path)
    return hosts, find_host(hosts, path) if chosen.node_rank is None else chosen.node_rank


def _add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_output(parser, "the cluster file to write, such as my.toml")
    add("-n", "--ranks", type=int, metavar="N", help="number of ranks that measure (one per GPU; without GPUs 2)")
    add("--like", metavar="CLUSTER", help="a bundled cluster of the same hardware, for the peaks: h100")
    add("--points", metavar="FILE", help="fit a file of shardwise.launch.measure instead of measuring")
    add("--tiny", action="store_true", help="measure only a few small sizes, as a test")


def _calibrate(chosen: argparse.Namespace) -> int:
    from shardwise.launch.calibrate import calibrate

    with show_progress("measuring this machine"):
        cluster, lines = calibrate(
            chosen.output, num_ranks=chosen.ranks, points=chosen.points, like=chosen.like, tiny=chosen.tiny
        )
    texts = [f"{cluster}\n\npredicted against measured seconds, by relative error:", *(f"  {line}" for line in lines)]
    texts.append(f"\nwritten to {chosen.output}: sw.Cluster.load({chosen.output!r})")
    data = {"written": chosen.output, "cluster": cluster_data(cluster), "fits": lines}
    show("\n".join(texts), chosen, lambda: data)
    return 0


def _add_clusters_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show the figures and sources of this cluster: h100-16x8, or a file")


def _clusters(chosen: argparse.Namespace) -> int:
    if chosen.name is not None:
        cluster = Cluster.load(chosen.name)
        show(format_cluster(cluster).rstrip(), chosen, lambda: cluster_data(cluster))
        return 0
    clusters = [Cluster.load(family) for family in families()]
    more = "h100-16x8 is 16 such nodes. shardwise clusters h100-16x8 shows all figures and where they come from."
    show("\n".join([*map(str, clusters), more]), chosen, lambda: list(map(cluster_data, clusters)))
    return 0


def _recipe(chosen: argparse.Namespace) -> int:
    return write_recipe(chosen, main)


COMMANDS: tuple[Command, ...] = (
    *PLAN_COMMANDS,
    Command("recipe", "write a training script and a plan for a published model", add_recipe, _recipe, has_json=False),
    Command("run", "start the ranks of a training script on this machine", _add_run_arguments, _run, has_json=False),
    Command("calibrate", "measure this machine and write a cluster file", _add_calibrate_arguments, _calibrate),
    Command("clusters", "list the bundled clusters, or show one", _add_clusters_arguments, _clusters),
)

if __name__ == "__main__":
    sys.exit(main())
