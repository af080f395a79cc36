"""The first section of a report in words: which batch size is the fastest on this machine.

`lit_dps.analysis.answer` computes the numbers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import K_STAR, fastest_of, is_upper_bound
from lit_dps.analysis.ramps import constant_series
from lit_dps.analysis.rates import RateLaw
from lit_dps.analysis.tables import Row, cell_of, records, rows_of, three_digits, value_text, where
from lit_dps.core.batch_schedule import CONSTANT, GROWING, NAME_KEY
from lit_dps.core.racing import best_trial
from lit_dps.core.record import StudyRecord, cell_text
from lit_dps.core.text import every, format_duration
from lit_dps.core.trial import Cell, Series, Status
from lit_dps.report.result_table import examples_text, interval_text

# Metaparameters that a recommendation names.
MAX_PARAMETERS = 4


def answer_lines(study: Analysis) -> list[str]:
    """Return the sentences of the answer of all series, a line each; nothing without any K*."""
    lines = []
    if len(study.answer):
        for series, group in trained_series(study).items():
            lines += sentences(study, series, "; ".join(map(str, group)))
    return lines


def trained_series(study: Analysis) -> dict[Series, list[Series]]:
    """Return the series that are trained, each with the series that show its trials.

    Dense series that differ in the pruning alone have the same trials (`StudyRecord.shared`).
    """
    groups: dict[Series, list[Series]] = {}
    for cell in study.record.cells:
        trained = study.record.shared.get(cell, cell).series
        group = groups.setdefault(trained, [])
        if cell.series not in group:
            group.append(cell.series)
    return groups


def sentences(study: Analysis, series: Series, name: str = "") -> list[str]:
    """Return the answer of a series in lines: the recommendation, then its details.

    Args:
        study: The study.
        series: The series.
        name: What the answer is of; by default the series.
    """
    first = f"{name or series}: {recommendation(study, series)}"
    return [first, *map("  {}".format, details(study, series))]


def recommendation(study: Analysis, series: Series) -> str:
    """Return the batch size and rate to train with, or why none is recommended, in one line."""
    return " ".join(recommendation_sentences(study, series))


def recommendation_sentences(study: Analysis, series: Series) -> list[str]:
    """Return the sentences of `recommendation`; the first is the recommendation itself."""
    rows = _rows_of(study, series)
    if not rows:
        return [_without_k_star(study, series)]
    fastest = _first_with(rows, "fastest")
    if fastest is None:
        return [_without_times(study, series, rows)]
    train = "Train"
    if _is_pending(study, series):
        train = "So far, train"
    best = fastest["batch_size"]
    choice = f"{train} with batch size {best}{_parameters_text(study, cell_of(series, best))}"
    sizes = [summary.cell.batch_size for summary in study.cells_by_series[series]]
    sentences = [f"{choice}{_others_text(rows, fastest, sizes)}."]
    if len(sizes) == 1:
        sentences.append("It is the only batch size of the study.")
    elif len(rows) == 1:
        sentences.append(_only_k_star(study, series))
    return [*sentences, *_with_validation(fastest, study.validate_every)]


def _is_pending(study: Analysis, series: Series) -> bool:
    """Return True if trials of a series have not finished."""
    return any(summary.pending for summary in study.cells_by_series[series])


def _only_k_star(study: Analysis, series: Series) -> str:
    """Return that one batch size of a series has a K* and the others have none."""
    if any(summary.may_have_k_star for summary in study.cells_by_series[series]):
        return f"{_unknown_trials(study)}, so other batch sizes may have a K*."
    if _is_pending(study, series):
        return "No other batch size has a K* yet."
    if study.record.statistic.needed_trials > 1:
        return "No other batch size has a K*."
    return "No other batch size reached the goal."


def _rows_of(study: Analysis, series: Series) -> list[Row]:
    """Return the rows of the answer of a series."""
    return [row for cell, row in study.answers.items() if cell.series == series]


def _without_k_star(study: Analysis, series: Series) -> str:
    """Return why a series without K* has no recommendation."""
    cells = study.cells_by_series[series]
    if any(summary.may_have_k_star for summary in cells):
        return f"No recommendation. {_unknown_trials(study)}."
    if not any(summary.trials for summary in cells):
        if any(summary.counts[Status.FAILED] for summary in cells):
            return "No recommendation: all trials that ended failed."
        return "No recommendation: no trial has ended yet."
    goal = study.record.goal
    yet = ""
    if any(summary.pending for summary in cells):
        yet = " yet"
    reached = f"{study.record.statistic.too_few} reached {goal} within {goal.budget_text}{yet}"
    return f"No recommendation: {reached}."


def _unknown_trials(study: Analysis) -> str:
    """Return that undetermined trials may have reached the goal, in a sentence without its end."""
    reached = f"reached {study.record.goal}"
    return f"It is unknown which trials {reached}, because their validations stopped early"


def _without_times(study: Analysis, series: Series, rows: Sequence[Row]) -> str:
    """Return which batch sizes need the fewest steps and examples, if no step was timed."""
    so_far = ""
    if _is_pending(study, series):
        so_far = " so far"
    text = f"No recommendation{so_far}: step times are unknown."
    if len(rows) == 1:
        only = f"{text} Only B = {rows[0]['batch_size']} has a K*"
        return f"{only}{so_far}."
    fewest = min(rows, key=lambda row: (row["steps"], row["batch_size"]))
    examples = _first_with(rows, "fewest")
    assert examples is not None
    steps = f"{text} B = {fewest['batch_size']} needs the fewest steps"
    if examples is fewest:
        return f"{steps} and examples."
    return f"{steps}, B = {examples['batch_size']} the fewest examples."


def _others_text(rows: Sequence[Row], fastest: Row, sizes: Sequence[int]) -> str:
    """Return the batch sizes that may be as fast as the fastest: " (8 and 32 may be as fast)".

    Args:
        rows: The rows of a series.
        fastest: The row of the least time.
        sizes: All batch sizes of the series, also without K*.
    """
    best = fastest["batch_size"]
    tied = [row["batch_size"] for row in rows if row["tied"]]
    others = [size for size in tied if size != best]
    if not others:
        return ""
    # A range contains the fastest batch size only if that is in the middle.
    shown = tied if others[0] < best < others[-1] else others
    if len(shown) > 2 and shown == [size for size in sizes if shown[0] <= size <= shown[-1]]:
        return f" ({shown[0]}-{shown[-1]} may be as fast)"
    *first, last = map(str, others)
    text = last
    if first:
        text = f"{', '.join(first)} and {last}"
    return f" ({text} may be as fast)"


def _parameters_text(study: Analysis, cell: Cell) -> str:
    """Return the metaparameters of the K* trial of a cell: learning rate and momentum first."""
    best = study.by_cell[cell].best
    if best is None:
        return ""
    keys: dict[str, None] = {}
    for curve in study.rate_curves:
        if curve.series == cell.series:
            for key in (curve.source.rate_key, curve.source.momentum_key):
                if key is not None:
                    keys[key] = None
    keys |= dict.fromkeys(study.record.space)
    names = study.record.short_names
    parts = []
    for key in keys:
        if key in best.trial.params and key in study.record.space:
            value = value_text(best.trial.params[key], study.record.space[key])
            parts.append(f"{names[key].replace('_', ' ')} {value}")
    if not parts:
        return ""
    text = ", ".join(parts[:MAX_PARAMETERS])
    if len(parts) > MAX_PARAMETERS:
        text += f" (--show cells prints {len(parts) - MAX_PARAMETERS} more)"
    return f" at {text}"


def details(study: Analysis, series: Series) -> list[str]:
    """Return what the answer of a series rests on, in lines: examples, time, rate."""
    rows = _rows_of(study, series)
    fewest = _first_with(rows, "fewest")
    fastest = _first_with(rows, "fastest")
    if fewest is None or fastest is None:
        return []
    best = fastest["batch_size"]
    lines = [f"B = {best} needs {_time_text(fastest)} to the goal."]
    examples = f"B = {fewest['batch_size']} needs the fewest examples, {examples_text(fewest)}."
    lines.append(examples)
    if not study.record.batch_schedule(series).is_constant:
        lines.append(f"{ramp_text(study, series, best)}.")
    lines += _basis(rows, study.record)
    rate = study.rate_laws[series]
    if rate is not None:
        lines.append(_rate_text(rate, best))
    for curve in study.rate_curves:
        if curve.series == series and not curve.has_constant_batch:
            lines.append(f"No law of the learning rate: {GROWING}.")
    return lines


def _time_text(row: Row) -> str:
    """Return the time to the goal of a cell in a sentence."""
    return interval_text(row).replace("<=", "at most")


def ramp_text(study: Analysis, series: Series, batch_size: int) -> str:
    """Return what the growing batch of a series saves at a batch size, in a sentence."""
    place = f"batch schedule up to B = {batch_size}"
    rows = study.ramps
    if len(rows):
        rows = rows_of(series, rows)
    if len(rows):
        rows = where(rows, batch_size=batch_size)
    if not len(rows):
        reason = "its K*, or each K* of a constant batch, is missing or a bound"
        if constant_series(study.record, series) is None:
            reason = f"compare it with {CONSTANT} on an axis {NAME_KEY}"
        return f"What the {place} saves is unknown: {reason}"
    (row,) = records(rows)
    steps = _saved_text(row, "steps")
    examples = _saved_text(row, "examples")
    constant = row["constant_batch_size"]
    return (
        f"The {place} needs {steps} and {examples} than the constant batch size nearest in "
        f"examples, B = {constant} (by {row['steps_of']})"
    )


def _saved_text(row: Row, unit: str) -> str:
    """Return a ratio of `ramp_rows` in words, such as "22 % fewer steps [-31 %, -10 %]"."""
    percent = round(100 * (row[f"{unit}_ratio"] - 1))
    comparison = "more"
    if percent < 0:
        comparison = "fewer"
    text = f"{abs(percent)} % {comparison} {unit}"
    low, high = row[f"{unit}_low"], row[f"{unit}_high"]
    if low is None:
        return text
    return f"{text} [{_change_text(low)}, {_change_text(high)}]"


def _change_text(ratio: float) -> str:
    """Return the change of a ratio from 1, such as "-31 %"; an infinite ratio is "+inf %"."""
    percent = 100 * (ratio - 1)
    if math.isfinite(percent):
        percent = round(percent)
    return f"{percent:+} %"


def _first_with(rows: Sequence[Row], column: str) -> Row | None:
    """Return the first row whose value in a column is true; None without one."""
    for row in rows:
        if row[column]:
            return row
    return None


def _with_validation(fastest: Row, validate_every: int | None) -> list[str]:
    """Return the share of validation in the time of the fastest batch size."""
    if validate_every is None:
        return []
    if fastest["validation_seconds"] is None:
        return [f"The time of a validation at B = {fastest['batch_size']} is unknown."]
    added = format_duration(fastest["validation_seconds"])
    if is_upper_bound(fastest):
        added = f"at most {added}"
    place = f"B = {fastest['batch_size']}"
    return [f"The time at {place} includes {added} for a validation {every(validate_every)}."]


def _basis(rows: Sequence[Row], record: StudyRecord) -> list[str]:
    """Return what the times to the goal are based on; nothing if they have no intervals."""
    row = _first_with(rows, "seconds_low")
    if row is None:
        return []
    statistic = row["steps_of"]
    brackets = "Brackets: 95 % interval."
    if row["why_not_law"]:
        reason = f"since the law cannot be used ({row['why_not_law']})"
        lines = [f"Times use {statistic} itself, {reason}. {brackets}"]
    else:
        single = "single K*" if statistic == K_STAR else "single medians"
        lines = [f"Times use the fitted law of {statistic}, since {single} are noisy. {brackets}"]
    if statistic == K_STAR:
        meaning = "the best of several trials"
        if not record.statistic.is_minimum:
            meaning = record.k_star_words
        lines.append(f"K* is {meaning}; expect one run to need more (study.repeats measures it).")
    return lines


def _rate_text(rate: RateLaw, batch_size: int) -> str:
    """Return the best learning rate at a batch size, if it is known, and its law."""
    best = rate.at(batch_size)
    if best is None:
        return f"{rate.describe()}."
    value = f"Best {rate.name} at B = {batch_size}: {three_digits(best)}"
    return f"{value}, by the law {rate.describe()}."


def retrain_command(analysis: Analysis, storage: Sequence[str] = ()) -> str | None:
    """Return the command that retrains the best trial of the fastest cell; None without any K*.

    Without step times it is the cell of the least K*.

    Args:
        analysis: The study.
        storage: Options that name its storage, if that is not the default one.
    """
    if not analysis.answers:
        return None
    cell = fastest_of(analysis.answers)
    if cell is None:
        cell = min(analysis.answers, key=lambda each: (analysis.answers[each]["k_star"], each))
    command = ["lit-dps", "fit", "--of", analysis.record.name, "--cell", cell_text(cell)]
    best = analysis.by_cell[cell].best
    original = analysis.original
    stored = best_trial(original.results.get(cell, ()), original.statistic)
    # Without `--point`, `fit` trains the trial of K* of the stored study.
    if best is not None and (stored is None or stored.trial.point != best.trial.point):
        command += ["--point", str(best.trial.point)]
    return shlex.join([*command, *storage, "--checkpoint", "best.ckpt"])
