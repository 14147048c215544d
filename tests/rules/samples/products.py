"""Products, attention, recurrent layers and mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from rules.samples.calls import bits, call, ids, plain, x
from shardwise.graph.attention_sinks import ATTENTION_WITH_SINKS
from shardwise.graph.attention_within import ATTENTION_WITHIN
from shardwise.graph.float8 import FLOAT8_LINEAR
from shardwise.graph.grouped import grouped_mm
from shardwise.rules.attention_kernels import RING_GRADIENTS, RING_STEP

aten = torch.ops.aten

CONTRACTIONS = [
    call(aten.linear.default, x(2, 3, 4), x(5, 4)),
    call(aten.linear.default, x(3, 4), x(5, 4)),
    call(aten.linear.default, x(4), x(3, 4)),
    call(aten.linear.default, x(2, 3, 2, 4), x(4)),
    # Of operands without gradients: ranks combine the scales of cotangents (tests/programs/test_float8.py).
    call(FLOAT8_LINEAR, plain(x(2, 3, 4)), plain(x(5, 4)), plain(x()), plain(x())),
    call(FLOAT8_LINEAR, plain(x(3, 4)), plain(x(5, 4)), plain(x(3)), plain(x(5)), plain(x(4))),
    call(aten.matmul.default, x(3, 4), x(4, 5)),
    call(aten.matmul.default, x(4), x(4)),
    call(aten.matmul.default, x(4), x(2, 4, 3)),
    call(aten.matmul.default, x(2, 3, 4), x(4)),
    call(aten.matmul.default, x(2, 3, 4), x(4, 2)),
    call(aten.matmul.default, x(3, 1, 2, 4), x(2, 4, 3)),
    call(aten.matmul.default, x(1, 2, 4), x(3, 4, 2)),
    call(aten.mm.default, x(3, 4), x(4, 5)),
    call(aten.bmm.default, x(2, 3, 4), x(2, 4, 5)),
    call(aten.mv.default, x(3, 4), x(4)),
    call(aten.dot.default, x(5), x(5)),
    call(aten.outer.default, x(3), x(4)),
    call(aten.vdot.default, x(5), x(5)),
    call(aten.cdist.default, x(2, 3, 4), x(2, 5, 4)),
    call(aten.cdist.default, x(3, 4), x(2, 5, 4), 1.0),
    call(aten.cdist.default, x(2, 1, 3, 4), x(3, 5, 4), torch.inf),
    call(aten.einsum.default, "bij,bjk->bik", [x(2, 3, 4), x(2, 4, 5)]),
    call(aten.einsum.default, "ij,jk", [x(3, 4), x(4, 5)]),
    call(aten.einsum.default, "...i, ij -> ...j", [x(2, 3, 4), x(4, 2)]),
    call(aten.einsum.default, "bhtd,bhsd,s->bht", [x(2, 2, 3, 4), x(2, 1, 3, 4), x(3)]),
    call(aten.einsum.default, "iA->A", [x(3, 4)]),
    call(aten.einsum.default, "...b, bc -> ...c", [x(3, 4), x(4, 2)]),
]

ATTENTION = [
    call(aten.scaled_dot_product_attention.default, x(2, 2, 3, 4), x(2, 2, 5, 4), x(2, 2, 5, 3)),
    call(aten.scaled_dot_product_attention.default, x(2, 2, 4, 2), x(2, 2, 4, 2), x(2, 2, 4, 2), None, 0.0, True),
    call(aten.scaled_dot_product_attention.default, x(1, 2, 4, 2), x(1, 2, 7, 2), x(1, 2, 7, 2), None, 0.0, True),
    call(aten.scaled_dot_product_attention.default, x(1, 2, 7, 2), x(1, 2, 4, 2), x(1, 2, 4, 2), None, 0.0, True),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 6, 3, 4),
        x(2, 2, 3, 4),
        x(2, 2, 3, 4),
        None,
        0.0,
        True,
        enable_gqa=True,
    ),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 4, 3, 4),
        x(2, 2, 3, 4),
        x(2, 2, 3, 4),
        x(4, 3, 3),
        enable_gqa=True,
    ),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 4, 3, 4),
        x(2, 2, 3, 4),
        x(2, 2, 3, 4),
        x(2, 1, 1, 3),
        enable_gqa=True,
    ),
    call(aten.scaled_dot_product_attention.default, x(3, 4, 2), x(3, 5, 2), x(3, 5, 2), x(4, 5)),
    call(aten.scaled_dot_product_attention.default, x(4, 2), x(5, 2), x(5, 2), bits(4, 5) | (ids(5, 5) == 0)),
    call(
        aten.scaled_dot_product_attention.default,
        x(2, 2, 3, 2),
        x(2, 2, 3, 2),
        x(2, 2, 3, 2),
        torch.tensor([True, True, False]).expand(2, 1, 1, 3).contiguous(),
        scale=0.3,
    ),
    call(  # the last query sees nothing
        ATTENTION_WITHIN, x(2, 2, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 3), torch.tensor([-1, 0, 2, 2, 3, 6]),
        torch.tensor([1, 1, 4, 5, 6, 7]), None, False, None, (4, 2), (0, 3), (5, 6),
    ),
    call(
        ATTENTION_WITHIN, x(2, 4, 6, 2), x(2, 2, 5, 2), x(2, 2, 5, 3), None, torch.tensor([1, 2, 5, 4, 3, 1]),
        bits(2, 1, 1, 5), True, 0.3, (3, 3), (0, 0), (5, 4),
    ),
    call(
        ATTENTION_WITH_SINKS, x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 3), x(4), None, [-5, 0], True, 0.3,
        (6,), (0,), (6,),
    ),
    call(  # the last query sees nothing
        ATTENTION_WITH_SINKS, x(2, 2, 6, 2), x(2, 2, 4, 2), x(2, 2, 4, 3), x(2), bits(2, 1, 1, 4), [-1, 0], False, 0.3,
        (6,), (0,), (6,),
    ),
    call(
        RING_STEP, None, None, x(2, 2, 4, 3, 2), x(2, 2, 4, 3, 2), x(2, 2, 4, 3, 3), None, None, None, True, 0.3,
        [-12, 12], 1, 4, 1, [0, 1, 2, 3],
    ),
    call(
        RING_STEP, plain(x(4, 4, 2, 3)), plain(x(4, 4, 2)), x(4, 4, 2, 2), x(2, 4, 2, 2), x(2, 4, 2, 3), None, None,
        None, True, 0.3, [-8, 8], 3, 4, 2, [0, 1, 2, 3],
    ),
    call(
        RING_GRADIENTS, x(2, 4, 4, 3, 3), plain(x(2, 4, 4, 3)) + 3, x(2, 4, 4, 3, 2), x(2, 2, 4, 3, 2),
        x(2, 2, 4, 3, 3), bits(2, 1, 4, 3, 4, 3), None, None, False, 0.3, [-12, 12], 1, 4, 1, [0, 1, 2, 3],
    ),
    call(
        RING_GRADIENTS, x(2, 3, 5, 2), plain(x(2, 3, 5)) + 3, x(2, 3, 5, 4), x(2, 3, 5, 4), x(2, 3, 5, 2), None,
        torch.arange(15).reshape(3, 5) - 6, torch.arange(15).reshape(3, 5), False, 0.3, [-6, 1], 1, 3, 1, [0, 1, 2],
    ),
]  # fmt: skip


def _weights(gates: int, inputs: int, hidden: int, directions: int = 1) -> list[Tensor]:
    own = [(gates * hidden, inputs), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)]
    return [x(*shape) for shape in own * directions]


RECURRENT = [
    call(aten.lstm.input, x(2, 3, 4), [x(1, 3, 2), x(1, 3, 2)], _weights(4, 4, 2), True, 1, 0.0, True, False, False),
    call(
        aten.lstm.input,
        x(3, 2, 4),
        [x(2, 3, 2), x(2, 3, 2)],
        _weights(4, 4, 2, directions=2),
        True,
        1,
        0.0,
        True,
        True,
        True,
    ),
    call(
        aten.lstm.input,
        x(2, 3, 4),
        [x(1, 3, 2), x(1, 3, 5)],
        [x(20, 4), x(20, 2), x(2, 5)],
        False,
        1,
        0.0,
        True,
        False,
        False,
    ),
    call(aten.gru.input, x(2, 3, 4), x(1, 3, 2), _weights(3, 4, 2), True, 1, 0.0, True, False, False),
    call(aten.gru.input, x(2, 2, 4), x(1, 2, 2), _weights(3, 4, 2), True, 1, 0.0, True, False, True),
    call(aten.rnn_tanh.input, x(2, 3, 4), x(1, 3, 2), _weights(1, 4, 2), True, 1, 0.0, True, False, False),
    call(aten.rnn_relu.input, x(3, 2, 4), x(1, 3, 2), _weights(1, 4, 2), True, 1, 0.0, True, False, True),
]

EXPERTS = [
    call(grouped_mm._opoverload, x(6, 4), x(3, 4, 2), torch.tensor([1, 0, 2, 2, 0, 1]), [3], [0], [3]),
    # Two rows of each token; an expert without rows, and rows without an expert.
    call(grouped_mm._opoverload, x(3, 4), x(4, 4, 3), torch.tensor([0, 4, 3, 0, 3, 1]), [4], [0], [4], True),
]
