"""A share of ``rules.planned``: what the default plan asks of every operator, and plans of those whose backward
autograd keeps for itself."""

from __future__ import annotations

import warnings

import pytest
import torch

from rules.harness import make_case
from rules.planned import fault, planned_samples
from rules.samples import SAMPLES, Sample, call, x
from shardwise.costs.saved_for_backward import Saved, saved_for_backward

PLANNED = list(planned_samples())
# Their gradients depend on data, so that they cannot be traced; the last one names a device.
BY_AUTOGRAD = ("aten.index_fill.int_Tensor", "aten.index_put.default", "aten.to.device")


def kept(sample: Sample) -> Saved:
    case = make_case(sample)
    return saved_for_backward(case.op, [case.graph.by_name[name] for name in case.op.operands])


def test_what_autograd_keeps_is_known_for_every_sample() -> None:
    with warnings.catch_warnings(action="ignore"):
        assert len([kept(sample) for sample in SAMPLES if not sample.unspecified]) > 800


def test_a_cast_that_names_its_device_keeps_nothing() -> None:
    assert kept(call(torch.ops.aten.to.device, x(3, 4), torch.device("cpu"), torch.float32)) == Saved()


@pytest.mark.parametrize("sample", [s for s in PLANNED if str(s.target) in BY_AUTOGRAD], ids=str)
def test_operators_that_autograd_differentiates_are_planned(sample: Sample) -> None:
    assert not fault(sample)


@pytest.mark.long
@pytest.mark.parametrize("sample", PLANNED, ids=str)
def test_every_operator_that_has_a_rule_is_planned_and_proven(sample: Sample) -> None:
    assert not fault(sample)
