"""Sample calls for every operator that has a rule: small sizes, with 2s and 3s and sizes that do not divide evenly."""

from __future__ import annotations

from rules.samples.calls import Sample, bits, call, describe, ids, leaf, plain, unit, unsplit, x
from rules.samples.constructors import CONSTRUCTORS, DROPOUT
from rules.samples.elementwise import ELEMENTWISE_SAMPLES
from rules.samples.functions import FUNCTIONS
from rules.samples.indexing import INDEXING
from rules.samples.kinds import KINDS
from rules.samples.linalg import LINALG
from rules.samples.losses import LABEL_TERMS, LOSSES
from rules.samples.products import ATTENTION, CONTRACTIONS, EXPERTS, RECURRENT
from rules.samples.reductions import NORMALIZATION, REDUCTIONS
from rules.samples.shapes import JOINS, SHAPES
from rules.samples.transforms import TRANSFORMS
from rules.samples.windows import CONVOLUTION

__all__ = ["SAMPLES", "Sample", "bits", "call", "describe", "ids", "leaf", "plain", "unit", "unsplit", "x"]

SAMPLES: tuple[Sample, ...] = (
    *CONTRACTIONS,
    *REDUCTIONS,
    *SHAPES,
    *JOINS,
    *INDEXING,
    *ATTENTION,
    *NORMALIZATION,
    *CONVOLUTION,
    *LOSSES,
    *CONSTRUCTORS,
    *DROPOUT,
    *LABEL_TERMS,
    *RECURRENT,
    *EXPERTS,
    *TRANSFORMS,
    *LINALG,
    *FUNCTIONS,
    *ELEMENTWISE_SAMPLES,
    *KINDS,
)
