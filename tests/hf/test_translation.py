"""What models with an encoder write on ranks, in evaluations too, is what they write on one device."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import shardwise as sw
from hf.runs import VOCABULARY, Sentences, history, padded, t5
from launch.gloo_ranks import RunRanks
from raising import raises

TP = {"mesh": sw.Mesh(tp=2), "search": "sharding_propagation"}
COLUMNS = {
    "t5": {**TP, "strategies": {f"*.{name}": "n@tp" for name in ("q", "k", "v", "wi")}},
    "bart": {**TP, "strategies": {f"*.{name}": "n@tp" for name in ("q_proj", "k_proj", "v_proj", "fc1")}},
}
SAMPLES: dict[str, Any] = {"mode": "data_parallel", "zero": 3}
# Settings, and how many sources there are: six sequences each.
CALLS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"num_beams": 1, "do_sample": False}, 6),
    ({"num_beams": 3, "do_sample": False, "decoder_input_ids": torch.tensor([[0, 9, 4]] * 2)}, 2),
    ({"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True}, 2),
    ({"do_sample": True, "temperature": 1.5, "num_return_sequences": 2}, 3),
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says on the way


def bart() -> Any:
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in WIDE.items()}
    still = {"dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return tf.BartForConditionalGeneration(
        tf.BartConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=64, **sizes, **still)
    )


WIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def built(name: str) -> Any:
    """A model whose texts depend on what it reads: its weights are large."""
    torch.manual_seed(0)
    model = {"t5": t5, "bart": bart}[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def texts(model: Any) -> list[list[list[int]]]:
    found = []
    for settings, count in CALLS:
        batch = padded([Sentences(8)[index] for index in range(count)])
        source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        torch.manual_seed(5)
        found.append(model.generate(**source, max_new_tokens=6, **settings).tolist())
    return found


def written(name: str, plan: dict[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """On a rank: texts, and this rank's part of what it knows of a source."""
    from shardwise.transformers import generator

    batch = padded([Sentences(4)[index] for index in range(4)])
    model = built(name)
    par = sw.parallelize(model, sw.plan(model, batch, 2, **plan))
    with raises(sw.ShardwiseError, type(model).__name__, "an encoder"):
        generator(par, batch_size=6, max_length=12)
    writer = generator(par, batch_size=6, max_length=12, source_length=11)
    with raises(sw.ShardwiseError, "6 sources", "12 tokens"):
        writer.generate(input_ids=torch.ones(6, 12, dtype=torch.int64), max_new_tokens=2)
    return texts(writer), tuple(writer._generation.steps.get_buffer("source_keys_1").shape)


def compare(run_ranks: RunRanks, name: str, plan: dict[str, Any], part: tuple[int, ...]) -> None:
    found = run_ranks(written, 2, name, plan)
    expected = texts(built(name).eval())
    assert [own for own, _ in found] == [expected, expected]
    assert found[0][1] == part
    assert len({tuple(text) for call in expected for text in call}) > 6, "more than the sequences of one call"


def test_an_encoder_and_its_decoder_write_what_one_device_does(run_ranks: RunRanks) -> None:
    compare(run_ranks, "t5", COLUMNS["t5"], (6, 2, 11, 8))  # two of four heads


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "plan", "part"),
    [("bart", COLUMNS["bart"], (6, 2, 11, 8)), ("t5", SAMPLES, (3, 4, 11, 8)), ("bart", SAMPLES, (3, 4, 11, 8))],
)
def test_others_do(run_ranks: RunRanks, name: str, plan: dict[str, Any], part: tuple[int, ...]) -> None:
    compare(run_ranks, name, plan, part)


def counted(prediction: tf.EvalPrediction) -> dict[str, float]:
    """A number that every token of the texts counts for."""
    tokens = prediction.predictions
    places = 1 + torch.arange(tokens.size).reshape(tokens.shape).numpy()
    return {"accuracy": float((tokens * places).sum()), "counted": float(tokens.shape[1])}


def trainer(kind: Any, folder: Path, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "predict_with_generate": True,
        "generation_max_length": 7,
        "generation_num_beams": 2,
    }
    found = kind(
        model=built("t5"),
        args=tf.Seq2SeqTrainingArguments(**settings),
        train_dataset=Sentences(8),
        eval_dataset=Sentences(6),  # the last batch has two samples
        data_collator=padded,
        compute_metrics=counted,
        **more,
    )
    found.remove_callback(tf.PrinterCallback)
    return found


def evaluated(folder: str) -> tuple[list[dict[str, float]], Any]:
    """On a rank: what a run logs, and what its model writes afterwards."""
    from shardwise.transformers import ShardwiseSeq2SeqTrainer, ShardwiseTrainer

    with raises(sw.ShardwiseError, "predict_with_generate", "ShardwiseSeq2SeqTrainer"):
        trainer(ShardwiseTrainer, Path(folder))
    own = trainer(ShardwiseSeq2SeqTrainer, Path(folder), plan_settings=COLUMNS["t5"])
    own.train()
    return history(own), own.predict(Sentences(6), max_new_tokens=5, num_beams=1).predictions.tolist()


@pytest.mark.long
def test_evaluations_write_what_those_of_one_process_do(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(evaluated, 2, str(tmp_path / "ours"))
    theirs = trainer(tf.Seq2SeqTrainer, tmp_path / "theirs")
    theirs.train()
    expected = history(theirs), theirs.predict(Sentences(6), max_new_tokens=5, num_beams=1).predictions.tolist()
    for logged, texts_of_rank in found:
        assert texts_of_rank == expected[1]
        assert len(logged) == len(expected[0]) == 4
        for own, other in zip(logged, expected[0], strict=True):
            for key, value in other.items():  # losses are taken in float32; texts count exactly
                assert own[key] == (value if key.startswith("eval_a") else pytest.approx(value, rel=1e-6)), key
    first, last = (line["eval_accuracy"] for line in expected[0] if "eval_accuracy" in line)
    assert first != last, "a step of training changes the texts"


def test_a_writer_is_gone_before_a_longer_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have caches, which are most of what they hold."""
    from shardwise.transformers import ShardwiseSeq2SeqTrainer, seq2seq

    alive = weakref.WeakSet[Any]()

    class Writer:
        def generate(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    def made(par: Any, **sizes: int) -> Writer:
        assert not alive
        writer = Writer()
        alive.add(writer)
        return writer

    monkeypatch.setattr(seq2seq, "generator", made)
    own = ShardwiseSeq2SeqTrainer.__new__(ShardwiseSeq2SeqTrainer)
    own.__dict__ |= {"_generators": {}, "_front": t5(), "_parallel": object()}
    for length in (8, 200):
        source = torch.ones(2, length, dtype=torch.int64)
        assert own._generate(source) is source
    assert len(alive) == 1


def test_caches_have_the_layers_of_the_decoder() -> None:
    from shardwise.transformers.caches import Caches, CacheSizes

    config = tf.T5Config(num_layers=1, num_decoder_layers=3)
    caches = Caches(config, CacheSizes(2, 4, 3), torch.float32)
    assert len(caches.cache(torch.zeros((), dtype=torch.int64)).layers) == 3
    assert caches.get_buffer("source_values_2").shape[2] == 3
    assert config.num_layers == 1
