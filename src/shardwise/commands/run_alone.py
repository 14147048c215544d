"""``shardwise run --alone RANK PLAN MODEL``: measure one rank of a plan without the others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shardwise.commands.models import add_model, model_of
from shardwise.progress import show_progress


def run_rank_alone(rank: int, arguments: Sequence[str]) -> int:
    """Print the measured and the predicted step of a rank. Return the exit code."""
    parser = argparse.ArgumentParser(prog=f"shardwise run --alone {rank}")
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    add_model(parser)
    parser.add_argument("--steps", type=int, default=3, help="measured steps (3)")
    parser.add_argument("--device", metavar="DEVICE", help="device, such as cuda:1 or cpu (the GPU, if there is one)")
    parser.add_argument("--compile", action="store_true", help="compile the program, as on GPUs")
    chosen = parser.parse_args(arguments)
    from shardwise.plans.plan import Plan
    from shardwise.runtime.single_rank import run_alone

    plan = Plan.load(chosen.plan)
    model = model_of(chosen)
    with show_progress(f"running rank {rank} of {plan.num_ranks}"):
        measured = run_alone(
            model.module,
            model.inputs,
            plan,
            rank,
            loss=model.loss,
            device=chosen.device,
            compile=chosen.compile,
            steps=chosen.steps,
        )
    print(measured)
    return 0
