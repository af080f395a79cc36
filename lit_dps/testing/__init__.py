"""Conformance tests for plug-ins, as functions that an author calls in her own test suite.

    from lit_dps.testing import check_rule
    def test_my_rule(): check_rule(MY_RULE)

Each function returns None, or raises `ConformanceError` (an AssertionError) with one line: what is
wrong, what is expected, and the input that shows it. A study runs the quick part of them on
plug-ins of others before it starts (`lit_dps.study.preflight.plug_ins`).

`rule`, `pruner`, `reading`, `goal`, `statistic`, `schedule` and `data` have one function each;
`toy` has the network of a test. They need no study and no engine.
"""

from lit_dps.testing.data import check_data
from lit_dps.testing.failure import ConformanceError
from lit_dps.testing.goal import check_goal
from lit_dps.testing.pruner import check_pruner
from lit_dps.testing.reading import check_reading
from lit_dps.testing.rule import check_rule
from lit_dps.testing.schedule import check_schedule
from lit_dps.testing.statistic import check_statistic

__all__ = [
    "ConformanceError",
    "check_data",
    "check_goal",
    "check_pruner",
    "check_reading",
    "check_rule",
    "check_schedule",
    "check_statistic",
]
