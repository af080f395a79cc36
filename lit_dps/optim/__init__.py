"""Update rules by name, one file each, and their learning-rate schedules.

A `Rule` has the update of one parameter, for many networks at once, and makes the torch optimizer
of one network (`rule`). `stacked_update` applies it to the flat tensors of a stack. To add a rule,
write a file like `sgd.py` and list its rules in `BUILT_IN`. A configuration names the rule of
another package by its class path.
"""

from typing import Any

from lit_dps.core.registry import named
from lit_dps.optim.adam import ADAM, ADAMW
from lit_dps.optim.lion import LION
from lit_dps.optim.muon import MUON
from lit_dps.optim.rule import Rule, RuleOptimizer, State
from lit_dps.optim.schedule import RateSchedule, Schedule
from lit_dps.optim.schedule_free import SCHEDULE_FREE_ADAMW, SCHEDULE_FREE_SGD
from lit_dps.optim.sgd import MOMENTUM, NESTEROV, SGD, WITH_DECAY
from lit_dps.optim.soap import SOAP
from lit_dps.optim.stacked_update import FlatLayout, StackedUpdate

BUILT_IN = (
    *(SGD, MOMENTUM, NESTEROV, ADAM, ADAMW, LION, MUON, SOAP),
    *(SCHEDULE_FREE_SGD, SCHEDULE_FREE_ADAMW),
)
# None of these rules moves a weight of zero whose gradient and state are zero.
OURS = (SGD, MOMENTUM, NESTEROV, ADAM, ADAMW, LION, *WITH_DECAY)
RULES: dict[str, Rule] = {rule.name: rule for rule in BUILT_IN}


def rule_named(name: str) -> Rule:
    """Return the rule of a name or class path. Raise ConfigError for an unknown one."""
    rule = named("model.optimizer", name, RULES, "Rule", lambda value: isinstance(value, Rule))
    # `rule_of` looks for rules of class paths too.
    return RULES.setdefault(name, rule)


def rule_of(optimizer: Any) -> Rule | None:
    """Return the rule whose update an optimizer makes; None if no known rule makes it.

    All parameter groups must be of the rule. Their numbers may differ.
    """
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.rule
    for rule in (*RULES.values(), *WITH_DECAY):
        if _all_groups_are_of(rule, optimizer):
            return rule
    return None


def _all_groups_are_of(rule: Rule, optimizer: Any) -> bool:
    """Return True if a rule makes the update of each parameter group of an optimizer."""
    groups = optimizer.param_groups
    try:
        for group in groups:
            optimizer.param_groups = [group]
            if not rule.is_of(optimizer):
                return False
    finally:
        optimizer.param_groups = groups
    return True


__all__ = [
    "OURS",
    "RULES",
    "FlatLayout",
    "RateSchedule",
    "Rule",
    "RuleOptimizer",
    "Schedule",
    "StackedUpdate",
    "State",
    "rule_named",
    "rule_of",
]
