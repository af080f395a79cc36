"""Notes on the repeats of a study on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_tables import medians_outside
from lit_dps.analysis.repeats import all_runs_are_equal
from lit_dps.analysis.tables import times
from lit_dps.core.record import setting
from lit_dps.core.trial import Series, Status, TrialResult
from lit_dps.report.notes import Note, Values
from lit_dps.report.repeats import outside_text

SEEDED_ORDERS = ("authors", "per_trial")  # values of data.order that are not a file


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
        for of_cell in study.record.repeats.values():
            results += of_cell
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


def unused_repeats(study: Analysis) -> Iterator[Values]:
    """Yield repeats of samples that are not the best."""
    best = {(each.cell, each.point) for each in study.repeats}
    unused = 0
    for result in _stored_repeats(study):
        unused += (result.trial.cell, result.trial.point) not in best
    if unused:
        when = "at this goal"
        if study.original.goal.value == study.record.goal.value:
            when = "any more"
        yield {"unused": unused, "when": when}


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
    order = setting(study.record.config, "data.init_args.order")
    if _has_repeats(study) and order is not None and order not in SEEDED_ORDERS:
        yield {"order": order}


def medians_beside_law(study: Analysis) -> Iterator[Values]:
    """Yield series whose medians over seeds leave the law of K*."""
    interval = study.record.goal.check_interval
    yield from outside_of_laws(study.laws, study.median_laws, interval)


def outside_of_laws(
    laws: Mapping[Series, Law], medians: Mapping[Series, Law], check_interval: int
) -> Iterator[Values]:
    """Yield series whose medians over seeds leave a law, and the largest ratio to it.

    Args:
        laws: The law of K* of each series.
        medians: The law of the medians, of series that have repeats.
        check_interval: Steps between two validations.
    """
    parts = []
    ratios = []
    for series, of_medians in sorted(medians.items()):
        outside = medians_outside(laws[series], of_medians, check_interval)
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
    Note(pending_repeats, "{missing} of {planned} repeats of the best samples have not finished."),
    Note(
        unused_repeats,
        "{unused} repeats are stored and not counted: their samples are not the best {when}.",
    ),
    Note(
        failed_repeats,
        "{failed} repeats failed, the first with {reason}. The next run repeats them.",
    ),
    Note(
        equal_repeats,
        "All runs of {equal} of {started} repeated samples are equal, also the run of the search. "
        "The module or the data set a seed themselves, or use no random numbers. The spread over "
        "seeds is unknown.",
    ),
    Note(
        order_of_file,
        "data.order {order} is a file, so all repeats use the examples in that order.",
    ),
    Note(
        medians_beside_law,
        "Medians over seeds are outside the 95 % band of the law of K*: {places}; up to {most} the "
        "law. Expect one run at the best sample to need the median, not the law.",
    ),
)
