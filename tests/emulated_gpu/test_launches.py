"""A step launches about as many kernels as plain PyTorch's on the same GPU."""

from __future__ import annotations

from collections import Counter

import pytest

from emulated_gpu.cases import Case, batch, build, make_plan, train_all
from launch.gloo_ranks import RunRanks
from shardwise.proof.runs import OPTIMIZERS

MOST = 1.1  # of plain PyTorch's

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


def launches_of_a_step(case: Case, plan: str) -> tuple[Counter[str], Counter[str]]:
    """(under the plan, without one)"""
    from emulated_gpu.device import gpu

    ours = train_all({"it": (case, plan)})["it"].launches
    model = build(case.model).cuda()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    theirs: Counter[str] = Counter()
    for number in range(2):  # the first one makes the optimizer's states
        inputs = {name: tensor.cuda() for name, tensor in batch(case.model, number).items()}
        before = Counter(gpu.launches())
        model(**inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs = Counter(gpu.launches()) - before
    ours.subtract({"copy device to device": len(list(model.parameters()))})  # train_all keeps every gradient
    return ours, theirs


@pytest.mark.parametrize(
    "model",
    ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2 without dropout", "vit"))],
)
def test_a_step_launches_about_as_many_kernels_as_plain_pytorch(model: str, run_gpu_ranks: RunRanks) -> None:
    case = Case(model, {"dp": 1})
    ((ours, theirs),) = run_gpu_ranks(launches_of_a_step, 1, case, make_plan(case).to_json())
    more, fewer = (counts.most_common(8) for counts in (ours - theirs, theirs - ours))
    said = f"{ours.total()} beside {theirs.total()}: more {more}, fewer {fewer}"
    assert ours.total() <= MOST * theirs.total(), said
