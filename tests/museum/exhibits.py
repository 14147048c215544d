"""The exhibits: mistakes that others have published, put into small programs, and what finds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from museum import models
from museum.faults import cotangent, exchange, gradient, kernel, loaded
from museum.models import Case
from shardwise.errors import ShardwiseError

ROWS = {0: 3, 1: 4}  # of the seven that each rank of two has
COUNTED = {0: 8, 1: 32}  # labels that count


@dataclass(frozen=True)
class Exhibit:
    """``mistake``: in a sentence. ``published``: where (repository and number). ``modelled``: what stands for it here.
    ``fault``: puts it in place; ``edited``: or a plan that has it. ``named``: what the finding must name, beside a rank
    (``ranks``: whether there is one)."""

    name: str
    mistake: str
    published: tuple[str, ...]
    modelled: str
    case: Callable[[], Case]
    named: str
    fault: Callable[[], AbstractContextManager[None]] | None = None
    edited: Callable[[sw.Plan], sw.Plan] | None = None

    @property
    def has_rank(self) -> bool:
        """A plan that is refused was not run on any."""
        return self.edited is None


class NotCaught(AssertionError):
    """The proof called a wrong program equal."""


def finding(exhibit: Exhibit) -> str:
    case = exhibit.case()
    if exhibit.edited is not None:
        try:
            report = sw.verify(case.model, case.inputs, exhibit.edited(case.plan), steps=1)
        except ShardwiseError as error:
            return str(error)
    else:
        assert exhibit.fault is not None, exhibit.name
        with exhibit.fault():
            report = sw.verify(case.model, case.inputs, case.plan, steps=1)
    if report.ok:
        raise NotCaught(f"{exhibit.name}: {report}")
    return f"{report.differences[0].kind} {report.differences[0].name} is wrong; first wrong: {report.first_wrong}"


# ------------------------------------------------------------------------------------------------------------ mistakes


def only_own(_: int, sent: Tensor, __: Tensor) -> Tensor:
    return sent


def part_of_own(rank: int, sent: Tensor, got: Tensor) -> Tensor:
    """A rank's part of what it had itself, along the dim that was divided."""
    dim = next(i for i, (whole, part) in enumerate(zip(sent.shape, got.shape, strict=True)) if whole != part)
    return sent.narrow(dim, rank * got.shape[dim], got.shape[dim]).clone()


def unweighted(counts: dict[int, int]) -> Callable[[int, Tensor], Tensor]:
    """A sum that is sent so that the mean over all becomes the mean of the ranks' means."""
    total = sum(counts.values())
    return lambda rank, own: own * (total / (len(counts) * counts[rank]))


