"""All rule tables, joined: the rule of an operator is looked up here.

Start here to add a rule:

1. Add a line (``binding.rule``) or a function (``binding.build``) to the table of one family, such as
   ``rules/matmul.py``. A new family needs a new table, which ``RULES`` joins.
2. If the operator is a product, add its FLOPs to ``FLOPS`` in ``costs/flops.py``.
3. Add sample calls to the family in ``tests/rules/samples/``, which check the rule by every split.

The page on adding a rule explains each step. Rules of the user come from ``shardwise.rule`` (``rules/custom.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch._ops import OpOverload

from shardwise.graph.ir import Graph, Op
from shardwise.graph.schema import by_operator
from shardwise.rules.attention import ATTENTION
from shardwise.rules.autograd_functions import AUTOGRAD_FUNCTIONS
from shardwise.rules.binding import RuleFunction, RuleTable, RuleTemplate, bind, whole_rule
from shardwise.rules.constructors import CONSTRUCTORS
from shardwise.rules.convolution import CONVOLUTION
from shardwise.rules.dropout import DROPOUT
from shardwise.rules.elementwise import ELEMENTWISE
from shardwise.rules.experts import EXPERTS
from shardwise.rules.head import HEAD
from shardwise.rules.images import IMAGES
from shardwise.rules.indexing import INDEXING
from shardwise.rules.joins import JOINS
from shardwise.rules.label_terms import LABEL_TERMS
from shardwise.rules.linalg import LINALG
from shardwise.rules.losses import LOSSES
from shardwise.rules.matmul import MATMUL
from shardwise.rules.normalization import NORMALIZATION
from shardwise.rules.pooling import POOLING
from shardwise.rules.recurrent import RECURRENT
from shardwise.rules.reductions import REDUCTIONS
from shardwise.rules.rule import OpRule
from shardwise.rules.shapes import SHAPES
from shardwise.rules.transforms import TRANSFORMS
from shardwise.rules.updates import UPDATES

__all__ = ["RULES", "rule_of", "whole_rule"]


RULES: RuleTable = by_operator(
    {},
    MATMUL,
    ELEMENTWISE,
    REDUCTIONS,
    SHAPES,
    JOINS,
    INDEXING,
    UPDATES,
    ATTENTION,
    NORMALIZATION,
    CONVOLUTION,
    POOLING,
    IMAGES,
    LOSSES,
    CONSTRUCTORS,
    DROPOUT,
    LABEL_TERMS,
    HEAD,
    RECURRENT,
    EXPERTS,
    TRANSFORMS,
    LINALG,
    AUTOGRAD_FUNCTIONS,
)


@dataclass
class CustomRules:
    """The rules that users registered with ``shardwise.rule`` (custom.py).

    ``version`` changes whenever a rule is added or removed. Caches of rules compare it.
    """

    rules: dict[OpOverload, RuleTemplate | RuleFunction] = field(default_factory=dict)
    version: int = 0

    def add(self, target: OpOverload, entry: RuleTemplate | RuleFunction) -> None:
        self.rules[target] = entry
        self.version += 1

    def remove(self, target: OpOverload) -> bool:
        """Remove the rule of an operator; return whether there was one."""
        self.version += 1
        return self.rules.pop(target, None) is not None

    def entries(self) -> dict[OpOverload, RuleTemplate | RuleFunction]:
        return dict(self.rules)

    def replace(self, rules: dict[OpOverload, RuleTemplate | RuleFunction]) -> None:
        """Go back to earlier ``entries``."""
        if rules != self.rules:
            self.rules, self.version = dict(rules), self.version + 1


CUSTOM = CustomRules()


def rule_of(op: Op, graph: Graph) -> OpRule | None:
    """Return the rule of ``op``, or None if the operator, or this call of it, has no rule. It then runs unsplit.

    Raises LayoutError if the shapes in the graph contradict the rule.
    """
    entry = RULES.get(op.target) or CUSTOM.rules.get(op.target)
    if entry is None:
        return None
    return bind(entry, op, graph) if isinstance(entry, RuleTemplate) else entry(op, graph)
