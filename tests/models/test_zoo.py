"""A part of the zoo, models of each kind: under data parallel, tensor parallel, searched and random plans they
equal one device.

``make zoo`` runs all of it, with more plans. Those of ``test_models_on_ranks.py`` that are here too are those with the
most kinds of operators.
"""

from __future__ import annotations

import pytest

from models.zoo import KNOWN, ZOO, attempt

# Experts, weight norm and group norm.
PART = ("mixtral", "wav2vec2")

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers prints on the way


@pytest.mark.parametrize("name", PART)
@pytest.mark.long
def test_a_model_of_the_zoo_equals_one_device_under_every_plan(name):
    outcome = attempt(name, ZOO[name], num_plans=1, batch=4)
    assert outcome.failures == []
    assert outcome.passed == outcome.plans == 4
    assert not outcome.without_rule


def test_what_is_known_to_fail_is_in_the_zoo():
    assert KNOWN.keys() <= ZOO.keys()
