"""The notes below the table of a study: what to know before trusting it.

`STUDY_NOTES` and `trial_notes.TRIAL_NOTES` are tables of functions, in the order of the report.
Each function has one condition and yields a note where it holds: what happened, then what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import empty_layers, jacobian_notes
from lit_dps.analysis.summary import CellSummary, at_first_check
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.search_space import Range, short_names
from lit_dps.core.space_history import describe_expansions, expand_range
from lit_dps.core.trial import Status, TrialResult
from lit_dps.report.environment_notes import environment_notes
from lit_dps.report.no_result import missed_text
from lit_dps.report.repeats import median_notes, repeat_notes
from lit_dps.report.trial_notes import (
    TRIAL_NOTES,
    TRIAL_NOTES_AFTER_LAYERS,
    count_trials,
    first_names,
    schedule_notes,
    were,
)


def study_notes(study: Analysis) -> list[str]:
    """Return what to know before trusting the table of a study, a line each."""
    record = study.record
    interval = record.goal.check_interval
    return [
        *notes(record, study.cells),
        *repeat_notes(record, study.repeats, study.whole),
        *median_notes(study.scalings, study.median_scalings, interval),
    ]


def notes(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """Return the notes on a study without those on its repeats, a line each."""
    lines = [line for note in STUDY_NOTES for line in note(record, cells)]
    lines += environment_notes(record)
    lines += observed_notes(record)
    lines += schedule_notes(cells)
    names = short_names(list(record.space))
    lines += describe_expansions(record.boxes, names)
    lines += range_edge_notes(record, cells)
    return lines


def observed_notes(record: StudyRecord) -> list[str]:
    """Return the notes on what happened in the trials of a study, a line each."""
    results = [result for cell in record.cells for result in record.results[cell]]
    lines = [line for note in TRIAL_NOTES for line in note(results, record.goal)]
    lines += empty_layers(record)
    lines += jacobian_notes(record)
    lines += [line for note in TRIAL_NOTES_AFTER_LAYERS for line in note(results, record.goal)]
    return lines


def missing_k_star(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note cells in which no trial reached the goal, with the best values there."""
    missing = [cell for cell in cells if cell.best is None]
    if not missing:
        return
    if len(missing) == len(cells):
        yet = " yet" if any(cell.pending for cell in cells) else ""
        yield f"No trial has reached the goal{yet}, so there is no K* and no law."
        return
    reached = []
    for cell in missing:
        text = missed_text(record.goal, cell)
        if text:
            reached.append(text)
    line = f"No trial reached the goal in {len(missing)} of {len(cells)} cells: no K* there"
    yield "; ".join([line, *first_names(reached)]) + "."


def pending_trials(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note trials that have not finished."""
    pending = sum(cell.pending for cell in cells)
    running = sum(cell.running for cell in cells)
    if pending:
        declared = record.trials * len(cells)
        yield f"{pending} of {declared} trials have not finished ({running} running or queued)."


def undetermined_trials(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note trials that are left out at this goal, and K* that are upper bounds because of them."""
    count = sum(len(cell.undetermined_points) for cell in cells)
    if not count:
        return
    line = (
        f"It is unknown when {count} of {record.trials * len(cells)} trials met {record.goal}: "
        "their validation stopped early (goal.early_reject) at the study's own goals."
    )
    bounds = sum(cell.sooner for cell in cells)
    if bounds:
        line += (
            f" Such a trial may be faster than K* in {bounds} of {len(cells)} cells. K* is an "
            "upper bound there and is left out of the law."
        )
    yield line


def first_check_bounds(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note K* at the first validation, which are upper bounds."""
    interval = record.goal.check_interval
    bounds = sum(at_first_check(cell.k_star, interval) for cell in cells)
    if bounds:
        yield (
            f"K* is at the first validation in {bounds} of {len(cells)} cells. It is an upper "
            "bound there and is left out of the law. Lower goal.check_interval to resolve it."
        )


def single_complete_trials(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note cells whose interval rests on one trial that reached the goal."""
    count = 0
    for cell in cells:
        complete = sum(steps is not None for steps in cell.steps)
        is_repeated = bool(record.repeats.get(cell.cell))
        if len(cell.steps) > 1 and complete == 1 and not is_repeated and not cell.at_first_check:
            count += 1
    if count:
        yield (
            f"Only one trial reached the goal in {count} of {len(cells)} cells. Intervals over "
            "trials do not include what other trials would have needed there. Set study.repeats, "
            "run more trials or raise study.race_factor."
        )


def adaptive_sampler(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note a sampler that learns from earlier results, so that samples are not independent."""
    sampler = setting(record.config, "study.sampler") or "sobol"
    if sampler != "sobol":
        yield (
            f"study.sampler {sampler} learns from earlier results, which the paper's protocol "
            "does not. Samples differ between cells. Intervals over trials are too narrow, since "
            "they take samples to be independent. The study is reproducible only with one worker "
            "and without an interruption."
        )


def seeds_of_one_sample(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note a study that runs the best samples of another one on other seeds."""
    best_of = setting(record.config, "study.best_of")
    if best_of is None:
        return
    line = (
        f"All trials of a cell use the best sample of study {best_of}, on other seeds. K* is "
        "that of the luckiest seed, not of a search."
    )
    seeds = {result.trial.seed for results in record.results.values() for result in results}
    if record.seed in seeds:
        line += (
            " An earlier version started this study, so the best trial itself may be among them."
        )
    yield line


def short_curves_after_goal(record: StudyRecord, cells: Sequence[CellSummary]) -> Iterator[str]:
    """Note runs that were to continue after their goal and ended before max_steps."""
    if not record.train_past_goal:
        return
    diverged: list[TrialResult] = []
    stopped: list[TrialResult] = []
    for cell in record.cells:
        for result in record.results[cell]:
            if result.status is Status.COMPLETE and result.steps_run < record.goal.max_steps:
                (stopped if result.failure else diverged).append(result)
    meaning = "It counts as complete, with a curve up to there."
    several = "They count as complete, with curves up to there."
    if diverged:
        yield (
            f"{count_trials(diverged)} diverged after the goal. "
            f"{meaning if len(diverged) == 1 else several}"
        )
    if stopped:
        yield (
            f"{were(stopped)} stopped by the module or a callback after the goal. "
            f"{meaning if len(stopped) == 1 else several}"
        )


def range_edge_notes(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """Return notes on metaparameters whose best value is at an end of their range."""
    names = short_names(list(record.space))
    ends = Counter((key, end) for cell in cells for key, end in cell.boundary.items())
    lines = []
    for (key, end), count in sorted(ends.items()):
        box = record.space[key]
        advice = "Widen it with lit-dps study --extend-space."
        assert isinstance(box, Range)  # choices have no ends
        if expand_range(box, [end]) == box:
            advice = "No wider range is possible."
        lines.append(
            f"The best {names[key]} is at the {end} end of its range in {count} of {len(cells)} "
            f"cells. {advice}"
        )
    return lines


STUDY_NOTES = (
    missing_k_star,
    pending_trials,
    undetermined_trials,
    first_check_bounds,
    single_complete_trials,
    adaptive_sampler,
    seeds_of_one_sample,
    short_curves_after_goal,
)
