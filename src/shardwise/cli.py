"""The command ``shardwise``: one line per subcommand in ``COMMANDS``.

``shardwise run -n 8 train.py --lr 3e-4`` starts eight ranks of a script on this machine; ``shardwise run --hostfile
hosts.txt train.py``, on each of several machines, the ranks that the file gives it. ``shardwise calibrate -o my.toml``
measures this machine, ``shardwise clusters`` shows the clusters that are known. ``shardwise plan model.py:build
--cluster h100-16x8 -o plan.json`` plans what ``build()`` returns; ``fits``, ``explain``, ``top``, ``diff``, ``verify``
and ``check`` ask about models and plans (``commands.plans``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import shtab

from shardwise.commands.command import Command, add_output
from shardwise.commands.elastic_options import add_elastic_arguments, elastic_settings
from shardwise.commands.json_output import add_json, cluster_data, show
from shardwise.commands.models import BuildError
from shardwise.commands.plans import PLAN_COMMANDS
from shardwise.commands.run_alone import run_rank_alone
from shardwise.costs.cluster import Cluster
from shardwise.costs.cluster_file import families, format_cluster
from shardwise.errors import LaunchError, ShardwiseError, problem
from shardwise.hosts import Host, find_host, read_hostfile, read_rank_table
from shardwise.launch.calibrate import calibrate
from shardwise.launch.launcher import launch
from shardwise.progress import show_progress

EXIT_USAGE = 2
EXIT_BUILD = 1
EXIT_PIPE = 141  # as shells say it of a program that SIGPIPE ended
EXIT_INTERRUPT = 130  # or SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``shardwise``. Returns the exit code: 2 for whatever the user can mend in the command."""
    parser = argparse.ArgumentParser(prog="shardwise", description="Trains an ordinary PyTorch model on many devices.")
    parser.add_argument("--version", action="version", version=_versions())
    shtab.add_argument_to(parser, "--print-completion", help="a script for the shell, which completes commands")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(execute=command.execute)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.execute(chosen)
        if sys.stdout is not None:  # closed before it started: >&-
            sys.stdout.flush()
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BuildError as error:
        error.show()
        return EXIT_BUILD
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:  # whoever read the output has enough of it: head, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    return code


def _versions() -> str:
    """For example ``shardwise 0.1.0 (torch 2.13.0, Python 3.11.7)``."""
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
    add("--node-rank", type=int, metavar="I", help="which of them this one is, from 0 (0; of a file: found by name)")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--hostfile", metavar="FILE", help="the machines and their ranks, one a line: node1 slots=8")
    files.add_argument("--rank-table", metavar="FILE", help="the same as the JSON file of an Ascend cluster")
    add("--master-addr", metavar="HOST", help="address of machine 0 (127.0.0.1; with a file: the host of rank 0)")
    add("--master-port", type=int, metavar="PORT", help="a free port there (one machine: found; with a file: 29500)")
    add("--log-dir", metavar="DIR", help="keep the whole output of rank 3 in DIR/rank-3.log")
    add("--all", action="store_true", help="show the output of every rank, as mpirun does")
    add("--tag", action="store_true", help="show the output of every rank, each line behind [rank 3]")
    add(
        "--exit-grace",
        type=float,
        metavar="SECONDS",
        help="when a rank has ended with exit code 0, stop those that still run after this time (never)",
    )
    add(
        "--preload",
        type=lambda names: tuple(filter(None, names.split(","))),
        default=(),
        metavar="MODULES",
        help="import these once, in a process from which all ranks are forked: torch,transformers",
    )
    add_elastic_arguments(parser)
    add(
        "--alone",
        type=int,
        metavar="RANK",
        help="measure one rank's part of a plan here, without the others: shardwise run --alone RANK PLAN MODEL",
    )
    add("command", nargs=argparse.REMAINDER, metavar="script.py ...", help="the script and its arguments")


