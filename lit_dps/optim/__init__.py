"""Update rules by name, one file each, and their learning-rate schedules.

A rule is all that the package knows of an optimizer: how torch makes it, and the same update for
many networks at once. To add one: a file beside `sgd.py`, and its rules in `RULES`. Somebody else's
goes by its class path.
"""

from lit_dps.core.registry import named
from lit_dps.optim.adam import ADAM, ADAMW
from lit_dps.optim.rule import Rule, State
from lit_dps.optim.schedule import Schedule, factor, make_scheduler
from lit_dps.optim.sgd import MOMENTUM, NESTEROV, SGD

OURS = (
    SGD,
    MOMENTUM,
    NESTEROV,
    ADAM,
    ADAMW,
)  # where gradient and state are zero, none of these moves a zero
RULES: dict[str, Rule] = {rule.name: rule for rule in OURS}


def rule_named(name: str) -> Rule:
    """The rule of a name or class path. Raises ConfigError if there is none."""
    rule = named("model.optimizer", name, RULES, "Rule", lambda found: isinstance(found, Rule))
    return RULES.setdefault(name, rule)  # so that `rule_of` knows it


def rule_of(optimizer) -> Rule | None:
    """The rule whose update an optimizer makes for all its parameters; None if it is none of
    `RULES`."""
    if len(optimizer.param_groups) != 1:
        return None
    return next((rule for rule in RULES.values() if rule.is_of(optimizer)), None)


__all__ = [
    "OURS",
    "RULES",
    "Rule",
    "Schedule",
    "State",
    "factor",
    "make_scheduler",
    "rule_named",
    "rule_of",
]
