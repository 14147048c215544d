"""Every operator of every table, split in every factor, against the whole: forward and every gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from rules.harness import (
    Case,
    close,
    cotangents,
    gradients,
    grid_of,
    make_case,
    mismatch,
    numbers,
    pieces_of,
    run_part,
    splits,
    take_operand,
)
from rules.samples import SAMPLES, Sample
from rules.tracing import gathers
from shardwise.graph.emitter import rewrite_graph
from shardwise.graph.ir import Ref, Source
from shardwise.graph.normalize import normalize
from shardwise.graph.schema import filled, tensor_results
from shardwise.graph.simplify import SIMPLIFICATIONS
from shardwise.rules import RULES, rule_of
from shardwise.rules.rule import Factor, OpRule, Piece, takes_runs

Chosen = Mapping[str, Sequence[tuple[Piece, ...]]]
REDUCED = ("sum", "max", "min", "any")
SPLITTABLE = ("parallel", *REDUCED)
OPERATORS: dict[str, list[Sample]] = {}
for one in SAMPLES:
    OPERATORS.setdefault(str(one.target), []).append(one)

# PyTorch's own text; which calls give it is of no interest here.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("var", "std", "at::frobenius", "torch.meshgrid", "The reduce argument")
]


@cache
def ruled(sample: Sample) -> tuple[Case, OpRule]:
    case = make_case(sample)
    rule = rule_of(case.op, case.graph)
    assert rule is not None, f"{sample} has no rule"
    return case, rule


def splittable(rule: OpRule) -> list[Factor]:
    return [f for f in rule.factors if f.kind in SPLITTABLE and f.size > 1]


def problem(case: Case, rule: OpRule, chosen: Chosen, sample: Sample) -> str:
    if not sample.unspecified:
        return mismatch(case, rule, chosen)
    for pieces in splits(rule, chosen):  # the values mean nothing; run_part checks the shapes
        operands = zip(case.operands, rule.operands, strict=True)
        run_part(case, rule, pieces, [take_operand(tensor, rule, dims, pieces) for tensor, dims in operands])
    return ""


def check(case: Case, rule: OpRule, chosen: Chosen, sample: Sample) -> None:
    found = problem(case, rule, chosen, sample)
    assert not found, f"{sample}\n{rule}\nsplit {chosen}\n{found}"


def test_every_line_of_the_tables_has_a_sample() -> None:
    missing = sorted(str(target) for target in RULES.keys() - {sample.target for sample in SAMPLES})
    assert not missing, f"rules that no sample reaches: {missing}"


# Emitted by the normal form itself, or gone only where the operand is real, as those of the samples are.
_EMITTED = {"aten.alias.default", "aten.clone.default"}
_OF_COMPLEX = {f"aten.{name}.default" for name in ("conj", "conj_physical", "resolve_conj", "resolve_neg")}


def test_no_rule_is_of_an_operator_that_normal_forms_lack() -> None:
    def stays(sample: Sample) -> bool:
        graph = make_case(sample).graph
        made = {name for op in graph.ops for name in op.results}
        sources = tuple(Source(v.name, "input", (v.name,)) for v in graph.values if v.name not in made)
        graph = replace(graph, sources=sources, outputs=tuple(map(Ref, graph.ops[0].results)))
        return any(op.target is sample.target for op in normalize(rewrite_graph(graph, SIMPLIFICATIONS)).ops)

    gone = {name for name, samples in OPERATORS.items() if not any(map(stays, samples))}
    assert gone - _EMITTED - _OF_COMPLEX == {"aten.to.other"}  # whose packet is in the table, with all overloads


@pytest.mark.parametrize("name", OPERATORS)
def test_parts_put_together_equal_the_whole_operator(name: str) -> None:
    """Every factor by itself, in several ways and in more parts than it has indices, and several factors at once."""
    for sample in OPERATORS[name]:
        case, rule = ruled(sample)
        open_factors = splittable(rule)
        nothing_to_split = not open_factors and not any(f.kind == "lowered" for f in rule.factors)
        assert sample.unsplit == nothing_to_split, str(rule)
        check(case, rule, {}, sample)
        for factor in open_factors:
            for parts in (2, 3, factor.size + 1):
                if parts != 3 or factor.size >= 3:
                    check(case, rule, {factor.name: pieces_of((factor.size,), 0, parts)}, sample)
            for major in (2, 3):
                if factor.size % major == 0 and factor.size > major:
                    sizes = (major, factor.size // major)
                    check(case, rule, {factor.name: pieces_of(sizes, 0, 2)}, sample)
                    if not any(window.factor == factor.name for _, window in rule.windows):  # else: minor parts whole
                        check(case, rule, {factor.name: pieces_of(sizes, 1, 2)}, sample)
                        check(case, rule, {factor.name: grid_of(sizes, 2)}, sample)
        if len(open_factors) > 1:
            check(case, rule, {f.name: pieces_of((f.size,), 0, 2) for f in open_factors[:4]}, sample)
        # Only a sum has the cotangent of a partial value; max, min and any are for gradient-free values.
        if {f.kind for f in rule.factors} & {"max", "min", "any"}:
            assert not any(result.requires_grad for result in case.results)


def reduced(rule: OpRule) -> list[Factor]:
    return [factor for factor in splittable(rule) if factor.kind in REDUCED]


REDUCING = [name for name, samples in OPERATORS.items() if any(reduced(ruled(sample)[1]) for sample in samples)]
LINEAR = [name for name, samples in OPERATORS.items() if any(ruled(sample)[1].linear for sample in samples)]


@pytest.mark.parametrize("name", REDUCING)
def test_the_suite_notices_a_wrong_reduction(name: str) -> None:
    """Mutation: a sum that is combined otherwise, and a reduced factor with a part left out, are caught."""
    for sample in OPERATORS[name]:
        case, rule = ruled(sample)
        for factor in reduced(rule):
            halves = pieces_of((factor.size,), 0, 2)
            mutants = [(rule, {factor.name: half}) for half in (halves[:1], halves[1:])]
            if factor.kind == "sum":
                mutants.append((rule.with_kinds({factor.name: "max"}), {factor.name: halves}))
            assert any(problem(case, mutant, chosen, sample) for mutant, chosen in mutants), (
                f"{sample}: {factor} survives"
            )


# Rules that share their localize with operators that need it (for size arguments, or empty tensors), and do not
# themselves.
_SIZELESS = {
    "aten.flatten.using_ints",
    "aten.ravel.default",
    "aten.chunk.default",
    "aten.tensor_split.sections",
    "aten.fft_fftshift.default",  # shifts nothing as it is; the transforms beside it refuse
    "aten.fft_ifftshift.default",
    "aten.index_reduce.default",
}


# On an empty tensor PyTorch ends the process (SIGFPE: the norm in its backward, attention in 2.11): no test catches it.
_CRASHES = {
    "aten._native_batch_norm_legit_no_training.default",
    "aten.scaled_dot_product_attention.default",
}


def test_the_suite_notices_a_rule_that_forgets_its_sizes() -> None:
    """Mutation: without ``localize`` every operator that needs it fails for one of its samples."""
    localized = [
        s for s in SAMPLES if not s.unspecified and str(s.target) not in _CRASHES and ruled(s)[1].localize is not None
    ]
    survivors = {s.target for s in localized} - {s.target for s in localized if _fails_without_localize(s)}
    assert {str(target) for target in survivors} == _SIZELESS


def _fails_without_localize(sample: Sample) -> bool:
    case, rule = ruled(sample)
    bare = replace(rule, localize=None)
    for factor in splittable(rule):
        for parts in (2, factor.size + 1):
            try:
                if mismatch(case, bare, {factor.name: pieces_of((factor.size,), 0, parts)}):
                    return True
            except (RuntimeError, IndexError, ValueError, AssertionError):
                return True
    return False


@pytest.mark.parametrize("name", LINEAR)
def test_operators_are_linear_in_the_groups_that_say_so(name: str) -> None:
    for sample in OPERATORS[name]:
        if not sample.unspecified:
            check_linear(sample, *ruled(sample))


def check_linear(sample: Sample, case: Case, rule: OpRule) -> None:
    known = dict(zip(case.op.operands, (t.detach() for t in case.operands), strict=True))

    def run(values: Mapping[str, Tensor]) -> list[Tensor]:
        args = [filled(arg, values.__getitem__) for arg in case.op.args]
        kwargs = {key: filled(arg, values.__getitem__) for key, arg in case.op.kwargs}
        return [numbers(r) for r in tensor_results(case.op.target(*args, **kwargs))]

    single = any(r.dtype in (torch.float32, torch.complex64) for r in case.results)
    for group in rule.linear:
        names = [case.op.operands[i] for i in group]
        first = {name: known[name] * 3 for name in names}
        second = {name: torch.flip(known[name], list(range(known[name].dim()))) for name in names}
        together = {name: first[name] + second[name] for name in names}
        parts = zip(run(known | first), run(known | second), run(known | together), strict=True)
        assert all(close(a + b, c, 1e-5 if single else 1e-10) for a, b, c in parts), (
            f"{sample} is not linear in operands {group}"
        )
        zeros = run(known | {name: torch.zeros_like(known[name]) for name in names})
        assert not any(zero.any() for zero in zeros), f"{sample} of 0 is not 0 in operands {group}"


LOWERED = [s for s in SAMPLES if not s.unsplit and any(f.kind == "lowered" for f in ruled(s)[1].factors)]


@pytest.mark.parametrize("sample", LOWERED, ids=lambda s: str(s.target))
def test_lowerings_equal_their_operator(sample: Sample) -> None:
    case, rule = ruled(sample)
    assert rule.lowering is not None
    if not takes_runs(rule.lowering):
        return check_lowering(sample, case, rule, {})
    shape = case.operands[0].shape
    for runs in product(*([run for run in range(1, size + 1) if size % run == 0] for size in shape)):
        check_lowering(sample, case, rule, {"runs": runs})


def check_lowering(sample: Sample, case: Case, rule: OpRule, told: dict[str, tuple[int, ...]]) -> None:
    assert rule.lowering is not None
    known = {
        name: t.detach().requires_grad_(t.requires_grad)
        for name, t in zip(case.op.operands, case.operands, strict=True)
    }
    result = rule.lowering(
        *(filled(arg, known.__getitem__) for arg in case.op.args),
        **{key: filled(arg, known.__getitem__) for key, arg in case.op.kwargs},
        **told,
    )
    results = tensor_results(result)
    seeds = cotangents(case.results)
    operands = [known[name] for name in case.op.operands]
    for expected, actual in zip(case.results, results, strict=True):
        assert expected.dtype == actual.dtype
        assert close(numbers(expected), numbers(actual)), f"{sample}: {expected} is not {actual}"
    expected_gradients = gradients(case.results, case.operands, seeds)
    for expected_gradient, gradient in zip(expected_gradients, gradients(results, operands, seeds), strict=True):
        assert (expected_gradient is None) == (gradient is None)
        if expected_gradient is not None and gradient is not None:
            assert close(expected_gradient, gradient), f"{sample}: {expected_gradient} is not {gradient}"


@pytest.mark.parametrize("sample", LOWERED, ids=lambda s: str(s.target))
def test_lowerings_never_gather_the_factor_they_are_for(sample: Sample) -> None:
    """Every operator of a lowering has a rule, and a lowered factor stays split up to its reduction."""
    case, rule = ruled(sample)
    for factor in rule.factors:
        if factor.kind == "lowered" and factor.size > 1:
            refused = gathers(case, rule, factor.name)
            assert not refused, f"{sample}: {factor.name} is gathered for {refused}"
