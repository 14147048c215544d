"""Losses, and the terms of a loss that a part of the classes gives."""

from __future__ import annotations

import torch

from rules.samples.calls import GENERATOR, Sample, call, ids, leaf, plain, unit, x
from shardwise.graph.head_loss import HEAD_LOSS, HEAD_TERMS, checked_labels
from shardwise.graph.stand_ins import ctc_loss
from shardwise.rules.label_terms import label_terms

aten = torch.ops.aten

_LABELS = torch.tensor([1, -100, 3, 0])


def _losses() -> list[Sample]:
    cross, nll = aten.cross_entropy_loss.default, aten.nll_loss.default
    grid = ids(3, 2, 5)
    found = [
        call(cross, x(4, 5), _LABELS, None, 2),
        call(cross, x(4, 5), _LABELS, unit(5).detach(), 1),
        call(cross, x(4, 5), _LABELS, unit(5).detach(), 0, -100, 0.1),
        call(cross, x(4, 5), _LABELS, unit(5).detach(), 1, -100, 0.2),
        call(cross, x(4, 5), _LABELS, None, 1, -100, 0.2),
        call(cross, x(2, 3, 5), grid, None, 0, 1),
        call(cross, x(2, 3, 5), grid, unit(3).detach(), 2, 1, 0.1),
        call(cross, x(5), torch.tensor(2), None, 1),
        call(cross, x(4, 5), unit(4, 5), unit(5).detach(), 1),
        call(cross, x(4, 5), unit(4, 5), None, 2, -100, 0.1),
        call(cross, x(2, 3, 5), unit(2, 3, 5), unit(3).detach(), 0, -100, 0.1),
        call(HEAD_LOSS, x(6, 4), x(2, 3, 4), ids(6, 2, 3), 1, 0.1),
        call(HEAD_LOSS, x(5, 3), x(4, 3), _LABELS, -100, 0.0),
        call(HEAD_TERMS, x(2, 3, 4), x(5, 4), ids(6, 5), True, [2], [0], [2]),
        call(nll, x(4, 5), _LABELS, None, 2),
        call(nll, x(4, 5), _LABELS, unit(5).detach(), 1),
        call(nll, x(5), torch.tensor(2), None, 0),
        call(aten.nll_loss_nd.default, x(2, 3, 5), grid, None, 0),
        call(aten.nll_loss2d.default, x(2, 3, 2, 2), ids(3, 2, 2, 2), None, 1),
        call(cross, x(4, 5), torch.full((4,), -100), None, 1),
        call(cross, x(4, 5), torch.full((4,), -100), plain(unit(5)), 0, -100, 0.1),
        call(nll, x(4, 5), torch.full((4,), -100), None, 1),
        call(
            ctc_loss._opoverload,
            leaf(torch.randn(7, 3, 5, dtype=torch.float64, generator=GENERATOR).log_softmax(2)),
            ids(4, 3, 3) + 1,
            torch.tensor([7, 5, 6]),
            torch.tensor([3, 2, 0]),
            0,
            False,
        ),
        call(aten.pairwise_distance.default, x(6, 4), x(6, 4)),
        call(aten.pairwise_distance.default, x(2, 3, 4), x(2, 3, 4), 1.0, 1e-6, True),
        call(aten.l1_loss.default, x(3, 4), x(4), 2),
        call(aten.poisson_nll_loss.default, x(3, 4), unit(3, 4), True, False, 1e-8, 2),
        call(aten.binary_cross_entropy_with_logits.default, x(3, 4), unit(3, 4), plain(unit(4)), plain(unit(4)), 2),
        call(aten.binary_cross_entropy.default, unit(3, 4), unit(3, 4), unit(4).detach(), 2),
        call(aten.kl_div.default, x(3, 4), unit(3, 4), 2, log_target=True),
    ]
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0]).double()
    for reduction in (0, 2):  # a mean is a sum over the count in the normal form
        found += [
            call(target, x(3, 4), unit(3, 4), reduction)
            for target in (aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default)
        ]
        found += [
            call(target, x(3, 4), unit(3, 4), reduction) for target in (aten.huber_loss.default, aten.kl_div.default)
        ]
        found += [
            call(aten.hinge_embedding_loss.default, x(4, 6), signs, 1.0, reduction),
            call(aten.margin_ranking_loss.default, x(6), x(6), signs, 3.0, reduction),
            call(aten.soft_margin_loss.default, x(3, 4), plain(unit(3, 4)), reduction),
            call(aten.binary_cross_entropy.default, unit(3, 4), unit(3, 4), None, reduction),
            call(aten.binary_cross_entropy_with_logits.default, x(3, 4), unit(3, 4), None, None, reduction),
        ]
    for reduction in (0, 1, 2):
        found += [
            call(aten.cosine_embedding_loss.default, x(6, 4), x(6, 4), signs, 0.1, reduction),
            call(aten.triplet_margin_loss.default, x(6, 4), x(6, 4), x(6, 4), reduction=reduction),
            call(aten.triplet_margin_loss.default, x(3, 4), x(3, 4), x(3, 4), 0.5, 1, 1e-6, True, reduction),
            call(aten.multi_margin_loss.default, x(4, 5), ids(5, 4), 1, 1.0, plain(unit(5)), reduction),
            call(aten.multilabel_margin_loss.default, x(4, 3), torch.tensor([[2, 0, -1]] * 4), reduction),
        ]
    return found


LOSSES = _losses()

LABEL_TERMS = [
    call(checked_labels._opoverload, ids(5, 3, 2), 5),
    call(label_terms._opoverload, x(3, 5), plain(x(3, 1)), ids(5, 3), 1, [5], [0], [5]),
    call(label_terms._opoverload, x(3, 6, 2), plain(x(3, 1, 2)), ids(6, 3, 2), 1, [6], [0], [6]),
]