def without_offsets(_: int, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A random kernel that does not know where its shard lies."""
    if "shardwise" not in str(target):
        return NotImplemented
    position = next(i for i, argument in enumerate(target._schema.arguments) if argument.name == "offsets")
    return target(*args[:position], [0] * len(args[position]), *args[position + 1 :], **kwargs)


def from_zero(_: int, target: Any, *args: Any, **kwargs: Any) -> Tensor:
    numbers: Tensor = target(*args, **kwargs)
    return numbers - numbers[0]


def first_operand(_: int, target: Any, *args: Any, **kwargs: Any) -> Any:
    return args[0].clone() if "and" in str(target) else NotImplemented


def nothing(_: int, target: Any, *args: Any, **kwargs: Any) -> Any:
    returned = target(*args, **kwargs)
    return torch.zeros_like(returned) if isinstance(returned, Tensor) else NotImplemented


def contiguous(rank: int, own: Tensor, whole: Tensor) -> Tensor:
    return whole[rank * len(own) : (rank + 1) * len(own)]


def rows_of_equal_parts(rank: int, own: Tensor, whole: Tensor) -> Tensor:
    """Rows of a table of which every rank has as many, rounded down: the last ones are on no rank."""
    first = rank * len(whole) // 4
    kept = (torch.arange(first, first + len(own)) < len(whole) // 4 * 4)[:, None]
    return own * kept


def strategy(name: str, text: str) -> Callable[[sw.Plan], sw.Plan]:
    def edit(plan: sw.Plan) -> sw.Plan:
        assert name in plan.strategies, f"no operator {name}"
        operators = tuple(replace(op, strategy=text) if op.name == name else op for op in plan.operators)
        return plan.revised(operators=operators, conversions=None)

    return edit


def without_layer(plan: sw.Plan) -> sw.Plan:
    """A plan that has all layers but one, operators and parameters."""
    operators = tuple(op for op in plan.operators if not op.name.startswith("blocks.1."))
    parameters = tuple(entry for entry in plan.parameters if not entry.name.startswith("blocks.1."))
    assert len(operators) < len(plan.operators)
    return plan.revised(operators=operators, parameters=parameters, conversions=None)


EXHIBITS = (
    Exhibit(
        "bias on every rank",
        "Row-parallel layers add the whole bias on every rank, and then add up the ranks",
        ("pytorch/torchtitan#4245", "huggingface/text-generation-inference#1036", "PaddlePaddle/Paddle#35186"),
        "the bias becomes a summand on each of four ranks, instead of on one",
        models.tensor_parallel,
        "blocks.0.down/",
        lambda: exchange("blocks.0.down.bias", "*", backward=False, receive=only_own),
    ),
    Exhibit(
        "gradient of a divided bias",
        "The bias is divided by the ranks before they are added up, and its gradient is divided with it",
        ("pytorch/torchtitan#4332",),
        "the bias's gradient is a quarter",
        models.tensor_parallel,
        "blocks.0.down.bias",
        lambda: gradient("blocks.0.down.bias", 1 / 4),
    ),
    Exhibit(
        "one all-reduce too many",
        "A gradient that is complete already is summed over the tensor-parallel ranks once more",
        ("pytorch/torchtitan#2106",),
        "the gradient of a column-parallel layer's input arrives four times as large",
        models.tensor_parallel,
        "blocks.0.between",
        lambda: exchange("*between/*", "*up/*", backward=True, receive=lambda _, __, got: got * 4),
    ),
    Exhibit(
        "lost reduction of a cotangent",
        "The gradient of an input that all tensor-parallel ranks read is not added up over them",
        ("pytorch/torchtitan#1805",),
        "each rank goes on with its own summand of the gradient of a column-parallel layer's input",
        models.tensor_parallel,
        "blocks.0.between",
        lambda: exchange("*between/*", "*up/*", backward=True, receive=only_own),
    ),
    Exhibit(
        "norms under sequence parallelism",
        "Gradients of norms, each from a part of the sequence, are not added up over the tensor-parallel ranks",
        ("NVIDIA/Megatron-LM#1446",),
        "each rank keeps its own summand of the gradient of a norm",
        models.sequence_parallel,
        "blocks.0.before.weight",
        lambda: exchange("blocks.0.before.weight", "*", backward=True, receive=only_own),
    ),
    Exhibit(
        "lost window",
        "Context parallelism replaces every attention mask by a causal one",
        ("huggingface/accelerate#4177",),
        "of a sliding window's two conditions the causal one is left",
        models.context_parallel,
        "blocks.0.attention/",
        lambda: kernel("blocks.0.attention/*", first_operand),
    ),
    Exhibit(
        "gradients of keys and values",
        "Attention under context parallelism returns wrong gradients of keys and values",
        ("NVIDIA/Megatron-LM#1464", "NVIDIA/TransformerEngine#1557"),
        "each rank keeps its own summand of the gradients of keys and values",
        models.context_parallel,
        "blocks.0.attention.qkv",
        lambda: exchange("*", "*scaled_dot_product_attention*", backward=True, receive=part_of_own),
    ),
    Exhibit(
        "loss times context-parallel degree",
        "The loss is multiplied by the context-parallel degree, and gradients are not divided by it",
        ("NVIDIA/Megatron-LM#673", "NVIDIA/Megatron-LM#906"),
        "backward starts from twice the loss; the loss that is shown is right",
        models.context_parallel,
        "head",
        lambda: cotangent(2.0),
    ),
    Exhibit(
        "loss of a part",
        "The loss that is shown is that of a rank's part of the sequence, not of the whole",
        ("pytorch/torchtitan#3280", "pytorch/torchtitan#3329"),
        "the ranks' sums of losses are not added up; gradients are right",
        models.context_parallel,
        "/div",
        lambda: exchange("/cross_entropy_loss*", "/div", backward=False, receive=only_own),
    ),
    Exhibit(
        "gradients averaged twice",
        "A loss that is divided by the labels of all replicas, and gradients that are averaged over the replicas again",
        ("pytorch/torchtitan#2318", "pytorch/torchtitan#2323"),
        "all gradients of two replicas are half as large",
        models.data_parallel,
        "head",
        lambda: gradient("*", 1 / 2),
    ),
    Exhibit(
        "mean of means",
        "Every rank divides its loss by its own number of labels, and the ranks' means are averaged",
        ("pytorch/torchtitan#2206", "NVIDIA/Megatron-LM#7452"),
        "8 labels count on one rank, 32 on the other; their sums of losses are weighed so that means are averaged",
        models.data_parallel,
        "/div",
        lambda: exchange("/cross_entropy_loss*", "/div", backward=False, send=unweighted(COUNTED)),
    ),
    Exhibit(
        "no gradient synchronisation",
        "A sharding option of size one turns the synchronisation of gradients off",
        ("verl-project/verl#7493",),
        "no gradient is added up over the replicas",
        models.data_parallel,
        "head.weight",
        lambda: exchange("*", "*", backward=True, receive=only_own),
    ),
    Exhibit(
        "one dropout mask for all",
        "Ranks that hold different parts of a batch draw the same mask",
        ("tenstorrent/tt-metal#55947", "PaddlePaddle/PaddleFleetX#1005", "huggingface/transformers#31412"),
        "the random kernel of every rank draws for the first rank's part",
        models.data_parallel,
        "dropout",
        lambda: kernel("*dropout*", without_offsets),
    ),
    Exhibit(
        "a number on every rank",
        "A number is added to a partial sum on every rank, and so as many times as there are ranks",
        ("pytorch/pytorch#149768", "pytorch/pytorch#163193"),
        "the plan lets a partial sum of squares pass through the addition of an epsilon",
        models.scaled,
        "/add",
        edited=strategy("/add", "P@tp"),
    ),
    Exhibit(
        "half of a tied gradient",
        "The gradient of a tied table is not the sum of those of its uses",
        ("NVIDIA/Megatron-LM#844", "uw-syfi/piper#13"),
        "the lookup contributes nothing to the gradient of the table that is also the head",
        models.tied,
        "tokens.weight",
        lambda: kernel("tokens/*", nothing, backward=True),
    ),
    Exhibit(
        "fused projection cut in contiguous parts",
        "Ranks get contiguous rows of a fused projection, and take them for a part of each of its members",
        ("vllm-project/vllm#36242", "ndif-team/nnsight#719"),
        "the shards of the weight are contiguous, the program is the right one",
        models.tensor_parallel,
        "blocks.0.attention.qkv/",
        lambda: loaded("blocks.0.attention.qkv.weight", contiguous),
    ),
    Exhibit(
        "vocabulary that does not divide",
        "A vocabulary that does not divide by the ranks loses its last rows",
        ("NVIDIA/Megatron-LM#1754",),
        "of 30 rows over four ranks the last two are on none",
        models.tensor_parallel,
        "tokens/",
        lambda: loaded("tokens.weight", rows_of_equal_parts),
    ),
    Exhibit(
        "the first shard for all",
        "Every rank loads the shard of the first",
        ("vllm-project/vllm-gguf-plugin#103",),
        "all ranks hold the first rows of a column-parallel weight",
        models.tensor_parallel,
        "blocks.0.up/",
        lambda: loaded("blocks.0.up.weight", lambda _, own, whole: whole[: len(own)]),
    ),
    Exhibit(
        "loss of gathered logits",
        "A vocabulary-parallel loss takes logits that every rank has whole, and counts each once per rank",
        ("NVIDIA/Megatron-LM#7452",),
        "the sum of exponentials is four times as large, and so the loss larger by log 4",
        models.tensor_parallel,
        "cross_entropy_loss",
        lambda: exchange("*label_terms*", "*.log", backward=False, receive=lambda _, __, got: got * 4),
    ),
    Exhibit(
        "lost layers",
        "Layers that do not divide by the pipeline's stages are on none of them",
        ("NVIDIA/Megatron-LM#1304", "NVIDIA/Megatron-LM#468", "pytorch/torchtitan#963", "ml-explore/mlx-lm#1688"),
        "the plan of a model of two layers has one of them",
        models.two_layers,
        "blocks.1.",
        edited=without_layer,
    ),
    Exhibit(
        "gradients of experts",
        "Gradients of experts are as many times too large as there are expert-parallel ranks",
        ("deepspeedai/DeepSpeed#5618", "deepspeedai/DeepSpeed#6545", "NVIDIA/Megatron-LM#5956"),
        "the gradient of one of the experts' weights is four times as large",
        models.expert_parallel,
        "the gradient of up",
        lambda: gradient("up", 4.0),
    ),
    Exhibit(
        "batch norm over uneven batches",
        "Statistics of ranks with different numbers of samples are averaged as if they had as many",
        ("pytorch/pytorch#22192", "PaddlePaddle/Paddle#32464"),
        "3 and 4 of seven samples; the sums are weighed so that the ranks' means are averaged",
        models.batch_norm,
        "norm/",
        lambda: exchange("norm/sum", "norm/div", backward=False, send=unweighted(ROWS)),
    ),
    Exhibit(
        "gradient through batch norm",
        "The gradient through synchronised statistics does not know how many samples each rank has",
        ("pytorch/pytorch#36382",),
        "the cotangents of the statistics are weighed as if every rank had as many samples",
        models.batch_norm,
        "first.",
        lambda: exchange("norm/div", "norm/sub", backward=True, send=unweighted(ROWS)),
    ),
    Exhibit(
        "positions of a shard",
        "Positions of a rank's part of the sequence do not begin where the part does",
        ("NVIDIA/Megatron-LM#4075", "verl-project/verl#6267"),
        "the positions of the second rank begin at zero",
        models.context_parallel,
        "/arange",
        lambda: kernel("/arange*", from_zero),
    ),
)
