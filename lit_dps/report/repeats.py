"""Repeats on fresh seeds in words: a section of a report, the law of medians, notes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.best_of_n import halves, last_doubling, why_no_draws
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_tables import medians_outside
from lit_dps.analysis.repeats import RepeatSummary, all_runs_are_equal
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import (
    cell_texts,
    in_parts,
    k_star_text,
    listed_numbers,
    three_digits,
    times,
)
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import counted
from lit_dps.core.trial import Series, Status, TrialResult
from lit_dps.core.unit import STEPS, Unit
from lit_dps.report.notes import Level, Note, Values

# What the intervals of a law contain.
LAW_INTERVALS = "95 % intervals include the noise of each K and the misfit of the law"

SEEDED_ORDERS = ("authors", "per_trial")  # values of data.order that are not a file


def repeats_section(study: Analysis, width: int | None = None) -> str:
    """Return the section on repeats: a table, what trials were worth, the law of the medians.

    Empty without repeats.

    Args:
        study: The study.
        width: Columns of the terminal, for the table; None for any width.
    """
    if not study.repeats:
        return ""
    text = _repeats_text(study, width) + draws_text(study.record, study.cells)
    if study.median_laws:
        head = law_head("median K over seeds", study.record.goal.cost_unit)
        text += "\n".join([head, *law_lines(study.median_laws), ""])
    return text


def _repeats_text(study: Analysis, width: int | None) -> str:
    """Return the table of repeated samples, and how much lower K* is than their medians."""
    plan = study.record.plan
    which = "the best sample"
    if plan.points > 1:
        which = f"the {plan.points} best samples"
    until = study.record.goal.budget_text
    if plan.slack is not None:
        until = f"{plan.slack:g} x K*"
    seeds = counted(plan.count, "fresh seed")
    lines = [
        f"repeats: {which} on {seeds} (initial weights, mask and order of examples), up to {until}"
    ]
    rows = []
    biases = []
    for each in study.repeats:
        rows.append(_row_to_print(each, study.by_cell[each.cell], plan.points > 1))
        is_shared = each.cell in study.record.shared
        if each.rank == 1 and each.bias is not None and not is_shared:
            biases.append(each.bias)
    lines += in_parts(rows, len(cell_texts(study.repeats[0].cell)), width)
    if biases:
        meaning = "the best of many trials"
        if not study.record.statistic.is_minimum:
            meaning = study.record.k_star_words
        lines.append(
            f"  K* is x{geometric_mean(biases):.2f} the median of its sample over seeds "
            f"(geometric mean of {len(biases)} cells), because it is {meaning}"
        )
    return "\n".join(lines) + "\n"


def _row_to_print(
    repeated: RepeatSummary, searched: CellSummary, shows_point: bool
) -> dict[str, str]:
    """Return one row of the table of repeated points, by column.

    Args:
        repeated: The repeats of a point.
        searched: The result of the search in the same cell.
        shows_point: Whether several points of a cell are repeated.
    """
    row = cell_texts(repeated.cell)
    if shows_point:
        row["sample"] = str(repeated.point)
        row["K in the search"] = k_star_text(
            repeated.searched_cost, repeated.is_search_at_first_check
        )
    else:
        head = "K*" if searched.best is None else searched.best.unit.head
        row[head] = k_star_text(searched.k_star, searched.is_upper_bound)
    row["median"] = _quantile_text(repeated, 0.5)
    row["quartiles"] = _range_text(repeated, 0.25, 0.75)
    row["all"] = _range_text(repeated, 0, 1)
    row["repeats"] = str(len(repeated.results))
    row["missed"] = str(repeated.missed)
    row["K / median"] = "-"
    if repeated.bias is not None:
        row["K / median"] = f"{repeated.bias:.2f}"
    return row


def _quantile_text(repeated: RepeatSummary, q: float) -> str:
    """Return a quantile of the steps over seeds as text; "missed" if it is infinite."""
    steps = repeated.quantile(q)
    if steps is None:
        return "-"
    if math.isinf(steps):
        return "missed"
    is_bound = repeated.is_upper_bound(q)
    if isinstance(repeated.searched_cost, int):
        # Whole costs may have a median between two of them.
        steps = round(steps)
    return k_star_text(steps, is_bound)


def _range_text(repeated: RepeatSummary, low: float, high: float) -> str:
    """Return two quantiles of the steps over seeds as text."""
    if not repeated.results:
        return "-"
    return f"{_quantile_text(repeated, low)} to {_quantile_text(repeated, high)}"


def draws_text(record: StudyRecord, cells: Sequence[CellSummary]) -> str:
    """Return what the last doubling of the trials was worth, in a line.

    Empty where no cell has two trials and a K*.
    """
    cells = [cell for cell in cells if cell.cell not in record.shared]
    if why_no_draws(record) or not halves(cells, record.statistic):
        return ""
    ratios = last_doubling(cells, record.statistic)
    if not ratios:
        return (
            "more trials: it is unknown what doubling the trials saves, because too few "
            "trials of each cell met the goal\n"
        )
    spread = ""
    if len(ratios) > 1:
        spread = f" (x{three_digits(min(ratios))} to x{three_digits(max(ratios))})"
    half = "the best of half of the trials needs"
    if not record.statistic.is_minimum:
        half = "K* of half of the trials is"
    met = "in which a trial met the goal"
    if record.statistic.needed_trials > 1:
        met = "that have a K*"
    return (
        f"more trials: {half} x{three_digits(geometric_mean(ratios))}"
        f"{spread} the {record.goal.unit} of K*.\n"
        "  Doubling the trials may save a similar share. Geometric mean of "
        f"{len(ratios)} of {len(cells)} cells, over all halves {met}\n"
    )


def law_head(name: str, unit: Unit, method: str = "") -> str:
    """Return the line above the laws of a study: what is fitted to K, and its intervals."""
    if not unit.has_law:
        return f"{name} in {unit.axis}: no law is fitted"
    in_unit = "" if unit is STEPS else f" {unit.name}"
    return f"{name} = {unit.law}{in_unit}{method}; {LAW_INTERVALS}"


def law_lines(laws: Mapping[Series, Law]) -> list[str]:
    """Return the constants of the law of each series with intervals, its verdict and advice."""
    lines = []
    for series, law in sorted(laws.items()):
        lines.append(f"  {series}  {law.constants_line()}")
        if law.verdict.advice:
            lines.append(f"    {law.verdict.advice}")
    return lines


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


def unreached_by_repeats(study: Analysis) -> Iterator[Values]:
    """Hold at a goal that is harder than the study's goal, at which repeats ended."""
    if study.record.plan.count and _is_harder(study):
        yield {"goal": study.original.goal}


