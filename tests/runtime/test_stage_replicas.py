"""``check_replicas=`` under a plan of stages: what differs is named on all ranks, those of other stages too, and
nothing else changes."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message
from runtime.staged_model import Staged, staged_batch
from runtime.test_pipelines_on_ranks import own_stages
from runtime.test_replicas import Nudge, nudged
from shardwise.plans.schedule import SCHEDULES
from shardwise.runtime.local_shards import shard

WRONG = 3  # the rank that differs, of the last place


def break_stages(schedule: str) -> dict[str, str]:
    """On a rank of two places of two: what is said about everything that goes wrong on one rank, or one place."""
    torch.manual_seed(0)
    module = Staged(dropout=0.0).double()
    reference = copy.deepcopy(module)
    strategies = {"blocks.1": "n@tp", "blocks.2": "n@tp"}
    stages = 2 * SCHEDULES[schedule].stages_per_place
    ids, labels = staged_batch(8)
    plan = sw.plan(
        module,
        (ids, labels),
        4,
        mesh=sw.Mesh(tp=2),
        stages=stages,
        schedule=schedule,
        micro_batch=2,
        strategies=strategies,
        search="sharding_propagation",
    )
    wrong = dist.get_rank() == WRONG
    par = sw.parallelize(module, plan, check_replicas=1)
    check_gradients(par, reference, (ids, labels))
    other = sw.parallelize(copy.deepcopy(reference), plan, check_replicas=2)
    found = {"nothing": message(lambda: par.step(ids, labels))}
    changed = ids.clone()
    changed[0, 0] += int(wrong)
    found["batch"] = message(lambda: par.step(changed, labels))
    # Where a norm is whole on both ranks: in stage 0, and in stage 1 of four.
    nudges = dist.get_rank() == (1 if stages == 2 else WRONG)
    with Nudge(torch.ops.aten.native_layer_norm.default if nudges else None):
        found["operator"] = message(lambda: par.step(ids, labels))
        assert message(lambda: other.step(ids, labels)).split("\n")[0] == found["operator"].split("\n")[0]
        found["every second step"] = message(lambda: other.step(ids, labels))
    par.zero_grad()
    held = {name: own.layouts[name] for own in own_stages(par) for name in own.layouts}
    own = next(n for n, _ in par.named_parameters() if not held[n].positions and n != "tokens.weight")
    parameter = par.get_parameter(own)
    hook = parameter.register_hook(lambda grad: nudged(grad) if wrong else None)
    found["gradient"] = message(lambda: par.step(ids, labels))
    hook.remove()
    with torch.no_grad():
        before = parameter.detach().clone()
        parameter.copy_(nudged(parameter) if wrong else parameter)
        found["parameter"] = message(lambda: par.step(ids, labels))
        parameter.copy_(before)
        if schedule == "1F1B":  # folded stages have the tied weight on one place
            tokens = par.get_parameter("tokens.weight")
            # Both copies of one place: only the other place tells.
            tokens.copy_(nudged(tokens) if dist.get_rank() >= 2 else tokens)
            found["shared"] = message(lambda: par.step(ids, labels))
    par.eval()
    found["evaluation"] = message(lambda: par.step(ids, labels))
    return found


def check_gradients(par: sw.Parallel, reference: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    par.step(*batch)
    reference(*batch)[0].backward()
    whole = dict(reference.named_parameters())
    for stage in (stage for stage in par.plan.stages if dist.get_rank() in stage.placement.ranks):
        for entry in stage.parameters:
            gradient = whole[entry.name].grad
            assert gradient is not None
            part = shard(gradient, stage.layouts[entry.name], stage.placement.coordinates(dist.get_rank()))
            torch.testing.assert_close(par.get_parameter(entry.name).grad, part, rtol=1e-11, atol=1e-12)
    par.zero_grad()
    reference.zero_grad()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.sampled(1)
def test_what_differs_in_a_stage_is_named_on_every_rank(schedule: str, run_ranks: RunRanks) -> None:
    found, *others = run_ranks(break_stages, 4, schedule)
    assert all(other == found for other in others)
    for untouched in ("nothing", "every second step", "evaluation"):
        assert found[untouched] == ""
    expected = {
        "batch": r"copies of the batch: input args\[0\] are not equal: rank 3 differs from ranks 0, 1, 2",
        "operator": r"copies of the result of norms\.\d/layer_norm are not equal: rank [13] differs from rank [02]",
        "gradient": r"copies of gradient of \w+\.\d\.\w+ are not equal: rank 3 differs from rank 2",
        "parameter": r"copies of parameter \w+\.\d\.\w+ are not equal: rank 3 differs from rank 2",
        "shared": r"copies of parameter tokens\.weight of several stages are not equal: rank 2 differs",
    }
    if schedule != "1F1B":
        del expected["shared"]
    for what, pattern in expected.items():
        assert re.match(pattern, found[what]), found[what]
    for what, where in (
        ("operator", "forward of stage"),
        ("gradient", "backward of stage"),
        ("batch", "forward, call"),
    ):
        assert f"where:  {where}" in found[what]
