"""Passes over micro-batches compute what one pass over the whole batch does, or are refused; on the virtual cluster."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import shardwise as sw
from proving import prove
from raising import raises
from shardwise.errors import PlanError, PlanWarning
from shardwise.programs import time_axis
from shardwise.programs.micro_batches import pass_sizes
from shardwise.proof import runs

EQUAL = 1e-10  # float64, over sums of some thousand terms
BATCH = 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=generator())


def labels(*shape: int, classes: int = 5) -> torch.Tensor:
    """Labels of which the samples have more and more that are ignored: every micro-batch counts others."""
    found = torch.randint(0, classes, (BATCH, *shape), generator=generator(1))
    if shape:
        for i in range(BATCH):
            found[i, : i * shape[0] // BATCH] = -100
    else:
        found[1], found[2], found[7] = -100, -100, -100
    return found


class Body(nn.Module):
    """A layer and a loss, which is the method of a subclass."""

    def __init__(self, features: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(features, 8), nn.Linear(8, classes)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


class Mean(Body):
    def forward(self, x):
        return self.scores(x).square().mean()


class Summed(Body):
    def forward(self, x, y):
        return F.cross_entropy(self.scores(x).flatten(0, 1), y.flatten(), reduction="sum")


class CrossEntropy(Body):
    def forward(self, x, y):
        return F.cross_entropy(self.scores(x).flatten(0, 1), y.flatten())


class Weighted(Body):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.1, 2.0, 0.7, 1.1, 0.4]))

    def forward(self, x, y):
        return F.cross_entropy(self.scores(x).flatten(0, 1), y.flatten(), self.weight, label_smoothing=0.1)


class Masked(Body):
    """A mean written by hand, over the tokens of a mask that is an input."""

    def forward(self, x, mask):
        losses = self.scores(x).square().sum(-1)
        return (losses * mask).sum() / mask.sum().clamp(min=1)


class Auxiliary(Body):
    """Losses with denominators of their own, added up from 0, a learned weight, and a penalty on parameters, which
    counts once."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, y):
        scores = self.scores(x)
        main = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        calm = scores.square().mean()
        penalty = self.head.weight.square().sum()
        return sum((main * torch.exp(-self.log_scale), self.log_scale, 0.1 * calm, 0.01 * penalty))


class Shifted(Body):
    """Numbers that are added to means, on either side, of either sign, more than once."""

    def forward(self, x, y):
        scores = self.scores(x)
        alike = F.cosine_similarity(scores, scores.roll(1, -1), dim=-1).mean()
        entropy = torch.sub(F.cross_entropy(scores.flatten(0, 1), y.flatten()), 3, alpha=0.5)
        return (1 - alike) + 0.1 * (2 - (entropy + 1) * 3) - 1e-3


class PerSample(Body):
    """Means of every sample's own tokens, then a mean over samples."""

    def forward(self, x, mask):
        losses = self.scores(x).square().sum(-1)
        return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


class Margin(Body):
    def forward(self, x, y):
        scores = self.scores(x)
        apart = F.cosine_embedding_loss(scores, scores.roll(1, -1), torch.where(y > 2, 1, -1))
        return F.multi_margin_loss(scores, y) + apart


class Dropping(Body):
    def forward(self, x):
        hidden = F.dropout(torch.tanh(self.body(x)), 0.3)
        noise = torch.rand(x.shape[0], 1, 8, dtype=hidden.dtype)
        turned = F.dropout(hidden.transpose(0, 1), 0.5).transpose(0, 1)
        return (self.head(hidden + turned) * noise[..., :5]).square().mean()


class Attention(nn.Module):
    """A class token and positions expanded over the batch, dropout in the probabilities, batch second within."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 8)), nn.Parameter(torch.rand(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, x, y):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        z = x.transpose(0, 1)
        z = self.attention(z, z, z, need_weights=False)[0].transpose(0, 1)
        return F.cross_entropy(self.head(z[:, 0]), y)


class Numbered(Body):
    """What depends on a sample's number in the batch: a table of one row per sample, and a range."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.rand(BATCH, 6))

    def forward(self, x):
        return (self.scores(x + self.own) * torch.arange(BATCH)[:, None]).square().mean()


class Lookups(Body):
    """Indices that count the samples beside indices that choose among the elements of each."""

    def forward(self, x, lengths, positions, y):
        rows = torch.arange(x.shape[0])
        seen = (torch.arange(x.shape[1]) < lengths[:, None])[rows[:, None, None], torch.arange(x.shape[1])]
        hidden = self.body(x) * seen.transpose(1, 2)
        last = self.head(hidden[rows, lengths - 1])
        picked = hidden[rows[:, None], positions] + hidden.gather(1, positions[..., None].expand(-1, -1, 8))
        packed = (
            positions[rows[:, None, None], torch.arange(3)[:, None]]
            == positions[rows[:, None, None], positions[:, None]]
        )
        margin = torch.zeros_like(last).index_put((rows, y), torch.tensor(0.3).to(x.dtype))
        crossed = hidden[rows, y, -y]
        packed = packed.new_zeros(packed.shape, dtype=x.dtype) + packed
        return F.cross_entropy(last - margin, y) + (picked.square().sum(-1) * packed.sum(1)).mean() + crossed.sum()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.lstm(x)[0][:, -1]), y)


