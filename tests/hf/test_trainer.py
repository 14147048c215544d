"""An unmodified Trainer script on ranks: what it logs, and what it saves, is what one process logs and saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

import shardwise as sw
from hf.runs import LENGTH, VOCABULARY, Script, Sentences, adapted, bert, classified, history, llama, mixtral, t5
from launch.gloo_ranks import RunRanks
from raising import raises
from shardwise.transformers import ShardwiseTrainer

TP = {"mesh": sw.Mesh(tp=2), "search": "sharding_propagation"}
EP = {"mesh": sw.Mesh(ep=2), "search": "sharding_propagation"}
COLUMNS = {f"*.{name}": "n@tp" for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
DP = {"mode": "data_parallel"}
SCRIPTS = {
    # The last batches of training and evaluation have two samples, or one, of which a rank has none.
    "llama, columns": Script(llama, {**TP, "strategies": COLUMNS}, samples=(18, 6)),
    "lora, parameters in parts": Script(
        adapted,
        {**DP, "zero": 3},
        arguments={"gradient_checkpointing": True, "optim": "adamw_torch"},
        samples=(16, 5),
    ),
    "bert, samples": Script(bert, DP, classified),
    "mixtral, experts": Script(mixtral, {**EP, "strategies": {"model.layers.*.mlp.experts": "e@ep"}}, samples=(18, 6)),
}
MORE = {
    "t5, samples": Script(t5, DP),
    "smoothed, columns": Script(
        llama, {**TP, "strategies": COLUMNS}, arguments={"label_smoothing_factor": 0.1, "weight_decay": 0.0}
    ),
    "lora, columns": Script(adapted, {**TP, "strategies": {"*.[qkv]_proj.base_layer": "n@tp", "*.up_proj": "n@tp"}}),
    "float32": Script(llama, {**TP, "strategies": COLUMNS}, dtype=torch.float32),
    "bf16": Script(llama, {**TP, "strategies": COLUMNS}, dtype=torch.float32, arguments={"bf16": True}),
    "sgd, half the model": Script(
        llama, {**TP, "strategies": COLUMNS}, arguments={"optim": "sgd", "lr_scheduler_type": "linear"}
    ),
}
SAVING = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_total_limit": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
}
LLAMA = SCRIPTS["llama, columns"]
# (losses, all else). In float64 a language model still takes its loss of logits in float32 (6e-8 of rounding), and the
# Trainer adds up losses in it; a classifier's gradients are in float64 throughout. In float32 steps of AdamW, which
# divides gradients by their size, make up to 1e-3 of it; in bf16 (4e-3) a tenth.
BOUND = (1e-6, 1e-6)
BOUNDS = {"bert, samples": (3e-7, 1e-9), "float32": (1e-4, 1e-3), "bf16": (3e-2, 1e-1)}

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says on the way


class Uneven(Sentences):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index + dist.get_rank())


class Shaken(Sentences):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(3, VOCABULARY, (LENGTH,))}


def on_ranks(folder: str, scripts: dict[str, Script]) -> dict[str, Any]:
    logged = {}
    for refused in ({"auto_find_batch_size": True}, {"bf16_full_eval": True}, {"neftune_noise_alpha": 5.0}):
        with raises(sw.ShardwiseError, next(iter(refused))):
            LLAMA.made(ShardwiseTrainer, folder, refused)
    with raises(sw.ShardwiseError, "unknown mode", "'nonsense'"):
        LLAMA.made(ShardwiseTrainer, folder, plan_settings={"mode": "nonsense"}).train()
    for name, script in scripts.items():
        trainer = script.made(ShardwiseTrainer, Path(folder) / name, plan_settings=script.plan)
        trainer.train()
        par = trainer.model_wrapped
        assert isinstance(par, sw.Parallel)
        local, whole = (sum(p.numel() for p in module.parameters()) for module in (par, trainer.model))
        communicated = any(c.forward or c.backward for c in par.plan.conversions)
        trainer.save_model()
        logged[name] = history(trainer), local / whole, communicated
    with raises(sw.ShardwiseError, "rank 1", "another batch", "rank 0"):
        trainer.evaluate(Uneven(4))
    losses = {trainer.evaluate(Shaken(4))["eval_loss"] for _ in range(3)}
    assert len(losses) == 3, "nothing was drawn"
    return logged


def check_equal(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], bounds: tuple[float, float] = BOUND
) -> None:
    assert len(ours) == len(theirs) > 0
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for key in other:
            bound = bounds[0] if "loss" in key else bounds[1]
            assert own[key] == pytest.approx(other[key], rel=bound), (key, own, other)


def compare(run_ranks: RunRanks, folder: Path, scripts: dict[str, Script]) -> None:
    logged = run_ranks(on_ranks, 2, str(folder / "ours"), scripts)
    assert logged[0] == logged[1]
    for name, script in scripts.items():
        trainer = script.made(tf.Trainer, folder / "theirs" / name)
        trainer.train()
        trainer.save_model()
        ours, share, communicated = logged[0][name]
        assert communicated, name
        assert share < 0.9 or script.plan == DP, (name, share)
        check_equal(ours, history(trainer), BOUNDS.get(name, BOUND))
        theirs, own = (saved_tensors(folder / side / name, trainer.model, script) for side in ("theirs", "ours"))
        assert own.keys() == theirs.keys()
        for key, tensor in theirs.items():
            bound = {"rtol": 1e-5, "atol": 1e-7} if script.dtype == torch.float64 else {"rtol": 0.1, "atol": 0.02}
            torch.testing.assert_close(own[key], tensor, **bound, msg=f"{name}: {key}")


def saved_tensors(folder: Path, model: Any, script: Script) -> dict[str, torch.Tensor]:
    """What transformers loads: it writes experts one by one, we as the parameters that they are."""
    if (folder / "config.json").exists():
        loaded: dict[str, torch.Tensor] = type(model).from_pretrained(folder, dtype=script.dtype).state_dict()
        return loaded
    (file,) = folder.glob("*.safetensors")  # of adapters
    return load_file(file)


@pytest.mark.long
def test_scripts_log_and_save_what_one_process_does(run_ranks: RunRanks, tmp_path: Path) -> None:
    compare(run_ranks, tmp_path, SCRIPTS)


def saved(folder: str, resume: str | None, plan: dict[str, Any]) -> tuple[list[dict[str, float]], float]:
    """On a rank: a run that saves as it goes and ends with its best model, from the beginning or a checkpoint."""
    settings = {**SAVING, "output_dir": folder}
    trainer = LLAMA.made(ShardwiseTrainer, folder, settings, plan_settings=plan)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_model()  # replaces the first
    with (
        mock.patch("shardwise.transformers.hf_trainer.os.replace", side_effect=OSError("disk full")),
        raises(sw.errors.CheckpointError, "disk full"),
    ):
        trainer.save_model()  # the second one stays
    return history(trainer), float(trainer.evaluate()["eval_loss"])


def test_a_run_goes_on_elsewhere(run_ranks: RunRanks, tmp_path: Path) -> None:
    """From its second step, on two ranks under another plan, and on one."""
    theirs = LLAMA.made(tf.Trainer, tmp_path / "theirs", SAVING)
    theirs.train()
    expected, best = history(theirs), theirs.evaluate()["eval_loss"]
    first = run_ranks(saved, 2, str(tmp_path / "ours"), None, LLAMA.plan)
    runs = [first[0], first[1]]
    checkpoint = tmp_path / "ours" / "checkpoint-2"
    for count, plan in ((2, {**DP, "zero": 3}), (1, DP)):
        folder = str(tmp_path / f"on{count}")
        runs += run_ranks(saved, count, folder, str(checkpoint), plan)
    for logged, loss in runs:
        check_equal(logged, expected)
        assert loss == pytest.approx(best, rel=BOUND[0])
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    for name, tensor in theirs.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-5, atol=1e-7)


class Stream(IterableDataset[dict[str, Any]]):
    """Sentences that come one after another, from the beginning every time."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Sentences(12)[index] for index in range(12))


def streamed(folder: str) -> list[dict[str, float]]:
    """On a rank: a stream; and what ranks say that read different data."""
    with raises(sw.ShardwiseError, "rank 1", "another batch", "rank 0"):
        LLAMA.made(ShardwiseTrainer, folder, train_dataset=Uneven(18), plan_settings=LLAMA.plan).train()
    trainer = LLAMA.made(ShardwiseTrainer, folder, STREAMED, train_dataset=Stream(), plan_settings=LLAMA.plan)
    trainer.train()
    return history(trainer)


STREAMED = {"max_steps": 3, "eval_strategy": "no"}


@pytest.mark.long
def test_ranks_read_one_stream(run_ranks: RunRanks, tmp_path: Path) -> None:
    logged = run_ranks(streamed, 2, str(tmp_path))
    trainer = LLAMA.made(tf.Trainer, tmp_path / "theirs", STREAMED, train_dataset=Stream())
    trainer.train()
    for own in logged:
        check_equal(own, history(trainer))


@pytest.mark.long
def test_more_scripts_do(run_ranks: RunRanks, tmp_path: Path) -> None:
    compare(run_ranks, tmp_path, MORE)