def _run(chosen: argparse.Namespace) -> int:
    command = chosen.command[1:] if chosen.command[:1] == ["--"] else chosen.command
    if chosen.alone is not None:
        _check_alone(chosen)
        return run_rank_alone(chosen.alone, command)
    hosts, node_rank = _hosts(chosen)
    return launch(
        ["-m", *command] if chosen.module else command,
        chosen.num_ranks,
        hosts=hosts,
        nnodes=1 if chosen.nnodes is None else chosen.nnodes,
        node_rank=node_rank,
        master_addr=chosen.master_addr,
        master_port=chosen.master_port,
        log_dir=chosen.log_dir,
        tag=chosen.tag,
        show_all=chosen.all,
        exit_grace_seconds=chosen.exit_grace,
        elastic=elastic_settings(chosen),
        preload=chosen.preload,
    )


def _check_alone(chosen: argparse.Namespace) -> None:
    """Raise LaunchError for options of a job of several ranks."""
    others = {"-n": chosen.num_ranks, "--nnodes": chosen.nnodes, "-m": chosen.module or None}
    others |= {"--hostfile": chosen.hostfile, "--rank-table": chosen.rank_table, "--elastic": chosen.elastic or None}
    options = [option for option, value in others.items() if value is not None]
    if options:
        what = f"--alone runs one rank without others, and {options[0]} is about several"
        raise LaunchError(problem(what, fix=f"leave out {options[0]}: shardwise run --alone RANK PLAN MODEL"))


def _hosts(chosen: argparse.Namespace) -> tuple[tuple[Host, ...], int]:
    """The machines of a hostfile or a rank table, if there is one, and which of them this is."""
    path = chosen.hostfile or chosen.rank_table
    if path is None:
        return (), chosen.node_rank or 0
    if chosen.nnodes is not None or (chosen.rank_table and chosen.num_ranks is not None):
        option = "--nnodes" if chosen.nnodes is not None else "-n"
        raise LaunchError(problem(f"{option} and {path} both say how many there are", fix=f"leave out {option}"))
    hosts = read_hostfile(path, chosen.num_ranks) if chosen.hostfile else read_rank_table(path)
    return hosts, find_host(hosts, path) if chosen.node_rank is None else chosen.node_rank


def _add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_output(parser, "the cluster file to write, such as my.toml")
    add("-n", "--ranks", type=int, metavar="N", help="ranks that measure (one per GPU; without GPUs 2)")
    add("--like", metavar="CLUSTER", help="a bundled cluster of the same hardware, whose peaks are known: h100")
    add("--points", metavar="FILE", help="fit what shardwise.launch.measure wrote, instead of measuring")
    add("--tiny", action="store_true", help="measure a few small sizes only: to see whether it works")
    add_json(parser)


def _calibrate(chosen: argparse.Namespace) -> int:
    with show_progress("measuring this machine"):
        cluster, lines = calibrate(
            chosen.output, num_ranks=chosen.ranks, points=chosen.points, like=chosen.like, tiny=chosen.tiny
        )
    said = [f"{cluster}\n\npredicted against measured seconds, by relative error:", *(f"  {line}" for line in lines)]
    said.append(f"\nwritten to {chosen.output}: sw.Cluster.load({chosen.output!r})")
    data = {"written": chosen.output, "cluster": cluster_data(cluster), "fits": lines}
    show("\n".join(said), chosen, lambda: data)
    return 0


def _add_clusters_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a bundled name (h100-16x8) or a file: show its figures and sources")
    add_json(parser)


def _clusters(chosen: argparse.Namespace) -> int:
    if chosen.name is not None:
        cluster = Cluster.load(chosen.name)
        show(format_cluster(cluster).rstrip(), chosen, lambda: cluster_data(cluster))
        return 0
    clusters = [Cluster.load(family) for family in families()]
    more = "h100-16x8 is 16 such nodes. shardwise clusters h100-16x8 shows all figures and where they come from."
    show("\n".join([*map(str, clusters), more]), chosen, lambda: list(map(cluster_data, clusters)))
    return 0


COMMANDS: tuple[Command, ...] = (
    *PLAN_COMMANDS,
    Command("run", "start the ranks of a training script on this machine", _add_run_arguments, _run),
    Command("calibrate", "measure this machine and write a cluster file", _add_calibrate_arguments, _calibrate),
    Command("clusters", "show the clusters that plans can be made for", _add_clusters_arguments, _clusters),
)

if __name__ == "__main__":
    sys.exit(main())