class Outputs(Body):
    """Returns more than a loss; one input belongs to no sample."""

    def forward(self, batch, scale=None):
        scores = self.scores(batch["x"] * scale)
        return {"loss": F.cross_entropy(scores, batch["y"]), "accuracy": (scores.argmax(-1) == batch["y"]).sum()}


class Counting(Body):
    """Counts its steps: once, however many passes a step has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        return self.scores(x).square().mean() * (1 + self.steps)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6, momentum=0.3)
        self.head = nn.Linear(6, 5)

    def forward(self, x, y):
        x = F.relu(self.norm(self.first(x)))
        return F.cross_entropy(self.head(self.last(self.second(x)).mean((2, 3))), y)


MASK = (torch.rand(BATCH, 6, generator=generator(2)) < torch.linspace(0.1, 1, BATCH)[:, None]).double()
TOKENS = {
    "mean": (Mean, (rows(6),)),
    "sum": (Summed, (rows(6, 6), labels(6))),
    "cross entropy": (CrossEntropy, (rows(6, 6), labels(6))),
    "weighted": (Weighted, (rows(6, 6), labels(6))),
    "masked": (Masked, (rows(6, 6), MASK)),
    "auxiliary": (Auxiliary, (rows(6, 6), labels(6))),
    "shifted": (Shifted, (rows(6, 6), labels(6))),
    "per sample": (PerSample, (rows(6, 6), MASK)),
    "margin": (Margin, (rows(6), labels().clamp(min=0))),
    "dropout": (Dropping, (rows(4, 6),)),
    "attention": (Attention, (rows(4, 8), labels())),
    "numbered": (Numbered, (rows(6),)),
    "lookups": (Lookups, (rows(6, 6), labels() % 5 + 1, labels(3) % 3, labels() % 5)),
    "recurrent": (Recurrent, (rows(4, 6), labels())),
    "outputs": (Outputs, ({"x": rows(6), "y": labels()}, torch.rand(6))),
    "counting": (Counting, (rows(6),)),
}


def made(name: str) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    kind, inputs = TOKENS[name]
    return kind(), inputs


@pytest.mark.filterwarnings("ignore:a batch of 1 on 2 devices")
@pytest.mark.parametrize(
    "micro_batch", [2, pytest.param(4, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.sampled(4)
def test_passes_of_a_step_compute_what_one_pass_over_the_batch_does(name, micro_batch):
    module, inputs = made(name)
    plan = sw.plan(
        module, inputs, 2, mode="data_parallel", global_batch=BATCH, micro_batch=micro_batch, optimizer="sgd"
    )
    assert (plan.micro_batches, plan.micro_batch) == (BATCH // micro_batch, micro_batch)
    prove(module, inputs, plan, tolerance=EQUAL)


@pytest.mark.parametrize("name", ["cross entropy", "auxiliary", "shifted", "dropout", "attention"])
@pytest.mark.sampled(2)
def test_a_last_pass_over_fewer_samples_counts_for_as_much_as_it_has(name):
    module, inputs = made(name)
    plan = sw.plan(module, inputs, 2, mode="data_parallel", global_batch=BATCH, micro_batch=2, optimizer="sgd")
    seven = tuple(x[:7] for x in inputs)
    assert pass_sizes(7, 2) == (2, 2, 2, 1)
    prove(module, seven, plan, tolerance=EQUAL)


LANGUAGE_MODELS = {
    "llama": lambda **sizes: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
    "gpt2": lambda **sizes: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    ),
    "qwen2": lambda **sizes: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)),
    "mistral": lambda **sizes: transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=4, **sizes)),
    "last token": lambda **sizes: transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(pad_token_id=0, num_labels=5, **sizes)
    ),
    "encoder and decoder": lambda **sizes: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
        )
    ),
}


@pytest.mark.parametrize("options", [{}, {"stages": 2}], ids=["passes", "stages"])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@pytest.mark.sampled(1)
def test_padded_batches_of_language_models_run_in_passes_and_stages(name, options):
    torch.manual_seed(0)
    model = LANGUAGE_MODELS[name](
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    ids = torch.randint(3, 64, (BATCH, 9), generator=generator(3))
    mask = (torch.arange(9) < 9 - torch.arange(BATCH)[:, None] % 4).long()
    targets = labels().clamp(min=0) if name == "last token" else ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": targets}
    plan = sw.plan(model, batch, 2, mode="data_parallel", micro_batch=2, optimizer="sgd", **options)
    prove(model, batch, plan, steps=2, tolerance=EQUAL)


@pytest.mark.parametrize("sizes", [(8, 4), (7, 4)])
def test_statistics_of_batch_norm_are_those_of_micro_batches_and_announced(sizes):
    batch, micro_batch = sizes
    torch.manual_seed(0)
    module, inputs = Convolutions(), (rows(3, 8, 8), labels())
    with pytest.warns(PlanWarning, match=r"running statistics \(last.num_batches_tracked.* by every micro-batch"):
        plan = sw.plan(module, inputs, 2, mode="data_parallel", micro_batch=micro_batch)
    prove(module, tuple(x[:batch] for x in inputs), plan, tolerance=1e-9)


def test_a_plan_chosen_by_price_and_one_with_strategies_run_in_passes():
    module, inputs = made("cross entropy")
    for options in ({"mesh": sw.Mesh(dp=2, tp=2)}, {"mesh": sw.Mesh(dp=2, tp=2), "strategies": {"body": "n@tp"}}):
        plan = sw.plan(module, inputs, sw.Cluster.local(4), global_batch=BATCH, micro_batch=4, **options)
        prove(module, inputs, plan, tolerance=EQUAL)


# ------------------------------------------------------------------------------------------------------------- refusals


class Contrastive(Body):
    def forward(self, x):
        z = self.scores(x)
        return F.cross_entropy(z @ z.T, torch.arange(x.shape[0]))


class Centred(Body):
    def forward(self, x):
        z = self.scores(x)
        return (z - z.mean(0)).pow(4).mean()


class Balanced(Body):
    """The product of two means over tokens, as mixtures of experts balance their load."""

    def forward(self, x):
        p = self.scores(x).softmax(-1)
        chosen = F.one_hot(p.argmax(-1), 5).to(p.dtype).mean(0)
        return p.square().mean() + (chosen * p.mean(0)).sum()


class Rooted(Body):
    def forward(self, x):
        return self.scores(x).square().mean().sqrt()


class Chosen(Body):
    def forward(self, x):
        return self.scores(x).square().sum(-1).amax()


@pytest.mark.parametrize("kind", [Contrastive, Centred, Balanced, Rooted, Chosen])
def test_a_loss_that_is_no_sum_over_micro_batches_is_refused_by_operator_and_line(kind):
    with raises(PlanError, "micro-batches", "micro_batch", "global_batch", source="test_micro_batches.py") as caught:
        sw.plan(kind(), (rows(6),), 2, mode="data_parallel", micro_batch=4)
    assert caught.value.op.startswith("/")
    assert sw.plan(kind(), (rows(6),), 2, mode="data_parallel", micro_batch=BATCH).micro_batches == 1


class SequenceFirst(nn.Module):
    """Steps of a sequence are the first dim of what it reads, and samples the second."""

    def __init__(self):
        super().__init__()
        self.over, self.head = nn.GRU(6, 6), nn.Linear(6, 5)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.over(x)[0][-1]), y)


def test_inputs_that_disagree_on_their_samples_are_named_and_no_term_is_suggested():
    inputs = (rows(4, 6), labels()[:4])
    with raises(PlanError, "micro-batches", fix=("args[0]", 8, "args[1]", 4)) as caught:
        sw.plan(SequenceFirst(), inputs, 2, mode="data_parallel", micro_batch=2)
    assert "per_micro_batch" not in caught.value.fix
    with pytest.warns(PlanWarning, match=r"dim 0 of args\[0\], and args\[1\] has 4"):
        sw.plan(SequenceFirst(), inputs, 2, mode="data_parallel", micro_batch=2, per_micro_batch=["loss"])


# ------------------------------------------------------------------------------------------------------------ mutations


def without(forgotten):
    """The analysis in time, in which a set of operands is forgotten."""
    real = time_axis.TimeSplit.decide_sums

    def forgetful(split):
        real(split)
        getattr(split, forgotten).clear()

    return mock.patch.object(time_axis.TimeSplit, "decide_sums", forgetful)


@pytest.mark.parametrize(
    ("name", "forgotten"), [("cross entropy", "whole"), ("auxiliary", "once"), ("shifted", "shifted")]
)
def test_without_counts_of_the_whole_batch_or_with_a_penalty_in_every_pass_micro_batches_are_wrong(name, forgotten):
    module, inputs = made(name)
    with without(forgotten):
        wrong = sw.plan(module, inputs, 2, mode="data_parallel", global_batch=BATCH, micro_batch=2)
        report = sw.verify(module, inputs, wrong, steps=1)
    assert not report.ok
    assert report.max_error > 1e-3


def test_masks_that_do_not_know_which_samples_a_pass_has_are_found():
    module, inputs = made("dropout")
    plan = sw.plan(module, inputs, 2, mode="data_parallel", global_batch=BATCH, micro_batch=2)
    real = runs.values_of_step

    def mutated(graph, whole, first):
        return real(graph, whole, lambda: torch.tensor(0))

    with mock.patch.object(runs, "values_of_step", mutated):
        assert not sw.verify(module, inputs, plan, steps=1).ok
