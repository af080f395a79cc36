"""Notes on the times of an answer: how steps were timed, on which machines, how busy they were."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import MEDIAN, NORMAL_QUARTILE
from lit_dps.analysis.intervals import NORMAL_95
from lit_dps.analysis.step_seconds import OWN_CLOCK, QUIET, WITH_CHECKS
from lit_dps.analysis.tables import has_values, listed, numbers, three_digits, where
from lit_dps.core.text import every
from lit_dps.core.unit import SECONDS
from lit_dps.report.notes import Level, Note, Values, first_names, lines_of

# Ratio of the quartiles of step times from which on a time says little: the limits of its 95 %
# interval then differ by a factor of 10. The fastest and the slowest batch size of a study often
# differ by less.
UNUSABLE_RATIO = 2.2
UNKNOWN_HARDWARE = "hardware that an earlier version did not keep"


def timing_notes(study: Analysis) -> list[str]:
    """Return the notes on the times of the answer, a line each; nothing if there are no times."""
    return lines_of(TIMING, study)


def place_of(study: Analysis) -> str:
    """Return the machine of the times in words, as far as it is known."""
    machines = _machines_of(study)
    if len(machines) > 1:
        return "several machines"
    if machines and machines[0] is not None:
        return machines[0]
    return "the machine that ran the trials"


def _machines_of(study: Analysis) -> list[str | None]:
    """Return the machines of the times; None for one that is not stored."""
    timing = study.record.step_timing
    sources = set(study.answer["timing"].dropna())
    if counts_validations(study):
        sources |= {seconds.source for seconds in study.step_seconds.values()}
    machines: list[str | None] = []
    if timing is not None and QUIET in sources:
        machines.append(timing.machine)
    if sources != {QUIET}:
        machines += study.record.hardware
    return list(dict.fromkeys(machines))


def times_text(study: Analysis) -> str:
    """Return what the times to the goal are: of which runs and machine; empty without times."""
    if not len(study.answer) or not has_values(study.answer, "seconds"):
        return ""
    parts = [f"on {place_of(study)}"]
    if any(row["steps_of"] == MEDIAN for row in study.answers.values()):
        parts.insert(0, "medians over seeds")
    parts.append(validation_text(study))
    return f"Times: {', '.join(parts)}."


def computation_text(study: Analysis) -> str:
    """Return how the times to the goal follow from the trials, without validation.

    Such as "the steps to the goal times the time of a step". Empty without times.
    """
    timed = {cell: row for cell, row in study.answers.items() if row["seconds"] is not None}
    if not timed:
        return ""
    if study.record.goal.cost_unit is SECONDS:
        statistics = dict.fromkeys(row["steps_of"] for row in timed.values())
        return f"{' or '.join(statistics)} in seconds of training"
    by_clock = [str(cell) for cell, row in timed.items() if row["step_seconds"] is None]
    if len(by_clock) == len(timed):
        return "the time of the runs to the goal by their own clock"
    text = "the steps to the goal times the time of a step"
    if by_clock:
        cells = "; ".join(first_names(by_clock))
        text += f", or, where the batch grows ({cells}), the time of the runs by their own clock"
    return text


def validation_text(study: Analysis) -> str:
    """Return whether times to the goal include validation, such as "without validation"."""
    if study.validate_every is not None and counts_validations(study):
        text = f"with a validation {every(study.validate_every)}"
        without = []
        for cell, row in study.answers.items():
            if row["total_seconds"] is not None and row["validation_seconds"] is None:
                without.append(str(cell))
        if without:
            text += f" (none is counted at {'; '.join(first_names(without))})"
        return text
    sources = sources_of(study)
    if WITH_CHECKS not in sources:
        return "without validation"
    if sources == {WITH_CHECKS}:
        return "with validation"
    return "of some cells with validation"


def counts_validations(study: Analysis) -> bool:
    """Return True if times include validations at the interval that the user asked for."""
    return bool(len(study.answer)) and has_values(study.answer, "validation_seconds")


def sources_of(study: Analysis) -> set[str]:
    """Return how the steps of times to the goal were timed: the column timing of the answer."""
    if not len(study.answer):
        return set()
    return set(study.answer["timing"].dropna()) - {OWN_CLOCK}


def growing_batches(study: Analysis) -> Iterator[Values]:
    """Yield the series whose batch size changes along a trial, if there is an answer."""
    record = study.record
    growing = [each for each in record.series if not record.batch_schedule(each).is_constant]
    if len(study.answer) and growing:
        yield {"series": listed(growing)}


def steps_of_trials(study: Analysis) -> Iterator[Values]:
    """Hold if no step was timed alone, after the study."""
    sources = sources_of(study)
    if sources and QUIET not in sources:
        yield {}


def several_machines(study: Analysis) -> Iterator[Values]:
    """Yield the machines if the times are from several kinds, or may be."""
    if not len(study.answer) or not has_values(study.answer, "timing"):
        return
    machines = _machines_of(study)
    if len(machines) > 1 or None in machines:
        action = "run lit-dps study --time-steps"
        hardware = study.record.hardware
        is_of_several = len(hardware) > 1 or None in hardware
        if is_of_several and OWN_CLOCK in set(study.answer["timing"]):
            action = "run the whole study on one machine"
        names = [each or UNKNOWN_HARDWARE for each in machines]
        yield {"machines": " and on ".join(names), "action": action}


def best_at_end_of_batch_sizes(study: Analysis) -> Iterator[Values]:
    """Yield the ends of the batch sizes of the study beyond which one may be faster."""
    sizes = study.record.batch_sizes
    places: dict[str, list[str]] = {}
    for cell, row in study.answers.items():
        if row["tied"] and cell.batch_size == sizes[0]:
            places.setdefault(f"below {sizes[0]}", []).append(str(cell.series))
        if row["tied"] and cell.batch_size == sizes[-1]:
            places.setdefault(f"above {sizes[-1]}", []).append(str(cell.series))
    ends = []
    for end, series in places.items():
        where = ""
        if len(series) < len(study.record.series):
            where = f" ({', '.join(first_names(series))})"
        ends.append(f"{end}{where}")
    if ends and len(sizes) > 1:
        yield {"ends": " or ".join(ends)}


def busy_machine(study: Analysis, is_very_busy: bool) -> Iterator[Values]:
    """Yield the ratio of the quartiles and of the 95 % limits of step times, if other programs ran.

    Args:
        study: The study.
        is_very_busy: Whether the factor is at least `UNUSABLE_RATIO`, or below it.
    """
    if not len(study.answer):
        return
    busy = where(study.answer, busy=True)
    if not len(busy):
        return
    ratio = float(max(numbers(busy["step_high"]) / numbers(busy["step_low"])))
    if (ratio >= UNUSABLE_RATIO) is is_very_busy:
        noise = ratio ** (NORMAL_95 / NORMAL_QUARTILE)
        yield {"spread": three_digits(ratio), "noise": three_digits(noise)}


_SPREAD = (
    "x{spread} is the ratio of the quartiles of the times of one step, x{noise} the ratio of their "
    "95 % limits."
)
TIMING = (
    Note(
        best_at_end_of_batch_sizes,
        "Batch sizes {ends} may be faster: extend study.batch_sizes.",
        level=Level.WEAK,
    ),
    Note(
        growing_batches,
        "Times at {series} are by the clock of the runs, beside other programs: compare them with "
        "care.",
        "The batch size changes along a trial there. Times are missing where a run was resumed, or "
        "where K* is between two trials.",
        Level.WEAK,
    ),
    Note(
        steps_of_trials,
        "Steps were timed beside other workers and programs: lit-dps study --time-steps measures "
        "them alone.",
        "A step is the median over trials.",
        Level.WEAK,
    ),
    Note(
        several_machines,
        "Times were measured on {machines}, so those of batch sizes cannot be compared: {action}.",
        "What is the fastest here may only have run on the faster machine.",
        Level.WRONG,
    ),
    Note(
        partial(busy_machine, is_very_busy=True),
        "Other programs were running: step times vary by x{spread}, and times are uncertain by "
        "more. Run lit-dps study --time-steps on an idle machine.",
        _SPREAD,
        Level.UNUSABLE,
    ),
    Note(
        partial(busy_machine, is_very_busy=False),
        "Other programs were running: step times vary by x{spread}; ignore differences below "
        "x{noise}.",
        _SPREAD,
        Level.WEAK,
    ),
)
