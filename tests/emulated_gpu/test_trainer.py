"""An unmodified Trainer script on emulated GPUs logs what it logs in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers as tf

import shardwise as sw
from hf.runs import Script, history, llama
from launch.gloo_ranks import RunRanks
from shardwise.transformers import ShardwiseTrainer

COLUMNS = {f"*.{name}": "n@tp" for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
SCRIPT = Script(
    llama, {"mesh": sw.Mesh(tp=2), "search": "sharding_propagation", "strategies": COLUMNS}, samples=(18, 6)
)
BOUND = 1e-6  # the Trainer takes the loss of logits in float32, and adds losses up in it

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says on the way


def train(script: Script, folder: str) -> tuple[list[dict[str, float]], str, list[str]]:
    from emulated_gpu.device import record

    trainer = script.made(ShardwiseTrainer, Path(folder), {"use_cpu": False}, plan_settings=script.plan)
    trainer.train()
    return history(trainer), trainer.model_wrapped.device.type, list(record.races)


@pytest.mark.long
def test_a_trainer_logs_what_it_logs_in_one_process(run_gpu_ranks: RunRanks, tmp_path: Path) -> None:
    theirs = SCRIPT.made(tf.Trainer, tmp_path / "theirs")
    theirs.train()
    for ours, device, races in run_gpu_ranks(train, 2, SCRIPT, str(tmp_path / "ours")):
        assert (device, races) == ("cuda", [])
        assert len(ours) == len(history(theirs)) > 0
        for own, other in zip(ours, history(theirs), strict=True):
            assert own == pytest.approx(other, rel=BOUND)
