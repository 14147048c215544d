"""What may be split in every operator: factors, rules in tables, lowerings. No mesh, no price.

Begin with ``rule.py`` (what a rule says) and ``tables.py`` (where rules are looked up, and how one is added).
"""

from shardwise.rules.binding import RuleTable, RuleTemplate, bind, whole_rule
from shardwise.rules.notation import Pattern, format_dims, parse_rule
from shardwise.rules.tables import RULES, rule_of

__all__ = [
    "RULES",
    "Pattern",
    "RuleTable",
    "RuleTemplate",
    "bind",
    "format_dims",
    "parse_rule",
    "rule_of",
    "whole_rule",
]
