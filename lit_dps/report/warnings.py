"""The notes on a study: what to know before trusting it.

`NOTES` is the table of all notes, the most important first: what K* and the law lack, how trials
ended, what they differ in, how they were repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import MEDIAN
from lit_dps.analysis.summary import CellSummary, can_move
from lit_dps.core.idle_axes import notes_on_idle_axes
from lit_dps.core.trial import Cell, TrialResult
from lit_dps.core.unit import SECONDS
from lit_dps.report.no_result import (
    have_diverged,
    have_failed,
    have_no_k_star,
    missed_text,
    spent_budgets,
)
from lit_dps.report.notes import Level, Note, Values, first_names, lines_of
from lit_dps.report.pruning_notes import PRUNING
from lit_dps.report.repeats import REPEATS
from lit_dps.report.trial_notes import ENGINES, ENVIRONMENTS, FAILURES, SCHEDULES


def study_notes(study: Analysis) -> list[str]:
    """Return what to know before trusting the table of a study, a line each."""
    return lines_of(NOTES, study)


def ended_by_clock(study: Analysis) -> Iterator[Values]:
    """Hold if trials have a budget in seconds."""
    goal = study.record.goal
    if goal.max_seconds is not None:
        yield {"key": f"goal.max_seconds = {goal.max_seconds:g}"}


def k_star_by_clock(study: Analysis) -> Iterator[Values]:
    """Hold if K* is in seconds, with what the race does then."""
    goal = study.record.goal
    if goal.unit == SECONDS.name:
        race = ""
        if study.record.race_factor is not None:
            race = ", and the race (study.race_factor) stops trials by the clock"
        yield {"key": f"goal.unit = {goal.unit}", "race": race}


def no_k_star(study: Analysis) -> Iterator[Values]:
    """Hold if surely no cell has a K*."""
    if have_no_k_star(study.cells):
        yet = ""
        if _total(study, "pending"):
            yet = " yet"
        too_few = study.record.statistic.too_few_have.capitalize()
        yield {"yet": yet, "too_few": too_few}


def missing_k_star(study: Analysis) -> Iterator[Values]:
    """Yield cells in which too few trials reached the goal, with the best values there."""
    missing = []
    for cell in _without_k_star(study):
        if not (cell.pending or have_failed(cell) or have_diverged(cell)):
            missing.append(cell)
    if not missing or have_no_k_star(study.cells):
        return
    reached = []
    trials: list[TrialResult] = []
    for cell in missing:
        trials += cell.trials
        text = missed_text(study.record.goal, cell)
        if text:
            reached.append(text)
    best = ""
    if reached:
        best = f"{'; '.join(first_names(reached))}."
    too_few = study.record.statistic.too_few.capitalize()
    counts = {"count": len(missing), "cells": len(study.cells)}
    budgets = " and ".join(spent_budgets(study.record.goal, trials))
    yield {**counts, "best": best, "too_few": too_few, "budgets": budgets}


def failed_cells(study: Analysis) -> Iterator[Values]:
    """Yield the cells in which each trial failed."""
    cells = [cell for cell in _without_k_star(study) if not cell.pending and have_failed(cell)]
    if cells:
        yield _named(study, cells)


def diverged_cells(study: Analysis) -> Iterator[Values]:
    """Yield the cells in which each trial diverged, if other cells have or may have a K*."""
    cells = [cell for cell in _without_k_star(study) if not cell.pending and have_diverged(cell)]
    if cells and not have_no_k_star(study.cells):
        yield _named(study, cells)


def _named(study: Analysis, cells: Sequence[CellSummary]) -> Values:
    """Return the number of some cells, and the names of the first ones."""
    names = [str(cell.cell) for cell in cells]
    counts = {"count": len(cells), "cells": len(study.cells)}
    return {**counts, "names": ", ".join(first_names(names))}


def _without_k_star(study: Analysis) -> list[CellSummary]:
    """Return the cells in which too few trials reached the goal for a K*."""
    return [cell for cell in study.cells if cell.best is None and not cell.may_have_k_star]


def pending_trials(study: Analysis) -> Iterator[Values]:
    """Yield trials that have not finished."""
    pending = _total(study, "pending")
    if pending:
        running = _total(study, "running")
        yield {"pending": pending, "declared": _declared_trials(study), "running": running}


def _total(study: Analysis, name: str) -> int:
    """Return the sum of an attribute of `CellSummary` over all cells that are trained."""
    return sum(getattr(study.by_cell[cell], name) for cell in study.record.trained_cells)


def _declared_trials(study: Analysis) -> int:
    """Return the number of trials that a study runs in all."""
    return study.record.trials * len(study.record.trained_cells)


def undetermined_trials(study: Analysis) -> Iterator[Values]:
    """Yield trials that do not count at this goal, and K* that are upper bounds because of them."""
    count = 0
    bounds = 0
    for cell in study.cells:
        if cell.cell not in study.record.shared:
            count += len(cell.undetermined_points)
        bounds += cell.may_be_lower
    if not count:
        return
    consequence = ""
    if bounds:
        consequence = (
            f" Such a trial may be faster than K* in {bounds} of {len(study.cells)} cells. K* is "
            "an upper bound there and is left out of the law."
        )
    yield {
        "count": count,
        "declared": _declared_trials(study),
        "goal": study.record.goal,
        "consequence": consequence,
    }


def few_trials_bounds(study: Analysis) -> Iterator[Values]:
    """Yield the cells with a K* of less than half of their trials, which is an upper bound."""
    cells = [cell for cell in study.cells if cell.has_few_trials]
    if cells:
        yield _named(study, cells)


def first_check_bounds(study: Analysis) -> Iterator[Values]:
    """Yield K* at the first validation, which are upper bounds."""
    bounds = [cell.cell for cell in study.cells if cell.is_at_first_check]
    if bounds:
        counts = {"count": len(bounds), "cells": len(study.cells)}
        yield {**counts, "places": _places_text(study, bounds)}


def median_bounds(study: Analysis) -> Iterator[Values]:
    """Yield the medians over seeds of the answer that are upper bounds."""
    bounds = []
    for cell, steps in study.expected_steps.items():
        if steps.statistic == MEDIAN and steps.is_bound:
            bounds.append(cell)
    if bounds:
        yield {"places": _places_text(study, bounds)}


def _places_text(study: Analysis, cells: Sequence[Cell]) -> str:
    """Return the first of some cells as text, by batch size if the study has one series."""
    places = [str(cell) for cell in cells]
    if len(study.record.series) == 1:
        places = [f"B = {cells[0].batch_size}"]
        places += [str(cell.batch_size) for cell in cells[1:]]
    return ", ".join(first_names(places))


def single_complete_trials(study: Analysis) -> Iterator[Values]:
    """Yield cells whose interval rests on one trial that reached the goal."""
    count = 0
    for cell in study.cells:
        complete = len(cell.costs) - cell.costs.count(None)
        is_repeated = bool(study.record.repeats.get(cell.cell))
        is_measured = cell.k_star is not None and not cell.is_upper_bound
        if len(cell.costs) > 1 and complete == 1 and not is_repeated and is_measured:
            count += 1
    if count:
        yield {"count": count, "cells": len(study.cells)}


def adaptive_sampler(study: Analysis) -> Iterator[Values]:
    """Yield a sampler that learns from earlier results, so that samples are not independent."""
    sampler = study.record.setting("study.sampler") or "sobol"
    if sampler != "sobol":
        yield {"sampler": sampler}


def seeds_of_one_sample(study: Analysis) -> Iterator[Values]:
    """Hold if a study runs the best samples of another one on other seeds."""
    best_of = study.record.setting("study.best_of")
    if best_of is not None:
        meaning = "that of the luckiest seed"
        if not study.record.statistic.is_minimum:
            meaning = study.record.k_star_words
        yield {"best_of": best_of, "meaning": meaning}


def changed_samples(study: Analysis) -> Iterator[Values]:
    """Yield the cells whose samples are no longer the best ones of the study that has them."""
    count = sum(cell.cell in study.record.changed_samples for cell in study.cells)
    if count:
        best_of = study.record.setting("study.best_of")
        yield {"best_of": best_of, "count": count, "cells": len(study.cells)}


def best_at_edge(study: Analysis) -> Iterator[Values]:
    """Yield the metaparameters whose best value is at an end that can move, and their cells."""
    names = study.record.short_names
    ends: Counter[tuple[str, str]] = Counter()
    for cell in study.cells:
        ends.update(cell.boundary.items())
    of_cells = f" of {len(study.cells)} cells"
    places = []
    for (key, end), count in sorted(ends.items()):
        if can_move(study.record, key, end):
            places.append(f"{names[key]} {end} in {count}{of_cells}")
            of_cells = ""
    if places:
        yield {"places": ", ".join(places)}


def notes_of_dry_runs(study: Analysis, level: Level) -> Iterator[Values]:
    """Yield the stored notes of dry runs at a level."""
    for text, name in study.record.notes.items():
        if name == level.name:
            yield {"text": text.removesuffix(".")}


def notes_without_dry_run(study: Analysis) -> Iterator[Values]:
    """Yield the notes on idle axes of a study that an earlier version ran, which stored none."""
    record = study.record
    for text in notes_on_idle_axes(record.config, record.axes, record.space):
        if text not in record.notes:
            yield {"text": text}


RESULTS = (
    Note(
        ended_by_clock,
        "{key} ends trials by the clock: compare only studies of the same idle machine.",
        "The table is not reproducible: on another machine, or a busy one, other trials meet the "
        "goal.",
        Level.WRONG,
    ),
    Note(
        k_star_by_clock,
        "{key} measures K* by the clock{race}: compare only studies of the same idle machine.",
        "The table is not reproducible, because K* depends on the machine and its load.",
        Level.WRONG,
    ),
    Note(no_k_star, "{too_few} reached the goal{yet}, so there is no K* and no law."),
    Note(
        missing_k_star,
        "{too_few} reached the goal in {count} of {cells} cells: raise {budgets} or choose an "
        "easier goal.",
        "{best}",
        Level.WRONG,
    ),
    Note(
        failed_cells,
        "All trials failed in {count} of {cells} cells ({names}): correct the error, then run the "
        "same command.",
        level=Level.WRONG,
    ),
    Note(
        diverged_cells,
        "All trials diverged in {count} of {cells} cells ({names}): lower the range of the "
        "learning rate.",
        level=Level.WRONG,
    ),
    Note(
        pending_trials,
        "{pending} of {declared} trials have not finished ({running} running or queued): run the "
        "same command to resume.",
        level=Level.WRONG,
    ),
    Note(
        undetermined_trials,
        "It is unknown whether and when {count} of {declared} trials met {goal}: set "
        "goal.early_reject false in a new study.",
        "Their validation stopped early at the study's own goals.{consequence}",
        Level.WRONG,
    ),
    Note(
        few_trials_bounds,
        "Less than half of the trials have a result in {count} of {cells} cells ({names}): K* is "
        "an upper bound (<=) there.",
        "A search proceeds to better rates, so K* of few trials is too high. The law leaves it "
        "out. Failed trials have no result until they run again.",
        Level.WEAK,
    ),
    Note(
        first_check_bounds,
        "K* at {places} is an upper bound (<=). Choose a smaller goal.check_interval.",
        "K* is at the first validation in {count} of {cells} cells. The law leaves them out.",
        Level.WEAK,
    ),
    Note(
        median_bounds,
        "The median K over seeds at {places} is an upper bound (<=) and may be lower.",
        "It is at the first validation (lower goal.check_interval), or repeats were stopped before "
        "they could meet the goal. The law leaves it out.",
        Level.WEAK,
    ),
    Note(
        best_at_edge,
        "Best values are at an end of their range ({places}): run lit-dps study --extend-space.",
        "It widens the search range of each, and keeps all trials.",
        Level.WEAK,
    ),
    Note(
        single_complete_trials,
        "Only one trial reached the goal in {count} of {cells} cells: run more trials, or set "
        "study.repeats.",
        "Intervals over trials do not include what other trials would have needed there. A larger "
        "study.race_factor lets more trials finish.",
        Level.WEAK,
    ),
    Note(
        adaptive_sampler,
        "study.sampler {sampler} makes the intervals too narrow: use sobol for valid intervals.",
        "It learns from earlier results, which the paper's protocol does not. Samples differ "
        "between cells, and they are not independent. The study is reproducible only with one "
        "worker and without an interruption.",
        Level.WEAK,
    ),
    Note(
        seeds_of_one_sample,
        "This study repeats the best sample of study {best_of} on other seeds: its K* is not that "
        "of a search.",
        "K* is {meaning}.",
        Level.WRONG,
    ),
    Note(
        changed_samples,
        "The best samples of study {best_of} have changed in {count} of {cells} cells: choose "
        "another study.name to train the present ones.",
        level=Level.WRONG,
    ),
)

DRY_RUNS = tuple(
    Note(partial(notes_of_dry_runs, level=level), "Dry run: {text}.", level=level)
    for level in Level
)

NOTES = (
    *RESULTS,
    *DRY_RUNS,
    Note(notes_without_dry_run, "{text}.", level=Level.WEAK),
    *FAILURES,
    *ENVIRONMENTS,
    *PRUNING,
    *ENGINES,
    *SCHEDULES,
    *REPEATS,
)