def _is_harder(study: Analysis) -> bool:
    """Return True if this goal is harder than the goal of the study."""
    goal = study.record.goal
    return goal.value != study.original.goal.value and not study.original.goal.is_easier(goal.value)


def _has_repeats(study: Analysis) -> bool:
    """Return True if repeats were asked for and are known at this goal."""
    return bool(study.record.plan.count) and not _is_harder(study)


def _stored_repeats(study: Analysis) -> list[TrialResult]:
    """Return all stored repeats that are known at this goal."""
    results = []
    if _has_repeats(study):
        for cell in study.record.trained_cells:
            results += study.record.repeats.get(cell, ())
    return results


def samples_without_repeats(study: Analysis) -> Iterator[Values]:
    """Yield best samples at this goal that are not the best at the goal of the study."""
    without = sum(not each.planned for each in study.repeats)
    if _has_repeats(study) and without:
        yield {"without": without, "samples": len(study.repeats), "goal": study.original.goal}


def pending_repeats(study: Analysis) -> Iterator[Values]:
    """Yield repeats that have not finished."""
    planned = 0
    missing = 0
    for each in study.repeats:
        planned += each.planned
        missing += each.planned - len(each.results)
    if _has_repeats(study) and missing:
        yield {"missing": missing, "planned": planned}


def failed_repeats(study: Analysis) -> Iterator[Values]:
    """Yield repeats that ended with an error."""
    failed = [result for result in _stored_repeats(study) if result.status is Status.FAILED]
    if failed:
        yield {"failed": len(failed), "reason": failed[0].failure}


def equal_repeats(study: Analysis) -> Iterator[Values]:
    """Yield samples whose runs are all equal, so that the spread over seeds is unknown."""
    if not _has_repeats(study):
        return
    started = 0
    equal = 0
    for each in study.repeats:
        if each.results:
            started += 1
            equal += all_runs_are_equal(study.record, each)
    if equal:
        yield {"equal": equal, "started": started}


def order_of_file(study: Analysis) -> Iterator[Values]:
    """Yield an order of the examples that is a file, and so equal in all repeats."""
    order = study.record.setting("data.init_args.order")
    if _has_repeats(study) and order is not None and order not in SEEDED_ORDERS:
        yield {"order": order}


def medians_beside_law(study: Analysis) -> Iterator[Values]:
    """Yield series whose medians over seeds leave the law of K*, and the largest ratio to it."""
    interval = study.record.goal.check_interval
    parts = []
    ratios = []
    for series, of_medians in sorted(study.median_laws.items()):
        outside = medians_outside(study.laws[series], of_medians, interval)
        if outside:
            parts.append(f"{series} {outside_text(outside)}")
            ratios += outside.values()
    if parts:
        most = max(ratios, key=lambda ratio: abs(math.log(ratio)))
        yield {"places": "; ".join(parts), "most": times(most)}


REPEATS = (
    Note(unreached_by_repeats, "There are no repeats here: they end at {goal}, the study's goal."),
    Note(
        samples_without_repeats,
        "{without} of the {samples} best samples have no repeats here: repeats are of the best "
        "samples at {goal}, the study's goal.",
    ),
    Note(
        pending_repeats,
        "{missing} of {planned} repeats of the best samples have not finished: run the same "
        "command to resume.",
        level=Level.WRONG,
    ),
    Note(
        failed_repeats,
        "{failed} repeats failed, the first with {reason}: the same command repeats them.",
        level=Level.WRONG,
    ),
    Note(
        equal_repeats,
        "All runs of {equal} of {started} repeated samples are equal, so their spread over seeds "
        "is unknown: remove fixed seeds.",
        "The run of the search is equal too. The module or the data set a seed themselves, or use "
        "no random numbers.",
        Level.WEAK,
    ),
    Note(
        order_of_file,
        "data.order {order} is a file, so all repeats use the examples in that order.",
    ),
    Note(
        medians_beside_law,
        "Medians over seeds are outside the 95 % band of the law of K*: expect one run to need the "
        "median.",
        "They are outside at {places}; up to {most} the law.",
        Level.WEAK,
    ),
)
