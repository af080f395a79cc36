"""check_statistic: the conformance test of a statistic, which says what K* is."""

from __future__ import annotations

from lit_dps.core.registry import DESCRIPTION, description_error
from lit_dps.core.statistic import Statistic, broken_rule
from lit_dps.testing.failure import ConformanceError, require


def check_statistic(statistic: Statistic | type[Statistic]) -> None:
    """Raise ConformanceError if a statistic does not do what lit_dps requires, on random cells.

    - `value` is above 0, or None for too few complete trials. It only reads the steps, and does
      not depend on the order of the trials.
    - Another trial, or fewer steps of a trial, never raise it.
    - `of_draws` equals `value`.
    - A trial that `race_limit` stops never changes the value, and a larger race factor never lowers
      the limit.
    - `describe` returns a text of one line.

    A study runs all of this before it starts.

    Args:
        statistic: The statistic, or its class.
    """
    if isinstance(statistic, type):
        statistic = statistic()
    name = type(statistic).__name__
    wrong = description_error(statistic)
    require("description", wrong is None, f"{name}.{wrong}", DESCRIPTION, f"{name}.describe()")
    broken = broken_rule(statistic)
    if broken is not None:
        shown_by = f"a cell of steps {list(broken.steps)}"
        what = f"{name}.{broken.what}"
        raise ConformanceError(broken.requirement, what, broken.expected, shown_by)
