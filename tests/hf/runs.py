"""Fine-tuning scripts, for transformers' Trainer in one process and for ours on ranks: models, data, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, CLASSES = 32, 8, 3
WIDE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE, num_key_value_heads=2))


def mixtral() -> nn.Module:
    config = tf.MixtralConfig(
        **WIDE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False
    )
    module = tf.MixtralForCausalLM(config)
    module.set_experts_implementation("eager")  # PyTorch has no grouped product of float64
    return module


def adapted() -> nn.Module:
    """A language model of which only low-rank adapters are trained."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted_model: nn.Module = peft.get_peft_model(llama(), config)
    with torch.no_grad():
        for name, parameter in adapted_model.named_parameters():
            if "lora_B" in name:  # zeros, that hide what is wrong with A
                parameter.normal_(std=0.1)
    return adapted_model


def bert() -> nn.Module:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
    return tf.BertForSequenceClassification(tf.BertConfig(**WIDE, **still))


def t5() -> nn.Module:
    narrow = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = tf.T5Config(vocab_size=VOCABULARY, **narrow, pad_token_id=0, decoder_start_token_id=0)
    return tf.T5ForConditionalGeneration(config)


class Sentences(Dataset[dict[str, Any]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(5, LENGTH + 1, (), generator=generator))
        return {"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator)}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch for a language model, padded on the right."""
    ids = torch.zeros(len(samples), LENGTH, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length], mask[row, :length], labels[row, :length] = sample["input_ids"], 1, sample["input_ids"]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classified(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch for a classifier: what a sentence begins with is its class."""
    batch = padded(samples)
    return {**batch, "labels": batch["input_ids"][:, 0] % CLASSES}


def accuracy(prediction: tf.EvalPrediction) -> dict[str, float]:
    scores, labels = prediction.predictions, prediction.label_ids
    guesses = np.argmax(scores[0] if isinstance(scores, tuple) else scores, -1)
    if labels.ndim == 2:
        guesses, labels = guesses[:, :-1], labels[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean()), "counted": float(counted.sum())}


@dataclass(frozen=True)
class Script:
    """What a user has written. ``plan``: how ranks divide it; ``samples``: for training and evaluation."""

    build: Callable[[], nn.Module]
    plan: dict[str, Any]
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] = padded
    arguments: dict[str, Any] = field(default_factory=dict)
    samples: tuple[int, int] = (16, 4)
    dtype: torch.dtype = torch.float64

    def made(self, kind: type[tf.Trainer], folder: str | Path, arguments: Any = None, **more: Any) -> tf.Trainer:
        """A Trainer of a class. Four batches of four samples are an epoch, two of them a step."""
        settings: dict[str, Any] = {
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
            **self.arguments,
            **(arguments or {}),
        }
        torch.manual_seed(0)
        trainer = kind(
            model=self.build().to(self.dtype),
            args=tf.TrainingArguments(**settings),
            **{
                "train_dataset": Sentences(self.samples[0]),
                "eval_dataset": Sentences(self.samples[1]),
                "data_collator": self.collate,
                "compute_metrics": accuracy,
                **more,
            },
        )
        trainer.remove_callback(tf.PrinterCallback)
        return trainer


def history(trainer: tf.Trainer) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_counted", "epoch", "step")
    lines = ({k: float(v) for k, v in line.items() if k in kept} for line in trainer.state.log_history)
    return [line for line in lines if "loss" in line or "eval_loss" in line]
