"""``shardwise.rule``: rules of operators that are not ours.

The operator must be registered with ``torch.library``, as a graph can hold no other. A Triton kernel or a
``torch.autograd.Function`` goes inside such an operator. A registered rule equals an entry of our own tables. It is
checked three times: against the operator's schema here, against the shapes of each call when a model is planned, and
against the operator's results by ``shardwise.check_rule``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from shardwise.errors import LayoutError, NotationError, ShardwiseError
from shardwise.graph.schema import written_arguments
from shardwise.rules.binding import Linear, RuleFunction, RuleTemplate, kind_fault
from shardwise.rules.binding import rule as template_of
from shardwise.rules.notation import ELLIPSIS
from shardwise.rules.rule import FactorKind, Localize, Lowering
from shardwise.rules.tables import CUSTOM, RULES


@dataclass(frozen=True)
class RegisteredRule:
    """A registered rule. As a context manager, it removes the rule at the end of the ``with`` block."""

    target: OpOverload

    def remove(self) -> None:
        """Remove the rule, so that the operator runs unsplit again. Raises ShardwiseError if it was removed before."""
        if not CUSTOM.remove(self.target):
            raise ShardwiseError(f"{self.target} has no rule of sw.rule", fix="remove a rule once")

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

    A factor is a named dimension of the operator's iteration space. It is parallel unless ``reduction``, ``lowered`` or
    ``whole`` names it: every result has it, and each part of it computes its part of the results. Register the rule on
    every rank. ``sw.check_rule`` tests it against the operator.

    Args:
        operator: The result of ``torch.library.custom_op``, ``torch.ops.mylib.scale`` (one overload, if it has
            several), or the name ``"mylib::scale"``. It must not write to its operands.
        how: The factors of every tensor operand and result, in the order of the schema. Commas separate tensors, blanks
            separate dims. A dim is a factor (``n``) or a product of factors, major first (``(h d)``). ``1`` is a
            broadcast dim of size 1, ``...`` any leading dims, ``()`` a scalar. If the factors depend on the
            arguments, pass a function ``how(op, graph)`` without keywords. It returns an ``OpRule``, made with
            ``shardwise.rules.binding.build``, or None for a call that runs unsplit.
        reduction: Factors that no result has, with the reduction that combines the parts: ``"sum"``, ``"max"``,
            ``"min"`` or ``"any"``. With ``{"k": "sum"}`` each part of k computes a summand. The others are for values
            without gradient.
        lowered: Factors that may be split by replacing the operator with ``lowering``.
        whole: Factors that may not be split.
        linear: Groups of operand positions. The operator must be jointly linear in each group while the other operands
            are fixed: ``((0, 1),)`` for ``x + y``, ``((0,), (1,))`` for ``x * y``. Partial sums then pass through the
            operator without a reduction before it. If in doubt, leave it out.
        localize: ``localize(op, context)`` returns the ``LocalOpCall`` of a rank. Needed if sizes or positions are
            among the arguments. ``context`` (``shardwise.rules.rule.LocalContext``) has the local shapes, and the
            rank's part of each factor. Default: the same arguments work on shards.
        lowering: A module-level function with the operator's arguments and result, written with operators that have
            rules. Needed if ``lowered`` names factors. A parameter ``runs`` also receives, per dim of the first
            operand, the length of the contiguous runs that every rank holds.

    Returns:
        The registered rule. ``.remove()`` removes it; as a context manager, it holds for the block only.

    Raises:
        NotationError: The notation does not parse, a keyword names a factor that it lacks, or ``how`` is neither text
            nor function.
        LayoutError: The rule contradicts itself or the operator's schema, or the operator writes to an operand.
        ShardwiseError: The operator has a rule already, is not one registered overload, or keywords go with a function.

    Example:
        A matrix product, whose rows and columns are parallel and whose inner dim is a sum::

            sw.rule("mylib::mm", "m k, k n -> m n", reduction={"k": "sum"}, linear=((0,), (1,)))
    """
    target = overload_of(operator)
    if target in RULES or target in CUSTOM.rules:
        whose = "of shardwise" if target in RULES else "by sw.rule"
        fix = "call remove() on it first" if target in CUSTOM.rules else "use a strategy, or a custom operator"
        raise ShardwiseError(f"{target} already has a rule {whose}", fix=fix)
    written = written_arguments(target)
    if written:
        raise LayoutError(
            f"{target} writes to {', '.join(written)}: graphs have no mutation",
            fix="register an operator that returns its result instead (mutates_args=())",
        )
    entry: RuleTemplate | RuleFunction
    keywords: dict[str, Any] = {"reduction": reduction, "lowered": lowered, "whole": whole, "linear": linear}
    keywords |= {"localize": localize, "lowering": lowering}
    if isinstance(how, str):
        try:
            entry = template_of(how, **keywords)
        except NotationError as error:
            raise NotationError(f"the rule of {target} does not parse: {error}") from error
        _check(target, how, entry)
    elif not callable(how):
        raise NotationError(f"the rule of {target} is {how!r}", fix='a text such as "m k, k n -> m n"')
    elif any(keywords.values()):
        what = f"the rule of {target} is a function, with keywords"
        raise ShardwiseError(what, fix="pass keywords to build() in the function")
    else:
        entry = how
    CUSTOM.add(target, entry)
    return RegisteredRule(target)


def overload_of(operator: Any) -> OpOverload:
    """Return the single overload of an operator. Raises ShardwiseError if there is none, or several."""
    if isinstance(operator, str):
        namespace, separator, name = operator.partition("::")
        name, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None) if separator else None
        if packet is None:
            raise ShardwiseError(
                f"there is no operator {operator!r}", fix='use "namespace::name" and import its library'
            )
        operator = getattr(packet, overload, None) if overload else packet
    operator = getattr(operator, "_opoverload", operator)  # what torch.library.custom_op returns
    if isinstance(operator, OpOverloadPacket):
        names = operator.overloads()
        if len(names) > 1:
            listed = ", ".join(f"{operator}.{name}" for name in names)
            raise ShardwiseError(f"{operator} has {len(names)} overloads", fix=f"choose one: {listed}")
        operator = getattr(operator, names[0])
    if not isinstance(operator, OpOverload):
        fix = "register it: torch.library.custom_op (a Triton kernel or an autograd.Function goes inside)"
        raise ShardwiseError(f"{operator!r} is not an operator", fix=fix)
    return operator


def _check(target: OpOverload, text: str, template: RuleTemplate) -> None:
    """Raise LayoutError if the number of tensors, a factor's kind or a linear group contradicts the schema."""
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
        raise LayoutError(f"the rule {text!r} of {target} is invalid: {'; '.join(faults)}")
