"""Repeats on fresh seeds in words: their section of a report, and the law of medians."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.best_of_n import halves, last_doubling, why_no_draws
from lit_dps.analysis.law import Law
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import aligned, listed_numbers, short_columns, three_digits
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series

# What the intervals of a law contain.
LAW_INTERVALS = "95 % intervals: the noise of each K and the law's own error"


def repeats_section(study: Analysis) -> str:
    """Return the section on repeats: a table, what trials were worth, the law of the medians.

    Empty without repeats.
    """
    if not study.repeats:
        return ""
    draws = draws_text(study.record, study.cells)
    return _repeats_text(study) + draws + _median_law_text(study.median_laws)


def _repeats_text(study: Analysis) -> str:
    """Return the table of repeated samples, and how much lower K* is than their medians."""
    plan = study.record.plan
    which = "the best sample"
    if plan.points > 1:
        which = f"the {plan.points} best samples"
    until = "max_steps"
    if plan.race_factor is not None:
        until = f"{plan.race_factor:g} x K*"
    seeds = f"{plan.count} fresh seed{'s' * (plan.count > 1)}"
    lines = [
        f"repeats: {which} on {seeds} (initial weights, mask and order of examples), up to {until}"
    ]
    rows = []
    biases = []
    for each in study.repeats:
        rows.append(_row_to_print(each, plan.points > 1))
        if each.rank == 1 and each.bias is not None:
            biases.append(each.bias)
    lines += aligned(rows)
    if biases:
        lines.append(
            f"  K* is x{_geometric_mean(biases):.2f} the median of its sample over seeds "
            f"(geometric mean of {len(biases)} cells), because it is the best of many trials"
        )
    return "\n".join(lines) + "\n"


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _row_to_print(repeated: RepeatSummary, shows_point: bool) -> dict[str, str]:
    """Return one row of the table of repeated points, by column."""
    interval = repeated.check_interval
    row = {"B": str(repeated.cell.batch_size), **short_columns(repeated.cell.series)}
    steps_column = "K*"
    if shows_point:
        row["sample"] = str(repeated.point)
        steps_column = "K in the search"
    row[steps_column] = _steps_text(repeated.steps, interval)
    row["median"] = _steps_text(repeated.median, interval)
    row["quartiles"] = _range_text(repeated, 0.25, 0.75)
    row["all"] = _range_text(repeated, 0, 1)
    row["repeats"] = str(len(repeated.results))
    row["missed"] = str(repeated.missed)
    row["K / median"] = "-"
    if repeated.bias is not None:
        row["K / median"] = f"{repeated.bias:.2f}"
    return row


def _steps_text(steps: float | None, check_interval: int) -> str:
    """Return steps over seeds as text; a bound at the first check, "missed" if infinite."""
    if steps is None:
        return "-"
    if math.isinf(steps):
        return "missed"
    if steps <= check_interval:
        return f"<= {check_interval}"
    return three_digits(steps)


def _range_text(repeated: RepeatSummary, low: float, high: float) -> str:
    """Return two quantiles of the steps over seeds as text."""
    if not repeated.results:
        return "-"
    interval = repeated.check_interval
    lowest = _steps_text(repeated.quantile(low), interval)
    return f"{lowest} to {_steps_text(repeated.quantile(high), interval)}"


def draws_text(record: StudyRecord, cells: Sequence[CellSummary]) -> str:
    """Return what the last doubling of the trials was worth, in a line.

    Empty where no cell has two trials and a K*.
    """
    if why_no_draws(record) or not halves(cells):
        return ""
    ratios = last_doubling(cells)
    if not ratios:
        return (
            "draws: it is unknown what doubling the trials would save, because too few trials of "
            "each cell met the goal\n"
        )
    spread = ""
    if len(ratios) > 1:
        spread = f" (x{three_digits(min(ratios))} to x{three_digits(max(ratios))})"
    return (
        f"draws: the best of half of the trials needs x{three_digits(_geometric_mean(ratios))}"
        f"{spread} the steps of K*.\n  Doubling the trials may save as much. Geometric mean of "
        f"{len(ratios)} of {len(cells)} cells, over all halves in which a trial met the goal\n"
    )


def _median_law_text(laws: Mapping[Series, Law]) -> str:
    """Return the law of the medians over seeds, a line a series; empty without repeats."""
    if not laws:
        return ""
    lines = [f"median K over seeds = c1 / B + c2, {LAW_INTERVALS}", *law_lines(laws)]
    return "\n".join(lines) + "\n"


def law_lines(laws: Mapping[Series, Law]) -> list[str]:
    """Return a line a series: the constants of its law with intervals, and its verdict."""
    return [f"  {series}  {law.line()}" for series, law in sorted(laws.items())]


def outside_text(outside: Mapping[int, float]) -> str:
    """Return where medians leave the law in words: above at B = 8, 16, below at B = 2."""
    above = []
    below = []
    for batch_size, ratio in outside.items():
        if ratio > 1:
            above.append(batch_size)
        else:
            below.append(batch_size)
    parts = []
    if above:
        parts.append(f"above at B = {listed_numbers(above)}")
    if below:
        parts.append(f"below at B = {listed_numbers(below)}")
    return ", ".join(parts)
