"""``shardwise.rule``: rules of operators that are not ours.

The operator must be one that a graph can hold: registered with ``torch.library``, or a Triton kernel or a
``torch.autograd.Function`` inside such an operator. Its rule is what a line of our own tables is, and is checked in the
same way: against the operator's schema here, against the shapes of each call when a model is planned, and against the
operator itself by ``shardwise.check_rule``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from shardwise.errors import LayoutError, NotationError, ShardwiseError, problem
from shardwise.graph.schema import written_arguments
from shardwise.rules.binding import Linear, RuleFunction, RuleTemplate, kind_fault
from shardwise.rules.binding import rule as template_of
from shardwise.rules.notation import ELLIPSIS
from shardwise.rules.rule import FactorKind, Localize, Lowering
from shardwise.rules.tables import CUSTOM, RULES


@dataclass(frozen=True)
class RegisteredRule:
    """A rule that was registered. As a context manager it holds for the ``with`` block only."""

    target: OpOverload

    def remove(self) -> None:
        """Forget the rule: the operator runs unsplit again. Raises ShardwiseError the second time."""
        if not CUSTOM.remove(self.target):
            raise ShardwiseError(problem(f"{self.target} has no rule of sw.rule", fix="remove a rule once"))

    def __enter__(self) -> RegisteredRule:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def rule(
    operator: Any,
    how: str | RuleFunction,
    *,
    reduction: Mapping[str, FactorKind] | None = None,
    lowered: Sequence[str] = (),
    whole: Sequence[str] = (),
    linear: Linear = (),
    localize: Localize | None = None,
    lowering: Lowering | None = None,
) -> RegisteredRule:
    """Register how a custom operator may be split: ``sw.rule("mylib::scale", "b n, n -> b n", linear=((0,), (1,)))``.

    A factor is parallel unless ``reduction``, ``lowered`` or ``whole`` names it. The page on adding a rule explains
    each argument. Every rank needs the rule.

    Args:
        operator: The result of ``torch.library.custom_op``, ``torch.ops.mylib.scale`` (one overload, if it has
            several), or the operator's name.
        how: The factors of every tensor operand and result in notation, in the order of the schema. If they depend on
            the arguments: a function of the op and its graph that returns an ``OpRule`` (see
            ``shardwise.rules.binding.build``), or None for calls that run unsplit.
        reduction: Reduced factors with their kind; ``{"k": "sum"}``: each part computes a summand.
        lowered: Factors for which ``lowering`` replaces the operator when they are split.
        whole: Factors that cannot be split.
        linear: Groups of operand positions in which the operator is jointly linear.
        localize: Returns the call on a shard, when sizes or positions are among the arguments.
        lowering: A function with the operator's arguments that replaces it when a lowered factor is split.

    Returns:
        The registered rule; its ``.remove()`` forgets the rule, and as a context manager it holds for the block only.

    Raises:
        NotationError: The notation does not parse, or ``how`` is neither text nor function.
        LayoutError: The rule contradicts itself or the operator's schema.
        ShardwiseError: The operator has a rule already, is not one registered overload, or keywords go with a function.
    """
    target = overload_of(operator)
    if target in RULES or target in CUSTOM.rules:
        whose = "of shardwise" if target in RULES else "by sw.rule"
        fix = "call remove() on it first" if target in CUSTOM.rules else "use a strategy, or a custom operator"
        raise ShardwiseError(problem(f"{target} already has a rule {whose}", fix=fix))
    written = written_arguments(target)
    if written:
        raise LayoutError(
            problem(
                f"{target} writes to {', '.join(written)}: graphs have no mutation",
                fix="register an operator that returns its result instead (mutates_args=())",
            )
        )
    entry: RuleTemplate | RuleFunction
    if isinstance(how, str):
        try:
            entry = template_of(
                how,
                reduction=reduction,
                lowered=lowered,
                whole=whole,
                linear=linear,
                localize=localize,
                lowering=lowering,
            )
        except NotationError as error:
            raise NotationError(problem(f"the rule of {target} does not parse: {error}")) from error
        _check(target, how, entry)
    elif not callable(how):
        raise NotationError(problem(f"the rule of {target} is {how!r}", fix='a text such as "m k, k n -> m n"'))
    elif reduction or lowered or whole or linear or localize or lowering:
        raise ShardwiseError(
            problem(
                f"the rule of {target} is a function, with keywords", fix="pass keywords to build() in the function"
            )
        )
    else:
        entry = how
    CUSTOM.add(target, entry)
    return RegisteredRule(target)


def overload_of(operator: Any) -> OpOverload:
    """Return the one overload that is meant. Raises ShardwiseError if none is, or if there are several."""
    if isinstance(operator, str):
        namespace, separator, name = operator.partition("::")
        name, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None) if separator else None
        if packet is None:
            raise ShardwiseError(
                problem(f"there is no operator {operator!r}", fix='use "namespace::name" and import its library')
            )
        operator = getattr(packet, overload, None) if overload else packet
    operator = getattr(operator, "_opoverload", operator)  # what torch.library.custom_op returns
    if isinstance(operator, OpOverloadPacket):
        names = operator.overloads()
        if len(names) > 1:
            listed = ", ".join(f"{operator}.{name}" for name in names)
            raise ShardwiseError(problem(f"{operator} has {len(names)} overloads", fix=f"choose one: {listed}"))
        operator = getattr(operator, names[0])
    if not isinstance(operator, OpOverload):
        fix = "register it: torch.library.custom_op (a Triton kernel or an autograd.Function goes inside)"
        raise ShardwiseError(problem(f"{operator!r} is not an operator", fix=fix))
    return operator


def _check(target: OpOverload, text: str, template: RuleTemplate) -> None:
    """Check what needs no call: numbers of tensors, kinds and linear groups."""
    pattern, faults = template.pattern, []
    for tensors_word, tensors, declared in (
        ("operands", pattern.operands, target._schema.arguments),
        ("results", pattern.results, target._schema.returns),
    ):
        types = [str(item.type) for item in declared if "Tensor" in str(item.type)]
        least = len([name for name in types if name == "Tensor"])
        most = len(types) if all(name in ("Tensor", "Optional[Tensor]") for name in types) else len(tensors)
        if not least <= len(tensors) <= max(most, least):
            faults.append(f"it has {len(tensors)} {tensors_word}, the operator has {least}: {target._schema}")
    kinds = {name: template.kinds.get(name, "parallel") for dims in pattern.operands + pattern.results for dim in dims
             for name in dim if name != ELLIPSIS}  # fmt: skip
    for name, kind in kinds.items():
        has_factor = [any(name in dim for dim in dims) for dims in pattern.results]
        faults += [fault for fault in (kind_fault(name, kind, has_factor, template.lowering),) if fault]
    outside = [group for group in template.linear for i in group if not 0 <= i < len(pattern.operands)]
    if outside:
        faults.append(f"linear names operands {outside}, but there are {len(pattern.operands)}")
    if faults:
        raise LayoutError(problem(f"the rule {text!r} of {target} is invalid: {'; '.join(faults)}"))
