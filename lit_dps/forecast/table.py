"""The table of a forecast: one row per batch size, and what runs beside the trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lit_dps.analysis.tables import fitted
from lit_dps.core.noise_scale import reading_batch_size
from lit_dps.core.racing import default_rungs
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import WIDTH, format_duration
from lit_dps.core.trial import Cell
from lit_dps.forecast.remaining import (
    Points,
    StepRatio,
    Work,
    expected_repeat_work,
    expected_work,
    forecast_basis,
    laws_of,
    limited,
    max_repeat_work,
    max_work,
    pruning_passes,
    ratio_by_laws,
    repeat_pruning_passes,
    total_work,
)
from lit_dps.forecast.step_times import Timing
from lit_dps.study.noise import MAX_SECONDS, STEPS
from lit_dps.study.setup import StudySetup

_COUNT_HEADS = ("trials", "steps", "validations")
_STEP_HEADS = ("one step", "one validation", "share of validation")
_EARLY = "validations early"
# Columns that are left out, in this order, until the table fits the terminal.
_LESS_NEEDED = (
    "share of validation",
    "one validation",
    "validations",
    "one step",
    _EARLY,
    "steps",
    "trials",
)


class Times(NamedTuple):
    """A column of times.

    Attributes:
        head: Its head.
        trials: The work of the trials, by cell.
        repeats: The work of the repeats, by cell.
        check_share: The share of the validation split that a validation reads.
    """

    head: str
    trials: Mapping[Cell, Work]
    repeats: Mapping[Cell, Work]
    check_share: float


@dataclass(frozen=True)
class Remaining:
    """What remains of a study.

    Attributes:
        setup: The study, after its checks.
        timing: How long things take here.
        columns: The times to print: the largest ones first, expected ones last.
        expected: The last column if it is an expectation; None without one.
        workers: Trials that run at a time.
        rungs: Steps after which the race pauses trials.
        passes: Pruning passes by batch size.
        reads_noise: Whether a run reads the noise scale first.
    """

    setup: StudySetup
    timing: Timing
    columns: Sequence[Times]
    expected: Times | None
    workers: int
    rungs: Sequence[float]
    passes: Mapping[int, int]
    reads_noise: bool

    @property
    def trials(self) -> Work:
        """All trials, at most."""
        return total_work(self.columns[0].trials.values())

    @property
    def repeats(self) -> Work:
        """All repeats, at most."""
        return total_work(self.columns[0].repeats.values())


def training_seconds(cells: Mapping[Cell, Work], timing: Timing, share: float = 1.0) -> float:
    """Return the seconds of the work of some cells, one trial after another, without pruning.

    Args:
        cells: The work, by cell.
        timing: How long things take here.
        share: The share of the validation split that a validation reads.
    """
    seconds = 0.0
    for cell, work in cells.items():
        checks = share * work.checks
        seconds += timing.trial_seconds(cell.batch_size, work.trials, work.steps, checks)
    return seconds


def pruning_seconds(passes: Mapping[int, int], timing: Timing) -> float:
    """Return the seconds of pruning passes by batch size, one after another."""
    seconds = 0.0
    for batch_size, count in passes.items():
        seconds += count * timing.pruning.at(1 / batch_size)
    return seconds


def noise_seconds(setup: StudySetup, timing: Timing) -> float:
    """Return the seconds of the run that reads the noise scale before the first trial.

    Each of its steps takes about as long as two.
    """
    step = timing.step.at(reading_batch_size(setup.study.batch_sizes))
    return timing.start + min(MAX_SECONDS, 2 * STEPS * step)


def study_table(
    setup: StudySetup,
    points: Points,
    record: StudyRecord | None,
    timing: Timing,
    basis: StudyRecord | None = None,
    width: int = WIDTH,
) -> list[str]:
    """Return the lines of the table, and what its columns are.

    Args:
        setup: The study, after its checks.
        points: The points that are still to run, of every cell.
        record: What is stored of it; None without anything.
        timing: How long things take here.
        basis: Whose trials an expectation rests on (`remaining.nearest_record`); by default
            `record`.
        width: Columns of the terminal.
    """
    if basis is None:
        basis = record
    laws = laws_of(basis)
    remaining = _remaining(setup, points, record, timing, basis, ratio_by_laws(laws))
    rows = _rows(remaining, sorted({cell.batch_size for cell in points}))
    lines = fitted(rows, _LESS_NEEDED, width)
    if not (remaining.trials + remaining.repeats).trials:
        return [*lines, "", "all trials and repeats have finished"]
    trials = _explain_trials(remaining, forecast_basis(setup, basis, laws))
    return [*lines, "", *trials, *_explain_repeats(remaining)]


def _remaining(
    setup: StudySetup,
    points: Points,
    record: StudyRecord | None,
    timing: Timing,
    basis: StudyRecord | None,
    ratio: StepRatio,
) -> Remaining:
    """Return what remains of a study.

    Args:
        setup, points, record, timing, basis: As of `study_table`.
        ratio: As of `remaining.expected_work`.
    """
    goal = setup.built_goal
    plan = setup.study.repeat_plan
    pauses: Sequence[float] = ()
    if setup.study.race_factor is not None:
        pauses = default_rungs(goal.check_interval, goal.max_steps)[:-1]
    most_steps = {}
    with_pauses = {}
    for cell in points:
        step_seconds = timing.step.at(cell.batch_size)
        schedule = setup.batch.with_axes(cell.axes).build()
        steps = goal.most_steps(cell.batch_size, step_seconds, schedule)
        most_steps[cell] = steps
        with_pauses[cell] = steps + sum(pause for pause in pauses if pause < steps)
    most = max_work(points, with_pauses, goal.check_interval)
    most_repeats = max_repeat_work(plan, points, record, most_steps, goal.check_interval)
    columns = [Times("time at most", most, most_repeats, 1.0)]
    share = timing.min_check_share
    if share < 1:
        columns.append(Times(_EARLY, most, most_repeats, share))
    results = {}
    if basis is not None:
        results = basis.results
    expected = None
    expected_trials = expected_work(points, results, goal.check_interval, ratio)
    if expected_trials is not None:
        repeats = expected_repeat_work(plan, points, basis, goal.check_interval, ratio)
        repeats = limited(repeats or {}, most_repeats)
        expected = Times("time expected", limited(expected_trials, most), repeats, share)
        columns.append(expected)
    trials = total_work(most.values()).trials + total_work(most_repeats.values()).trials
    workers = min(setup.workers, max(1, trials))
    passes = Counter(pruning_passes(points, workers, timing.reuses_scores))
    passes += Counter(repeat_pruning_passes(most_repeats))
    has_noise = record is not None and record.noise is not None
    return Remaining(
        setup=setup,
        timing=timing,
        columns=columns,
        expected=expected,
        workers=workers,
        rungs=pauses,
        passes=passes,
        reads_noise=setup.study.noise_scale and not has_noise and trials > 0,
    )


def _rows(remaining: Remaining, batch_sizes: Sequence[int]) -> list[dict[str, str]]:
    """Return the rows of the table: batch sizes, repeats, pruning, the noise run, the total."""
    blank = dict.fromkeys(["B", *_COUNT_HEADS, *_STEP_HEADS], "")
    for times in remaining.columns:
        blank[times.head] = ""
    timing = remaining.timing
    rows = [_batch_size_row(remaining, batch_size) for batch_size in batch_sizes]
    if remaining.repeats.trials:
        row = {**blank, "B": "repeats", **_count_texts(remaining.repeats)}
        for times in remaining.columns:
            seconds = training_seconds(times.repeats, timing, times.check_share)
            row[times.head] = format_duration(seconds / remaining.workers)
        rows.append(row)
    passes = sum(remaining.passes.values())
    other_seconds = 0.0
    if passes:
        seconds = pruning_seconds(remaining.passes, timing) / remaining.workers
        row = {**blank, "B": "pruning", "trials": f"{passes:,} passes"}
        rows.append(row | _same_times(remaining, seconds))
        other_seconds += seconds
    if remaining.reads_noise:
        seconds = noise_seconds(remaining.setup, timing)
        row = {**blank, "B": "noise scale", "trials": f"{STEPS} steps"}
        rows.append(row | _same_times(remaining, seconds))
        other_seconds += seconds
    row = {**blank, "B": "total", **_count_texts(remaining.trials + remaining.repeats)}
    for times in remaining.columns:
        seconds = training_seconds(times.trials, timing, times.check_share)
        seconds += training_seconds(times.repeats, timing, times.check_share)
        row[times.head] = format_duration(seconds / remaining.workers + other_seconds)
    rows.append(row)
    return rows


def _batch_size_row(remaining: Remaining, batch_size: int) -> dict[str, str]:
    """Return the row of the trials of a batch size."""
    timing = remaining.timing
    step = timing.step.at(batch_size)
    check = timing.check.at(1 / batch_size)
    share = check / (check + remaining.setup.built_goal.check_interval * step)
    row = {"B": str(batch_size)}
    most = _of_batch_size(remaining.columns[0].trials, batch_size)
    row |= _count_texts(total_work(most.values()))
    step_texts = (format_duration(step), format_duration(check), f"{share:.0%}")
    row |= dict(zip(_STEP_HEADS, step_texts, strict=True))
    for times in remaining.columns:
        cells = _of_batch_size(times.trials, batch_size)
        seconds = training_seconds(cells, timing, times.check_share)
        row[times.head] = format_duration(seconds / remaining.workers)
    return row


def _of_batch_size(works: Mapping[Cell, Work], batch_size: int) -> dict[Cell, Work]:
    return {cell: work for cell, work in works.items() if cell.batch_size == batch_size}


def _count_texts(work: Work) -> dict[str, str]:
    counts = (f"{work.trials:,}", f"{work.steps:,.0f}", f"{work.checks:,.0f}")
    return dict(zip(_COUNT_HEADS, counts, strict=True))


def _same_times(remaining: Remaining, seconds: float) -> dict[str, str]:
    """Return a time that is the same in all columns."""
    return {times.head: format_duration(seconds) for times in remaining.columns}


def _explain_trials(remaining: Remaining, basis: str) -> list[str]:
    """Return what the columns of times assume about trials."""
    if not remaining.trials.trials:
        return ["all trials of the search have finished; repeats remain"]
    goal = remaining.setup.built_goal
    ends = f"runs to max_steps = {goal.max_steps:,}"
    if goal.limits:
        ends = f"spends its budget of {goal.budget_text}"
    if remaining.rungs:
        pauses = ", ".join(map("{:,}".format, remaining.rungs))
        ends = f"restarts from its first step after each rung ({pauses} steps), then {ends}"
    text = f"at most: every trial {ends}. Every validation reads the whole split"
    if remaining.expected is None:
        hint = (
            "An expected time needs finished trials: start the study, or run lit-dps advise with it"
        )
        return [f"{text}. {hint}"]
    steps = total_work(remaining.expected.trials.values()).steps
    return [text, f"expected: {steps:,.0f} steps, from {basis}"]


def _explain_repeats(remaining: Remaining) -> list[str]:
    """Return what the columns of times assume about repeats; nothing without repeats."""
    if not remaining.repeats.trials:
        return []
    slack = remaining.setup.study.repeat_plan.slack
    text = "repeats, at most: every repeat runs to max_steps"
    if slack is not None:
        text += f", or to {slack:g} x K* if its cell has one"
    lines = [text]
    if remaining.expected is not None:
        work = total_work(remaining.expected.repeats.values())
        lines.append(
            f"repeats, expected: {work.steps:,.0f} steps of {work.trials:,} repeats, by the steps "
            "of finished repeats at the nearest batch size, or by K* there"
        )
    return lines
